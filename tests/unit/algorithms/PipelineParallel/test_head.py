"""What a worker's head orders of its stages, and what becomes of orders when a stage is lost."""

import logging
import math
import threading
from contextlib import closing, suppress
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from harness import local_settings
from peers import opened, small_replica
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Crew, Peer, computed
from smolcluster.algorithms.PipelineParallel.head import (
    Head,
    Order,
    assembled,
    naming,
    pipeline_run,
    settings_of,
    without_average,
)
from smolcluster.algorithms.PipelineParallel.part_copy import CopyStream, copy_frames
from smolcluster.algorithms.PipelineParallel.plan import StageMap, unmeasured
from smolcluster.algorithms.spreading import SpreadContext
from smolcluster.configs.schema import StagesConfig
from smolcluster.errors import DeviceFailed, OutOfMemory, PeerLost, PortBusy, RunFailed
from smolcluster.server.joining import RunOver
from smolcluster.server.report import why_ended
from smolcluster.server.worker import Worker
from smolcluster.training.build import TrainingContext
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.compute import BatchLoss
from smolcluster.training.local_copy import LocalCopy
from smolcluster.training.recipe import Training
from smolcluster.training.workload import Workload
from smolcluster.wire.inbox import Call, Inbox, MessageReceived
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import (
    CopyOrder,
    CopyPiece,
    LeaseKey,
    Message,
    StageDone,
    StageKept,
    StageReady,
)

NUM_WEIGHTS = 10
PLACES = ((0, 6),), ((6, 10), (0, 2))
"""Of two stages; the first two weights are tied."""


OF_ALL: dict[str, Any] = {"fragment": None, "is_difference": False}


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
        self.dealer, self.pool = Mock(), Mock()
        self.dealer.newcomers.return_value = []
        self.turn, self.step_s, self.num_grants = 0, 0.0, 0
        self.fragments, self.lost, self.crew = None, None, None
        self.waiting = None
        self._ended = threading.Event()
        self.streams = {}
        self.peers = self.dealer.peers = {}
        for number in (1, 2):
            member = Member(number, number, f"node{number}", 8 * str(number))
            self.peers[number] = Peer(Worker(member, session=Mock()))

    def deal(self) -> None:
        """All have their layers."""
        cut = unmeasured(StageMap((0, 1, 2), (0, 1), ("a", "b")), PipelineConfig())
        self.crew = Crew(7, cut, list(self.peers.values()))
        self.questions = self.work(
            self.crew, [StageReady(attempt=7, places=each) for each in PLACES]
        )
        self.go_on(self.crew)

    def told(self, number: int) -> list[Message]:
        """What a stage has been told since this was asked last: messages, and frames of pieces."""
        session: Any = self.peers[number].worker.session
        found = [call.args[0] for call in session.send.call_args_list]
        session.send.reset_mock()
        return found

    def do(self, order: Order) -> Any:
        """Begin it, and do not wait: `given` is what has been ordered last."""
        self.given = order
        self.take(order)
        if self.crew is not None and self.crew.question is None:
            self.go_on(self.crew)

    def outcome(self) -> Any:
        return self.given.outcome.result(0)

    def answer(self) -> None:
        """Both stages have done what they were told."""
        for number in self.peers:
            self.hear(self.peers[number], StageKept(attempt=7, step=self.turn), b"")


def whole(*parts: Tensor) -> list[tuple[slice, Tensor]]:
    """Flat weights in parts."""
    stops = list(accumulate(len(each) for each in parts))
    return [(slice(stop - len(each), stop), each) for stop, each in zip(stops, parts, strict=True)]


def test_an_order_waits_for_the_layers_and_is_done_when_all_have_done_it() -> None:
    head = Hand()
    head.order("reset")
    assert head.told(1) == []
    head.deal()
    assert head.told(1) == head.told(2) == [CopyOrder(attempt=7, turn=1, order="reset")]
    head.hear(head.peers[1], StageKept(attempt=7, step=1), b"")
    assert not head.given.outcome.done()
    head.hear(head.peers[2], StageKept(attempt=6, step=1), b"")  # of layers that it had before
    assert not head.given.outcome.done()
    head.hear(head.peers[2], StageKept(attempt=7, step=1), b"")
    assert head.given.outcome.done()


def test_what_goes_on_from_lost_weights_is_refused_until_whole_ones_have_come() -> None:
    head = Hand()
    head.deal()
    head.order("reset")
    head.begin_again("node1 is gone")
    with pytest.raises(PeerLost, match="node1 is gone"):
        head.outcome()
    head.order("step")
    with pytest.raises(PeerLost):
        head.outcome()
    head.order("take", whole(torch.zeros(6), torch.ones(4)), **OF_ALL)
    assert not head.given.outcome.done()
    head.deal()
    head.answer()
    assert head.outcome() is None
    head.order("step")
    head.answer()
    head.outcome()


def test_stages_of_a_new_plan_hear_of_the_fragments_first() -> None:
    head = Hand()
    head.deal()
    fragments = (((0, 4),), ((4, 10),))
    head.order("begin", fragments=fragments)
    head.answer()
    head.begin_again("node1 is gone")
    head.told(1)
    head.order("take", whole(torch.zeros(10)), **OF_ALL)
    head.deal()
    for expected in ("begin", "load"):
        [order] = head.told(1)
        assert isinstance(order, CopyOrder)
        assert order.order == expected
        assert order.fragments == (fragments if expected == "begin" else ())
        head.answer()


def test_weights_go_to_those_that_have_them_in_pieces_no_larger_than_a_bucket() -> None:
    head = Hand()
    head.deal()
    head.order("take", whole(torch.arange(7.0), torch.arange(7.0, 10.0)), **OF_ALL)
    starts: dict[int, list[list[float]]] = {}
    for number, peer in head.peers.items():
        session: Any = peer.worker.session
        frames = [call.args[0] for call in session.send_frame.call_args_list]
        starts[number] = [
            torch.frombuffer(each.payload, dtype=torch.float32).tolist() for each in frames
        ]
    assert starts[1] == [[0, 1, 2, 3], [4, 5]]
    assert starts[2] == [[6], [0, 1], [7, 8, 9]]


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
    training = without_average(TrainingContext(workload, small_replica(), 1))
    run.of(PipelineConfig).check_training(training.recipe, training.recipe.applied_to(told.train))


def test_an_error_of_a_pipeline_names_the_keys_that_it_is_about() -> None:
    with (
        pytest.raises(PortBusy, match=r"^nodes\.mini1\.stages: port 7000"),
        naming("nodes.mini1.stages"),
    ):
        raise PortBusy("port 7000 is taken")


def piece(session_id: int, *values: float, attempt: int = 7, turn: int = 1) -> MessageReceived:
    [frame] = copy_frames(attempt, turn, [torch.tensor(values)], 1000)
    said, payload = opened(frame)
    assert isinstance(said, CopyPiece)
    return MessageReceived(session_id, said, bytearray(payload))


def test_a_change_is_put_together_from_those_that_have_it() -> None:
    head = Hand()
    head.deal()
    head.handle(piece(1, 1.0))  # before anything was asked for
    head.order("read", fragment=0, places=[(7, 9), (0, 3)], is_gradient=False)
    orders = [head.told(number)[0] for number in (1, 2)]
    assert [each.places for each in orders if isinstance(each, CopyOrder)] == [
        ((0, 3),),  # both have the first two
        ((7, 9),),
    ]
    head.handle(piece(2, 2.0, 2.0, attempt=6, turn=head.turn))
    head.handle(piece(2, 3.0, 3.0, turn=head.turn - 1))
    head.handle(piece(2, 7.0, 8.0, turn=head.turn))
    head.handle(piece(1, 0.0, 1.0, 2.0, turn=head.turn))
    head.answer()
    assert head.outcome().tolist() == [7, 8, 0, 1, 2]


def test_a_stage_that_sends_another_change_than_was_asked_for_is_cut() -> None:
    head = Hand()
    head.deal()
    head.order("read", fragment=0, places=[(0, 3)], is_gradient=False)
    arrived = piece(1, 0.0, 1.0, 2.0, turn=head.turn)
    session: Any = head.peers[1].worker.session
    head.handle(arrived)
    session.cut.assert_not_called()
    head.handle(arrived)  # one that comes twice counts for no other
    session.cut.assert_called_once()


def test_a_hole_in_a_change_is_noticed() -> None:
    stream = CopyStream([slice(0, 3)], torch.float32)
    with pytest.raises(PeerLost, match="0 of 3 values"):
        assembled([slice(0, 3)], [stream], torch.float32)


def test_waiting_for_stages_ends_with_the_session_with_the_server() -> None:
    head = Hand()
    head.context.inbox = Mock()

    def check() -> None:
        raise PeerLost("the server is lost")

    head.do = partial(Head.do, head)  # type: ignore[method-assign]
    context = SpreadContext(Mock(), small_replica(), 1, others=head)
    with pytest.raises(PeerLost, match="the server is lost"):
        context.wait_until_ready(check)
    with pytest.raises(PeerLost, match="the server is lost"):
        LocalCopy(context.executor, [[slice(0, NUM_WEIGHTS)]])


def closed_by(error: BaseException | None) -> BaseException | None:
    """What the stages hear when `error` ends their worker; None: their run has ended well."""
    head = Hand()
    head.context.inbox, head._thread = Inbox(), Mock()
    context = SpreadContext(Mock(), small_replica(), 1, others=head)
    with suppress(Exception, KeyboardInterrupt), closing(context):
        if error is not None:
            raise error
    call = head.context.inbox.get(0)
    assert isinstance(call, Call)
    call.run()
    assert head.is_over
    return head.failure


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
        (6.0, 16.0, (3.0, 2.5)),
        (None, 16.0, (math.nan, 2.5)),
        (6.0, None, (3.0, math.nan)),
    ],
)
def test_losses_and_norms_of_stages_are_the_models(
    loss: float | None, squared: float | None, expected: tuple[float, float]
) -> None:
    lease = LeaseKey(incarnation="i", epoch=0, start=0, stop=2, grant=1)
    told: dict[str, Any] = {"attempt": 1, "lease": lease, "seconds": {}}
    first = StageDone(loss=0.0, num_terms=0, squared_norm=9.0, **told)
    last = StageDone(loss=loss, num_terms=2, squared_norm=squared, **told)
    found, norm = computed([first, last])
    assert found.num_terms == 2
    assert (found.mean, norm) == pytest.approx(expected, nan_ok=True)


def test_a_batch_without_loss_terms_counts_none() -> None:
    lease = LeaseKey(incarnation="i", epoch=0, start=0, stop=2, grant=1)
    told: dict[str, Any] = {"attempt": 1, "lease": lease, "seconds": {}}
    stage = StageDone(loss=0.0, num_terms=0, squared_norm=0.0, **told)
    assert computed([stage, stage]) == (BatchLoss(0.0, 0), 0.0)
