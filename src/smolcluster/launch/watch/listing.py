"""`smolcluster runs`: all runs whose folders are here, and which of them live.

Only small files are read, a few a run. A run that was launched on other machines and is not known to be over
is asked for there, each machine once; the answer is kept in the run's folder for when they cannot be reached.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from smolcluster.errors import DataError, SmolclusterError
from smolcluster.launch.find import all_runs
from smolcluster.launch.tmux import TMUX_TIMEOUT_S
from smolcluster.launch.watch.probe import Ask, ProbeResult, alive_of, look
from smolcluster.launch.watch.report import state_of
from smolcluster.observability.terminal import SteadyConsole, displayable, steady
from smolcluster.observability.view.snapshot import RunSnapshot, read_snapshot
from smolcluster.runs.files import write_whole
from smolcluster.runs.launched import Launched
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths, latest_of
from smolcluster.runs.processes import read_processes
from smolcluster.runs.status import Instant, RunStatus, instant
from smolcluster.runs.summary import Summary
from smolcluster.utils.units import format_duration

NEWS_S = 5.0
"""What is older than this is shown with its age."""
MAX_ASKED = 16
"""Runs whose machines are asked at the same time."""

COLUMNS = ("run", "state", "steps", "loss", "time", "where")
NUMERIC = ("steps", "loss", "time")
GAP = 2
LEAST_WHERE = 6

Sessions = Callable[[], Collection[str]]
"""What says the names of this machine's tmux sessions."""


class ListedRun(BaseModel):
    """A run in a line; null is what is not known. `runs --json` prints a list of these, the newest last."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    algorithm: str | None
    state: str = Field(
        description="starting, waiting, training, ended, stopped, failed, broken off, or unknown."
    )
    is_alive: bool | None = Field(
        description="Whether a process of it lives; null: its machines cannot be asked."
    )
    steps: int | None
    loss: float | None
    wall_s: float | None
    nodes: tuple[str, ...] = Field(description="Empty: it was started on this machine alone.")
    began_at: Instant
    as_of: Instant | None = Field(
        None, description="When its machines last answered; null: what is told is of now."
    )


def runs(*, as_json: bool = False, ask: Ask | None = None) -> int:
    """Print a table of all runs, the newest last, or a list of `ListedRun` as JSON."""
    root = all_runs()
    found = listed(root, ask)
    if as_json:
        lines = [run.model_dump(mode="json") for run in found]
        sys.stdout.write(json.dumps(lines, indent=2, ensure_ascii=False) + "\n")
        return 0
    console = SteadyConsole()
    with steady(console):
        console.print(_table(console, found) if found else f"no runs yet in {root}")
    return 0


def listed(root: Path, ask: Ask | None = None) -> list[ListedRun]:
    """The runs in a folder, in the order in which they began."""
    return _listed(folders(root), ask)


def folders(root: Path) -> list[RunPaths]:
    """The runs in a folder, in no order."""
    with suppress(OSError):
        return [RunPaths(path) for path in root.iterdir() if _is_run(path)]
    return []


def living(root: Path, ask: Ask | None = None) -> list[RunPaths]:
    """The runs of which a process lives, the newest last.

    One whose machines cannot be asked is taken to live if `latest` points to it. Where only that one can live
    nobody is asked.
    """
    sessions = cache(_sessions)
    possible = [paths for paths in folders(root) if _may_live(paths, sessions)]
    newest = latest_of(root)
    if [paths.run_id for paths in possible] == [newest]:
        return possible
    return [
        RunPaths(root / run.run_id)
        for run in _listed(possible, ask)
        if run.is_alive or (run.is_alive is None and run.run_id == newest)
    ]


def _is_run(path: Path) -> bool:
    return not path.name.startswith(".") and not path.is_symlink() and path.is_dir()


def _listed(runs: Sequence[RunPaths], ask: Ask | None) -> list[ListedRun]:
    sessions = cache(_sessions)
    with ThreadPoolExecutor(MAX_ASKED) as pool:
        found = [_begun_to_list(paths, ask, sessions, pool) for paths in runs]
        return sorted((tell() for tell in found), key=lambda run: run.began_at)


def _begun_to_list(
    paths: RunPaths, ask: Ask | None, sessions: Sessions, pool: ThreadPoolExecutor
) -> Callable[[], ListedRun]:
    """What tells how a run stands; its machines are asked meanwhile, if they must be."""
    read = read_snapshot(paths)
    lives = _lives_here(read, sessions)
    if read.is_elsewhere and not lives and not read.is_over:
        return pool.submit(_elsewhere, read, ask).result
    run = _line(read, read.state_here(lives=lives), read.status, read.summary, is_alive=lives)
    return lambda: run


def _lives_here(read: RunSnapshot, sessions: Sessions) -> bool:
    """Whether a process of this machine is of the run."""
    if is_held(read.paths.lock):
        return True
    if read.launched is not None and not read.is_over:
        own = {each.session for each in read.launched.processes if each.ssh is None}
        return bool(own & set(sessions()))
    with suppress(DataError):
        return bool(alive_of(read_processes(read.paths.processes)))
    return False


def _may_live(paths: RunPaths, sessions: Sessions) -> bool:
    read = read_snapshot(paths)
    if _lives_here(read, sessions):
        return True
    if not read.is_elsewhere or read.is_over:
        return False
    known = _remembered(paths)
    return known is None or known.is_alive is not False


def _line(
    read: RunSnapshot,
    state: str,
    status: RunStatus | None,
    summary: Summary | None,
    *,
    is_alive: bool | None,
    as_of: float | None = None,
) -> ListedRun:
    steps, loss, wall_s = None, None, None
    if summary is not None and (status is None or status.is_over):
        steps, loss, wall_s = summary.steps, summary.final.train_loss, summary.wall_s
    elif status is not None:
        steps, loss, wall_s = status.step, status.loss, status.wall_s
    return ListedRun(
        run_id=read.paths.run_id,
        algorithm=(status or summary or read).algorithm,
        state=state,
        is_alive=is_alive,
        steps=steps,
        loss=loss,
        wall_s=wall_s,
        nodes=_nodes(read.launched),
        began_at=instant(read.began),
        as_of=None if as_of is None else instant(as_of),
    )


# --- on other machines


def _elsewhere(read: RunSnapshot, ask: Ask | None) -> ListedRun:
    """What the machines of a run say, else what they said last."""
    known = _remembered(read.paths)
    if known is not None and known.is_alive is False:
        return known
    try:
        probed = look(read.paths, ask)
    except SmolclusterError:
        return _line(read, "unknown", None, None, is_alive=None)
    if probed.processes[0].liveness == "unreachable":
        if known is None:
            return _line(read, "unknown", None, None, is_alive=None)
        return known.model_copy(update={"is_alive": None})
    run = _line(
        read,
        state_of(probed),
        probed.status,
        probed.summary,
        is_alive=_is_alive(probed),
        as_of=time.time(),
    )
    with suppress(SmolclusterError):
        write_whole(read.paths.standing, run.model_dump_json() + "\n", durable=False)
    return run


def _is_alive(probed: ProbeResult) -> bool | None:
    seen = {each.liveness for each in probed.processes}
    if "running" in seen:
        return True
    is_over = probed.status is not None and probed.status.is_over
    return None if "unreachable" in seen and not is_over else False


def _remembered(paths: RunPaths) -> ListedRun | None:
    with suppress(OSError, ValueError):
        return ListedRun.model_validate_json(paths.standing.read_bytes())
    return None


# --- on this machine


def _sessions() -> Collection[str]:
    command = ["tmux", "list-sessions", "-F", "#{session_name}"]
    try:
        said = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=TMUX_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return said.stdout.split()


def _nodes(launched: Launched | None) -> tuple[str, ...]:
    if launched is None:
        return ()
    return tuple(dict.fromkeys(each.node for each in launched.processes))


def _table(console: Console, found: list[ListedRun]) -> Table:
    """As many columns as there is room for, whole: the names of runs are for copying."""
    rows = [[displayable(console, cell) for cell in row(run)] for run in found]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    room = console.width
    for name, *cells in zip(COLUMNS, *rows, strict=True):
        width = max(cell_len(cell) for cell in (name, *cells))
        least = min(width, LEAST_WHERE) if name == "where" else width
        if table.columns and least > room:
            break
        justify: JustifyMethod = "right" if name in NUMERIC else "left"
        least = min(least, room)
        table.add_column(name, justify=justify, overflow="fold", min_width=least, max_width=room)
        room -= least + GAP
    for cells in rows:
        table.add_row(*map(Text, cells[: len(table.columns)]))
    return table


def row(run: ListedRun) -> list[str]:
    """A run's cells: id, state, steps, loss, time, where."""
    age_s = 0.0 if run.as_of is None else time.time() - run.as_of.timestamp()
    is_old = run.is_alive is not False and age_s > NEWS_S
    return [
        run.run_id,
        f"{run.state}, {format_duration(age_s)} ago" if is_old else run.state,
        "" if run.steps is None else f"{run.steps:,}",
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.wall_s is None else format_duration(run.wall_s),
        ", ".join(run.nodes) or "local",
    ]
