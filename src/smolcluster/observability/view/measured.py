"""What a run has measured, as plain columns for the page's curves."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from smolcluster.observability.view.curves import Points, smooth
from smolcluster.runs.series import STEP_VALUES, Bucket, Series, rounded

DIGITS = 6
STANDS_OUT = 10.0
"""So many times the usual distance of a bucket's highest loss from its mean."""


def columns_of(series: Series) -> dict[str, Any]:
    """Points of what no later start has undone: of the steps, the evaluations, and of each process.

    Each has `t` (seconds since 1970), `step`, and a column a value; null is what was not measured or is no
    finite number. `smoothed` has the columns of the steps as all views smooth them.
    """
    steps = series.steps.columns()
    smoothed = {name: _smoothed(steps[name]) for name in STEP_VALUES if name in steps}
    if "loss" in steps:
        steps["loss"] = _with_peaks(series.steps.buckets)
    processes = sorted(
        series.processes.values(), key=lambda each: -1 if each.rank is None else each.rank
    )
    return {
        "steps": steps,
        "smoothed": smoothed,
        "evaluations": series.evaluations.columns(),
        "processes": [
            {"role": each.role, "rank": each.rank, "node": each.node, **each.curve.columns()}
            for each in processes
        ],
    }


def _with_peaks(buckets: Sequence[Bucket]) -> list[float | None]:
    """The mean loss of each bucket; its highest where that stands out: a moment's explosion must be seen."""
    means = [bucket.mean("loss") for bucket in buckets]
    over = [
        0.0 if mean is None else bucket.high - mean
        for bucket, mean in zip(buckets, means, strict=True)
    ]
    usual = STANDS_OUT * median(over)
    return [
        rounded(bucket.high if usual < above else mean, DIGITS)
        for bucket, mean, above in zip(buckets, means, over, strict=True)
    ]


def _smoothed(values: Sequence[float | None]) -> list[float | None]:
    known = [value for value in values if value is not None]
    averages = iter(smooth(Points(known, known)).y)
    return [None if value is None else rounded(next(averages), DIGITS) for value in values]
