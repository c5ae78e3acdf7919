"""What each process of a run reported of itself, in words of a report: where its time went."""

import math
from collections.abc import Mapping

from smolcluster.runs.paths import process_title
from smolcluster.runs.series import ProcessSeries

SHARES = ("data", "forward", "backward", "encode", "send", "wait", "apply")
"""Of the time of a process, as `share/…`; the rest is other."""


def title_of(process: ProcessSeries) -> str:
    return process_title(process.role, process.node, process.rank).strip()


def step_s_of(process: ProcessSeries) -> float | None:
    """Mean time of a step: a report of a second cannot tell it, where a step takes longer than that."""
    steps_per_s, step_s = process.totals.get("steps_per_s"), process.totals.get("step_s")
    if steps_per_s is not None and steps_per_s.mean:
        return 1.0 / steps_per_s.mean
    return step_s.mean if step_s else None


def shares_of(process: ProcessSeries) -> Mapping[str, float]:
    """Parts of its time by phase, which make a whole; none when it reported none."""
    known = {name: process.totals.get(f"share/{name}") for name in SHARES}
    shares = {name: max(0.0, share.mean) for name, share in known.items() if share is not None}
    if not shares:
        return {}
    total = max(1.0, math.fsum(shares.values()))
    shares = {name: share / total for name, share in shares.items()}
    return shares | {"other": max(0.0, 1.0 - math.fsum(shares.values()))}
