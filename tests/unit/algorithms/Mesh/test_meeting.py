"""What ranks look at before a backend connects them."""

import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from harness import free_port
from smolcluster.algorithms.Mesh import meeting
from smolcluster.algorithms.Mesh.meeting import (
    compare,
    interface_of,
    is_elsewhere,
    meet,
    open_store,
)
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.algorithms.Mesh.watch import FAILED
from smolcluster.errors import ConfigError, ConnectTimeout, PortBusy

HERE = "127.0.0.1"
pytestmark = pytest.mark.flaky(reruns=1)
"""Torch's stores are connected to, which a busy machine may take seconds for."""


def ranks(world_size: int, port: int, address: str = HERE) -> Ranks:
    return Ranks(range(1), world_size, True, address, port)


def test_ranks_of_other_code_or_configuration_are_named() -> None:
    first = {"smolcluster": "1.0", "batch_size": "16"}
    compare(2, first, dict(first))
    with pytest.raises(ConfigError, match="batch_size is 16 on rank 0 and 32 on rank 2"):
        compare(2, {**first, "batch_size": "32"}, first)
    with pytest.raises(ConfigError, match="ema is 1 on rank 0 and not known on rank 1"):
        compare(1, first, {**first, "ema": "1"})


def test_ranks_that_never_come_are_named() -> None:
    there = ranks(4, free_port())
    store = open_store(0, there, 10)
    store.set("here/2", "{}")
    with pytest.raises(ConnectTimeout, match="ranks 1, 3 of 4 are missing"):
        meet(0, there, store, {}, 0.1)


@pytest.mark.parametrize(("first", "told"), [({0, 4}, "--nproc-per-node 4"), ({0, 1}, "missing")])
def test_nodes_that_have_started_one_rank_each_are_told_the_flag(
    monkeypatch: pytest.MonkeyPatch, first: set[int], told: str
) -> None:
    monkeypatch.setattr(meeting, "ONE_A_NODE_S", -1.0)
    there = ranks(8, free_port())
    store = open_store(0, there, 10)
    for rank in first:
        store.set(f"here/{rank}", "{}")
    with pytest.raises((ConfigError, ConnectTimeout), match=told):
        meet(0, there, store, {}, 1.0)


def test_two_ranks_0_are_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two machines: the second one's own store is not that at the address."""
    there = ranks(2, free_port())
    store = open_store(0, there, 10)
    monkeypatch.setattr(meeting, "TCPStore", partial(client, store.port))
    with pytest.raises(ConfigError, match="two processes are rank 0"):
        open_store(0, there, 10)


def client(port: int, *_: object, is_master: bool, **options: Any) -> TCPStore:
    """Of the store at this port, in the place of another one."""
    return TCPStore(HERE, port, is_master=False, **options)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """torchrun's store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return TCPStore(HERE, 0, is_master=True, timeout=timedelta(seconds=10))


def test_ranks_of_a_group_meet_by_torchruns_store(agent: TCPStore) -> None:
    there = ranks(2, agent.port)
    first = open_store(0, there, 10)
    first.set("a", "b")
    assert open_store(1, there, 10).get("a") == b"b"


class Before:
    """A group whose keys are in torchrun's store."""

    def __init__(self, agent: TCPStore) -> None:
        self.there = ranks(2, agent.port)
        self.rank_0 = open_store(0, self.there, 10)
        self.rank_0.set("old", "1")

    def rank_1_comes(self) -> None:
        open_store(1, self.there, 10)

    def fails(self) -> None:
        self.rank_0.set(FAILED, "{}")

    def ends(self) -> None:
        del self.rank_0


@pytest.mark.parametrize("what", [Before.rank_1_comes, Before.fails, Before.ends])
@pytest.mark.parametrize("counts", [("0", "1"), ("1", "0")])
def test_a_group_that_is_formed_again_meets_by_nothing_of_the_one_before(
    agent: TCPStore,
    what: Callable[[Before], None],
    counts: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often each agent thinks that it was."""
    before = Before(agent)
    what(before)
    there, found = ranks(2, agent.port), queue.SimpleQueue[TCPStore]()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", counts[1])
    waiting = threading.Thread(target=lambda: found.put(open_store(1, there, 60)), daemon=True)
    waiting.start()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", counts[0])
    now = open_store(0, there, 10)
    now.set("new", "1")
    assert found.get(timeout=60).check(["new"])
    waiting.join()


def test_who_waits_for_a_rank_0_that_never_comes_says_so(agent: TCPStore) -> None:
    with pytest.raises(ConnectTimeout, match="rank 1 has waited 5 s for rank 0"):
        open_store(1, ranks(2, agent.port), 5)


def test_a_port_that_is_taken() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortBusy, match=f"port {port}"):
            open_store(0, ranks(2, port), 1)


def test_an_address_that_leads_to_oneself_is_said() -> None:
    with pytest.raises(ConnectTimeout, match="on this machine that leads to itself"):
        open_store(1, ranks(2, free_port(), "localhost"), 0.5)


def test_whose_address_it_is() -> None:
    assert not is_elsewhere("localhost")
    assert is_elsewhere("192.0.2.7")  # a documentation address (RFC 5737), nobody's


HEAD, WORKER = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("rank", "ways", "name"),
    [
        (0, [(HERE, HERE), (HERE, HERE)], None),
        (1, [(HERE, HERE), (WORKER, HEAD)], "eth1"),
        # the head's own name is 127.0.1.1 to itself: it takes the interface at which others find it
        (0, [("127.0.1.1", "127.0.1.1"), (WORKER, HEAD)], "eth0"),
        (1, [(HERE, HERE), (HERE, HERE), (WORKER, HEAD)], "eth0"),
        (0, [(HERE, HERE), ("10.9.9.9", "198.51.100.4")], None),
    ],
)
def test_the_interface_is_the_one_that_leads_to_the_others(
    rank: int, ways: list[tuple[str, str]], name: str | None
) -> None:
    addresses = {HERE: "lo", HEAD: "eth0", WORKER: "eth1"}
    assert interface_of(addresses, rank, ways) == name
