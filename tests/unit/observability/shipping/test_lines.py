"""Lines of log files as Loki gets them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.observability.shipping.lines import (
    MAX_AHEAD_NS,
    MAX_LINE_NBYTES,
    LokiLine,
    entry_of,
    labels_of,
)
from smolcluster.runs.files import json_line

NOW = 1_795_000_000 * 10**9
LABELS = labels_of("worker-rank0-mini2", "edp-1")


def entry(**fields: Any) -> LokiLine:
    found = entry_of(json_line(fields), LABELS, NOW)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("stem", "labels"),
    [
        (
            "worker-rank12-mini2",
            {"job": "smolcluster-worker", "component": "worker", "rank": "12"},
        ),
        ("server-my-mini.local", {"job": "smolcluster-server", "component": "server"}),
        ("Weird", {"job": "smolcluster-other", "component": "other"}),
    ],
)
def test_the_name_of_a_log_says_its_labels(stem: str, labels: dict[str, str]) -> None:
    assert labels_of(stem, "edp-1") == labels | {"host": stem, "run": "edp-1"}


def test_a_line_has_its_own_time_and_level_and_comes_as_it_is() -> None:
    line = b'{"ts": "2026-11-18T11:06:40.123Z", "level": "ERROR", "message": "\\u03c4"}'
    found = entry_of(line + b"\r\n", LABELS, NOW)
    assert found is not None
    assert found.ns == 1_795_000_000_123_000_000
    assert dict(found.labels) == LABELS | {"level": "ERROR"}
    assert found.text == line.decode()


@pytest.mark.parametrize(
    ("ts", "ns"),
    [
        ("2026-11-18T16:36:40.000+05:30", NOW),
        ("2026-11-18T11:06:40", NOW),
        ("2026-11-18T11:06:39.999999Z", NOW - 1000),
        ("1969-12-31T23:59:59Z", NOW),
        ("0001-01-01T00:00:00+23:00", NOW),
        ("9999-12-31T23:59:59Z", NOW),
        ("yesterday", NOW),
        (12, NOW),
        (None, NOW),
    ],
)
def test_a_time_that_loki_would_not_take_is_the_time_of_reading(ts: object, ns: int) -> None:
    assert entry(ts=ts).ns == ns


@pytest.mark.parametrize("level", ["LOUD", "", None, 7, ["INFO"], {"a": 1}])
def test_labels_come_from_closed_sets(level: object) -> None:
    assert dict(entry(level=level, component="x", host="y", rank=8).labels) == LABELS


@pytest.mark.parametrize(
    "line", [b"plain \xff text", b"[1]", b"{", b"[" * 100_000, b'{"a": "\\ud800"}', b"\x00\x1b[2J"]
)
def test_a_line_that_is_not_ours_ships_all_the_same(line: bytes) -> None:
    found = entry_of(line, LABELS, NOW)
    assert found == LokiLine(tuple(LABELS.items()), NOW, line.decode("utf-8", "replace"))


@pytest.mark.parametrize("line", [b"", b"\n", b" \r\n"])
def test_an_empty_line_is_none(line: bytes) -> None:
    assert entry_of(line, LABELS, NOW) is None


@pytest.mark.parametrize("char", ["x", "τ", "\x00", '"', "🚀"])
def test_a_message_of_a_megabyte_is_cut_and_the_line_is_still_json(char: str) -> None:
    found = entry(ts="2026-11-18T11:06:40Z", level="INFO", message=char * 1_000_000, step=3)
    assert len(found.text.encode()) <= MAX_LINE_NBYTES
    line = json.loads(found.text)
    assert line["message"].endswith(" … (cut: it has 1,000,000 characters)")
    assert line["step"] == 3
    assert dict(found.labels)["level"] == "INFO"


def test_many_long_fields_and_long_text_are_cut_with_a_mark() -> None:
    many = entry(**{f"f{n}": "x" * 9000 for n in range(100)}).text
    plain = entry_of("🚀".encode() * 250_000, LABELS, NOW)
    assert plain is not None
    for text in (many, plain.text):
        assert len(text.encode()) <= MAX_LINE_NBYTES
        assert "… (cut: the line has " in text[-50:]


@given(st.binary(max_size=300))
def test_any_bytes_make_a_line_that_json_can_carry(line: bytes) -> None:
    found = entry_of(line, LABELS, NOW)
    assert found is None or json.loads(json.dumps(found.text)) == found.text
    assert found is None or 0 < found.ns <= NOW + MAX_AHEAD_NS
    assert found is None or found.text.encode()
