"""What has happened in a run: from `events.jsonl`, of frequent kinds not every event."""

from collections import Counter
from pathlib import Path
from typing import Any

from smolcluster.observability.view.story import told
from smolcluster.runs.events import EventRecord, RunStarted, kind_of, records_of
from smolcluster.runs.files import seconds_of
from smolcluster.runs.tail import Tail

MAX_OF_A_KIND = 500
MAX_TEXT = 500


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
        self._kept: dict[str, list[tuple[int, EventRecord]]] = {}
        """By kind; each with its place in the file."""

    def poll(self) -> bool:
        """Take what is new, a piece of the file at most; whether there was something."""
        offset = self._tail.offset
        lines = self._tail.poll()
        if self._tail.offset < offset:
            self.version += 1
            self._kept.clear()
            self.counts.clear()
        for record in records_of(line.data for line in lines):
            self._add(record)
        return bool(lines)

    def shown(self) -> list[dict[str, Any]]:
        """The events for a time line, in the order of the file: a later start may have an earlier clock.

        Each has `t`, `kind`, `text`, and `rank`, `node` and `step` where they apply.
        """
        merged = [each for own in self._kept.values() for each in own]
        return [_shown(record) for _, record in sorted(merged, key=lambda each: each[0])]

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


def _shown(record: EventRecord) -> dict[str, Any]:
    event, kind = record.event.model_dump(), kind_of(type(record.event))
    where = {name: event[name] for name in ("rank", "node", "step") if event.get(name) is not None}
    seconds, text = seconds_of(record.ts, 0.0), told(record.event)[:MAX_TEXT]
    return {"t": seconds, "kind": kind, "text": text, **where}
