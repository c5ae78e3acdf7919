"""Stages that are neighbours, over loopback: what arrives, what is dropped, who is lost, who is let in."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from peers import DEADLINE_S, opened
from pipelines import BUCKET_BYTES, Linked, connect, linked
from proxy import Proxy
from smolcluster.algorithms.PipelineParallel import links as links_module
from smolcluster.algorithms.PipelineParallel.links import _Incoming
from smolcluster.algorithms.PipelineParallel.transfers import Key, Mailbox, encode
from smolcluster.errors import (
    AuthError,
    ConnectTimeout,
    DataError,
    PeerLost,
    ProtocolError,
    RunFailed,
)
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.wire import node
from smolcluster.wire.messages import HostPort, TensorSpec, Transfer, TransferPiece
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret
from smolcluster.wire.streams import byte_frames
from waiting import eventually

MakeStages = Callable[[int], list[Linked]]


@pytest.fixture
def stages() -> Iterator[MakeStages]:
    """Makes stages that are closed with the test."""
    with ExitStack() as stack:
        yield lambda num_stages: stack.enter_context(linked(num_stages))


def outbox_of(stage: Linked, neighbour: Linked) -> links_module._Outbox:
    outbox = stage.links._outbox(neighbour.known)
    assert outbox is not None
    return outbox


def flush(stage: Linked, neighbour: Linked) -> None:
    """Wait until what was sent has left."""
    assert outbox_of(stage, neighbour).session.flush(DEADLINE_S)


@contextmanager
def held_back(stage: Linked, neighbour: Linked) -> Iterator[links_module._Outbox]:
    """Let nothing leave for the neighbour within the block."""
    outbox, entered, may_go = outbox_of(stage, neighbour), threading.Event(), threading.Event()

    def hold(_timeout_s: float) -> None:
        entered.set()
        may_go.wait(DEADLINE_S)

    outbox.session.send_later(hold)
    assert entered.wait(DEADLINE_S)
    try:
        yield outbox
    finally:
        may_go.set()


def forward(microbatch: int, stage: int) -> Instruction:
    return Instruction(Op.FORWARD, microbatch, stage)


def backward(microbatch: int, stage: int) -> Instruction:
    return Instruction(Op.BACKWARD, microbatch, stage)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_activations_go_up_and_gradients_down_in_pieces(stages: MakeStages) -> None:
    low, middle, high = made = stages(3)
    connect(made)
    sent = {"hidden": values(4, 33, 32), "mask": torch.ones(4, 33, dtype=torch.bool)}
    assert sent["hidden"].nbytes > 3 * BUCKET_BYTES
    low.links.send(forward(0, 0), sent)
    got = middle.links.receive(forward(0, 1))
    assert torch.equal(got["hidden"], sent["hidden"])
    assert torch.equal(got["mask"], sent["mask"])
    middle.links.send(forward(0, 1), values(2, 2))
    high.links.send(backward(0, 2), values(2, 2, seed=1))
    assert torch.equal(high.links.receive(forward(0, 2)), values(2, 2))
    assert torch.equal(middle.links.receive(backward(0, 1)), values(2, 2, seed=1))


def test_bytes_are_counted_for_each_neighbour_as_they_were_encoded(stages: MakeStages) -> None:
    low, middle, high = made = stages(3)
    connect(made, codec="int8")
    middle.links.send(forward(0, 1), values(64, 256))  # of no step that is counted
    high.links.receive(forward(0, 2))
    assert middle.links.take_sent() == (0, 0, 0)
    for each in made:
        each.links.begin_step(1, is_counted=True)
    middle.links.send(forward(0, 1), values(64, 256))
    middle.links.send(backward(0, 1), values(2, 256))
    high.links.receive(forward(0, 2))
    low.links.receive(backward(0, 0))
    to_low, to_itself, to_high = middle.links.take_sent()
    assert to_itself == 0
    assert 64 * 256 < to_high < 2 * 64 * 256  # a byte and not four for each number
    assert 2 * 256 < to_low < 2 * 2 * 256
    middle.links.begin_step(2)  # an evaluation
    high.links.begin_step(2)
    middle.links.send(forward(0, 1), values(2, 2))
    high.links.receive(forward(0, 2))
    assert middle.links.take_sent() == (0, 0, 0)


def test_virtual_stages_of_one_rank_hand_over_without_a_session(stages: MakeStages) -> None:
    [only] = stages(1)
    only.links.connect(only.route((), (0, 0)), DEADLINE_S)
    only.links.send(forward(0, 0), values(2).requires_grad_())
    got = only.links.receive(forward(0, 1))
    assert torch.equal(got, values(2))
    assert not got.requires_grad


def test_int8_is_used_for_activations_and_not_for_what_is_exchanged(stages: MakeStages) -> None:
    low, high = made = stages(2)
    connect(made, codec="int8")
    low.links.send(forward(0, 0), values(8, 32))
    got = high.links.receive(forward(0, 1))
    assert not torch.equal(got, values(8, 32))
    torch.testing.assert_close(got, values(8, 32), rtol=0, atol=0.02)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(low.links.exchange, 1, {"wte": values(8, 32)})
        got = high.links.exchange(0, {"wte": values(8, 32, seed=1)})
        assert torch.equal(other.result()["wte"], values(8, 32, seed=1))
    assert torch.equal(got["wte"], values(8, 32))


def test_what_is_of_an_older_step_or_attempt_is_dropped(stages: MakeStages) -> None:
    low, high = made = stages(2)
    connect(made)
    low.links.send(forward(0, 0), torch.tensor(0))
    low.links.begin_step(1)
    low.links.send(forward(0, 0), torch.tensor(1))
    high.links.begin_step(1)
    assert high.links.receive(forward(0, 1)) == 1
    low.links.send(forward(1, 0), torch.tensor(2))
    connect(made, attempt=2, step=1)
    low.links.send(forward(1, 0), torch.tensor(3))
    assert high.links.receive(forward(1, 1)) == 3
    assert high.links._mailbox._held_nbytes == 0


def test_what_comes_early_of_the_next_attempt_is_kept(stages: MakeStages) -> None:
    low, high = made = stages(2)
    connect(made)
    low.links.connect(low.route([high.known], (0, 1), attempt=2), DEADLINE_S)
    low.links.send(forward(0, 0), torch.tensor(7))
    flush(low, high)
    high.links.connect(high.route([low.known], (0, 1), attempt=2), DEADLINE_S)
    assert high.links.receive(forward(0, 1)) == 7


def test_a_neighbour_that_is_lost_is_named_and_can_come_back(stages: MakeStages) -> None:
    low, high = made = stages(2)
    connect(made)
    low.links.send(forward(0, 0), torch.tensor(1))
    flush(low, high)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(high.links.receive, forward(1, 1))
        low.links.close()
        with pytest.raises(PeerLost, match=r"stage 0 \(node0\) is lost"):
            waiting.result(DEADLINE_S)
    assert high.links.receive(forward(0, 1)) == 1, "it had come before"
    with pytest.raises(PeerLost, match="stage 0"):
        high.links.send(backward(0, 1), torch.tensor(1))
    [returned] = stages(1)
    connect([returned, high], attempt=2)
    returned.links.send(forward(0, 0), torch.tensor(5))
    assert high.links.receive(forward(0, 1)) == 5


def test_nothing_for_too_long_is_an_error_that_says_what_did_not_come(stages: MakeStages) -> None:
    made = stages(2)
    connect(made, patience_s=0.1)
    with pytest.raises(PeerLost, match="the input of microbatch 3, step 0 did not come within"):
        made[1].links.receive(forward(3, 1))


def test_the_coordinator_interrupts_whoever_waits_until_the_next_attempt(
    stages: MakeStages,
) -> None:
    made = stages(2)
    connect(made)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made[1].links.receive, forward(0, 1))
        made[1].links.interrupt(RunFailed("stage 3 is lost"), through=1)
        with pytest.raises(RunFailed, match="stage 3"):
            waiting.result(DEADLINE_S)
    with pytest.raises(RunFailed):
        made[1].links.send(backward(0, 1), torch.tensor(1))
    connect(made, attempt=2)
    made[0].links.send(forward(0, 0), torch.tensor(2))
    assert made[1].links.receive(forward(0, 1)) == 2


def test_what_an_interrupted_attempt_has_computed_with_is_freed(stages: MakeStages) -> None:
    [stage] = stages(1)
    stage.links.connect(stage.route((), (0,)), DEADLINE_S)
    stage.links.interrupt(RunFailed("the plan has changed"), through=1)
    freed: list[weakref.ref[Tensor]] = []

    def compute() -> None:
        layers = torch.zeros(3)
        freed.append(weakref.ref(layers))
        stage.links.receive(forward(0, 0))

    with suppress(RunFailed):
        compute()
    gc.collect()
    assert freed[0]() is None


def test_what_waits_to_leave_keeps_no_graph_of_what_it_was_computed_with(
    stages: MakeStages,
) -> None:
    low, high = made = stages(2)
    connect(made)

    def compute() -> weakref.ref[Tensor]:
        layers = torch.zeros(3, requires_grad=True)
        low.links.send(forward(0, 0), {"hidden": layers.exp()})
        return weakref.ref(layers)

    with held_back(low, high):
        freed = compute()
        gc.collect()
        assert freed() is None
    assert torch.equal(high.links.receive(forward(0, 1))["hidden"], torch.ones(3))


def test_a_wrong_secret_is_said_on_both_sides(
    stages: MakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "DIAL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(node, "LAST_TRY_S", DEADLINE_S)
    [low] = stages(1)
    stranger = Linked(1, secret=Secret(Path("theirs"), b"x" * 64))
    try:
        low.links._route = low.route([stranger.known], (0, 1))
        with pytest.raises(AuthError, match=r"link to stage 0 \(node0\).*theirs"):
            stranger.links.connect(stranger.route([low.known], (0, 1)), DEADLINE_S)
        eventually(lambda: any("does not know the secret" in line for line in low.log))
    finally:
        stranger.links.close()


def test_who_comes_before_the_plan_is_let_in_with_it(stages: MakeStages) -> None:
    low, high = stages(2)
    with ThreadPoolExecutor(1) as pool:
        route = high.route([low.known], (0, 1))
        reaching = pool.submit(high.links.connect, route, DEADLINE_S)
        assert not reaching.done()
        low.links.connect(low.route([high.known], (0, 1)), DEADLINE_S)
        reaching.result(DEADLINE_S)


def test_a_neighbour_that_cannot_be_reached_is_an_error_where_nobody_relays(
    stages: MakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "DIAL_TIMEOUT_S", 0.1)
    low, high = stages(2)
    low.links.close()
    with pytest.raises(ConnectTimeout, match=r"stage 0 \(node0\)"):
        high.links.connect(high.route([low.known], (0, 1)), DEADLINE_S)


def test_who_has_forgotten_that_the_server_relays_hears_of_it_again(
    stages: MakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lower one has measured a link to somebody else between two plans, the higher one has not."""
    low, high = made = stages(2)
    servers = []
    for each, other in ((low, high), (high, low)):
        heard = partial(other.links.relayed, each.known.instance)
        each.links._server = Mock(send=Mock(side_effect=lambda _, heard=heard: heard()))
        servers.append(each.links._server)
    monkeypatch.setattr(Node, "dial_session", Mock(side_effect=ConnectTimeout("a firewall")))
    connect(made)
    low.links.connect(low.route((), (0,), attempt=2), DEADLINE_S)
    connect(made, attempt=3)
    assert [each.send.call_count for each in servers] == [0, 2]


def test_a_thing_that_cannot_travel_ends_the_attempt(stages: MakeStages) -> None:
    made = stages(2)
    connect(made)
    made[0].links.send(forward(0, 0), {"cache": object()})
    with pytest.raises(DataError, match="the input of microbatch 0, step 0 cannot be sent"):
        made[0].links.receive(backward(0, 0))


def test_more_than_there_is_memory_for_is_refused_before_it_is_taken(stages: MakeStages) -> None:
    low, high = made = stages(2)
    connect(made)
    high.links._mailbox._max_held_nbytes = 10_000
    low.links.send(forward(0, 0), values(1000))
    low.links.send(forward(1, 0), values(2000))
    with pytest.raises(PeerLost, match="lower batch_size"):
        high.links.receive(forward(1, 1))
    assert torch.equal(high.links.receive(forward(0, 1)), values(1000))


def test_who_computes_waits_when_the_link_does_not_keep_up(
    stages: MakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "MAX_QUEUED_NBYTES", 1000)
    low, high = made = stages(2)
    connect(made)
    with ThreadPoolExecutor(1) as pool:
        with held_back(low, high) as outbox:
            low.links.send(forward(0, 0), values(200))
            waiting = pool.submit(low.links.send, forward(1, 0), values(200, seed=1))
            assert not outbox.has_room(800)
            assert not waiting.done()
        waiting.result(DEADLINE_S)
    assert torch.equal(high.links.receive(forward(1, 1)), values(200, seed=1))


def arrive(incoming: _Incoming, data: bytes, halves: slice = slice(2)) -> None:
    """Let it take this, or half of it, as the input of the first microbatch."""
    key = Key(attempt=1, step=0, direction="forward", stage=0, microbatch=0)

    def piece(offset: int, tensor: TensorSpec) -> Transfer:
        at = TransferPiece(**key._asdict(), offset=offset, nbytes=len(data))
        return Transfer(piece=at, tensor=tensor)

    half = len(data) // 2
    frames = byte_frames(piece, [memoryview(data)[:half], memoryview(data)[half:]])
    for message, payload in map(opened, [*frames][halves]):
        if (place := incoming.place_for(message)) is not None:
            place[:] = payload
        incoming(message, payload)


def test_what_is_refused_holds_no_memory() -> None:
    tree = b"".join(encode(1, "fp32").pieces)
    mailbox = Mailbox(2 * len(tree))
    incoming = _Incoming("neighbour", mailbox)
    with pytest.raises(ProtocolError, match="skeleton"):
        arrive(incoming, bytes(len(tree)))
    arrive(incoming, tree)
    with pytest.raises(ProtocolError, match="came twice"):
        arrive(incoming, tree)
    mailbox.reserve(len(tree))
    with pytest.raises(ProtocolError, match="wait already"):
        mailbox.reserve(1)


def test_half_a_tree_of_a_lost_sender_is_given_up_for_the_next_one() -> None:
    tree = b"".join(encode(values(4), "fp32").pieces)
    mailbox = Mailbox(2 * len(tree))
    incoming = _Incoming("neighbour", mailbox)
    arrive(incoming, tree, slice(1))
    arrive(incoming, tree)
    assert mailbox._held_nbytes == len(tree)
    arrive(incoming, tree, slice(1, 2))
    arrive(incoming, tree, slice(1))
    incoming.close()
    assert mailbox._held_nbytes == len(tree), "of halves nothing is held"


def test_a_neighbour_that_is_lost_once_all_are_ready_is_known(stages: MakeStages) -> None:
    """It may have lost this stage first, and wait for it, while this one waits for samples."""
    low, high = made = stages(2)
    connect(made)
    high.links.check(1)
    low.links.close()
    eventually(lambda: low.known.instance in high.links._mailbox._lost)
    high.links.check(2)
    with pytest.raises(PeerLost, match=r"stage 0 \(node0\) is lost"):
        high.links.check(1)


def test_a_neighbour_is_not_taken_for_another_one(
    stages: MakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines may have the same address, each in a network of its own."""
    monkeypatch.setattr(links_module, "DIAL_TIMEOUT_S", 0.0)  # each address is tried once
    monkeypatch.setattr(node, "LAST_TRY_S", DEADLINE_S)
    low, middle, high = stages(3)
    shared = low.known.model_copy(update={"places": (*middle.known.places, *low.known.places)})
    routes = {
        low: low.route([high.known], (0, 2, 1)),
        middle: middle.route([high.known], (0, 2, 1)),
        high: high.route([shared, middle.known], (0, 2, 1)),
    }
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: each.links.connect(routes[each], DEADLINE_S), routes))
    high.links.send(backward(0, 1), values(2, 2))
    assert torch.equal(low.links.receive(backward(0, 0)), values(2, 2))


@pytest.fixture
def proxied(stages: MakeStages) -> Iterator[tuple[Linked, Linked, Proxy]]:
    """Two stages, of which the higher one reaches the lower one through a proxy."""
    low, high = stages(2)
    proxy = Proxy(low.known.places[0].port)
    there = low.known.model_copy(update={"places": (HostPort(host="127.0.0.1", port=proxy.port),)})
    with ThreadPoolExecutor(1) as pool:
        route = low.route([high.known], (0, 1))
        waiting = pool.submit(low.links.connect, route, DEADLINE_S)
        high.links.connect(high.route([there], (0, 1)), DEADLINE_S)
        waiting.result()
    yield low, high, proxy
    proxy.close()


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "reset"])
def test_a_message_that_is_not_whole_is_never_computed_with(
    proxied: tuple[Linked, Linked, Proxy], fault: str
) -> None:
    low, high, proxy = proxied
    sent = values(64, 1024)
    if fault == "corrupt":
        proxy.corrupt(sent.nbytes, upward=False)  # in the last piece
    else:
        proxy.throttle(200_000)
    low.links.send(forward(0, 0), sent)
    if fault != "corrupt":
        eventually(lambda: high.links._mailbox._num_pieces[low.known.instance] > 2)
        proxy.cut("close" if fault == "truncate" else "reset")
    with pytest.raises(PeerLost, match="damaged" if fault == "corrupt" else "lost"):
        high.links.receive(forward(0, 1))
    eventually(lambda: high.links._mailbox._held_nbytes == 0)
