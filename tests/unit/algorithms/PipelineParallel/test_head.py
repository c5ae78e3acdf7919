"""What a worker's head orders of its stages, and what becomes of orders when a stage is lost."""

import logging
import math
import threading
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from harness import local_settings
from peers import small_replica
from smolcluster.algorithms.PipelineParallel.builders import Builders
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Crew
from smolcluster.algorithms.PipelineParallel.head import (
    Computed,
    Head,
    Order,
    PieceArrived,
    PipelineContext,
    computed,
    naming,
    pipeline_run,
    settings_of,
    what_stages_hear,
    without_servers_part,
)
from smolcluster.algorithms.PipelineParallel.peers import Peer
from smolcluster.algorithms.PipelineParallel.plan import StageMap
from smolcluster.configs.schema import StagesConfig
from smolcluster.errors import DeviceFailed, OutOfMemory, PeerLost, PortBusy, RunFailed
from smolcluster.server.joining import RunOver
from smolcluster.server.report import why_ended
from smolcluster.server.worker import Worker
from smolcluster.training.build import TrainingContext
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.recipe import Training
from smolcluster.training.workload import Workload
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import (
    CopyOrder,
    CopyPiece,
    LeaseKey,
    Message,
    StageDone,
    StageKept,
    StageReady,
    TensorSpec,
)

NUM_WEIGHTS = 10
PLACES = ((0, 6),), ((6, 10), (0, 2))
"""Of two stages; the first two weights are tied."""


class Hand(Head):
    """A head of two stages, which are told nothing but what is written down, and answer as the test says."""

    def __init__(self) -> None:
        replica = SimpleNamespace(
            params=torch.zeros(NUM_WEIGHTS), bucket_bytes=16, buckets=[slice(0, 10)]
        )
        training = SimpleNamespace(replica=replica)
        self.context: Any = SimpleNamespace(
            log=logging.getLogger("test"), training=training, incarnation="i"
        )
        self.builders, self.dealer, self.report = Builders(), Mock(), Mock()
        self.turn, self.step_s, self.num_grants, self.dealing_s = 0, 0.0, 0, 0.0
        self.num_moves = 0
        self.fragments, self.lost, self.crew = None, None, None
        self.waiting = self.running = None
        self._ended = threading.Event()
        self.arrived, self.places, self.has_begun = [], [], False
        self.peers = {}
        for number in (1, 2):
            member = Member(number, number, f"node{number}", 8 * str(number))
            self.peers[number] = Peer(Worker(member, session=Mock()))

    def newcomers(self) -> list[Peer]:
        return []

    def deal(self) -> None:
        """All have their layers."""
        self.crew = Crew(7, StageMap((0, 1, 2), (0, 1), ("a", "b")), list(self.peers.values()))
        self.dealt(self.crew, [StageReady(attempt=7, places=each) for each in PLACES])

    def told(self, number: int) -> list[Message]:
        """What a stage has been told since this was asked last: messages, and frames of pieces."""
        session: Any = self.peers[number].worker.session
        found = [call.args[0] for call in session.send.call_args_list]
        session.send.reset_mock()
        return found

    def give(self, order: Order) -> Order:
        self.take(order)
        if self.crew is not None and self.crew.question is None:
            self.next_turn(self.crew)
        return order

    def answer(self) -> None:
        """Both stages have done what they were told."""
        for number in self.peers:
            self.hear(self.peers[number], StageKept(attempt=7, step=self.turn))


def test_an_order_waits_for_the_layers_and_is_done_when_all_have_done_it() -> None:
    head = Hand()
    order = head.give(head.ordered("reset"))
    assert head.told(1) == []
    head.deal()
    assert head.crew is not None
    head.next_turn(head.crew)
    assert head.told(1) == head.told(2) == [CopyOrder(attempt=7, turn=1, order="reset")]
    head.hear(head.peers[1], StageKept(attempt=7, step=1))
    assert not order.outcome.done()
    head.hear(head.peers[2], StageKept(attempt=6, step=1))  # of layers that it had before
    assert not order.outcome.done()
    head.hear(head.peers[2], StageKept(attempt=7, step=1))
    assert order.outcome.done()


def test_what_goes_on_from_lost_weights_is_refused_until_whole_ones_have_come() -> None:
    head = Hand()
    head.deal()
    running = head.give(head.ordered("reset"))
    head.begin_again("node1 is gone")
    with pytest.raises(PeerLost, match="node1 is gone"):
        running.outcome.result(0)
    later = head.give(head.ordered("step"))
    with pytest.raises(PeerLost):
        later.outcome.result(0)
    loading = head.give(head.loading([torch.zeros(6), torch.ones(4)]))
    assert not loading.outcome.done()
    head.deal()
    assert head.crew is not None
    head.next_turn(head.crew)
    head.answer()
    assert loading.outcome.result(0) is None
    later = head.give(head.ordered("step"))
    head.answer()
    assert later.outcome.result(0) is None


def test_stages_of_a_new_plan_hear_of_the_fragments_first() -> None:
    head = Hand()
    head.deal()
    fragments = (((0, 4),), ((4, 10),))
    head.give(head.beginning(fragments))
    head.answer()
    head.begin_again("node1 is gone")
    head.told(1)
    head.take(head.loading([torch.zeros(10)]))
    head.deal()
    for expected in ("begin", "load"):
        assert head.crew is not None
        head.next_turn(head.crew)
        [order] = head.told(1)
        assert isinstance(order, CopyOrder)
        assert order.order == expected
        assert order.fragments == (fragments if expected == "begin" else ())
        head.answer()


def test_weights_go_to_those_that_have_them_in_pieces_no_larger_than_a_bucket() -> None:
    head = Hand()
    head.deal()
    head.give(head.loading([torch.arange(7.0), torch.arange(7.0, 10.0)]))
    starts: dict[int, list[list[float]]] = {}
    for number, peer in head.peers.items():
        session: Any = peer.worker.session
        frames = [call.args[0] for call in session.send_frame.call_args_list]
        starts[number] = [
            torch.frombuffer(each.payload, dtype=torch.float32).tolist() for each in frames
        ]
    assert starts[1] == [[0, 1, 2, 3], [4, 5]]
    assert sorted(starts[2]) == [[0, 1], [6], [7, 8, 9]]


def test_what_is_the_servers_is_not_asked_of_stages() -> None:
    """The server of the run averages weights, and waits so long for a worker that prepares."""
    own = "ema_decay=0.9", "start_timeout_s=86400", "prepare_timeout_s=600"
    settings = local_settings(*own, algorithm="diloco")
    stages = StagesConfig(host_ip={"pi5": "127.0.0.1"}, port=7000)
    run = pipeline_run(settings.run_config("run-1", "diloco"), stages)
    told = settings_of(settings, run.train, stages, "mini1")
    run.of(PipelineConfig).check(told)
    assert told.cluster.start_timeout_s == 600
    assert told.cluster.port == 7000
    workload = Workload(
        lambda: nn.Linear(1, 1), cross_entropy, [1], training=Training(ema_decay=0.9)
    )
    training = without_servers_part(TrainingContext(workload, small_replica(), 1))
    run.of(PipelineConfig).check_training(training.recipe, training.recipe.applied_to(told.train))


def test_an_error_of_a_pipeline_names_the_keys_that_it_is_about() -> None:
    with (
        pytest.raises(PortBusy, match=r"^nodes\.mini1\.stages: port 7000"),
        naming("nodes.mini1.stages"),
    ):
        raise PortBusy("port 7000 is taken")


def piece(start: int, *values: float, attempt: int = 7, turn: int = 1) -> PieceArrived:
    spec = TensorSpec(codec="raw", dtype="float32", shape=(len(values),), nbytes=4 * len(values))
    said = CopyPiece(attempt=attempt, turn=turn, start=start, tensor=spec)
    return PieceArrived(said, torch.tensor(values))


def test_a_change_is_put_together_and_a_hole_in_it_is_noticed() -> None:
    head = Hand()
    head.fragments = (((2, 5), (8, 10)),)
    head.arrived = [piece(8, 8.0, 9.0), piece(3, 3.0, 4.0)]
    assert head.assembled(0, slice(1, 5)).tolist() == [3, 4, 8, 9]
    with pytest.raises(PeerLost, match="4 of 5 values"):
        head.assembled(0, slice(0, 5))
    head.arrived = [piece(2, 2.0, 3.0), piece(3, 3.0, 4.0), piece(8, 8.0)]
    with pytest.raises(PeerLost, match="4 of 5 values"):  # one of them came twice
        head.assembled(0, slice(0, 5))


def test_pieces_of_a_change_that_nobody_waits_for_any_more_are_dropped() -> None:
    head = Hand()
    head.deal()
    head.fragments, head.has_begun = (((0, 4),),), True
    head.handle(piece(0, 1.0))  # before anything was asked for
    change = head.give(head.change(0, slice(0, 4)))
    head.handle(piece(0, 2.0, 2.0, attempt=6, turn=head.turn))
    head.handle(piece(0, 3.0, 3.0, turn=head.turn - 1))
    head.handle(piece(0, *range(4), turn=head.turn))
    assert [each.values.tolist() for each in head.arrived] == [[0, 1, 2, 3]]
    head.answer()
    assert change.outcome.result(0).tolist() == [0, 1, 2, 3]


def test_waiting_for_stages_ends_with_the_session_with_the_server() -> None:
    head = Hand()
    head.context.inbox = Mock()

    def check() -> None:
        raise PeerLost("the server is lost")

    replica = small_replica()
    context = PipelineContext(Mock(), replica, 1, head=head, rooms=ExitStack())
    with pytest.raises(PeerLost, match="the server is lost"):
        context.wait_until_ready(check)
    with pytest.raises(PeerLost, match="the server is lost"):
        context.local_copy([[slice(0, NUM_WEIGHTS)]])


def closed_by(error: BaseException | None) -> BaseException | None:
    """What the stages hear when `error` ends their worker; None: their run has ended well."""
    told: list[BaseException | None] = []
    rooms = ExitStack()
    rooms.push(lambda _kind, error, _trace: told.append(what_stages_hear(error)))
    context = PipelineContext(Mock(), small_replica(), 1, head=Mock(), rooms=rooms)
    with suppress(Exception, KeyboardInterrupt), closing(context):
        if error is not None:
            raise error
    return told[0]


def test_stages_end_well_only_with_the_run() -> None:
    """With anything else their worker may come back, or begin another run: they look for it."""
    assert closed_by(RunOver("every sample has been applied")) is None
    for error in (None, KeyboardInterrupt(), ZeroDivisionError(), DeviceFailed("it is gone")):
        assert isinstance(closed_by(error), KeyboardInterrupt)


def test_stages_hear_why_their_worker_cannot_go_on() -> None:
    failed = closed_by(RunFailed("the run failed: loss is nan"))
    assert failed is not None
    assert why_ended(failed) == "the run failed: loss is nan"
    assert isinstance(closed_by(OutOfMemory("too little")), OutOfMemory)


@pytest.mark.parametrize(
    ("loss", "squared", "expected"),
    [
        (6.0, 16.0, Computed(3.0, 2, 2.5)),
        (None, 16.0, Computed(math.nan, 2, 2.5)),
        (6.0, None, Computed(3.0, 2, math.nan)),
    ],
)
def test_losses_and_norms_of_stages_are_the_models(
    loss: float | None, squared: float | None, expected: Computed
) -> None:
    lease = LeaseKey(incarnation="i", epoch=0, start=0, stop=2, grant=1)
    told: dict[str, Any] = {"attempt": 1, "lease": lease, "seconds": {}}
    first = StageDone(loss=0.0, num_terms=0, squared_norm=9.0, **told)
    last = StageDone(loss=loss, num_terms=2, squared_norm=squared, **told)
    assert computed([first, last]) == pytest.approx(expected, nan_ok=True)


def test_a_batch_without_loss_terms_counts_none() -> None:
    lease = LeaseKey(incarnation="i", epoch=0, start=0, stop=2, grant=1)
    told: dict[str, Any] = {"attempt": 1, "lease": lease, "seconds": {}}
    stage = StageDone(loss=0.0, num_terms=0, squared_norm=0.0, **told)
    assert computed([stage, stage]) == Computed(0.0, 0, 0.0)
