"""What ranks look at before a backend connects them."""

import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from faults.proxy import Fault, FaultProxy, Point, nothing
from harness import free_port
from smolcluster.algorithms.Mesh import meeting
from smolcluster.algorithms.Mesh.meeting import (
    connect,
    interface_of,
    is_elsewhere,
    meet,
    part,
    stays_here,
    use_interface,
)
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.algorithms.Mesh.store import Answer, Ask, GroupStore, Host
from smolcluster.algorithms.Mesh.watch import FAILED
from smolcluster.configs.checks import check_unencrypted
from smolcluster.errors import AuthError, ConfigError, ConnectTimeout, PortBusy
from smolcluster.wire.messages import Message
from smolcluster.wire.security import Secret
from waiting import DEADLINE_S

HERE = "127.0.0.1"
SECRET = Secret(Path("secret"), b"s" * 32)
LOG = logging.getLogger("test")


def ranks(world_size: int, port: int, address: str = HERE) -> Ranks:
    return Ranks(range(1), world_size, True, address, port)


@pytest.fixture
def opened() -> Iterator[list[GroupStore]]:
    made: list[GroupStore] = []
    yield made
    for each in reversed(made):
        each.close()


@pytest.fixture
def open_store(opened: list[GroupStore]) -> Callable[..., GroupStore]:
    def open_(rank: int, there: Ranks, timeout_s: float, secret: Secret = SECRET) -> GroupStore:
        opened.append(meeting.open_store(rank, there, secret, timeout_s, LOG))
        return opened[-1]

    return open_


def test_ranks_that_never_come_are_named(open_store: Callable[..., GroupStore]) -> None:
    there = ranks(4, free_port())
    store = open_store(0, there, DEADLINE_S)
    store.set("here/2", "{}")
    with pytest.raises(ConnectTimeout, match="ranks 1, 3 of 4 are missing"):
        meet(0, 4, store, {}, 0.1)


@pytest.mark.parametrize(("first", "told"), [({0, 4}, "--nproc-per-node 4"), ({0, 1}, "missing")])
def test_nodes_that_have_started_one_rank_each_are_told_the_flag(
    monkeypatch: pytest.MonkeyPatch,
    open_store: Callable[..., GroupStore],
    first: set[int],
    told: str,
) -> None:
    monkeypatch.setattr(meeting, "ONE_A_NODE_S", -1.0)
    there = ranks(8, free_port())
    store = open_store(0, there, DEADLINE_S)
    for rank in first:
        store.set(f"here/{rank}", "{}")
    with pytest.raises((ConfigError, ConnectTimeout), match=told):
        meet(0, 8, store, {}, 1.0)


def test_rank_0_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--master-addr is 192.0.2.7, which is another machine"):
        meeting.open_store(0, ranks(2, free_port(), "192.0.2.7"), SECRET, 1, LOG)


def test_who_does_not_know_the_secret_reads_and_forges_nothing(
    open_store: Callable[..., GroupStore],
) -> None:
    there = ranks(2, free_port())
    store = open_store(0, there, DEADLINE_S)
    store.set("here/0", "what is trained")
    with pytest.raises(AuthError):
        open_store(1, there, 8, Secret(Path("other"), b"o" * 32))
    with pytest.raises((RuntimeError, ValueError)):  # torch's own client, as an attacker has it
        TCPStore(HERE, there.port or 0, is_master=False, timeout=timedelta(seconds=1)).set(
            "failed", "x"
        )
    assert not store.check([FAILED])
    assert open_store(1, there, DEADLINE_S).get("here/0") == b"what is trained"


@pytest.mark.parametrize("found", [b"9" * 20, b"a word", b"9" * 5000])
def test_a_rank_that_adds_to_what_is_no_number_is_cut_off_alone(
    open_store: Callable[..., GroupStore], found: bytes
) -> None:
    there = ranks(3, free_port())
    open_store(0, there, 10).set("number", found)
    wrong, right = open_store(1, there, 10), open_store(2, there, 10)
    with pytest.raises(DistStoreError, match="lost"):
        wrong.add("number", 1)
    assert right.get("number") == found


@pytest.mark.parametrize("kind", [Ask, Answer])
def test_what_comes_twice_is_done_once_and_is_no_answer_to_what_is_asked_next(
    open_store: Callable[..., GroupStore], kind: type[Message]
) -> None:
    there = ranks(2, free_port())
    own = open_store(0, there, 10)
    proxy = FaultProxy(there.port or 0, Point("add", kind, nothing), Fault.DUPLICATE)
    with closing(proxy):
        store = open_store(1, ranks(2, proxy.port), 10)
        with pytest.raises(DistStoreError, match="lost"):
            assert store.add("number", 1) == 1
            store.get("number")
        assert own.get("number") == b"1"


def test_rank_0_listens_at_its_address_only(open_store: Callable[..., GroupStore]) -> None:
    there = ranks(2, free_port(), "127.0.0.2")
    open_store(0, there, DEADLINE_S)
    with pytest.raises(OSError):
        socket.create_connection((HERE, there.port), 1)


def test_between_machines_that_nothing_is_encrypted_must_be_said() -> None:
    check_unencrypted("off")
    with pytest.raises(ConfigError, match=r"encryption is 'auto', .* --override encryption=off"):
        check_unencrypted("auto")
    assert stays_here((HERE, "127.0.1.1")) and stays_here((HEAD, HEAD))
    assert not stays_here((WORKER, HEAD))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """torchrun's store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return TCPStore(HERE, 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))


def test_ranks_of_a_group_meet_by_torchruns_store(
    agent: TCPStore, open_store: Callable[..., GroupStore]
) -> None:
    there = ranks(2, agent.port)
    first = open_store(0, there, DEADLINE_S)
    first.set("a", "b")
    assert open_store(1, there, DEADLINE_S).get("a") == b"b"


class Before:
    """A group whose keys are in torchrun's store."""

    def __init__(self, agent: TCPStore) -> None:
        self.there = ranks(2, agent.port)
        self.rank_0 = meeting.open_store(0, self.there, SECRET, DEADLINE_S, LOG)
        self.rank_0.set("old", "1")

    def rank_1_comes(self) -> None:
        meeting.open_store(1, self.there, SECRET, DEADLINE_S, LOG).close()

    def fails(self) -> None:
        self.rank_0.set(FAILED, "{}")

    def ends(self) -> None:
        self.rank_0.close()


@pytest.mark.parametrize("what", [Before.rank_1_comes, Before.fails, Before.ends])
@pytest.mark.parametrize("counts", [("0", "1"), ("1", "0")])
def test_a_group_that_is_formed_again_meets_by_nothing_of_the_one_before(
    agent: TCPStore,
    what: Callable[[Before], None],
    counts: tuple[str, str],
    open_store: Callable[..., GroupStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often each agent thinks that it was."""
    before = Before(agent)
    what(before)
    there, found = ranks(2, agent.port), queue.SimpleQueue[GroupStore]()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", counts[1])
    waiting = threading.Thread(
        target=lambda: found.put(open_store(1, there, DEADLINE_S)), daemon=True
    )
    waiting.start()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", counts[0])
    now = open_store(0, there, DEADLINE_S)
    now.set("new", "1")
    assert found.get(timeout=DEADLINE_S).check(["new"])
    waiting.join()
    before.rank_0.close()


def test_who_waits_for_a_rank_0_that_never_comes_says_so(
    agent: TCPStore, open_store: Callable[..., GroupStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_agent_at", lambda *_: agent)
    with pytest.raises(ConnectTimeout, match="rank 1 has waited 1 s for rank 0"):
        open_store(1, ranks(2, agent.port), 1)


def test_a_port_that_is_taken(open_store: Callable[..., GroupStore]) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortBusy, match=f"port {port}"):
            open_store(0, ranks(2, port), 1)


def test_an_address_that_leads_to_oneself_is_said(
    open_store: Callable[..., GroupStore],
) -> None:
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


@pytest.mark.parametrize(("is_only", "name"), [(True, "eth0"), (False, "eth7")])
def test_the_environment_may_name_another_interface_between_machines_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, *, is_only: bool
) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(os, "environ", environ)
    use_interface("eth0", is_only=is_only)
    assert environ == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": "=eth0"}


def test_ranks_of_one_machine_are_connected_on_its_loopback_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(meeting, "_addresses", lambda: {HERE: "lo", HEAD: "eth0"})
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    with closing(GroupStore(Host([HERE], 0, SECRET, LOG), 1.0)) as store:
        store.set("at/1", json.dumps([HERE, HERE]))
        connect(0, 2, store, "gloo", "auto")
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_a_rank_whose_store_is_gone_at_a_good_end_ends_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def lost(ask: Ask, _: bytes) -> Any:
        asked.append(ask.operation)
        raise DistStoreError("rank 0, which has the store, is lost")

    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    end: Any = lost
    part(1, 2, GroupStore(end, 1.0))
    assert asked == ["set"]
