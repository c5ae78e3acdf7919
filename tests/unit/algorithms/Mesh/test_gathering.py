"""Who waits for a mesh's weights, and what becomes of it when they do not come."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from peers import DEADLINE_S
from smolcluster.algorithms.Mesh.gathering import StateGathering
from smolcluster.algorithms.Mesh.shards import Shard
from smolcluster.algorithms.Mesh.trainer import WEIGHTS
from waiting import eventually

SENT: list[list[Any]] = [[0, 4, 2, [[0, 2]], [[0, 2]]], [4, 3, 1, [[0, 3]], [[0, 1]]]]
"""Rank 1 of 2 sends two parameters; rank 0 has none of them."""


class Wire:
    """What arrives from rank 1; the test says when."""

    def __init__(self) -> None:
        self.may_arrive = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.num_received = 0
        self.has_ended = threading.Event()
        """Rank 1 has said its last word, or the connection is broken."""

    def recv(self, out: torch.Tensor, **_: object) -> None:
        assert self.may_arrive.acquire(timeout=DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        self.num_received += 1
        out.fill_(self.num_received)

    def irecv(self, *_: object, **__: object) -> "Wire":
        return self

    def wait(self) -> None:
        """For the last word; a part of which some has arrived is not told of a broken connection."""
        assert self.has_ended.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    own = Wire()
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(dist, "recv", own.recv)
    monkeypatch.setattr(dist, "irecv", own.irecv)
    yield own
    own.has_ended.set()
    own.may_arrive.release(10)


def rank_0() -> StateGathering:
    groups = SimpleNamespace(rank=0, all_told=lambda own: [own, SENT])
    nothing: Any = SimpleNamespace(sent={})
    optimizer = SimpleNamespace(num_steps=0)
    trainer: Any = SimpleNamespace(
        groups=groups, slots=[], optimizer=optimizer, dtype=torch.float32
    )
    return StateGathering(trainer, nothing)


def test_who_waits_is_told_of_progress_and_has_all_then(wire: Wire) -> None:
    whole, progress = rank_0(), [0]
    flat = torch.zeros(7)
    wire.has_ended.set()
    whole.begin({WEIGHTS: flat})

    def on_progress() -> None:
        progress.append(wire.num_received)
        wire.may_arrive.release()

    whole.wait(on_progress)
    assert flat.tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert not whole.has_failed
    assert len(progress) >= 2


def test_a_rank_that_ends_meanwhile_leaves_nothing_whole(wire: Wire) -> None:
    whole = rank_0()
    whole.begin({WEIGHTS: torch.zeros(7)})
    wire.failure = RuntimeError("Connection closed by peer")
    wire.may_arrive.release()
    with pytest.raises(RuntimeError, match="Connection closed"):
        whole.wait()
    assert whole.has_failed
    with pytest.raises(RuntimeError, match="Connection closed"):
        whole.begin({WEIGHTS: torch.zeros(7)})


def test_a_connection_that_breaks_within_a_part_is_noticed_though_that_is_told_nothing(
    wire: Wire,
) -> None:
    whole = rank_0()
    whole.begin({WEIGHTS: torch.zeros(7)})
    wire.failure = RuntimeError("Connection closed by peer")
    wire.has_ended.set()
    with pytest.raises(RuntimeError, match="Connection closed"):
        whole.wait()
    assert whole.has_failed


def test_a_process_that_ends_at_once_waits_for_no_rank(wire: Wire) -> None:
    whole = rank_0()
    whole.begin({WEIGHTS: torch.zeros(7)})
    found: list[BaseException] = []

    def wait() -> None:
        try:
            whole.wait()
        except RuntimeError as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    whole.abandon()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert found
    wire.failure = RuntimeError("Connection closed by peer")
    wire.may_arrive.release()
    eventually(lambda: whole.has_failed)  # its thread leaves the next test's wire alone


def test_what_is_sent_is_that_of_the_step_though_the_weights_change_meanwhile(
    monkeypatch: pytest.MonkeyPatch, wire: Wire
) -> None:
    local, sent = torch.ones(2, 2), list[torch.Tensor]()
    own: Any = SimpleNamespace(sent={0: Shard(*SENT[0])})

    def send(tensor: torch.Tensor, **_: object) -> None:
        assert wire.may_arrive.acquire(timeout=DEADLINE_S)
        sent.append(tensor.clone())

    monkeypatch.setattr(dist, "send", send)
    trainer: Any = SimpleNamespace(
        groups=SimpleNamespace(rank=1, all_told=lambda told: [[], told]),
        slots=[SimpleNamespace(local=local)],
        optimizer=SimpleNamespace(num_steps=0, moments=lambda _: {}),
        dtype=torch.float32,
    )
    part = StateGathering(trainer, own)
    part.begin()
    local.fill_(2)
    wire.may_arrive.release(2)
    part.wait()
    weights, _ = sent
    assert weights.tolist() == [[1, 1], [1, 1]]
