"""What a worker of a pipeline does with what comes while it does something else."""

import logging
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from pipelines import gpt, stages_of
from smolcluster.algorithms.PipelineParallel.worker import PlanChanged, Worker
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
