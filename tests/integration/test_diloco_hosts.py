"""DiLoCo with weights that lie on several hosts: what the table of `test_several_hosts` lacks."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

import own_workloads
import several_hosts
from harness import Cluster
from own_workloads import first_saved, killed_after
from several_hosts import many_buckets  # noqa: F401 - a fixture
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.DiLoCo.exchange import delta_frames
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.errors import ConfigError
from smolcluster.runs.events import BeginningEnded
from smolcluster.training.local_copy import InProcess
from smolcluster.wire.messages import Collect

start = partial(several_hosts.start, algorithm="diloco")
run = partial(own_workloads.run, algorithm="diloco")
settings_for = partial(several_hosts.settings_for, "diloco")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("many_buckets")]
STREAMING = "mode=streaming", "fragments=3"


@pytest.mark.nightly
def test_muon_begins_with_rounds_where_its_matrices_are_cut(tmp_path: Path) -> None:
    cluster = run(settings_for(2, "mode=sync", "optimizer=muon", "sync_fraction=0.5"), tmp_path)
    [event] = cluster.happened(BeginningEnded)
    assert event.reason.startswith("0 steps")
    assert "several hosts, and muon" in event.reason


@pytest.mark.nightly
def test_what_a_worker_says_it_has_received_came_from_all_hosts(tmp_path: Path) -> None:
    received: list[tuple[int, int]] = []

    class Watched(Worker):
        def send_change(self, collect: Collect) -> None:
            super().send_change(collect)
            received.append((self.link.bytes_moved()[1], self.link.connection.bytes_received))

    cluster, stores = start(settings_for(3, "mode=sync"), tmp_path)
    cluster.finish(cluster.worker(1, make=Watched), *stores)
    from_all, from_server = received[-1]
    assert from_all > 2 * from_server


@pytest.mark.nightly
@pytest.mark.parametrize("sync_fraction", [0, 0.5])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2)])
def test_a_run_goes_on_with_more_hosts_or_fewer(
    tmp_path: Path,
    before: int,
    after: int,
    sync_fraction: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a checkpoint of an undisturbed run, and what the worker has kept for it.

    That lies between two rounds, or within the synchronous beginning.
    """
    monkeypatch.setattr(rounds, "MOST_WAITING", math.inf)
    begins = f"sync_fraction={sync_fraction}"
    own = "mode=sync", "codec_up=int8", "codec_down=int4", "outer_momentum=0.5", "local_steps=5"
    saved = "checkpoint_steps=30", "keep_last=100"
    whole = run(settings_for(before, *own, *saved, begins), tmp_path / "whole")
    step = first_saved(whole)
    assert sync_fraction == 0 or step < sync_fraction * len(whole.metrics.steps)
    folder = killed_after(whole.folder, tmp_path / "resumed", step)
    resumed = run(settings_for(after, *own, *saved, begins), folder, resume=True)
    assert len(resumed.metrics.steps) == len(whole.metrics.steps) - step >= 30
    assert torch.equal(resumed.training.replica.params, whole.training.replica.params)


class Unplugged(Worker):
    """Loses a store, and then the server, when it has just sent a part of a change."""

    num_lost = 0

    def send_change(self, collect: Collect) -> None:
        if self.num_lost < 2 and collect.fragment == 0:
            self.num_lost += 1
            frame = delta_frames(
                self.layout,
                collect,
                self.encoder.encode(0, self.anchor_of(0)),
                self.encoder.codec,
            )[0]
            self.encoder.forget(0)
            self.link.send_frame(frame)
            last = self.hosts.session_of(len(self.replica.buckets) - 1)
            assert last is not self.link
            (last if self.num_lost == 1 else self.link).cut("the cable was pulled")
        super().send_change(collect)

    def anchor_of(self, number: int) -> torch.Tensor:
        assert isinstance(self.copy.executor, InProcess)
        return torch.cat(list(self.copy.executor.start[number].values()))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [("mode=sync",), STREAMING, ("mode=async",)])
def test_a_worker_that_is_lost_in_the_middle_of_a_change_costs_no_sample(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    cluster, stores = start(settings_for(3, *mode, "num_epochs=8", workers=2), tmp_path)
    workers = cluster.worker(1), cluster.worker(2, make=Unplugged)
    cluster.finish(*workers, *stores)
    joined = [line for line in cluster.log_lines if "trying to reconnect" in line]
    assert len(joined) >= 2, cluster.log_lines


def test_more_workers_than_stores_can_be_told_of_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_workers is 513, more than the 512"):
        Cluster(settings_for(2, workers=513), tmp_path, algorithm="diloco")
