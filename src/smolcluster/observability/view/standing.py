"""How a run stands, as one value: from what its server wrote last, and what its processes reported."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolcluster.configs.spec import algorithms
from smolcluster.observability.view.snapshot import state_of
from smolcluster.runs.events import RunStarted
from smolcluster.runs.launched import Launched
from smolcluster.runs.status import OLD_S, STALENESS_EDGES, RunStatus, WorkerStatus
from smolcluster.runs.summary import Summary

Reports = Mapping[int | None, Mapping[str, float]]


@dataclass(frozen=True)
class Known:
    """What is known of a run; None is what is not there.

    Attributes:
        places: role, rank and node of the processes that were started.
        age_s: seconds since its server wrote last.
        is_held: whether a process of this machine writes it; None: it would be on another machine.
        reports: what each rank reported of itself last; None is the server.
        staleness: of the steps that are known, for runs that did not count it.
        problems: what cannot be read, and what to do about it.
    """

    run_id: str
    launched: Launched | None
    places: Sequence[tuple[str, int | None, str]]
    started: RunStarted | None
    status: RunStatus | None
    summary: Summary | None
    age_s: float | None
    is_held: bool | None
    reports: Reports = field(default_factory=dict)
    staleness: Sequence[float] = ()
    problems: Sequence[str] = ()


def standing(known: Known) -> dict[str, Any]:
    """How the run stands, as plain values; null is what is not known, or does not apply."""
    state = state_of(known.status, known.summary, known.is_held is not False)
    is_over = state in ("ended", "stopped", "failed", "broken off")
    return {
        "run_id": known.run_id,
        "state": state,
        "is_over": is_over,
        "is_old": not is_over and known.age_s is not None and known.age_s > OLD_S,
        "age_s": known.age_s,
        "problems": list(known.problems),
        "staleness_edges": STALENESS_EDGES,
        **_setup(known),
        **_progress(known, is_over),
        "workers": _workers(known, is_over),
        "server": {
            "node": _server_node(known),
            "process_stats": _server_stats(known),
        },
        "staleness": _staleness(known),
    }


def _setup(known: Known) -> dict[str, Any]:
    """What does not change while it runs."""
    started = known.started.model_dump() if known.started else {}
    told = known.status or known.summary or known.launched or known.started
    names = ("num_workers", "batch_size", "codec", "dataset", "model", "num_params")
    spec = None if told is None else algorithms().get(told.algorithm)
    return {
        "algorithm": None if told is None else told.algorithm,
        "is_synchronous": spec is not None and spec.is_synchronous,
        **{name: started.get(name) for name in names},
    }


def _progress(known: Known, is_over: bool) -> dict[str, Any]:
    status, summary = known.status, known.summary
    if status is None:
        return {} if summary is None else _summed_up(summary)
    left = max(0, status.total_samples - status.samples_applied)
    eta_s = left / status.samples_per_s if status.samples_per_s and not is_over else None
    names = set(RunStatus.model_fields) - {
        "run_id",
        "algorithm",
        "state",
        "workers",
        "process_stats",
    }
    values = status.model_dump(mode="json", include=names)
    return values | {"eta_s": eta_s}


def _summed_up(summary: Summary) -> dict[str, Any]:
    return {
        "step": summary.steps,
        "total_steps": summary.steps,
        "epoch": max(0, summary.epochs - 1),
        "num_epochs": summary.epochs,
        "samples_applied": summary.samples_applied,
        "total_samples": summary.samples_applied,
        "loss": summary.final.train_loss,
        "val_loss": summary.final.val_loss,
        "val_accuracy": summary.final.val_accuracy,
        "val_perplexity": summary.final.val_perplexity,
        "samples_per_s": summary.samples_applied / summary.wall_s if summary.wall_s else None,
        "wall_s": summary.wall_s,
        "pushes": summary.pushes.model_dump(),
        "leases_returned": summary.leases_returned,
    }


def _server_node(known: Known) -> str | None:
    named = (node for role, rank, node in known.places if rank is None)
    return known.started.node if known.started else next(named, None)


def _server_stats(known: Known) -> dict[str, float]:
    told = known.status.process_stats if known.status else {}
    return dict(told or known.reports.get(None, {}))


def _workers(known: Known, is_over: bool) -> list[dict[str, Any]]:
    """A row a worker: those that took part, and those that were started and have not come yet."""
    rows = {row["rank"]: row for row in _took_part(known, is_over)}
    for _, rank, node in known.places:
        if rank is not None and rank not in rows:
            rows[rank] = {
                "rank": rank,
                "node": node,
                "state": "not seen" if is_over else "starting",
            }
    return [rows[rank] for rank in sorted(rows)]


def _took_part(known: Known, is_over: bool) -> list[dict[str, Any]]:
    if known.status is not None and (known.status.workers or known.summary is None):
        return [_worker(each, known, is_over) for each in known.status.workers]
    workers = [] if known.summary is None else known.summary.workers
    return [{**each.model_dump(), "state": "ended"} for each in workers]


def _worker(worker: WorkerStatus, known: Known, is_over: bool) -> dict[str, Any]:
    assert known.status is not None  # noqa: S101 - it is the worker's
    applied = sum(each.samples for each in known.status.workers)
    silent_s = worker.silent_s(known.status.updated_at) + (known.age_s or 0.0)
    values = worker.model_dump(mode="json", exclude={"process_stats"})
    return values | {
        "state": worker.state,
        "share": worker.samples / applied if applied else 0.0,
        "silent_s": None if is_over else silent_s,
        "process_stats": _process_stats(worker, known)
        if is_over or worker.state == "joined"
        else {},
    }


def _process_stats(worker: WorkerStatus, known: Known) -> dict[str, float]:
    """What it reported of itself last, which says nothing any more of one that has gone."""
    return dict(worker.process_stats) or dict(known.reports.get(worker.rank, {}))


def _staleness(known: Known) -> dict[str, Any]:
    """How many pushes had which staleness; where it was not counted, of the steps that are known."""
    own = (
        [each.staleness for each in known.status.workers if each.staleness] if known.status else []
    )
    if own:
        return {"counts": [sum(counts) for counts in zip(*own, strict=False)], "is_sampled": False}
    counts = [0] * (len(STALENESS_EDGES) + 1)
    for value in known.staleness:
        counts[bisect_left(STALENESS_EDGES, value)] += 1
    return {"counts": counts if known.staleness else [], "is_sampled": True}
