"""The baseline as a command: training in one process, with everything that a run leaves behind."""

import platform
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.process import process_log
from smolcluster.algorithms.records import open_records, open_run
from smolcluster.configs.resolve import load_settings
from smolcluster.observability.terminal import SteadyConsole, steady
from smolcluster.runs.paths import new_run_id
from smolcluster.runs.summary import table
from smolcluster.training.loop import train_single
from smolcluster.utils.device import use_threads

ALGORITHM: Final = "single"
CLUSTER = "edp"
"""The cluster file whose seed is taken, so that the baseline begins as the cluster does."""


def train(config: str, overrides: Sequence[str]) -> int:
    """Train what the training file `config` says, in this process; returns the exit code."""
    return guarded(lambda: _train(config, overrides))


def _train(config: str, overrides: Sequence[str]) -> None:
    settings = load_settings(CLUSTER, config, None, overrides, local=True, local_workers=1)
    use_threads(settings.node.threads)
    console, host = SteadyConsole(stderr=True), platform.node()
    run = settings.run_config(new_run_id(ALGORITHM, datetime.now().astimezone()), ALGORITHM)
    with process_log("trainer", host, console=console) as log:
        paths = open_run(settings, run, role="trainer", node=host, log=log)
        with open_records(
            paths, run, role="trainer", node=host, log=log, progress=console
        ) as records:
            summary = train_single(settings, paths, records.metrics, records.events, log.logger)
        output = SteadyConsole()
        with steady(output):
            output.print(table(summary))
