"""How a process lets itself be observed: `/metrics`, and a worker's progress, also in Weights & Biases."""

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from smolcluster.configs.schema import RunConfig, Settings, TrainConfig
from smolcluster.configs.spec import title_of
from smolcluster.observability.exporter import (
    RunCollector,
    metrics_address,
    serve_metrics,
)
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.console import ProgressView, ShownBeside
from smolcluster.observability.sinks.wandb import WandbSink, wandb_for
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import RunPaths, create_run, runs_root
from smolcluster.runs.status import RunStatus
from smolcluster.server.process_stats import Gauge
from smolcluster.utils.meter import Meter
from smolcluster.utils.units import format_address
from smolcluster.wire.messages import Telemetry


@contextmanager
def metrics_served(
    settings: Settings,
    who: Process,
    meter: Meter,
    log: logging.Logger,
    *,
    run_id: Callable[[], str],
    status: Callable[[], RunStatus | None] = lambda: None,
) -> Iterator[None]:
    """Serve `/metrics` of a process while it works, where its configuration says so.

    `run_id`: of the run, empty as long as it is not known; `status`: its newest, of its owner.
    """
    worker_id = None if who.rank is None else who.rank + 1
    place = metrics_address(settings.cluster, worker_id)
    if place is None:
        yield
        return
    collector = RunCollector(
        who,
        meter,
        existing(runs_root(settings.node.runs_dir)),
        run_id=run_id,
        status=status,
    )
    address, port = place
    with serve_metrics(collector, address, port, warn=log.warning) as served:
        if served not in (None, port):
            where = format_address(address, served)
            log.info(
                "metrics for Prometheus are at http://%s/metrics (port %d is taken)", where, port
            )
        yield


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


class WorkerRun:
    """What a worker writes of each run of a cluster that it takes part in, on its own machine.

    Its log, what it keeps for a resumed run, its progress on a terminal, and its own run in Weights & Biases,
    which begins with the worker's first step, so that it does not slow down what comes before.
    """

    def __init__(
        self,
        node: str,
        rank: int | None,
        log: NodeLog,
        root: Path,
        role: str = "worker",
        *,
        meter: Meter | None = None,
        console: Console | None = None,
    ) -> None:
        """Begin without a run.

        Args:
            root: the folder of all runs.
            role: worker, stage of one, or store.
            meter: what the worker counts.
            console: where its progress is shown; None, and no terminal: nowhere.
        """
        self._node, self._rank, self._log, self._root = node, rank, log, root
        self._role = role
        self._meter = meter or Meter()
        self._console = console if console is not None and console.is_interactive else None
        self._progress: ShownBeside | None = None
        self._lock = threading.Lock()
        self._run: tuple[RunConfig, RunPaths] | None = None
        self._sink: WandbSink | None = None
        self._gauge = Gauge()

    @property
    def run_id(self) -> str:
        run = self._run
        return "" if run is None else run[0].run_id

    def file_logs(self, run_id: str) -> RunPaths:
        """Make the run's folder, and write the log there from now on.

        Raises:
            ConfigError: the folder cannot be made.
        """
        paths = create_run(self._root, run_id, newest=False)
        self._log.file_logs_to(paths.log_file(self._role, self._node, self._rank), run_id)
        return paths

    def begin(self, run: RunConfig) -> RunPaths:
        """Write of this run from now on.

        Raises:
            ConfigError: its folder cannot be made.
        """
        paths = self.file_logs(run.run_id)
        if self._run is None or self._run[0].run_id != run.run_id:
            self.close()
            self._run = run, paths
            if self._console is not None:
                view = ProgressView(self._console, num_epochs=run.train.num_epochs)
                self._progress = ShownBeside(view, partial(self._newest, run.train))
        return paths

    def _newest(self, train: TrainConfig) -> MetricRecord | None:
        """How far the run is, by the samples that this worker has computed last; None before the first."""
        newest = self._meter.newest
        if newest is None:
            return None
        samples = {
            "samples_applied": newest.epoch * newest.epoch_size + newest.stop,
            "total_samples": train.total_samples(newest.epoch_size),
        }
        loss = {} if math.isnan(newest.loss) else {"loss": newest.loss}
        rates = {name: rate for name, rate in self._gauge.values.items() if name == "samples_per_s"}
        return MetricRecord("step", self._meter.steps, newest.epoch, samples | loss | rates)

    def own_folder(self, run_id: str) -> Path:
        """Where the worker keeps what is its own of that run."""
        return RunPaths(self._root / run_id).own_folder(self._role, self._node, self._rank)

    def take(self, report: Telemetry) -> None:
        """Take what the worker tells the server of itself. Any thread; never blocks for long."""
        kept = self._gauge.take(report)
        if kept is None or not report.steps or self._role != "worker":
            return
        with self._lock:
            self._sink = self._sink or self._open()
            if self._sink is not None:
                self._sink.log(
                    MetricRecord("worker", report.steps, 0, kept, rank=self._rank, node=self._node)
                )

    def _open(self) -> WandbSink | None:
        if self._run is None:
            return None
        run, paths = self._run
        return wandb_for(
            run,
            title_of(run.algorithm),
            role="worker",
            node=self._node,
            rank=self._rank,
            paths=paths,
            warn=self._log.logger.warning,
        )

    def close(self) -> None:
        """Report what is left, within a deadline."""
        with self._lock:
            sink, self._sink, self._run = self._sink, None, None
            progress, self._progress = self._progress, None
        if progress is not None:
            progress.close()
        if sink is not None:
            sink.close()
