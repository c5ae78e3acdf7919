"""DiLoCo goes on from a checkpoint with what workers have kept of it on their own machines.

An undisturbed run leaves checkpoints on its way, which are what a server that is killed some rounds later
finds: one is resumed from here, in a folder of its own.
"""

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import own_workloads
from faults.cases import in_equal_parts
from harness import Cluster, local_settings
from own_workloads import first_saved, killed_after
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.DiLoCo import server as diloco
from smolcluster.algorithms.DiLoCo.peers import Peer
from smolcluster.configs.schema import Settings
from smolcluster.observability.metrics import MetricRecord
from tiers import at_night
from waiting import eventually

run = partial(own_workloads.run, algorithm="diloco")
pytestmark = pytest.mark.slow

KEPT = Path("test-run") / "worker-1"


def settings_for(
    codec: str, workers: int = 1, optimizer: str = "adam", sync_fraction: float = 0.0
) -> Settings:
    is_sparse = codec == "topk"
    momentum, codec_down = (0.0, "int8") if is_sparse else (0.9, codec)
    return local_settings(
        *(f"optimizer={optimizer}", f"sync_fraction={sync_fraction}"),
        *(
            "mode=sync",
            f"codec_up={codec}",
            f"codec_down={codec_down}",
            "local_steps=5",
            "num_epochs=4",
        ),
        *("checkpoint_steps=30", "keep_last=100", f"min_workers={workers}"),
        *("outer_lr=0.7", f"outer_momentum={momentum}", "eval_steps=1000"),
        *("lr_schedule.warmup_iters=20", "lr_schedule.min_lr=0.0001"),
        workers=workers,
        algorithm="diloco",
    )


def losses_after(records: list[MetricRecord], step: int) -> list[float]:
    return [record.values["loss"] for record in records if record.step > step]


@pytest.mark.parametrize(
    ("codec", "optimizer", "sync_fraction"),
    [
        ("int8", "muon", 0),
        ("topk", "adam", 0.5),
        *at_night(
            ("fp32", "adam", 0),
            ("int8", "adam", 0),
            ("int8", "adam", 0.5),
            ("int8", "muon", 0.5),
            ("int4", "adam", 0.167),  # of 180 batches the first 30
            ("topk", "adam", 0.167),
        ),
    ],
)
def test_one_worker_goes_on_bit_for_bit(
    tmp_path: Path,
    codec: str,
    optimizer: str,
    sync_fraction: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From between two rounds, from within the synchronous beginning, and from its end."""
    monkeypatch.setattr(rounds, "MOST_WAITING", math.inf)
    settings = settings_for(codec, optimizer=optimizer, sync_fraction=sync_fraction)
    whole = run(settings, tmp_path / "whole")
    step = first_saved(whole)
    assert sync_fraction == 0 or step <= sync_fraction * 180
    resumed = run(settings, killed_after(whole.folder, tmp_path / "resumed", step), resume=True)
    assert torch.equal(resumed.training.replica.params, whole.training.replica.params)
    expected = losses_after(whole.metrics.steps, step)
    assert len(expected) >= 50
    assert losses_after(resumed.metrics.steps, step) == expected
    assert losses_after(resumed.metrics.steps, step=0)[0] == expected[0]


@pytest.mark.nightly
def test_without_what_a_worker_kept_it_goes_on_with_cold_moments(tmp_path: Path) -> None:
    settings = settings_for("fp32")
    whole = run(settings, tmp_path / "whole")
    step = first_saved(whole)
    folder = killed_after(whole.folder, tmp_path / "resumed", step)
    shutil.rmtree(folder / KEPT)
    resumed = run(settings, folder, resume=True)
    assert not torch.equal(resumed.training.replica.params, whole.training.replica.params)
    losses, expected = (losses_after(each.metrics.steps, step) for each in (resumed, whole))
    assert len(losses) == len(expected)
    assert losses[-1] == pytest.approx(expected[-1], abs=0.2)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_resumed_run_begins_with_the_local_steps_it_had(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    class Watched(diloco.Server):
        def begin_round(self) -> None:
            super().begin_round()
            begun.append(self.round.local_steps)

    settings = local_settings(
        *(f"mode={mode}", "num_epochs=3", "checkpoint_steps=30", "keep_last=100", "min_workers=1"),
        workers=1,
        algorithm="diloco",
    )
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "measured_steps", lambda *_: 5)
        whole = run(settings, tmp_path / "whole")
    step = first_saved(whole)
    folder = killed_after(whole.folder, tmp_path / "resumed", step)
    run(settings, folder, server_class=Watched, resume=True)
    assert begun[0] == 5


class AllAtOnce(diloco.Server):
    """Gives both workers all of a round at once, in the order in which they joined, half of it each."""

    def hand_out(self, now: float) -> None:
        if len(self.active) == 2:
            super().hand_out(now)


def test_two_workers_go_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own moments and what its codec owes, where times do not decide who computes what.

    While fragments are sent behind computation, times decide which weights a batch meets.
    """
    monkeypatch.setattr(rounds, "shared_out", in_equal_parts)
    monkeypatch.setattr(Peer, "num_wanted", lambda _peer, _busy_s: 1000)
    settings = settings_for("int8", workers=2)

    def run_both(folder: Path, *, resume: bool) -> Cluster:
        cluster = Cluster(settings, folder, AllAtOnce, algorithm="diloco", resume=resume)
        outcomes = [cluster.worker(1)]
        eventually(lambda: len(cluster.core.pool.workers) == 1)
        outcomes.append(cluster.worker(2))
        for outcome in (cluster.server, *outcomes):
            outcome.finish()
        return cluster

    whole = run_both(tmp_path / "whole", resume=False)
    step = first_saved(whole)
    killed_after(whole.folder, tmp_path / "resumed", step)
    resumed = run_both(tmp_path / "resumed", resume=True)
    losses = losses_after(whole.metrics.steps, step)
    assert losses_after(resumed.metrics.steps, step) == pytest.approx(losses, rel=1e-6)
    assert len(losses) >= 50
    ours, theirs = resumed.training.replica.params, whole.training.replica.params
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
def test_more_workers_than_before_count_exactly(tmp_path: Path) -> None:
    whole = run(settings_for("int8"), tmp_path / "whole")
    folder = killed_after(whole.folder, tmp_path / "resumed", first_saved(whole))
    resumed = run(settings_for("int8", workers=2), folder, resume=True)
    assert resumed.server.summary is not None
    total = 4 * resumed.server.summary.train_samples
    assert resumed.server.summary.samples_applied == total
    assert resumed.server.summary.final.val_loss is not None
    assert resumed.server.summary.final.val_loss < 1.5


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 3])
def test_the_learning_rate_goes_on_as_it_was_with_another_number_of_workers(
    tmp_path: Path, workers: int
) -> None:
    """The warm-up of 20 steps has 40 batches of the two workers that were; 30 have been applied."""

    def rates_of(cluster: Cluster) -> dict[int, float]:
        return {record.step: record.values["lr"] for record in cluster.metrics.steps}

    settings = settings_for("fp32", workers=2)
    whole = run(settings, tmp_path / "whole")
    folder = killed_after(whole.folder, tmp_path / "resumed", step=30)
    resumed = run(settings_for("fp32", workers=workers), folder, resume=True)
    expected = rates_of(whole)
    assert expected[40] < expected[41] == settings.train.learning_rate
    assert {step: rate for step, rate in rates_of(resumed).items() if step > 30} == {
        step: rate for step, rate in expected.items() if step > 30
    }


class WaitsForTheSecond(diloco.Server):
    """Hands out one round after the checkpoint, then nothing until a second worker is there."""

    def hand_out(self, now: float) -> None:
        if self.version == self.resumed_at or len(self.pool.workers) == 2:
            super().hand_out(now)


@pytest.mark.nightly
def test_who_joins_later_loses_nothing_that_it_kept(tmp_path: Path) -> None:
    settings = settings_for("int8")
    whole = run(settings, tmp_path / "whole")
    step = first_saved(whole)
    folder = killed_after(whole.folder, tmp_path / "resumed", step)
    newer = folder / "test-run" / "worker-2" / f"step-{step + 15:08d}.safetensors"
    shutil.copytree(folder / KEPT, newer.parent)
    shutil.copyfile(folder / KEPT / f"step-{step:08d}.safetensors", newer)
    cluster = Cluster(settings, folder, WaitsForTheSecond, algorithm="diloco", resume=True)
    first = cluster.worker(1)
    eventually(lambda: cluster.core.version != step)
    second = cluster.worker(2)
    for outcome in (cluster.server, first, second):
        outcome.finish()
    assert newer.exists()
