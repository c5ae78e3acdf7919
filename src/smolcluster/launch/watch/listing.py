"""`smolcluster runs`: all runs whose folders are here, and which of them live.

Only small files are read, a few a run. A run that was launched on other machines and is not known to be over
is asked for there, each machine once; the answer is kept in the run's folder for when they cannot be reached.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from smolcluster.errors import SmolclusterError
from smolcluster.launch.watch.probe import Ask, look
from smolcluster.observability.terminal import SteadyConsole, displayable
from smolcluster.observability.view.listing import ListedRun, line_of, remembered
from smolcluster.observability.view.snapshot import LAST_EPOCH, Snapshot, read_snapshot
from smolcluster.runs.files import write_whole
from smolcluster.runs.lock import is_held
from smolcluster.runs.paths import RunPaths, all_runs, latest_of, runs_in
from smolcluster.utils.at_once import at_once
from smolcluster.utils.units import format_duration
from smolcluster.utils.words import write_json

NEWS_S = 5.0
"""What is older than this is shown with its age."""
MAX_ASKED = 16
"""Runs whose machines are asked at the same time."""

COLUMNS = ("run", "state", "steps", "loss", "time", "where")
NUMERIC = ("steps", "loss", "time")
GAP = 2
LEAST_WHERE = 6


def runs(*, as_json: bool = False, ask: Ask | None = None) -> int:
    """Print a table of all runs, the newest last, or a list of `ListedRun` as JSON."""
    root = all_runs()
    found = listed(root, ask)
    if as_json:
        lines = [run.model_dump(mode="json") for run in found]
        write_json(lines)
        return 0
    console = SteadyConsole()
    console.print(_table(console, found) if found else f"no runs yet in {root}")
    return 0


def listed(root: Path, ask: Ask | None = None) -> list[ListedRun]:
    """The runs in a folder, in the order in which they began."""
    return _listed([read_snapshot(paths) for paths in runs_in(root)], ask)


def living(root: Path, ask: Ask | None = None) -> list[RunPaths]:
    """The runs of which a process lives, the newest last.

    One whose machines cannot be asked is taken to live if `latest` points to it. Where only that one can live
    nobody is asked.
    """
    possible = [read for read in map(read_snapshot, runs_in(root)) if _may_live(read)]
    newest = latest_of(root)
    if [read.paths.run_id for read in possible] == [newest]:
        return [read.paths for read in possible]
    return [
        RunPaths(root / run.run_id)
        for run in _listed(possible, ask)
        if run.is_alive or (run.is_alive is None and run.run_id == newest)
    ]


def _listed(reads: Sequence[Snapshot], ask: Ask | None) -> list[ListedRun]:
    def line(read: Snapshot) -> ListedRun:
        is_alive = _lives_here(read)
        has_server_elsewhere = read.is_alive is None  # also while a worker lives here
        if not read.is_over and (has_server_elsewhere or (read.is_elsewhere and not is_alive)):
            run = _elsewhere(read, ask)
            return run.model_copy(update={"is_alive": True}) if is_alive else run
        return line_of(read, read.state, is_alive=is_alive)

    return sorted(at_once(line, reads, MAX_ASKED), key=lambda run: run.began_at)


def _lives_here(read: Snapshot) -> bool:
    """Whether a process of it lives on this machine; one that is over is not asked for its workers."""
    if is_held(read.paths.lock):
        return True
    if read.launched is None:
        return False
    asked = [read.launched.server] if read.is_over else read.launched.processes
    return any(each.lives_here for each in asked)


def _may_live(read: Snapshot) -> bool:
    if _lives_here(read):
        return True
    if not read.is_elsewhere or read.is_over:
        return False
    known = remembered(read.paths)
    return known is None or known.is_alive is not False


# --- on other machines


def _elsewhere(read: Snapshot, ask: Ask | None) -> ListedRun:
    """What the machines of a run say, else what they said last."""
    known = remembered(read.paths)
    if known is not None and known.is_alive is False:
        return known
    unknown = line_of(replace(read, status=None, summary=None), "unknown", is_alive=None)
    launched_ns = _changed_ns(read.paths)
    try:
        seen = look(read.paths, ask)
    except SmolclusterError:
        return unknown
    if seen.seen[0].process == "unreachable":
        return unknown if known is None else known.model_copy(update={"is_alive": None})
    run = line_of(seen, seen.state, is_alive=_is_alive(seen), as_of=time.time())
    if launched_ns == _changed_ns(read.paths):  # else it was started while its machines were asked
        with suppress(SmolclusterError):
            write_whole(read.paths.standing, run.model_dump_json() + "\n", durable=False)
    return run


def _changed_ns(paths: RunPaths) -> int | None:
    """When `launch.json` was written last, or its server started."""
    with suppress(OSError):
        return paths.launched.stat().st_mtime_ns
    return None


def _is_alive(read: Snapshot) -> bool | None:
    seen = {each.process for each in read.seen}
    if "running" in seen:
        return True
    is_over = read.status is not None and read.status.is_over
    return None if "unreachable" in seen and not is_over else False


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
    """A run's cells: id, state, steps, loss of the last step, time, where."""
    age_s = 0.0 if run.as_of is None else time.time() - run.as_of.timestamp()
    is_old = run.is_alive is not False and age_s > NEWS_S
    return [
        run.run_id,
        f"{run.state}, {format_duration(age_s)} ago" if is_old else run.state,
        "" if run.steps is None else f"{run.steps:,}",
        _loss(run),
        "" if run.wall_s is None else format_duration(run.wall_s),
        ", ".join(run.nodes) or "local",
    ]


def _loss(run: ListedRun) -> str:
    """Its training loss of the last step; where only an epoch's mean is known that, after a `~`."""
    if run.loss is None:
        return ""
    return f"{'~' if run.loss_is == LAST_EPOCH else ''}{run.loss:.4g}"
