"""A trace of all processes of a run on one clock, in the Trace Event Format of Chrome and Perfetto.

It shows the newest stretch of time in which the run's owner has taken so many steps in a row; the processes
keep the first steps of every ten seconds, see `utils/meter.py`. Open it at ui.perfetto.dev or in
chrome://tracing; both work on the file alone, nothing is uploaded.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from smolcluster.errors import DataError
from smolcluster.observability.spans import SpanLine, read_spans
from smolcluster.runs.files import write_whole
from smolcluster.runs.paths import RunPaths, process_title
from smolcluster.utils.meter import PHASES, STEP
from smolcluster.utils.words import as_command

NAMES = (*PHASES, "step")
GAP_FACTOR = 3.0
"""Steps follow each other as long as the pause between them is not so many times the longest of them."""
LEAST_GAP_S = 1.0
MICRO = 1_000_000


class Traced(NamedTuple):
    """A span of a process: its start and length in microseconds since 1970, and what it was."""

    start: int
    length: int
    what: int
    process: str

    @property
    def stop(self) -> int:
        """Its end."""
        return self.start + self.length


def write_trace(paths: RunPaths, num_steps: int, out: Path) -> int:
    """Write a trace of the newest `num_steps` steps that are known; returns how many it shows.

    Raises:
        DataError: no step of the run has left spans.
        SmolclusterError: the file cannot be written.
    """
    of_owners = (line for line in read_spans(paths.spans) if line.role != "worker")
    owners = sorted(_traced(of_owners), key=attrgetter("start"))
    newest = [span for span in owners if span.process == owners[-1].process]
    steps = newest_stretch(newest, num_steps)
    if not steps:
        raise DataError(
            f"{paths.root} has no spans to trace; they are written while a run lives, about every second: "
            f"try again in a moment, or {as_command('fetch')} them from the server's machine"
        )
    first, last = steps[0].start, steps[-1].stop
    # Read again: what is shown is little, and all spans of a long run are half a gigabyte of memory.
    beside = (s for s in _traced(read_spans(paths.spans)) if s.stop > first and s.start < last)
    shown = sorted(beside, key=attrgetter("start"))
    write_whole(out, json.dumps({"traceEvents": list(events_of(shown, first))}), durable=False)
    return len(steps)


def _traced(lines: Iterable[SpanLine]) -> Iterator[Traced]:
    for line in lines:
        process = process_title(line.role, line.node, line.rank)
        at = round(line.at * MICRO)
        for what, start, length in line.spans:
            if 0 <= what < len(NAMES):
                yield Traced(at + start, length, what, process)


def newest_stretch(spans: Sequence[Traced], num_steps: int) -> list[Traced]:
    """The newest `num_steps` whole steps that follow each other; the longest stretch if none has so many."""
    best: list[Traced] = []
    stretch: list[Traced] = []
    longest = 0
    for step in reversed([span for span in spans if span.what == STEP]):
        longest = max(longest, step.length)
        if stretch and stretch[-1].start - step.stop > max(
            GAP_FACTOR * longest, LEAST_GAP_S * MICRO
        ):
            stretch, longest = [], step.length
        stretch.append(step)
        if len(stretch) > len(best):
            best = stretch
        if len(stretch) == num_steps:
            break
    return best[::-1]


def events_of(spans: Sequence[Traced], zero: int) -> Iterator[dict[str, Any]]:
    """Trace events: a process a row, its phases as complete events within their step, times from `zero`."""
    processes = sorted({span.process for span in spans}, key=lambda name: ("worker" in name, name))
    numbers = {name: number for number, name in enumerate(processes, 1)}
    for name, number in numbers.items():
        of_process = {"ph": "M", "pid": number, "tid": 1}
        yield of_process | {"name": "process_name", "args": {"name": name}}
        yield of_process | {"name": "process_sort_index", "args": {"sort_index": number}}
        yield of_process | {"name": "thread_name", "args": {"name": "training"}}
    for span in spans:
        what = {"name": NAMES[span.what], "cat": "step" if span.what == STEP else "phase"}
        when = {"ts": span.start - zero, "dur": span.length}
        yield {"ph": "X", "pid": numbers[span.process], "tid": 1, **what, **when}
