"""Nodes that dial each other: protocols of their own between any two processes."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

from harness import SECRET, free_port
from peers import DEADLINE_S
from proxy import Proxy
from smolcluster.errors import AuthError, ConnectTimeout, ProtocolError, Rejected
from smolcluster.wire import dialling
from smolcluster.wire.dialling import Address
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    PS,
    Count,
    Kinds,
    Message,
    MessageSet,
    TensorSpec,
    frame_of,
)
from smolcluster.wire.node import Connected, Disconnected, Node, Peer, Received
from smolcluster.wire.security import Secret

E = TypeVar("E", bound=Event)
HOST = "127.0.0.1"
CHUNK_NUMEL = 1000


class Chunk(Message):
    """A part of a tensor on its way around a ring."""

    KIND: ClassVar[int] = 90
    number: Count
    tensor: TensorSpec


class Token(Message):
    """A number that each node adds one to."""

    KIND: ClassVar[int] = 91
    value: Count


BOTH: Kinds = frozenset({Chunk, Token})
RING = MessageSet("ring", from_dialler=BOTH, from_listener=BOTH)


MakeNode = Callable[..., Node]


@pytest.fixture
def node() -> Iterator[MakeNode]:
    """Makes nodes that are closed with the test."""
    usual: dict[str, Any] = {
        "encryption": "on",
        **dict.fromkeys(("heartbeat_timeout_s", "reconnect_timeout_s"), DEADLINE_S),
    }
    with ExitStack() as stack:

        def make(name: str, *sets: MessageSet, secret: Secret = SECRET, **options: Any) -> Node:
            return stack.enter_context(Node(name, secret, sets or (RING,), **(usual | options)))

        yield make


def event(of: Node, kind: type[E]) -> E:
    """The next event of that kind."""
    while True:
        happened = of.next_event(DEADLINE_S)
        assert happened is not None, f"no {kind.__name__}"
        if isinstance(happened, kind):
            return happened


def pair(node: MakeNode) -> tuple[Node, Peer, Node, Peer]:
    """Two nodes of which the first has dialled the second, and what each calls the other."""
    left, right = node("left"), node("right")
    to_right = left.dial(right.listen(HOST), DEADLINE_S)
    return left, to_right, right, event(right, Connected).peer


def send_chunk(peer: Peer, number: int, values: Tensor) -> None:
    sent = values.clone().numpy()  # the chunk may change before it has left
    spec = TensorSpec(codec="fp32", dtype="float32", shape=sent.shape, nbytes=sent.nbytes)
    peer.send(Chunk(number=number, tensor=spec), sent.data)


def hear_chunk(node: Node) -> tuple[int, Tensor]:
    heard = event(node, Received)
    assert isinstance(heard.message, Chunk)
    return heard.message.number, torch.frombuffer(bytearray(heard.payload), dtype=torch.float32)


def all_reduce(node: Node, right: Peer, rank: int, own: Tensor, world_size: int) -> Tensor:
    """The sum of all nodes' tensors by a ring: reduce-scatter, then all-gather."""
    chunks = list(own.clone().chunk(world_size))
    for step in range(world_size - 1):
        number = (rank - step) % world_size
        send_chunk(right, number, chunks[number])
        number, partial = hear_chunk(node)
        chunks[number] += partial
    for step in range(world_size - 1):
        number = (rank + 1 - step) % world_size
        send_chunk(right, number, chunks[number])
        number, chunks[number] = hear_chunk(node)
    return torch.cat(chunks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nodes_that_listen_and_dial_each_other_sum_a_tensor_over_a_ring(
    node: MakeNode, world_size: int
) -> None:
    nodes = [node(f"node{rank}") for rank in range(world_size)]
    addresses = [each.listen(HOST) for each in nodes]
    tensors = [torch.arange(CHUNK_NUMEL * world_size) * (rank + 1.0) for rank in range(world_size)]

    def run(rank: int) -> Tensor:
        right = nodes[rank].dial(addresses[(rank + 1) % world_size], DEADLINE_S)
        return all_reduce(nodes[rank], right, rank, tensors[rank], world_size)

    with ThreadPoolExecutor(world_size) as pool:
        sums = list(pool.map(run, range(world_size), timeout=3 * DEADLINE_S))
    for each in sums:
        assert torch.equal(each, torch.stack(tensors).sum(0))


def test_either_side_may_begin_and_events_name_their_peer(node: MakeNode) -> None:
    left, to_right, right, to_left = pair(node)
    assert (to_left.name, to_left.address) == ("left", None)
    assert to_right.name == "right"
    assert event(left, Connected).peer is to_right
    to_left.send(Token(value=1))
    heard = event(left, Received)
    assert (heard.peer, heard.message) == (to_right, Token(value=1))
    to_right.send(Token(value=2))
    heard = event(right, Received)
    assert (heard.peer, heard.message) == (to_left, Token(value=2))
    assert to_right.session.connection.is_encrypted


def test_what_is_of_no_agreed_set_cannot_be_said(node: MakeNode) -> None:
    ring, other = node("ring"), node("other", PS)
    peer = ring.dial(other.listen(HOST), DEADLINE_S)
    assert peer.is_connected, "of what both know there is the session"
    with pytest.raises(ProtocolError, match="Token"):
        peer.send(Token(value=1))


def test_a_message_of_a_set_that_was_not_agreed_closes_the_session(node: MakeNode) -> None:
    ring, other = node("ring", reconnect_timeout_s=0.1), node("other", PS)
    peer = ring.dial(other.listen(HOST), DEADLINE_S)
    peer.session.send_frame(frame_of(Token(value=1)))
    lost = event(other, Disconnected)
    assert (lost.peer.name, lost.is_final) == ("ring", True)
    assert "message kind 91" in lost.reason


def test_two_versions_of_a_set_are_refused(node: MakeNode) -> None:
    newer = MessageSet("ring", from_dialler=BOTH, from_listener=frozenset({Token}))
    address = node("older").listen(HOST)
    with pytest.raises(Rejected, match="install the same") as refused:
        node("newer", newer).dial(address, DEADLINE_S)
    assert refused.value.code == "version"


def test_a_wrong_secret_is_refused_on_both_sides(node: MakeNode) -> None:
    address = node("right").listen(HOST)
    stranger = node("stranger", secret=Secret(Path("theirs"), b"x" * 64))
    with pytest.raises(AuthError):
        stranger.dial(address, DEADLINE_S)


def test_nobody_there_and_who_says_nothing_are_an_error_in_time(node: MakeNode) -> None:
    with socket.create_server((HOST, 0)) as silent:
        for port in (free_port(), silent.getsockname()[1]):
            with pytest.raises(ConnectTimeout):
                node("left").dial(Address(HOST, port), 0.2)


def test_a_peer_that_dies_and_returns_is_dialled_again(node: MakeNode) -> None:
    left, to_right, right, _ = pair(node)
    address = to_right.address
    assert address is not None
    right.close()
    assert not event(left, Disconnected).is_final
    returned = node("right")
    returned.listen(HOST, address.port)
    to_left = event(returned, Connected).peer
    assert event(left, Connected).peer is to_right
    to_right.send(Token(value=3))
    assert event(returned, Received).message == Token(value=3)
    to_left.send(Token(value=4))
    heard = event(left, Received)
    assert (heard.peer, heard.message) == (to_right, Token(value=4))


def test_another_node_than_the_one_that_was_dialled_is_refused(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialling, "LAST_TRY_S", DEADLINE_S)
    address = replace(node("right").listen(HOST), node="third")
    with pytest.raises(ConnectTimeout, match=r"'right' answers at .*, not 'third'"):
        node("left").dial(address, 0.0)


def test_a_peer_that_stays_away_is_given_up(node: MakeNode) -> None:
    left, right = node("left", reconnect_timeout_s=0.2), node("right")
    peer = left.dial(right.listen(HOST), DEADLINE_S)
    right.close()
    assert not event(left, Disconnected).is_final
    assert event(left, Disconnected).is_final
    peer.send(Token(value=1))  # is dropped, and no error


def test_who_sits_in_between_can_only_cut(node: MakeNode) -> None:
    left, right = node("left"), node("right")
    proxy = Proxy(right.listen(HOST).port)
    try:
        to_right = left.dial(Address(HOST, proxy.port), DEADLINE_S)
        event(right, Connected)
        proxy.corrupt(1)
        to_right.send(Token(value=1))
        while not isinstance(happened := right.next_event(DEADLINE_S), Disconnected):
            assert happened is not None, "the change was not noticed"
            assert not isinstance(happened, Received), "what was changed was believed"
        proxy.cut()
        event(right, Connected)
        assert event(left, Disconnected).peer is to_right
        assert event(left, Connected).peer is to_right
        to_right.send(Token(value=2))
        assert event(right, Received).message == Token(value=2)
        assert proxy.connections == 2
    finally:
        proxy.close()
