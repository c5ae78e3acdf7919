"""How a run stands, as one value: what was seen of its processes, with what its server wrote."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from smolcluster.launch.watch.probe import Liveness, ProbeResult, Seen
from smolcluster.observability.view import snapshot
from smolcluster.observability.view.snapshot import State
from smolcluster.runs.paths import process_title
from smolcluster.runs.status import Presence, WorkerStatus

KILLED = 137
"""The exit code of a process that SIGKILL has ended."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class ProcessReport(_Part):
    """How one process stands. Null is what is not known, or does not apply."""

    node: str
    role: str
    rank: int | None = Field(description="A worker's, from 0.")
    process: Liveness = Field(
        description="gone: not there any more, and nobody knows how it ended; unreachable: its machine "
        "cannot be asked; unknown: this launcher did not start it."
    )
    exit_code: int | None = None
    why: str | None = Field(None, description="Why its machine cannot be asked.")
    fix: str | None = Field(None, description="The same in a sentence, with what mends it.")
    presence: Presence | None = Field(None, description="A worker's, as the server sees it.")
    device: str | None = None
    step: int | None = None
    loss: float | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    heartbeat_age_s: float | None = Field(
        None, description="Since the server's last word; of a worker since the server heard of it."
    )
    gpu: dict[str, float] = Field(
        {},
        description="What its GPU does, as far as it tells: utilization (of 1), memory_bytes, "
        "memory_size_bytes, temperature_c, power_w.",
    )

    @property
    def title(self) -> str:
        """The process for people: `worker 2 (pi5)`."""
        return process_title(self.role, self.node, self.rank)


class RunReport(_Part):
    """How a run stands. Epochs and ranks count from 0; null is what is not known."""

    run_id: str
    algorithm: str | None = None
    state: State = Field(
        description="starting: the server has not written yet; broken off: its process is no more and "
        "could not write why; unknown: its machine cannot be asked."
    )
    reason: str | None = Field(None, description="Why the run is over, or has broken off.")
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    num_epochs: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_perplexity: float | None = None
    samples_per_s: float | None = None
    age_s: float | None = Field(None, description="Since the server wrote this.")
    processes: tuple[ProcessReport, ...]


def report_of(run_id: str, algorithm: str | None, probed: ProbeResult) -> RunReport:
    """What was found of a run, as one value."""
    processes = _processes(probed)
    status, summary, state = probed.status, probed.summary, state_of(probed)
    if status is not None:
        shared = set(RunReport.model_fields) & set(type(status).model_fields)
        values = {name: getattr(status, name) for name in shared}
        age = None if status.is_over else status.age_s(probed.now)
        values |= {"run_id": run_id, "state": state, "processes": processes, "age_s": age}
        if state in ("starting", "broken off"):
            values |= {"reason": _why(probed), "samples_per_s": None}
        return RunReport.model_validate(values)
    if summary is not None:
        return RunReport(
            run_id=run_id,
            algorithm=summary.algorithm,
            state=state,
            step=summary.steps,
            epoch=max(0, summary.epochs - 1),
            loss=summary.final.train_loss,
            val_loss=summary.final.val_loss,
            val_accuracy=summary.final.val_accuracy,
            val_perplexity=summary.final.val_perplexity,
            processes=processes,
        )
    return RunReport(
        run_id=run_id,
        algorithm=algorithm,
        state=state,
        reason=_why(probed) if state == "broken off" else None,
        processes=processes,
    )


def _why(probed: ProbeResult) -> str | None:
    """Why a run has broken off, as far as its server's end tells."""
    server = probed.processes[0] if probed.processes else None
    if server is None or server.liveness == "running":
        return None
    words = probed.stderr_tail
    if server.code in (None, 0):
        return words
    who = process_title(server.role, server.node)
    if server.code == KILLED:  # it could not say anything: what is on its screen is older
        words = "it was killed, perhaps for want of memory"
    return f"{who} ended with exit code {server.code}" + (f": {words}" if words else "")


def state_of(probed: ProbeResult) -> State:
    """How the run stands: what the server wrote, unless its process says otherwise."""
    server = probed.processes[0].liveness if probed.processes else "unknown"
    is_alive = None if server in ("unreachable", "unknown") else server == "running"
    return snapshot.state_of(probed.status, probed.summary, is_alive)


def _processes(probed: ProbeResult) -> tuple[ProcessReport, ...]:
    """A report for each process that was launched, then for each worker that came by itself."""
    known = {} if probed.status is None else {w.rank: w for w in probed.status.workers}
    launched = {seen.rank for seen in probed.processes}
    strangers = [
        Seen(worker.node, "worker", rank, "unknown")
        for rank, worker in known.items()
        if rank not in launched
    ]
    return tuple(
        _owner(seen, probed) if seen.rank is None else _worker(seen, known.get(seen.rank), probed)
        for seen in (*probed.processes, *strangers)
    )


def _owner(seen: Seen, probed: ProbeResult) -> ProcessReport:
    status = probed.status
    report = _bare(seen)
    if status is None:
        return report
    goes_on = not status.is_over and seen.liveness in ("running", "unreachable")
    values: dict[str, object] = {"step": status.step, "loss": status.loss}
    if goes_on:
        values |= {
            "samples_per_s": status.samples_per_s,
            "heartbeat_age_s": status.age_s(probed.now),
            "gpu": _gpu(status.process_stats),
        }
    return report.model_copy(update=values)


def _worker(seen: Seen, worker: WorkerStatus | None, probed: ProbeResult) -> ProcessReport:
    report = _bare(seen)
    if worker is None or probed.status is None:
        return report
    was_lost = worker.state == "lost" and (seen.liveness, seen.code) == ("ended", None)
    values: dict[str, object] = {
        "process": "gone" if was_lost else seen.liveness,
        "presence": worker.state,
        "device": worker.device,
        "step": worker.step,
        "loss": worker.loss,
        "samples": worker.samples,
    }
    if not probed.status.is_over:
        values |= {
            "samples_per_s": worker.samples_per_s,
            "heartbeat_age_s": worker.silent_s(probed.now),
            "gpu": _gpu(worker.process_stats),
        }
    return report.model_copy(update=values)


def _gpu(process_stats: Mapping[str, float]) -> dict[str, float]:
    found = (
        (name.removeprefix("gpu/"), value)
        for name, value in process_stats.items()
        if "gpu/" in name
    )
    return dict(found)


def _bare(seen: Seen) -> ProcessReport:
    return ProcessReport(
        node=seen.node,
        role=seen.role,
        rank=seen.rank,
        process=seen.liveness,
        exit_code=seen.code,
        why=seen.why,
        fix=seen.fix,
    )
