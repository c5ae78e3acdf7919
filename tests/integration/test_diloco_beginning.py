"""DiLoCo's synchronous beginning, between real sessions over TCP in one process."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import harness
import own_workloads
import several_hosts
from harness import Cluster, local_settings
from own_workloads import Rows
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.DiLoCo.server import Server
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.configs.schema import Settings
from smolcluster.errors import PeerLost
from smolcluster.runs.events import BeginningEnded
from smolcluster.server.assignment import Assigned
from smolcluster.training.build import build
from smolcluster.training.compute import BatchLoss
from smolcluster.training.workload import Workload

LOSSLESS = "codec_up=null", "codec_down=null"
STREAMING = "mode=streaming", "fragments=3"


def settings_for(*overrides: str, workers: int = 2) -> Settings:
    return local_settings(
        *(
            "num_epochs=2",
            "batch_size=20",
            "mode=sync",
            "local_steps=4",
            f"min_workers={workers}",
            *overrides,
        ),
        workers=workers,
        algorithm="diloco",
    )


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take no time are short beside any exchange."""
    monkeypatch.setattr(rounds, "MOST_WAITING", math.inf)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def workload(make: Callable[[], nn.Module] = model) -> Workload:
    """Without statistics of batches, which depend on how a step is cut."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(160, 8, generator=generator)
    rows = Rows(inputs, torch.randint(0, 4, (160,), generator=generator))
    return Workload(make, own_workloads.loss, rows, name="plain")


def run(
    settings: Settings,
    folder: Path,
    core: type[Server] = Server,
    make: type[Worker] = Worker,
    *,
    trained: Workload | None = None,
) -> Cluster:
    what = trained or workload()
    cluster = Cluster(settings, folder, core, algorithm="diloco", workload=what)
    num_workers = settings.cluster.num_workers
    makers = [make, *[Worker] * (num_workers - 1)]
    cluster.finish(*(cluster.worker(rank + 1, make=maker) for rank, maker in enumerate(makers)))
    return cluster


class Dying(Worker):
    """Loses its connection in the middle of a step, once."""

    has_died = False

    def compute(self, lease: Assigned) -> BatchLoss:
        if not self.has_died and self.versions[0] >= 6:
            self.has_died = True
            raise PeerLost("the test cuts it off")
        return super().compute(lease)


class Together(Server):
    """Hands out nothing before both workers have reached all hosts."""

    def hand_out(self, now: float) -> None:
        if len(self.active) == 2:
            super().hand_out(now)


@pytest.mark.parametrize(
    ("mode", "optimizer", "num_hosts"),
    [
        ((), "adamw", 1),
        (STREAMING, "adamw", 1),
        (("mode=async",), "sgd", 1),
        (STREAMING, "adamw", 3),
    ],
    ids=["sync", "streaming", "async", "streaming on 3 hosts"],
)
def test_a_run_that_is_all_beginning_is_training_with_larger_batches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: tuple[str, ...],
    optimizer: str,
    num_hosts: int,
) -> None:
    """Two workers' batches of 20 are one process's of 40, whoever computes them.

    Buckets have 32 weights; the mean is clipped by the norm of the whole.
    """
    monkeypatch.setattr(harness, "build", partial(build, bucket_bytes=256))
    common = f"optimizer={optimizer}", "gradient_clipping.max_norm=0.05", "num_epochs=3"
    hosts = several_hosts.on_hosts(num_hosts)
    own = settings_for(*LOSSLESS, *common, *mode, "sync_fraction=1", hosts)
    cluster, stores = several_hosts.start(
        own, tmp_path, "diloco", server_class=Together, workload=workload()
    )
    cluster.finish(cluster.worker(1), cluster.worker(2), *stores)
    whole = settings_for(*common, "batch_size=40", workers=1)
    _, alone = own_workloads.alone(whole, workload())
    ours, theirs = cluster.training.replica.params, alone.replica.params
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_where_changes_go_as_topk_gradients_go_as_int4(tmp_path: Path) -> None:
    """In the beginning both runs are the same, bit for bit; the sentence of its end names the codec."""

    def ran(codec_up: str, sync_fraction: float) -> Cluster:
        own = f"codec_up={codec_up}", f"sync_fraction={sync_fraction}", "codec_down=int8"
        folder = tmp_path / f"{codec_up}-{sync_fraction}"
        trained = workload(lambda: model().float())
        return run(settings_for(*own, *STREAMING, workers=1), folder, trained=trained)

    sparse, dense = (ran(codec, 1.0).training.replica.params for codec in ("topk", "int4"))
    assert torch.equal(sparse, dense)
    [event] = ran("topk", 0.25).happened(BeginningEnded)
    assert event.reason == "4 steps, 25.0% of the samples, gradients sent as int4"


def test_every_sample_counts_once_when_a_worker_is_lost_in_the_beginning(tmp_path: Path) -> None:
    own = settings_for(*LOSSLESS, "num_epochs=4", "sync_fraction=0.75", *STREAMING)
    cluster = run(own, tmp_path, make=Dying)
    spans = sorted(
        (record.epoch, record.values["start"], record.values["stop"])
        for record in cluster.metrics.steps
    )
    assert spans == [
        (epoch, start, start + 20) for epoch in range(4) for start in range(0, 160, 20)
    ]


def test_rounds_follow_when_its_share_of_the_samples_has_been_applied(tmp_path: Path) -> None:
    told: list[tuple[int, int, bool]] = []

    class Watched(Server):
        def begin_round(self) -> None:
            super().begin_round()
            told.append(
                (self.dispatcher.samples_applied, self.round.local_steps, self.pacing.waits)
            )

    cluster = run(
        settings_for(*LOSSLESS, "num_epochs=4", "sync_fraction=0.25", *STREAMING), tmp_path, Watched
    )
    assert isinstance(cluster.core, Server)
    total = cluster.core.dispatcher.total_samples
    for samples_applied, local_steps, waits in told:
        is_beginning = samples_applied < total / 4
        assert (local_steps, waits) == ((1, True) if is_beginning else (4, False))
    assert {waits for *_, waits in told} == {True, False}
    [line] = [line for line in cluster.log_lines if "the synchronous beginning is over" in line]
    [event] = cluster.happened(BeginningEnded)
    assert (event.step, event.reason) == (8, "4 steps, 25.0% of the samples")
    assert event.reason in line
