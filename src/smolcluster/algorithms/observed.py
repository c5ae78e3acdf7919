"""How a process lets itself be observed: `/metrics`, and a worker's run in Weights & Biases."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smolcluster.algorithms.registry import title_of
from smolcluster.cluster.vitals import Gauge
from smolcluster.configs.resolve import Settings
from smolcluster.configs.schema import RunConfig
from smolcluster.observability.exporter import (
    ProcessLabels,
    ProcessNumbers,
    RunCollector,
    metrics_address,
    serve_metrics,
)
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.wandb import WandbSink, wandb_for
from smolcluster.runs.paths import RunPaths, runs_root
from smolcluster.runs.status import RunStatus
from smolcluster.transport.messages import Telemetry
from smolcluster.utils.meter import Meter


@contextmanager
def metrics_served(
    settings: Settings,
    who: ProcessLabels,
    meter: Meter,
    log: logging.Logger,
    *,
    local: bool,
    status: Callable[[], RunStatus | None] = lambda: None,
) -> Iterator[None]:
    """Serve `/metrics` of a process while it works, where its configuration says so.

    `local`: only to this machine, unless the configuration names an address. `status`: the run's newest.
    """
    worker_id = None if who.rank is None else who.rank + 1
    place = metrics_address(settings.cluster, worker_id, local=local)
    if place is None:
        yield
        return
    collector = RunCollector(
        who,
        lambda: ProcessNumbers(meter.steps, meter.samples, meter.by_phase),
        existing(runs_root(settings.node.runs_dir)),
        status=status,
    )
    with serve_metrics(collector, *place, warn=log.info):
        yield


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


class WorkerRun:
    """A worker's own run in Weights & Biases, for each run of a cluster that it takes part in."""

    def __init__(self, node: str, rank: int, log: logging.Logger) -> None:
        self._node, self._rank, self._log = node, rank, log
        self._run_id = ""
        self._sink: WandbSink | None = None
        self._gauge = Gauge()

    def begin(self, run: RunConfig, paths: RunPaths) -> None:
        """The worker takes part in a run, for the first time or again."""
        if run.run_id == self._run_id:
            return
        self.close()
        self._run_id = run.run_id
        self._sink = wandb_for(
            run,
            title_of(run.algorithm),
            role="worker",
            node=self._node,
            rank=self._rank,
            paths=paths,
            warn=self._log.warning,
        )

    def take(self, report: Telemetry) -> None:
        """Take what the worker tells the server of itself. Any thread; never blocks."""
        kept = self._gauge.take(report)
        if kept is not None and self._sink is not None:
            self._sink.log(
                MetricRecord("worker", report.steps, 0, kept, rank=self._rank, node=self._node)
            )

    def close(self) -> None:
        """Report what is left, within a deadline."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None
