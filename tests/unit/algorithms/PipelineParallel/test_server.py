"""Whom the server of a pipeline gives layers, as workers fail, leave and come back."""

import logging
import signal
import time
from collections.abc import Iterator, Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pipelines import gpt
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Crew, Peer, Question, Questions
from smolcluster.algorithms.PipelineParallel.dealing import Dealer
from smolcluster.algorithms.PipelineParallel.plan import Cut, even_cut, unmeasured
from smolcluster.algorithms.PipelineParallel.server import Server, check_metrics
from smolcluster.configs.schema import GradientClipping
from smolcluster.data.permutation import Range
from smolcluster.errors import ClusterEmpty, ConfigError
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.workload import OfLoss
from smolcluster.utils.stopping import Interrupted
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import (
    Commit,
    EvaluateStages,
    Goodbye,
    HostPort,
    LeaseKey,
    Listening,
    StageDone,
    StageEvaluated,
    StageReady,
    WantState,
)

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
            num_workers=num_workers,
            node_of=str,
            checkpoint_steps=None,
            **dict.fromkeys(limits, 0.0),
        )
        log = logging.getLogger("test")
        self.dealer: ByHand = ByHand(config, Mock(), cluster, 4, log)
        self.context: Any = SimpleNamespace(
            log=log,
            records=SimpleNamespace(folder=None),
            settings=SimpleNamespace(cluster=cluster),
        )
        self.keeper: Any = Mock()
        self.keeper.kept.folder, self.keeper.kept.state.step = None, 0
        self.report: Any = Mock()
        self.train: Any = Mock(samples_per_step=8)
        self.held_out: Any = SimpleNamespace(num_samples=8, parts=lambda: [None])
        self.crew, self.turn, self.evaluated_version = None, 0, None
        self.is_stopping = False
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


@pytest.mark.parametrize("names", [["x" * 65], ["two\nlines"], [f"m{n}" for n in range(64)]])
def test_metrics_that_no_stage_can_tell_are_refused(names: list[str]) -> None:
    workload = gpt()
    workload.metrics = dict.fromkeys(names, cross_entropy)
    with pytest.raises(ConfigError, match=r"^metrics: the last stage"):
        check_metrics(workload)
    workload.metrics = {"x" * 64: cross_entropy, **dict.fromkeys(names, OfLoss(float))}
    check_metrics(workload)


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


def test_a_stage_that_is_lost_in_the_last_evaluation_is_waited_for_and_no_step_is_taken_again() -> (
    None
):
    server = Hand()
    server.report.counts.version, server.report.counts.is_over = 5, True
    server.keeper.kept.state.step, server.keeper.kept.state.val_loss = 5, None
    asked: list[EvaluateStages] = []
    for attempt, instance in enumerate("ab", 1):
        peer = server.join(1, instance)
        server.deal(peer)
        server.hear(peer, StageReady(attempt=attempt), b"")
        *_, last = peer.worker.session.send.call_args_list  # type: ignore[union-attr]
        asked.append(last.args[0])
        if instance == "a":
            server.leave(peer)
        assert not server.is_over
    assert [type(each) for each in asked] == [EvaluateStages, EvaluateStages]
    answer = StageEvaluated(attempt=2, turn=asked[-1].turn, is_finite=True, totals={})
    server.hear(peer, answer, b"")
    assert server.is_over


def test_a_state_is_read_as_it_is_sent_until_the_layers_are_dealt_out_anew() -> None:
    server, read = Hand(), list[int]()

    def reading() -> Iterator[int]:
        for each in range(3):
            read.append(each)
            yield each

    server.context.training = Mock()
    server.keeper.frames.return_value = reading()
    peer = server.join(1, "a")
    server.deal(peer)
    server.hear(peer, WantState(attempt=1, content="weights", names=("a",)), b"")
    session: Any = peer.worker.session
    [call] = session.send_frames.call_args_list
    frames = iter(call.args[0])
    assert read == []
    assert next(frames) == 0
    server.deal(peer)
    assert list(frames) == []


def test_a_run_whose_last_evaluation_is_known_is_over_when_it_is_resumed() -> None:
    server = Hand()
    server.report.counts.version, server.report.counts.is_over = 5, True
    server.keeper.kept.state.step, server.keeper.kept.state.val_loss = 5, 0.5
    assert server.is_over


def test_a_step_of_less_than_one_loss_term_is_taken() -> None:
    """Such as of a few samples, whose terms are weighted by small weights of classes."""
    server = Hand()
    server.report.counts.version, server.train.learning_rate = 0, 0.1
    server.train.gradient_clipping = GradientClipping(enabled=False)
    server.feed, server.context.training, server.took_s = Mock(), Mock(), 0.1
    server.context.training.recipe.schedule = lambda *_: 1.0
    peer = server.join(1, "a")
    server.deal(peer)
    assert server.crew is not None
    lease = LeaseKey(incarnation="here", epoch=0, start=0, stop=8, grant=1)
    sums: dict[str, Any] = {"loss": 0.5, "num_terms": 0.25, "squared_norm": 0.25}
    done = StageDone(attempt=1, lease=lease, seconds={}, **sums)
    server.commit(server.crew, Range(0, 0, 8), [done])
    *_, last = peer.worker.session.send.call_args_list  # type: ignore[union-attr]
    assert last.args == (Commit(version=1, num_samples=8, clip=4.0, learning_rate=0.1),)


def test_no_step_is_taken_once_an_evaluation_has_ended_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, counts = Hand(), SimpleNamespace(version=0, is_over=False)
    server.report.counts, server.train.eval_steps = counts, 1
    server.keeper.can_keep = False

    def step(_crew: Crew) -> Questions[None]:
        counts.version += 1
        yield from ()

    def evaluate(_crew: Crew) -> Questions[None]:
        counts.is_over, server.evaluated_version = True, counts.version
        yield from ()

    monkeypatch.setattr(server, "step", step)
    monkeypatch.setattr(server, "evaluate", evaluate)
    assert list(server.work(Mock(), [])) == []
    assert counts.version == 1


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_run_that_shall_stop_waits_for_its_step_and_its_state_and_evaluates_nothing_before(
    monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    server, counts = Hand(), SimpleNamespace(version=0, is_over=False)
    server.report.counts, server.train.eval_steps = counts, 1
    server.keeper.can_keep = True
    server.context.check_stop = Mock(side_effect=Interrupted(signal.SIGTERM, is_orderly=True))
    asked, clock = list[str](), count(0.0, 100.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    def asks(what: str) -> None:
        def ask(_crew: Crew) -> Questions[None]:
            asked.append(what)
            yield Question((what,), 600.0)
            counts.version += what == "step"

        monkeypatch.setattr(server, what, ask)

    for each in ("step", "evaluate", "keep"):
        asks(each)
    crew = server.crew = Crew(attempt=1, cut=Mock(), peers=[])
    server.questions = server.work(crew, [])
    for _ in ("step", "evaluate"):
        server.go_on(crew)
    for _ in ("step", "keep"):
        server.go_on(crew, [])
        for _ in range(2):
            server.heed_stop()
    server.go_on(crew, [])
    if is_saved:
        server.keeper.kept.state.step = counts.version
    with pytest.raises(Interrupted):
        server.heed_stop()
    assert asked == ["step", "evaluate", "step", "keep"]
