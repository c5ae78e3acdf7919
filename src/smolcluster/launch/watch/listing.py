"""`smolcluster runs`: all runs whose folders are here. Only small files are read, a few a run."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smolcluster.launch.find import all_runs
from smolcluster.observability.terminal import SteadyConsole, displayable, steady
from smolcluster.runs.files import or_none
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import RunStatus, read_status
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.utils.units import format_duration

ELSEWHERE = "see status"
"""The state of a run whose server is on another machine and has not said here that it is over."""
STARTING_S = 60.0
"""So long a run may take to load PyTorch and its data before it writes anything."""


@dataclass(frozen=True)
class ListedRun:
    """A run in a line. What is not known is None."""

    run_id: str
    state: str
    steps: int | None
    loss: float | None
    wall_s: float | None
    where: str
    began: float


def runs() -> int:
    """Print a table of all runs, the newest last."""
    root = all_runs()
    console = SteadyConsole()
    found = listed(root)
    with steady(console):
        console.print(_table(console, found) if found else f"no runs yet in {root}")
    return 0


def listed(root: Path) -> list[ListedRun]:
    """The runs in a folder, in the order in which they began."""
    with suppress(OSError):
        folders = [path for path in root.iterdir() if _is_run(path)]
        return sorted(map(listed_run, map(RunPaths, folders)), key=lambda run: run.began)
    return []


def _is_run(path: Path) -> bool:
    return not path.name.startswith(".") and not path.is_symlink() and path.is_dir()


def listed_run(paths: RunPaths) -> ListedRun:
    """What the small files of a run say."""
    launched = or_none(read_launched, paths.launched)
    summary, status = or_none(read_summary, paths.summary), or_none(read_status, paths.status)
    if summary is not None and (status is None or status.is_over):
        steps, loss, wall_s = summary.steps, summary.final.train_loss, summary.wall_s
    elif status is not None:
        steps, loss, wall_s = status.step, status.loss, status.wall_s
    else:
        steps, loss, wall_s = None, None, None
    return ListedRun(
        paths.run_id,
        _state(paths, launched, summary, status),
        steps,
        loss,
        wall_s,
        _where(launched),
        _began(paths, status),
    )


def _state(
    paths: RunPaths, launched: Launched | None, summary: Summary | None, status: RunStatus | None
) -> str:
    """How a run stands: a server that lives holds its run's lock."""
    if status is not None and status.is_over:
        return status.word
    if status is None and summary is not None:
        return "ended"
    if is_held(paths.lock):
        return "starting" if status is None else status.state
    if paths.launched.is_file() and (launched is None or launched.server.ssh is not None):
        return ELSEWHERE
    if status is None and time.time() - _began(paths, None) < STARTING_S:
        return "starting"
    return "broken off"


def _where(launched: Launched | None) -> str:
    if launched is None:
        return "local"
    return ", ".join(dict.fromkeys(each.node for each in launched.processes))


def _began(paths: RunPaths, status: RunStatus | None) -> float:
    """When a run began, as well as its files tell: they are written in this order."""
    for path in (paths.launched, paths.config, paths.processes):
        with suppress(OSError):
            return path.stat().st_mtime
    if status is not None:
        return status.started_at.timestamp()
    with suppress(OSError):
        return paths.root.stat().st_mtime
    return 0.0


def _table(console: Console, found: list[ListedRun]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "loss", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where", min_width=6, overflow="fold")
    for run in found:
        table.add_row(*(Text(displayable(console, cell)) for cell in row(run)))
    return table


def row(run: ListedRun) -> list[str]:
    """A run's cells: id, state, steps, loss, time, where."""
    return [
        run.run_id,
        run.state,
        "" if run.steps is None else f"{run.steps:,}",
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.wall_s is None else format_duration(run.wall_s),
        run.where,
    ]
