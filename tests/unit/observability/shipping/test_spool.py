"""Log files as a spool."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from smolcluster.observability.shipping.spool import READ_NBYTES, STATE, Batch, Spool
from smolcluster.runs.files import rotate

NOW_NS = 1_795_000_000 * 10**9
LOG = "worker-rank0-pi5.log"


def spool(folder: Path, *only: str, max_lines: int = 2000, max_nbytes: int = 10**6) -> Spool:
    return Spool(folder, only, max_lines=max_lines, max_nbytes=max_nbytes, now_ns=lambda: NOW_NS)


def texts(batch: Batch | None) -> list[str]:
    return [entry.text for entry in batch.entries] if batch else []


def taken(source: Spool, *, at_end: bool = False) -> list[str]:
    """All that comes next, which counts as pushed."""
    found: list[str] = []
    while batch := source.next_batch(at_end=at_end):
        source.commit(batch)
        found += texts(batch)
    return found


def test_lines_come_once_also_after_a_restart(tmp_path: Path) -> None:
    log = tmp_path / LOG
    log.write_bytes(b"one\ntwo\n")
    assert taken(spool(tmp_path)) == ["one", "two"]
    with log.open("ab") as file:
        file.write(b"three\n\nfour\n")
    assert taken(spool(tmp_path)) == ["three", "four"]
    assert taken(spool(tmp_path)) == []


def test_what_was_not_committed_comes_again_with_the_same_times(tmp_path: Path) -> None:
    line = b'{"ts": "2026-11-18T11:06:40.000Z", "message": "x"}\n'
    (tmp_path / LOG).write_bytes(line * 3)
    first, again = spool(tmp_path).next_batch(), spool(tmp_path).next_batch()
    assert first is not None
    assert first == again
    assert [entry.ns for entry in first.entries] == [NOW_NS, NOW_NS + 1, NOW_NS + 2]


@pytest.mark.parametrize(
    ("seconds", "shifts_ns"),
    [
        ((-10.0, -10.0, -10.0), (0, 1, 2)),
        ((-10.0, -10.5, -9.0), (0, 500_000_001, 0)),
        ((300.0, -10.0, -10.0, -9.0), (0, 0, 1, 0)),
    ],
)
def test_times_of_a_stream_rise_but_where_the_clock_was_set_back(
    tmp_path: Path, seconds: tuple[float, ...], shifts_ns: tuple[int, ...]
) -> None:
    """A line from a clock that was ahead shifts none of the later ones."""
    for second, shift_ns in zip(seconds, shifts_ns, strict=True):
        ns = NOW_NS + round(second * 1e9)
        ts = datetime.fromtimestamp(ns / 1e9, UTC).isoformat()
        (tmp_path / LOG).write_bytes(f'{{"ts": "{ts}", "n": "{shift_ns}"}}\n'.encode())
        source = spool(tmp_path)
        batch = source.next_batch()
        assert batch is not None
        source.commit(batch)
        assert [entry.ns for entry in batch.entries] == [ns + shift_ns]
        (tmp_path / LOG).unlink()


def test_a_half_line_waits_for_its_end_or_the_end_of_the_run(tmp_path: Path) -> None:
    log, source = tmp_path / LOG, spool(tmp_path)
    log.write_bytes(b"one\nhal")
    assert taken(source) == ["one"]
    assert taken(source) == []
    with log.open("ab") as file:
        file.write(b"f\nres")
    assert taken(source) == ["half"]
    assert taken(source, at_end=True) == ["res"]


def test_a_file_that_was_truncated_is_read_from_its_start(tmp_path: Path) -> None:
    log, source = tmp_path / LOG, spool(tmp_path)
    log.write_bytes(b"one\ntwo\nthree\n")
    assert len(taken(source)) == 3
    log.write_bytes(b"four\n")
    assert taken(source) == ["four"]
    log.write_bytes(b"longer than it was before\n" * 3)
    assert len(taken(source)) == 3


def test_a_new_file_with_the_inode_of_an_old_one_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / LOG
    log.write_bytes(b"one\n")
    assert taken(spool(tmp_path)) == ["one"]
    state = json.loads((tmp_path / STATE).read_text())
    [place] = state["places"].values()
    log.unlink()
    log.write_bytes(b"another\n")
    state["places"] = {str(log.stat().st_ino): place}
    (tmp_path / STATE).write_text(json.dumps(state))
    assert taken(spool(tmp_path)) == ["another"]


def test_rotated_files_come_first_and_only_once(tmp_path: Path) -> None:
    log, source = tmp_path / LOG, spool(tmp_path)
    log.write_bytes(b"one\ntwo\n")
    assert taken(source) == ["one", "two"]
    with log.open("ab") as file:
        file.write(b"three\nno end")
    rotate(log)
    assert taken(source) == ["three", "no end"], "before there is a new file"
    log.write_bytes(b"four\n")
    rotate(log)
    log.write_bytes(b"five\n")
    assert taken(source) == ["four", "five"]
    assert len(list(tmp_path.glob(f"{LOG}*"))) == 3
    assert source.lost_nbytes == 0


def test_what_was_removed_unread_is_counted(tmp_path: Path) -> None:
    log, source = tmp_path / LOG, spool(tmp_path)
    log.write_bytes(b"one\n")
    assert texts(source.next_batch()) == ["one"]
    for line in (b"two\n", b"three\n", b"four\n"):
        rotate(log)
        log.write_bytes(line)
    assert taken(source) == ["two", "three", "four"]
    assert source.lost_nbytes == 4
    assert source.left_nbytes() == 0


def test_a_batch_is_bounded_and_every_log_has_its_turn(tmp_path: Path) -> None:
    stems = ("server-a", "worker-rank0-b", "worker-rank1-c")
    for name in stems:
        (tmp_path / f"{name}.log").write_bytes(b"".join(b"%d\n" % n for n in range(100)))
    source = spool(tmp_path, max_lines=40)
    seen: dict[str, list[str]] = {name: [] for name in stems}
    turns: list[str] = []
    while batch := source.next_batch():
        [stem] = {dict(entry.labels)["host"] for entry in batch.entries}
        assert len(batch.entries) <= 40
        turns.append(stem)
        seen[stem] += texts(batch)
        source.commit(batch)
    assert turns == [*stems] * 3
    assert list(seen.values()) == [[str(n) for n in range(100)]] * 3
    assert source.left_nbytes() == 0
    (tmp_path / STATE).unlink()
    nbytes = sum(map(len, texts(spool(tmp_path, max_nbytes=100).next_batch())))
    assert 100 <= nbytes < 110


def test_a_line_without_an_end_is_taken_in_pieces(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b"x" * (READ_NBYTES + 10) + b"\nnext\n")
    first, second, third = taken(spool(tmp_path))
    assert "… (cut: the line has 4,194,304 bytes)" in first
    assert (second, third) == ("x" * 10, "next")


def test_only_logs_are_read_and_of_these_only_what_is_wanted(tmp_path: Path) -> None:
    for name in ("server-a.log", "worker-rank0-b.log", "server-a.console.txt", "x.log.gz"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "folder.log").mkdir()
    os.mkfifo(tmp_path / "fifo.log")
    assert taken(spool(tmp_path, "server-a")) == ["server-a.log"]
    assert taken(other := spool(tmp_path, "worker-rank0-b")) == ["worker-rank0-b.log"]
    assert taken(spool(tmp_path)) == [], "what one has shipped another knows"
    assert other.lost_nbytes == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"places": 3}', '{"places": {"1": {"offset": -1}}}', "\x00" * 100]
)
def test_of_a_damaged_state_all_is_sent_again(tmp_path: Path, text: str) -> None:
    (tmp_path / LOG).write_bytes(b"one\n")
    (tmp_path / STATE).write_text(text)
    assert taken(spool(tmp_path)) == ["one"]
    assert taken(spool(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
