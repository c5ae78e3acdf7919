"""Whom the server of a pipeline gives layers, as workers fail, leave and come back."""

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.coordinator import Builders
from smolcluster.algorithms.PipelineParallel.crew import Crew, Peer
from smolcluster.algorithms.PipelineParallel.dealing import Dealer
from smolcluster.algorithms.PipelineParallel.plan import even_cut
from smolcluster.algorithms.PipelineParallel.server import Server
from smolcluster.errors import ClusterEmpty
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import Goodbye, HostPort, Listening, StageReady

LISTENING = Listening(places=(HostPort(host="127.0.0.1", port=7777),))


class Hand(Server):
    """A server whose workers are told nothing: what they say and what is dealt are the test's."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config, self.builders = config, Builders()
        records = SimpleNamespace(folder=None)
        self.context: Any = SimpleNamespace(log=logging.getLogger("test"), records=records)
        self.dealer: Any = Mock()
        self.keeper: Any = Mock()
        self.keeper.kept.folder, self.keeper.kept.state.step = None, 0
        self.report: Any = Mock()
        self.peers, self.crew, self.turn = {}, None, 0
        self.pool: Any = SimpleNamespace(started=True, is_preparing=False, workers=[])
        self.num_sessions = 0

    def join(self, worker_id: int, instance: str) -> Peer:
        self.num_sessions += 1
        member = Member(self.num_sessions, worker_id, f"node{worker_id}", 8 * instance)
        self.handle(Joined(Worker(member, session=Mock()), Mock()))
        self.peers[member.session_id].listening = LISTENING
        return self.peers[member.session_id]

    def deal(self, attempt: int, *peers: Peer) -> Crew:
        """Give layers to those, and to no others."""
        self.dealer.attempt = attempt
        nodes = [each.worker.member.node for each in peers]
        layers = even_cut(4, nodes, self.config)
        self.dealer.deal.return_value = SimpleNamespace(
            map=layers, problem=None, plan=None, words="", document={}
        )
        self.disband()
        self.pool.workers = [each.worker for each in self.peers.values()]
        self.plan()
        assert self.crew is not None
        return self.crew

    def disband(self) -> None:
        self.crew = None

    def leave(self, peer: Peer, why: str | None = None) -> None:
        """It goes, and says why, or without a word."""
        peer.worker.goodbye = None if why is None else Goodbye(reason=why, fault="own")
        self.handle(Departed(peer.worker))


@pytest.fixture
def server() -> Hand:
    return Hand(PipelineConfig.model_construct(shard_plan="even", schedule="1f1b", microbatches=4))


def test_a_worker_that_could_not_build_its_layers_is_given_none_again_and_another_process_once(
    server: Hand,
) -> None:
    for attempt, instance in enumerate("ab", start=1):
        peer = server.join(1, instance)
        server.deal(attempt, peer)
        server.leave(peer, "no weights")
        server.join(1, instance)
        assert server.ready == [], f"process {instance} comes back as it was"
    server.join(1, "c")
    assert server.ready == []


def test_layers_of_an_earlier_plan_are_not_those_that_a_worker_builds_now(server: Hand) -> None:
    peer = server.join(1, "a")
    for attempt in (1, 2):
        server.deal(attempt, peer)
    server.hear(peer, StageReady(attempt=1), b"")
    server.hear(peer, StageReady(attempt=1, reason="its neighbour is gone"), b"")
    server.leave(peer)
    assert server.builders.num_lost == {1: 1}


def test_a_worker_that_a_new_plan_leaves_out_builds_nothing_any_more(server: Hand) -> None:
    one, other = server.join(1, "a"), server.join(2, "b")
    server.deal(1, one, other)
    server.deal(2, other)
    server.leave(one)
    assert server.builders.num_lost == {}


def test_who_waits_for_a_machine_of_shard_plan_hears_why_it_cannot_build_its_layers(
    server: Hand,
) -> None:
    server.config = server.config.model_copy(
        update={"shard_plan": {"node1": (0, 2), "node2": (2, 4)}}
    )
    limits = {"start_timeout_s": 0.0, "empty_cluster_timeout_s": 0.0}
    cluster: Any = SimpleNamespace(num_workers=2, node_of=str, **limits)
    server.dealer = Dealer(server.config, Mock(), cluster, 4, server.context.log)
    server.join(2, "b")
    server.builders.failed(1, 8 * "a", "worker 1 (node1): no weights")
    server.pool.workers = [each.worker for each in server.peers.values()]
    with pytest.raises(ClusterEmpty) as caught:
        server.plan()
    assert str(caught.value) == "shard_plan has layers for node1: worker 1 (node1): no weights"
