"""The runs of a folder, each in a line: only small files are read, a few a run."""

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from smolcluster.observability.view.snapshot import Snapshot, numbers_of, read_snapshot
from smolcluster.runs.paths import LATEST, RunPaths, check_run_id, is_run_folder, latest_of, runs_in
from smolcluster.runs.status import Instant, instant

MAX_LISTED = 200


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
    loss: float | None = Field(description="Its training loss: see `loss_is`.")
    loss_is: str | None = Field(None, description="last step, or mean of the last epoch.")
    val_loss: float | None = Field(None, description="Of its newest evaluation.")
    wall_s: float | None
    nodes: tuple[str, ...] = Field(description="Empty: it was started on this machine alone.")
    began_at: Instant
    as_of: Instant | None = Field(
        None, description="When its machines last answered; null: what is told is of now."
    )


def line_of(
    read: Snapshot, state: str, *, is_alive: bool | None, as_of: float | None = None
) -> ListedRun:
    """A run in a line; `as_of`: when its machines told this, seconds since 1970."""
    status, summary = read.status, read.summary
    has_begun_again = status is not None and status.loss is None  # it has told nothing yet
    told = numbers_of(None if has_begun_again and summary else status, summary)
    launched = () if read.launched is None or read.launched.is_local else read.launched.processes
    return ListedRun(
        run_id=read.paths.run_id,
        algorithm=read.algorithm,
        state=state,
        is_alive=is_alive,
        steps=told.get("step"),
        loss=told.get("loss"),
        loss_is=None if told.get("loss") is None else told["loss_is"],
        val_loss=told.get("val_loss"),
        wall_s=told.get("wall_s"),
        nodes=tuple(dict.fromkeys(each.node for each in launched)),
        began_at=instant(read.began),
        as_of=None if as_of is None else instant(as_of),
    )


def remembered(paths: RunPaths) -> ListedRun | None:
    """What the machines of a run said when they were asked last."""
    with suppress(OSError, ValueError):
        return ListedRun.model_validate_json(paths.standing.read_bytes())
    return None


def listed(root: Path) -> list[dict[str, str | None]]:
    """The newest runs of a folder, the newest first: `run_id`, `state` and `algorithm`, or null."""
    found = sorted(map(read_snapshot, runs_in(root)), key=lambda read: read.began, reverse=True)
    return [
        {"run_id": read.paths.run_id, "state": _state(read), "algorithm": read.algorithm}
        for read in found[:MAX_LISTED]
    ]


def run_of(root: Path, name: str) -> RunPaths | None:
    """The run of that name, or the newest for `latest`; None: there is none.

    Raises:
        ConfigError: the name cannot be a run's.
    """
    if name != LATEST:
        folder = root / check_run_id(name)
        return RunPaths(folder) if is_run_folder(folder) else None
    latest = latest_of(root)
    if latest is not None and is_run_folder(root / latest):
        return RunPaths(root / latest)
    return max(runs_in(root), key=lambda paths: read_snapshot(paths).began, default=None)


def _state(read: Snapshot) -> str | None:
    """How a run stands; None: only other machines know, and have not said that it is over."""
    if read.is_alive is not None or read.is_over:
        return read.state
    heard = remembered(read.paths)
    return heard.state if heard is not None and heard.is_alive is False else None
