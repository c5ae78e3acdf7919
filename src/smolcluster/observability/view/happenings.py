"""What has happened in a run: from `events.jsonl`, of frequent kinds not every event."""

from collections import Counter
from pathlib import Path
from typing import Any

from smolcluster.observability.view.story import records_of, told
from smolcluster.runs.events import (
    EventRecord,
    RunStarted,
    kind_of,
)
from smolcluster.runs.files import seconds_of
from smolcluster.runs.tail import Line, Tail

MAX_OF_A_KIND = 500
MAX_TEXT = 500
Numbered = tuple[int, EventRecord]
"""An event, and its place in the file."""


class Happenings:
    """The events of a run.

    Attributes:
        version: grows whenever there is something new.
        started: how the run began, as the newest start of its server has said.
        counts: how many there were of each kind.
    """

    def __init__(self, path: Path) -> None:
        self.version = 0
        self.started: RunStarted | None = None
        self.counts: Counter[str] = Counter()
        self._tail = Tail(path)
        self._kept: dict[str, list[Numbered]] = {}

    def poll(self) -> bool:
        """Take what is new, a piece of the file at most; whether there was something."""
        offset = self._tail.offset
        lines = self._tail.poll()
        if self._tail.offset < offset:
            self.version += 1
            self._kept.clear()
            self.counts.clear()
        for line in lines:
            self._take(line)
        return bool(lines)

    def records(self) -> list[EventRecord]:
        """The events that are kept, in the order of the file: a later start may have an earlier clock."""
        merged = [each for own in self._kept.values() for each in own]
        return [record for _, record in sorted(merged, key=_number)]

    def shown(self) -> list[dict[str, Any]]:
        """The events for a time line: `t`, `kind`, `text`, and `rank`, `node` and `step` where they apply."""
        return [shown(record) for record in self.records()]

    def _take(self, line: Line) -> None:
        for record in records_of([line.data]):
            self._add(record)

    def _add(self, record: EventRecord) -> None:
        kind = kind_of(type(record.event))
        self.version += 1
        self.counts[kind] += 1
        if isinstance(record.event, RunStarted):
            self.started = record.event
        kept = self._kept.setdefault(kind, [])
        kept.append((self.version, record))
        if len(kept) > 2 * MAX_OF_A_KIND:
            del kept[1:-1:2]


def shown(record: EventRecord) -> dict[str, Any]:
    """An event for a time line."""
    event = record.event.model_dump()
    where = {name: event[name] for name in ("rank", "node", "step") if event.get(name) is not None}
    kind = kind_of(type(record.event))
    return {
        "t": seconds_of(record.ts, 0.0),
        "kind": kind,
        "text": told(record.event)[:MAX_TEXT],
        **where,
    }


def _number(numbered: Numbered) -> int:
    return numbered[0]
