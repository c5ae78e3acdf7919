"""Whom the server of a pipeline gives layers, as workers fail, leave and come back."""

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Peer
from smolcluster.algorithms.PipelineParallel.dealing import Dealer
from smolcluster.algorithms.PipelineParallel.plan import Cut, even_cut, unmeasured
from smolcluster.algorithms.PipelineParallel.server import Server
from smolcluster.errors import ClusterEmpty
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import Goodbye, HostPort, Listening, StageReady

LISTENING = Listening(places=(HostPort(host="127.0.0.1", port=7777),))


class ByHand(Dealer):
    """Gives layers to those that a test names."""

    owners: list[str]

    def cut(self, _peers: Mapping[str, Peer]) -> Cut:
        return unmeasured(even_cut(4, self.owners, self._config), self._config)


class Hand(Server):
    """A server whose workers are told nothing: what they say and what is dealt are the test's."""

    def __init__(self, shard_plan: Any = "even", num_workers: int = 1) -> None:
        config = PipelineConfig.model_construct(
            shard_plan=shard_plan, schedule="1f1b", microbatches=4
        )
        limits = ("start_timeout_s", "empty_cluster_timeout_s", "prepare_timeout_s")
        cluster: Any = SimpleNamespace(
            num_workers=num_workers, node_of=str, **dict.fromkeys(limits, 0.0)
        )
        log = logging.getLogger("test")
        self.dealer: ByHand = ByHand(config, Mock(), cluster, 4, log)
        self.context: Any = SimpleNamespace(log=log, records=SimpleNamespace(folder=None))
        self.keeper: Any = Mock()
        self.keeper.kept.folder, self.keeper.kept.state.step = None, 0
        self.report: Any = Mock()
        self.crew, self.turn = None, 0
        self.pool: Any = SimpleNamespace(started=True, is_preparing=False)
        self.num_sessions = 0

    def join(self, worker_id: int, instance: str) -> Peer:
        self.num_sessions += 1
        member = Member(self.num_sessions, worker_id, f"node{worker_id}", 8 * instance)
        self.handle(Joined(Worker(member, session=Mock()), Mock()))
        self.dealer.peers[member.session_id].listening = LISTENING
        return self.dealer.peers[member.session_id]

    def deal(self, *peers: Peer) -> None:
        """Give layers to those, and to no others."""
        self.dealer.owners = [each.worker.member.node for each in peers]
        self.crew = None
        self.plan()

    def leave(self, peer: Peer, why: str | None = None) -> None:
        """It goes, and says why, or without a word."""
        peer.worker.goodbye = None if why is None else Goodbye(reason=why, fault="own")
        self.handle(Departed(peer.worker))


def test_a_worker_that_could_not_build_its_layers_is_given_none_again_and_another_process_once() -> (
    None
):
    server = Hand()
    for instance in "ab":
        peer = server.join(1, instance)
        server.deal(peer)
        server.leave(peer, "no weights")
        server.join(1, instance)
        assert server.dealer.ready == [], f"process {instance} comes back as it was"
    server.join(1, "c")
    assert server.dealer.ready == []


def test_layers_of_an_earlier_plan_are_not_those_that_a_worker_builds_now() -> None:
    server = Hand()
    peer = server.join(1, "a")
    for _ in range(2):
        server.deal(peer)
    server.hear(peer, StageReady(attempt=1), b"")
    server.hear(peer, StageReady(attempt=1, reason="its neighbour is gone"), b"")
    server.leave(peer)
    assert server.dealer.builders.num_lost == {1: 1}


def test_a_worker_that_a_new_plan_leaves_out_builds_nothing_any_more() -> None:
    server = Hand()
    one, other = server.join(1, "a"), server.join(2, "b")
    server.deal(one, other)
    server.deal(other)
    server.leave(one)
    assert server.dealer.builders.num_lost == {}


def test_who_waits_for_a_machine_of_shard_plan_hears_why_it_cannot_build_its_layers() -> None:
    server = Hand({"node1": (0, 2), "node2": (2, 4)})
    server.join(2, "b")
    server.dealer.builders.failed(Member(9, 1, "node1", 8 * "a"), "worker 1 (node1): no weights")
    with pytest.raises(ClusterEmpty) as caught:
        server.plan()
    assert str(caught.value) == "shard_plan has layers for node1: worker 1 (node1): no weights"


def test_workers_that_still_measure_layers_are_counted_with_those_that_are_there() -> None:
    server = Hand(num_workers=3)
    server.join(1, "a").listening = None
    with pytest.raises(ClusterEmpty) as caught:
        server.plan()
    assert str(caught.value) == "1 of 3 workers are there (0 have measured their layers)"
