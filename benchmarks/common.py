"""What the benchmarks share: timing two things side by side, and reporting them."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

FILE_WIDTH = 132
"""Columns of a table that does not go to a terminal."""


@dataclass(frozen=True)
class Paired:
    """Medians over the rounds of a comparison: seconds of each side, and reference / candidate."""

    reference_s: float
    candidate_s: float
    ratio: float


def paired_ratios(
    reference: Callable[[], object], candidate: Callable[[], object], rounds: int
) -> Paired:
    """Time both in each of `rounds` rounds, in alternating order, after one warm-up of each.

    The ratio is the median of the rounds' ratios: a slow moment of the machine hits both sides of a
    round.
    """
    reference(), candidate()
    pairs = []
    for number in range(rounds):
        if number % 2:
            candidate_s, reference_s = seconds(candidate), seconds(reference)
        else:
            reference_s, candidate_s = seconds(reference), seconds(candidate)
        pairs.append((reference_s, candidate_s))
    return Paired(
        reference_s=statistics.median(pair[0] for pair in pairs),
        candidate_s=statistics.median(pair[1] for pair in pairs),
        ratio=statistics.median(pair[0] / pair[1] for pair in pairs),
    )


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(
    title: str, rows: Sequence[Sequence[str]], results: Mapping[str, object], *, as_json: bool
) -> None:
    """Print `rows`, the first one the heading, as a table; or `results` as one JSON object."""
    if as_json:
        print(json.dumps(results))
        return
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)
