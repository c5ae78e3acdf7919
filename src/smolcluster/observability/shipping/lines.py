"""A line of a log file as Loki gets it: labels, a time, a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from smolcluster.runs.files import json_line, json_objects
from smolcluster.runs.paths import parse_log_stem

MAX_LINE_NBYTES = 256_000
"""Loki takes 256 KiB unless it is told otherwise."""
MAX_FIELD_CHARS = 10_000
"""Of each field of a line that is too long."""
MAX_AHEAD_NS = 600 * 10**9
"""Loki refuses what is later than that."""
LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LokiLine:
    """One line for Loki; `ns` are nanoseconds since 1970."""

    labels: Labels
    ns: int
    text: str


def labels_of(stem: str, run_id: str) -> dict[str, str]:
    """The labels of a run's log file, such as `worker-rank0-mini2`.

    The run is one of them: Loki takes no lines that are hours older than the newest of their stream, such as
    those of an earlier run.
    """
    component, _, rank = parse_log_stem(stem) or ("other", "", None)
    job = f"smolcluster-{component}"
    labels = {"job": job, "component": component, "host": stem, "run": run_id}
    return labels if rank is None else labels | {"rank": str(rank)}


def entry_of(line: bytes, labels: Mapping[str, str], now_ns: int) -> LokiLine | None:
    """A line of a file with these labels; None: it is empty.

    A line that is not ours, or whose time is no time or in the future, gets `now_ns`.
    """
    text = line.decode("utf-8", "replace").strip()
    if not text:
        return None
    fields = next(json_objects([text.encode()]), {})
    ns = _ns(fields.get("ts"))
    level = fields.get("level")
    known = {"level": level} if isinstance(level, str) and level in LEVELS else {}
    return LokiLine(
        labels=tuple({**labels, **known}.items()),
        ns=ns if ns is not None and 0 < ns <= now_ns + MAX_AHEAD_NS else now_ns,
        text=_cut(text, fields),
    )


def _ns(ts: object) -> int | None:
    """Nanoseconds since 1970 of a time in RFC 3339; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(str(ts))
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError):
        return None


def _cut(text: str, fields: Mapping[str, Any]) -> str:
    """`text`, if it is not too long; else its beginning, as a JSON object if it was one."""
    whole = text.encode()
    if len(whole) <= MAX_LINE_NBYTES:
        return text
    if fields:
        short = json_line({name: _cut_field(value) for name, value in fields.items()}).rstrip()
        if len(short) <= MAX_LINE_NBYTES:
            return short.decode()
    mark = f" … (cut: the line has {len(whole):,} bytes)"
    return whole[: MAX_LINE_NBYTES - len(mark.encode())].decode("utf-8", "ignore") + mark


def _cut_field(value: object) -> object:
    if not isinstance(value, str) or len(value) <= MAX_FIELD_CHARS:
        return value
    return f"{value[:MAX_FIELD_CHARS]} … (cut: it has {len(value):,} characters)"
