"""How a run stands, as one value: from what its server wrote last, and what its processes reported."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smolcluster.configs.spec import SINGLE, STALENESS, spec_of
from smolcluster.observability.view.snapshot import OVER, Snapshot, numbers_of
from smolcluster.runs.events import RunStarted
from smolcluster.runs.series import Series
from smolcluster.runs.status import OLD_S, STALENESS_EDGES, RunStatus, WorkerStatus

RATE = "samples_per_s"
Reports = Mapping[int | None, Mapping[str, float]]
"""What each rank reported of itself last; None is the server."""


def standing(
    read: Snapshot,
    started: RunStarted | None,
    series: Series,
    age_s: float | None,
) -> dict[str, Any]:
    """How the run stands, as plain values; null is what is not known, or does not apply.

    Args:
        read: what its files say.
        started: how its newest start began.
        series: what it has measured, for runs whose status does not tell.
        age_s: seconds since its server wrote last.
    """
    ordered = sorted(series.processes.values(), key=lambda each: each.last_s or 0.0)
    reports = {each.rank: each.newest() for each in ordered}
    state = read.heard
    is_over = state in OVER
    progress, staleness = _progress(read, is_over=is_over), _staleness_counts(read.status, series)
    if state in ("starting", "broken off"):
        progress = {name: progress[name] for name in progress if name not in (RATE, "eta_s")}
    if state == "starting":  # again: what was said of who took part is of before
        read = replace(read, status=None, summary=None)
    status, nodes = read.status, (each.node for each in read.processes if each.rank is None)
    known_age_s = None if is_over else age_s or 0.0
    if started is None or started.mesh is None:
        links = read.prediction.links if read.prediction else {}
        rows = [
            row | {"capacity": link.model_dump() if (link := links.get(row["node"])) else None}
            for row in _workers(read, reports, known_age_s)
        ]
    else:
        rows = _ranks(status, known_age_s)
    return {
        "run_id": read.paths.run_id,
        "state": state,
        "is_over": is_over,
        "is_old": not is_over and age_s is not None and age_s > OLD_S,
        "age_s": age_s,
        "staleness_edges": STALENESS_EDGES,
        **_setup(read, started),
        **progress,
        "workers": rows,
        "staleness": staleness,
        "server": {
            "node": started.node if started else next(nodes, None),
            "process_stats": dict((status and status.process_stats) or reports.get(None, {})),
        },
    }


def _setup(read: Snapshot, started: RunStarted | None) -> dict[str, Any]:
    """What does not change while it runs."""
    algorithm = started.shown_algorithm if started else read.algorithm
    spec = spec_of(algorithm)
    names = (
        *("num_ranks", "batch_size", "codec", "dataset", "model", "num_params"),
        "tokens_per_sample",
    )
    return {
        "algorithm": algorithm,
        "is_synchronous": spec.is_synchronous,
        "has_pushes": algorithm != SINGLE and spec.has_pushes,
        "has_staleness": STALENESS in spec.columns,
        **{name: getattr(started, name, None) for name in names},
        "grid": started.mesh if started else None,
        "writes_text": bool(started and started.tokens_per_sample and not started.source),
    }


def _progress(read: Snapshot, *, is_over: bool) -> dict[str, Any]:
    status, values = read.status, numbers_of(read.status, read.summary)
    if status is None:
        return values
    left = max(0, status.total_samples - status.samples_applied)
    eta_s = left / status.samples_per_s if status.samples_per_s and not is_over else None
    return values | {"eta_s": eta_s}


def _workers(read: Snapshot, reports: Reports, age_s: float | None) -> list[dict[str, Any]]:
    """A row a worker: those that took part, and those that were started and have not come yet.

    `age_s`: of the status; None: the run is over.
    """
    status, summary = read.status, read.summary
    rows: dict[int, dict[str, Any]] = {
        each.rank: {"rank": each.rank, "node": each.node, "state": "starting"}
        for each in read.processes
        if each.rank is not None
    }
    if age_s is None:
        rows = {rank: row | {"state": "not seen"} for rank, row in rows.items()}
    if status is not None and (status.workers or summary is None):
        rows |= {each.rank: _worker(each, status, reports, age_s) for each in status.workers}
    elif summary is not None:
        rows |= {each.rank: {**each.model_dump(), "state": "ended"} for each in summary.workers}
    return [rows[rank] for rank in sorted(rows)]


def _ranks(status: RunStatus | None, age_s: float | None) -> list[dict[str, Any]]:
    """A row a rank of a mesh; `age_s`: of the status; None: the run is over."""
    if status is None:
        return []
    return [
        {
            **each.model_dump(mode="json"),
            "role": "rank",
            "state": "ended" if age_s is None else "joined",
            "samples_per_s": each.process_stats.get(RATE),
            "silent_s": None if age_s is None else each.silent_s(status.updated_at) + age_s,
        }
        for each in status.ranks
    ]


def _worker(
    worker: WorkerStatus, status: RunStatus, reports: Reports, age_s: float | None
) -> dict[str, Any]:
    applied = sum(each.samples for each in status.workers)
    is_there = age_s is None or worker.state == "joined"
    own = dict(worker.process_stats or reports.get(worker.rank, {}))
    return {
        **worker.model_dump(mode="json"),
        "share": worker.samples / applied if applied else 0.0,
        "silent_s": None if age_s is None else worker.silent_s(status.updated_at) + age_s,
        "process_stats": own if is_there else {},  # of one that has gone it is no news
    }


def _staleness_counts(status: RunStatus | None, series: Series) -> dict[str, Any]:
    """How many pushes had which staleness; where it was not counted, of the steps that are known."""
    own = [each.staleness for each in status.workers if each.staleness] if status else []
    if own:
        return {"counts": [sum(counts) for counts in zip(*own, strict=False)], "is_sampled": False}
    counts = [0] * (len(STALENESS_EDGES) + 1)
    means = (bucket.mean("staleness") for bucket in series.steps.buckets)
    for value in (each for each in means if each is not None):
        counts[bisect_left(STALENESS_EDGES, value)] += 1
    return {"counts": counts if any(counts) else [], "is_sampled": True}
