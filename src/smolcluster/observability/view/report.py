"""How a run stands, as one value: what was seen of its processes, with what its server wrote."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from pydantic import Field

from smolcluster.observability.view.snapshot import (
    OVER,
    ProcessReport,
    Snapshot,
    State,
    numbers_of,
)
from smolcluster.observability.view.stages import StageView
from smolcluster.runs.evaluated import PREFIX
from smolcluster.runs.model_file import WithMetrics
from smolcluster.runs.status import RunStatus, WorkerStatus, no_space_on
from smolcluster.utils.meter import PEAK

GPU = "gpu/"
KILLED = 137
"""The exit code of a process that SIGKILL has ended."""
ASKED_TO_END = (130, 143)
"""Exit codes after SIGINT and SIGTERM, with one of which `stop` asks."""
LIVING = ("running", "unreachable")
"""Of a process that lives, as far as is known."""


class RunReport(WithMetrics):
    """How a run stands. Epochs and ranks count from 0; null is what is not known."""

    run_id: str
    algorithm: str | None = None
    state: State = Field(
        description="starting: the server has not written since it was started; broken off: its process "
        "is no more and could not write why; unknown: its machine cannot be asked."
    )
    reason: str | None = Field(None, description="Why the run is over, or has broken off.")
    trouble: str | None = Field(
        None, description="What its server cannot save, such as because its disk is full."
    )
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    num_epochs: int | None = None
    loss: float | None = None
    loss_is: str | None = Field(
        None, description="What `loss` is: last step, or mean of the last epoch."
    )
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_perplexity: float | None = None
    samples_per_s: float | None = None
    age_s: float | None = Field(None, description="Since the server wrote this.")
    processes: tuple[ProcessReport, ...]


def has_failed(process: ProcessReport) -> bool:
    """Whether it has ended otherwise than well, or as `stop` asks."""
    return process.exit_code not in (None, 0, *ASKED_TO_END)


def was_stopped(process: ProcessReport, state: State) -> bool:
    """Whether it has ended as `stop` asked it to, which stopped the run: `state` is the run's."""
    return state == "stopped" and process.exit_code in ASKED_TO_END


def report_of(read: Snapshot) -> RunReport:
    status, state = read.status, read.state
    values = numbers_of(status, read.summary)
    if status is None:
        values |= {"samples_per_s": None, "reason": read.reason}
    elif not status.is_over:
        values |= {"age_s": status.age_s(read.now)}
    if state in ("starting", "broken off"):
        values |= {"reason": _why(read), "samples_per_s": None}
    elif read.is_status_of_before and read.seen and has_failed(read.seen[0]):
        values |= {"reason": _why(read)}  # that of its newest start
    if read.is_full:
        values |= {"trouble": no_space_on(read.seen[0].node if read.seen else "its machine")}
    values |= {
        "run_id": read.paths.run_id,
        "algorithm": read.algorithm,
        "state": state,
        "processes": _processes(read),
    }
    known = {
        name: value
        for name, value in values.items()
        if name in RunReport.model_fields or name.startswith(PREFIX)
    }
    return RunReport.model_validate(known)


def _why(read: Snapshot) -> str | None:
    """Why a run has broken off, as far as its server's end tells."""
    server = read.seen[0] if read.seen else None
    if server is None or server.process == "running":
        return None
    words = read.stderr_tail
    if server.exit_code in (None, 0):
        return words
    if server.exit_code == KILLED:  # it could not say anything: what is on its screen is older
        words = "it was killed, perhaps for want of memory"
    said = f": {words}" if words else ""
    return f"{server.title} ended with exit code {server.exit_code}{said}"


def _processes(read: Snapshot) -> tuple[ProcessReport, ...]:
    """A report for each process that was launched, then for each worker that came by itself."""
    status, now, is_over = read.status, read.now, read.state in OVER
    if status is None or read.state == "starting":
        return read.seen
    if status.ranks:
        return tuple(_ranks(read.seen, status, now, is_over=is_over))
    known: dict[int | None, WorkerStatus] = {worker.rank: worker for worker in status.workers}
    launched = {process.rank for process in read.seen}
    strangers = [
        ProcessReport(node=worker.node, role="worker", rank=rank, process="unknown")
        for rank, worker in known.items()
        if rank not in launched
    ]
    return tuple(
        _of_status(each, status, known.get(each.rank), now, is_over=is_over)
        for each in (*read.seen, *strangers)
    )


def _ranks(
    starters: Sequence[ProcessReport], status: RunStatus, now: datetime, *, is_over: bool
) -> Iterator[ProcessReport]:
    """A report for each rank of a mesh, which lives as the process does that started those of its machine.

    Then one for each machine whose ranks have not reported yet.
    """
    by_node = {each.node: each for each in starters}
    for rank in status.ranks:
        starter, stats = by_node.get(rank.node, starters[0]), rank.process_stats
        live = _live(stats.get("samples_per_s"), rank.silent_s(now), stats)
        values: dict[str, object] = {
            "role": "rank",
            "rank": rank.rank,
            "node": rank.node,
            "peak_bytes": _below(PEAK, stats),
            **({} if is_over else {"process_stats": stats}),
            **(live if not is_over and starter.process in LIVING else {}),
        }
        yield _owner(starter, status, now, is_over=is_over).model_copy(update=values)
    heard = {by_node.get(rank.node, starters[0]).node for rank in status.ranks}
    yield from (each for each in starters if each.node not in heard)


def _of_status(
    process: ProcessReport,
    status: RunStatus,
    worker: WorkerStatus | None,
    now: datetime,
    *,
    is_over: bool,
) -> ProcessReport:
    """The report with what the server says of the process; of helpers it says nothing."""
    if process.is_helper:
        return process
    if process.rank is None:
        return _owner(process, status, now, is_over=is_over)
    report = _worker(process, worker, now, is_over=is_over)
    has_left = status.is_over and report.presence == "joined"
    return report.model_copy(update={"presence": "left"}) if has_left else report


def _owner(
    process: ProcessReport, status: RunStatus, now: datetime, *, is_over: bool
) -> ProcessReport:
    stats = status.process_stats
    live = _live(status.samples_per_s, status.age_s(now), stats)
    known = {name: value for name, value in stats.items() if value}
    values: dict[str, object] = {
        "step": status.step,
        "loss": status.loss,
        "peak_bytes": _below(PEAK, stats),
        **({} if is_over else {"process_stats": known}),
        **(live if not is_over and process.process in LIVING else {}),
    }
    return process.model_copy(update=values)


def _worker(
    process: ProcessReport, worker: WorkerStatus | None, now: datetime, *, is_over: bool
) -> ProcessReport:
    if worker is None:
        return process
    was_lost = worker.state == "lost" and (process.process, process.exit_code) == ("ended", None)
    stats = worker.process_stats
    live = {
        **_live(worker.samples_per_s, worker.silent_s(now), stats),
        "process_stats": stats if worker.state == "joined" else {},
    }
    values: dict[str, object] = {
        "process": "gone" if was_lost else process.process,
        "presence": worker.state,
        "device": worker.device,
        "step": worker.step,
        "loss": worker.loss,
        "samples": worker.samples,
        "mean_staleness": worker.mean_staleness if any(worker.staleness[1:]) else None,
        "peak_bytes": _below(PEAK, stats),
        "stage": StageView.of(stats),
        **({} if is_over else live),
    }
    return process.model_copy(update=values)


def _live(
    samples_per_s: float | None, heartbeat_age_s: float, process_stats: Mapping[str, float]
) -> dict[str, object]:
    """What is of interest only as long as a process lives."""
    return {
        "samples_per_s": samples_per_s,
        "heartbeat_age_s": heartbeat_age_s,
        "gpu": _below(GPU, process_stats),
    }


def _below(prefix: str, process_stats: Mapping[str, float]) -> dict[str, float]:
    """What a process reported of itself below a prefix, by names without it."""
    found = process_stats.items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}
