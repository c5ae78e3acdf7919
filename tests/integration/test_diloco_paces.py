"""DiLoCo with workers whose speed or number changes in mid-run: every sample counts once, whoever is slow."""

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from harness import Cluster, local_settings
from proxy import Proxy
from smolcluster.algorithms.DiLoCo.ledger import Applied
from smolcluster.algorithms.DiLoCo.peers import Peer
from smolcluster.algorithms.DiLoCo.rounds import MOST_BEHIND
from smolcluster.algorithms.DiLoCo.server import Server
from smolcluster.algorithms.DiLoCo.worker import Worker as DiLoCoWorker
from smolcluster.configs.schema import Settings
from smolcluster.server.assignment import Assigned
from smolcluster.server.worker import Worker
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.utils.retry import Deadline
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Ready, Welcome

pytestmark = pytest.mark.slow

STEP_S = 0.002
FAST_BYTES_PER_S = 2e6
INT8 = "codec_up=int8", "codec_down=int8", "local_steps=8", "num_epochs=3", "sync_fraction=0"


def settings_for(*overrides: str, workers: int = 2) -> Settings:
    own = f"min_workers={workers}", *overrides
    return local_settings(*own, workers=workers, algorithm="diloco")


class Changing(DiLoCoWorker):
    """Takes ten times as long for a step after the first fifteen, or a tenth."""

    first_s, later_s = STEP_S, STEP_S
    num_steps = 0

    def compute(self, lease: Assigned) -> BatchLoss:
        self.num_steps += 1
        time.sleep(self.first_s if self.num_steps <= 15 else self.later_s)
        return super().compute(lease)


class Slower(Changing):
    later_s = 10 * STEP_S


class Faster(Changing):
    first_s, later_s = 10 * STEP_S, STEP_S


class Leaving(Changing):
    """Its link breaks when it has taken so many steps, and again after as many."""

    def compute(self, lease: Assigned) -> BatchLoss:
        if self.num_steps in {10, 20}:
            self.link.cut("the test has cut it")
        return super().compute(lease)


class HeldUp(Changing):
    """Is held up for two steps, then as fast as before; `after`: steps that it has taken since."""

    after = 0

    def compute(self, lease: Assigned) -> BatchLoss:
        if self.num_steps in {5, 6}:
            time.sleep(300 * STEP_S)
        self.after += self.num_steps > 6
        return super().compute(lease)


def test_who_was_held_up_takes_part_again_when_it_is_as_fast_as_before(tmp_path: Path) -> None:
    settings = settings_for("mode=sync", "local_steps=4", "num_epochs=12")
    cluster = Cluster(settings, tmp_path, algorithm="diloco")
    held_up: list[HeldUp] = []

    def make(welcome: Welcome, training: TrainingContext) -> HeldUp:
        held_up.append(HeldUp(welcome, training))
        return held_up[-1]

    cluster.finish(cluster.worker(1, make=Changing), cluster.worker(2, make=make))
    assert sum(each.after for each in held_up) > 20


class NothingIsSentMeanwhile(Server):
    """Gives all that it has to give before the first of it is sent."""

    most_held = 0

    def on_join(self, worker: Worker, ready: Ready) -> None:
        connection = worker.live_session.connection
        send, self.sends = connection.send_frame, threading.Lock()

        def send_frame(frame: Frame, deadline: Deadline | None = None) -> None:
            with self.sends:
                send(frame, deadline)

        connection.send_frame = send_frame  # type: ignore[method-assign]
        super().on_join(worker, ready)

    def hand_out(self, now: float) -> None:
        if self.active:
            with self.sends:
                super().hand_out(now)
            self.most_held = max(self.most_held, *(len(each.unanswered) for each in self.active))


@pytest.mark.nightly
def test_all_that_a_worker_is_ever_given_at_once_may_wait_on_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Peer, "num_wanted", lambda peer, _busy_s: MOST_BEHIND - len(peer.unanswered)
    )
    settings = settings_for("mode=sync", "local_steps=400", "num_epochs=12", workers=1)
    cluster = Cluster(settings, tmp_path, NothingIsSentMeanwhile, algorithm="diloco")
    summary = cluster.finish(cluster.worker(1))
    assert isinstance(cluster.core, NothingIsSentMeanwhile)
    assert (cluster.core.most_held, summary.leases_returned) == (MOST_BEHIND, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["sync", "streaming", "async"])
def test_a_link_that_drops_to_a_tenth_costs_time_and_nothing_else(
    tmp_path: Path, mode: str
) -> None:
    settings = settings_for(f"mode={mode}", *INT8)
    with closing(Proxy(settings.cluster.port)) as proxy:
        proxy.throttle(FAST_BYTES_PER_S)

        class Dropping(Server):
            def count(self, applied: Sequence[Applied]) -> None:
                super().count(applied)
                if self.version > 40:
                    proxy.throttle(FAST_BYTES_PER_S / 10)

        cluster = Cluster(settings, tmp_path, Dropping, algorithm="diloco")
        far = cluster.worker(2, port=proxy.port, make=Changing)
        summary = cluster.finish(cluster.worker(1, make=Changing), far)
    assert summary.leases_returned == 0
    assert proxy.connections == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("other", "mode"), [(Slower, "sync"), (Faster, "streaming"), (Leaving, "streaming")]
)
def test_every_sample_counts_once(tmp_path: Path, other: type[Changing], mode: str) -> None:
    settings = settings_for(f"mode={mode}", *INT8)
    cluster = Cluster(settings, tmp_path, algorithm="diloco")
    board, told = cluster.core.report.board, []
    note = board.measured

    def measured(worker: Worker, **values: float) -> None:
        note(worker, **values)
        [row] = [row for row in board.workers() if row.rank == worker.rank]
        told.append(row.process_stats)

    board.measured = measured  # type: ignore[method-assign]
    cluster.finish(cluster.worker(1, make=Changing), cluster.worker(2, make=other))
    assert all(0 < each["drift"] < 1 for each in told)
    assert sum(each["local_steps"] for each in told) >= 3 * 45
    taken = [record.values for record in cluster.metrics.steps]
    outer = [values["outer_step"] for values in taken]
    assert outer == sorted(outer)
    assert any(0 < values.get("drift", 0) < 1 for values in taken)
