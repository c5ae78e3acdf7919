"""What a worker of a pipeline does with what comes while it does something else."""

import gc
import logging
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from pipelines import gpt, stages_of
from smolcluster.algorithms.PipelineParallel import worker as room
from smolcluster.algorithms.PipelineParallel.worker import PlanChanged, Worker
from smolcluster.errors import PeerLost
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.workload import Workload
from smolcluster.utils.meter import Meter
from smolcluster.wire.inbox import MessageReceived
from smolcluster.wire.messages import (
    HostPort,
    KeepStages,
    MeasureLink,
    Message,
    Planned,
    StageNeighbour,
    StageReady,
)

PLAN = Planned(attempt=1, turn=0, rank=0, cuts=(0, 2), ranks=(0,), neighbours=(), step=3)
PLACES = (HostPort(host="127.0.0.1", port=7777),)
NEIGHBOUR = StageNeighbour(rank=1, node="b", instance=8 * "b", places=PLACES)


@pytest.mark.parametrize(
    "message",
    [
        PLAN.model_copy(update={"attempt": 2}),
        MeasureLink(attempt=2, rank=0, neighbour=NEIGHBOUR),
    ],
)
def test_what_ends_a_plan_is_heard_while_the_state_is_loaded(message: Message) -> None:
    worker, event = Worker(Mock(), Mock()), MessageReceived(0, message)
    worker.stages, worker.link = {0: stages_of(gpt(2, 8), [0, 1, 2])[0]}, Mock()
    worker.link.next_event.side_effect = [event]
    worker.training.replica.meter = Meter()
    with pytest.raises(PlanChanged):
        worker.load_state(PLAN)
    assert worker.newest is event


@pytest.mark.parametrize(("turn", "is_told"), [(0, True), (1, False)])
def test_a_neighbour_that_is_lost_before_the_first_turn_is_told_of(
    turn: int, is_told: bool
) -> None:
    """It may have lost this stage before it was ready itself; later, computing finds out."""
    worker = Worker(Mock(), Mock())
    worker.plan, worker.turn, worker.stages = PLAN, turn, {0: Mock()}
    worker.link = Mock(next_event=Mock(return_value=None), is_cut=False)
    worker.links = Mock(check=Mock(side_effect=PeerLost("stage 1 is lost")))
    worker.training.replica.meter = Meter()
    worker.follow(Mock())
    told = [call.args[0] for call in worker.link.send.call_args_list]
    assert told == is_told * [StageReady(attempt=1, reason="stage 1 is lost")]


def test_what_a_lost_session_has_left_is_not_done_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A neighbour and the server may be lost at the same time, with a plan that has just come."""
    worker, plan = Worker(Mock(), Mock()), MessageReceived(0, PLAN)
    worker.plan, worker.turn, worker.stages, worker.links = PLAN, 1, {0: Mock()}, Mock()
    worker.training.replica.meter = Meter()
    worker.link = Mock(is_cut=True, next_event=Mock(side_effect=[Mock(), plan]))
    monkeypatch.setattr(worker, "handle", Mock(side_effect=PeerLost("a neighbour is lost")))
    with pytest.raises(PeerLost, match="a neighbour"):
        worker.follow(Mock())
    assert worker.newest is plan
    monkeypatch.setattr(room, "Links", Mock(side_effect=PeerLost("the test is over")))
    with pytest.raises(PeerLost, match="the test"):
        worker.take_part(Mock())
    assert worker.newest is None


@pytest.mark.parametrize("is_same_server", [True, False])
def test_layers_of_a_session_before_take_none_of_the_memory_that_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, is_same_server: bool
) -> None:
    left: list[object] = []
    stages = {0: stages_of(gpt(2, 8), [0, 1, 2])[0]}
    earlier, worker = weakref.ref(stages[0].module), Worker(Mock(), Mock())
    if is_same_server:
        worker.stages.update(stages)

    def links(*_: object, **__: object) -> None:
        left.append(earlier())
        raise PeerLost("the test is over")

    monkeypatch.setattr(room, "Links", links)
    gc.disable()  # which may not happen to do it
    try:
        stages.clear()
        with pytest.raises(PeerLost):
            worker.take_part(Mock())
    finally:
        gc.enable()
    assert left == [None]


class Counting(nn.Linear):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(1), persistent=False)


def test_it_is_said_once_which_buffer_is_in_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    workload = Workload(lambda: nn.Sequential(Counting()), cross_entropy, [(torch.zeros(4), 0)])
    [stage] = stages_of(workload, [0, 1])
    stage.module.get_buffer("0.calls").add_(1)
    stage.replica.buffers.find()
    worker = Worker(Mock(bucket_bytes=1000), Mock())
    worker.stages, worker.link = {0: stage}, Mock()
    worker.link.place.log = logging.getLogger("smolcluster.test")
    for step in (1, 2):
        worker.send_state(KeepStages(attempt=1, step=step))
    [said] = caplog.messages
    assert "0.calls" in said
