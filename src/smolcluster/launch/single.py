"""The baseline as a command: training in one process, with everything that a run leaves behind."""

import platform
from collections.abc import Sequence

from smolcluster.algorithms import single
from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.owner import Owner, own_run
from smolcluster.algorithms.process import process_log
from smolcluster.configs.resolve import Settings, load_settings
from smolcluster.configs.spec import SINGLE, default_algorithm
from smolcluster.observability.terminal import SteadyConsole


def train(
    config: str,
    overrides: Sequence[str],
    *,
    run_id: str | None = None,
    resume: str | None = None,
    cluster: str | None = None,
) -> int:
    """Train what the training file `config` says, in this process; returns the exit code.

    Args:
        config: a path or a shipped name.
        overrides: `key=value` texts.
        run_id: name of the run; None: made from the time.
        resume: a run that it goes on with, latest, or auto; None: a new run.
        cluster: the file whose seed is taken, so that the baseline begins as the cluster does, and how often
            checkpoints are; None: the default algorithm's.
    """
    settings = load_settings(
        cluster or default_algorithm().name, config, None, overrides, local=True, local_workers=1
    )
    return guarded(lambda: _train(settings, run_id, resume))


def _train(settings: Settings, run_id: str | None, resume: str | None) -> None:
    console, host = SteadyConsole(stderr=True), platform.node()
    with process_log("trainer", host, console=console) as log:
        own_run(
            Owner(SINGLE, "trainer", host, settings),
            log,
            single.train,
            run_id=run_id,
            resume=resume,
            progress=console,
            output=SteadyConsole(),
        )
