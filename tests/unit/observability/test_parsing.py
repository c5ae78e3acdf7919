import pytest

from smolcluster.observability.parsing import LogLine, parse_log_line
from smolcluster.runs.files import seconds_of


def test_a_line_of_ours_says_when_how_serious_what_and_where() -> None:
    line = b'{"ts": "1970-01-01T00:00:05.250Z", "level": "ERROR", "node": "pi5", "message": "m"}\n'
    assert parse_log_line(line, 42.0) == LogLine(5.25, "ERROR", "m", node="pi5")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((text, text.decode()) for text in (b"half a li", b"[1, 2]", b'"text"', b"[" * 100_000)),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'{"ts": 5, "message": ["x"]}', "['x']"),
        (b'{"ts": "9999-99-99T00:00:00Z", "message": {}}', "{}"),
    ],
)
def test_a_broken_line_is_shown_where_it_stands(line: bytes, message: str) -> None:
    assert parse_log_line(line + b"\n", 42.0) == LogLine(42.0, "", message)


def test_an_empty_line_says_nothing() -> None:
    assert parse_log_line(b"  \n", 42.0) is None


@pytest.mark.parametrize("ts", ["", "yesterday", None, 5, ["x"]])
def test_what_is_no_moment_is_the_other_one(ts: object) -> None:
    assert seconds_of(ts, 42.0) == 42.0
