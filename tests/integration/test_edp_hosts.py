"""EDP with weights that lie on several hosts: what the table of `test_several_hosts` lacks."""

import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

import several_hosts
from harness import DEADLINE_S, Cluster, local_settings
from several_hosts import many_buckets  # noqa: F401 - a fixture
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.EDP.worker import Worker
from smolcluster.configs.checks import check_algorithm
from smolcluster.errors import ClusterEmpty, ConfigError, Rejected
from smolcluster.server.assignment import Assigned
from smolcluster.server.store_host import SliceHost
from smolcluster.training.compute import BatchLoss
from smolcluster.wire.acceptor import SessionOpened
from smolcluster.wire.messages import LeaseKey, Message, Reject
from smolcluster.wire.session import Session

start = partial(several_hosts.start, algorithm="edp")
settings_for = partial(several_hosts.settings_for, "edp")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("many_buckets")]


class Unplugged(Worker):
    """Loses its server, or a store, in the middle of a push, once each."""

    def compute(self, lease: Assigned) -> BatchLoss:
        loss = super().compute(lease)
        if self.steps in (5, 12):
            last = self.stores.session_of(len(self.replica.buckets) - 1)
            assert last is not self.link
            session = self.link if self.steps == 5 else last
            [first, *_] = self.sender.frames(lease.lease, self.base_version, loss, 0.0)
            self.sender.settle(0)
            self.stores.session_of(0).send_frame(first)
            session.cut("the cable was pulled")
        return loss


def test_a_worker_that_is_lost_in_the_middle_of_a_push_costs_no_sample(tmp_path: Path) -> None:
    settings = settings_for(3, "num_epochs=3", workers=2)
    cluster, stores = start(settings, tmp_path)
    workers = cluster.worker(1), cluster.worker(2, make=Unplugged)
    cluster.finish(*workers, *stores)


def test_a_worker_that_pushes_for_the_lease_of_another_is_answered_and_changes_nothing(
    tmp_path: Path,
) -> None:
    named, has_lied = Future[LeaseKey](), threading.Event()

    class Victim(Worker):
        """Tells of its first lease, and pushes when another has pushed for it."""

        def compute(self, lease: Assigned) -> BatchLoss:
            if not named.done():
                named.set_result(lease.lease)
                assert has_lied.wait(DEADLINE_S)
            return super().compute(lease)

    class Liar(Worker):
        """Sends all parts of a push for the other's lease, and waits for the answer."""

        def compute(self, lease: Assigned) -> BatchLoss:
            loss = super().compute(lease)
            if not has_lied.is_set():
                stolen = named.result(DEADLINE_S)
                frames = list(self.sender.frames(stolen, self.base_version, loss, 0.0))
                self.sender.settle(0)
                self.unacknowledged = stolen
                self.stores.push([], frames)
                self.wait_until(lambda: self.unacknowledged is None)
                has_lied.set()
            return loss

    cluster, stores = start(settings_for(2, workers=2), tmp_path)
    summary = cluster.finish(cluster.worker(1, make=Victim), cluster.worker(2, make=Liar), *stores)
    assert summary.pushes.late == 1


@pytest.mark.nightly
def test_a_store_cannot_turn_a_worker_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, on_worker = [], SliceHost._on_worker

    def rejecting(held: SliceHost, event: SessionOpened) -> None:
        opened.append(event)
        if len(opened) == 1:
            event.session.send(Reject(code="over", sentence="the run is over"))
        on_worker(held, event)

    monkeypatch.setattr(SliceHost, "_on_worker", rejecting)
    cluster, stores = start(settings_for(2), tmp_path)
    cluster.finish(cluster.worker(1), *stores)
    assert len(opened) >= 2


@pytest.mark.nightly
def test_a_store_that_lives_and_does_nothing_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, obey, num_told = threading.Event(), SliceHost._obey, 0

    def freezing(held: SliceHost, message: Message, coordinator: Session) -> None:
        nonlocal num_told
        num_told += 1
        if num_told > 20:
            is_over.wait()
        obey(held, message, coordinator)

    monkeypatch.setattr(SliceHost, "_obey", freezing)
    settings = settings_for(2, "empty_cluster_timeout_s=1", "reconnect_timeout_s=1")
    cluster, [store] = start(settings, tmp_path)
    worker = cluster.worker(1)
    error = cluster.server.failure()
    is_over.set()
    assert isinstance(error, ClusterEmpty)
    assert "the store worker1 did not come within 1 s (empty_cluster_timeout_s)" in str(error)
    assert any("it does not send its slice" in line for line in cluster.log_lines)
    for each in (worker, store):
        each.failure()


@pytest.mark.nightly
def test_a_store_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    cluster, stores = start(settings_for(2), tmp_path)
    error = cluster.start_store("worker2").failure()
    assert isinstance(error, Rejected)
    assert "servers has worker1" in str(error)
    cluster.finish(cluster.worker(1), *stores)


@pytest.mark.parametrize("override", ["update_rule=mixing", "optimizer=Adagrad"])
def test_what_needs_all_weights_in_one_place_is_refused(tmp_path: Path, override: str) -> None:
    settings = settings_for(2, override)
    with pytest.raises(ConfigError):
        check_algorithm(settings, "edp")
        Cluster(settings, tmp_path)


def test_loops_of_ones_own_with_several_servers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerContext, "is_attached", True)
    with pytest.raises(ConfigError, match="loops of one's own push to one server only"):
        Cluster(settings_for(2), tmp_path)


def test_an_algorithm_without_stores_refuses_several_servers() -> None:
    settings = local_settings("servers=[mini1, worker1]", algorithm="pipeline")
    with pytest.raises(
        ConfigError, match=r"servers is \['mini1', 'worker1'\], but .* keeps its weights"
    ):
        check_algorithm(settings, "pipeline")
