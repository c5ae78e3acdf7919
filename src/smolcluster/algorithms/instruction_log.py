"""What each rank of a mesh has computed: a JSON line an instruction, a file a rank; read back as a timeline.

`start_s` and `end_s` are of the wall clock, so that ranks of one machine stand on one axis; those of several
are as far apart as the machines' clocks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

from smolcluster.errors import DataError
from smolcluster.runs.files import Follower, LineWriter
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.training.schedules.simulation import Span, Timeline

Note = Callable[[Span], None]
Line = tuple[int, int, Span]
"""The place along pp, the step, and what was computed."""


class InstructionLog:
    """Writes `rank-<rank>.jsonl` of a folder."""

    def __init__(self, folder: Path, rank: int, pp: int, warn: Callable[[str], None]) -> None:
        """`pp`: this rank's place in the pipeline.

        Raises:
            DataError: the folder cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"instruction_log {folder} cannot be made: {error}") from error
        self._rank = {"rank": rank, "pp": pp}
        self._lines = LineWriter(folder / f"rank-{rank}.jsonl", warn=warn)
        self._wall = time.time() - time.perf_counter()

    def of_step(self, step: int) -> Note:
        """What writes down the instructions of this step."""

        def note(span: Span) -> None:
            each = span.instruction
            told = {"op": each.op.value, "microbatch": each.microbatch, "stage": each.stage}
            times = {"start_s": self._wall + span.start_s, "end_s": self._wall + span.end_s}
            self._lines.append({"step": step, **self._rank, **told, **times})

        return note

    def tick(self) -> None:
        self._lines.tick()

    def close(self) -> None:
        self._lines.close()


def logged(
    folder: Path | None, rank: int, pp: int, warn: Callable[[str], None]
) -> AbstractContextManager[InstructionLog | None]:
    """A log, where a folder is named, that ends with the block.

    Raises:
        DataError: the folder cannot be made.
    """
    return nullcontext() if folder is None else closing(InstructionLog(folder, rank, pp, warn))


def read_step(folder: Path, step: int | None = None) -> tuple[int, Timeline]:
    """The step, and what the first rank at each place of the pipeline did, in seconds from its beginning.

    `step` None: the last one that all ranks have written.

    Raises:
        DataError: there is no such step.
    """
    ranks = dict(_read(folder))
    written = [{number for number, _ in spans} for spans in ranks.values()]
    common = set[int]().union(*written[:1]).intersection(*written)
    found = max(common, default=None) if step is None else step
    if found not in common or found is None:
        told = f"{min(common)} to {max(common)}" if common else "none"
        raise DataError(
            f"{folder} has no instructions of step {step or 'any'}; all {len(ranks)} ranks have: {told}"
        )
    kept = [[span for number, span in spans if number == found] for spans in ranks.values()]
    begin = min(span.start_s for spans in kept for span in spans)
    moved = (
        tuple(
            Span(each.instruction, each.start_s - begin, each.end_s - begin)
            for each in sorted(spans, key=lambda span: span.start_s)
        )
        for spans in kept
    )
    return found, Timeline(tuple(moved))


def _read(folder: Path) -> Iterator[tuple[int, list[tuple[int, Span]]]]:
    """Of each place along pp the spans of the rank with the lowest number, in the order of places.

    A folder may have been used before: only what came of its last use counts, which had perhaps fewer ranks.

    Raises:
        DataError: no rank has written anything.
    """
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.partition("-")[2]))
    ranks = [lines for file in files if (lines := _newest_use(Follower(file, _parsed).poll()))]
    if not ranks:
        raise DataError(f"{folder} has no instructions: name the folder that instruction_log names")
    begin = ranks[0][0][2].start_s
    places: dict[int, list[tuple[int, Span]]] = {}
    for lines in ranks:
        if lines[-1][2].end_s >= begin:
            places.setdefault(lines[0][0], [(step, span) for _, step, span in lines])
    yield from sorted(places.items())


def _newest_use(lines: list[Line]) -> list[Line]:
    """What was written since a step came a second time, or an earlier one."""
    first, seen = 0, set[tuple[int, Instruction]]()
    for number, (_, step, span) in enumerate(lines):
        if (step, span.instruction) in seen or (number and step < lines[number - 1][1]):
            first, seen = number, set()
        seen.add((step, span.instruction))
    return lines[first:]


def _parsed(line: dict[str, Any]) -> Line | None:
    try:
        instruction = Instruction(Op(line["op"]), int(line["microbatch"]), int(line["stage"]))
        span = Span(instruction, float(line["start_s"]), float(line["end_s"]))
        return int(line["pp"]), int(line["step"]), span
    except (KeyError, TypeError, ValueError):
        return None
