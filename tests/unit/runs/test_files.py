import errno
import json
import math
import os
import shutil
import threading
import time
from io import FileIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from smolcluster.errors import SmolclusterError
from smolcluster.runs import files
from smolcluster.runs.files import (
    Follower,
    LineWriter,
    json_line,
    rotations,
    utc_timestamp,
    write_whole,
)
from waiting import DEADLINE_S, Clock

if TYPE_CHECKING:
    from typing_extensions import Buffer


def follower(path: Path) -> Follower[dict[str, Any]]:
    return Follower(path, lambda entry: entry)


def test_a_timestamp_is_rfc_3339_in_utc_with_milliseconds() -> None:
    assert utc_timestamp(1_795_000_000.0004) == "2026-11-18T11:06:40.000Z"
    assert utc_timestamp(0.25) == "1970-01-01T00:00:00.250Z"


def test_values_that_json_lacks_become_null_at_any_depth() -> None:
    line = json_line({"a": math.nan, "b": [1.5, math.inf], "c": {"d": -math.inf}, "e": "τ"})
    assert line.endswith(b"\n")
    assert json.loads(line) == {"a": None, "b": [1.5, None], "c": {"d": None}, "e": "τ"}


def test_lines_reach_the_file_a_second_later(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "lines.jsonl"
    writer = LineWriter(path, warn=pytest.fail, clock=clock)
    writer.append({"n": 1})
    clock.now = 0.9
    writer.tick()
    assert follower(path).poll() == []
    clock.now = 1.0
    writer.tick()
    assert follower(path).poll() == [{"n": 1}]
    writer.close()


def test_a_writer_appends_and_closing_flushes(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for n in (1, 2):
        writer = LineWriter(path, warn=pytest.fail)
        writer.append({"n": n})
        writer.close()
        writer.append({"n": "too late"})
        writer.flush()
    assert follower(path).poll() == [{"n": 1}, {"n": 2}]


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    writer = LineWriter(path, warn=pytest.fail)

    def write(thread: int) -> None:
        for n in range(200):
            writer.append({"thread": thread, "n": n})
            writer.flush()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    writer.close()
    records = follower(path).poll()
    assert len(records) == 800
    for thread_id in range(4):
        assert [r["n"] for r in records if r["thread"] == thread_id] == list(range(200))


class Disk:
    """A disk with room for so many bytes; what is written beyond is refused as a full disk does."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path, mode: str) -> FileIO:
        disk = self

        class File(FileIO):
            def write(self, data: "Buffer") -> int:
                if not disk.room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                taken = super().write(memoryview(data)[: disk.room])
                disk.room -= taken
                return taken

        return File(path, mode)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(1 << 30)
    monkeypatch.setattr(files, "FileIO", made.open)
    return made


@pytest.mark.parametrize("room", range(1, 20))
def test_a_full_disk_costs_no_line_and_tears_none(tmp_path: Path, disk: Disk, room: int) -> None:
    path, clock, warnings = tmp_path / "x.jsonl", Clock(), list[str]()
    writer = LineWriter(path, warn=warnings.append, clock=clock)
    disk.room, sizes = room, [0]
    for n in range(100):
        writer.append({"n": n})
        clock.now += 1.0
        writer.flush()
        sizes.append(path.stat().st_size)
    assert sizes == sorted(sizes), "who follows a file that shrinks reads it again"
    assert ["No space left on device" in each for each in warnings] == [True]
    disk.room = 1 << 30
    clock.now += 1.0
    writer.tick()
    assert ["no line was lost" in each for each in warnings] == [False, True]
    writer.close()
    assert path.read_bytes() == b"".join(json_line({"n": n}) for n in range(100))


def test_of_a_disk_that_stays_full_the_newest_lines_are_kept_and_the_lost_are_told(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_KEPT_NBYTES", 100)
    path, clock, moments, warnings = tmp_path / "x.jsonl", Clock(), count(1000), list[str]()
    writer = LineWriter(path, warn=warnings.append, clock=clock, now=lambda: next(moments))
    disk.room = 12
    for n in range(10, 40):
        writer.append({"n": n})
        writer.flush()
    disk.room = 1 << 30
    clock.now += 1.0
    writer.tick()
    written = [entry["n"] for entry in follower(path).poll()]
    assert written == [10, 11, *range(29, 40)]  # 11 was in it by half
    assert warnings[1:] == [
        f"{path} is written again: 17 lines were lost, "
        "from 1970-01-01T00:16:42.000Z to 1970-01-01T00:16:58.000Z"
    ]
    writer.close()
    assert len(warnings) == 2


def test_a_disk_that_hangs_costs_the_oldest_lines_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_KEPT_NBYTES", 100)
    path, warnings = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    writer = LineWriter(path, warn=warnings.append)
    writer.append({"n": 0})
    hanging = threading.Thread(target=writer.flush)
    hanging.start()
    while writer._kept:
        time.sleep(0.001)
    for n in range(100, 200):
        writer.append({"n": n})
    with path.open("rb") as reader:
        hanging.join(DEADLINE_S)
        writer.close()
        assert [json.loads(line)["n"] for line in reader] == [0, *range(190, 200)]
    assert [each.partition(", from")[0] for each in warnings] == [
        f"{path} is written again: 90 lines were lost"
    ]


def test_closing_waits_for_space_and_says_what_is_lost_without(tmp_path: Path, disk: Disk) -> None:
    disk.room = 0

    def free(_: str) -> None:
        disk.room = 1 << 30

    writer = LineWriter(tmp_path / "x.jsonl", warn=free)
    writer.append({"n": 1})
    writer.close(30.0)
    assert follower(tmp_path / "x.jsonl").poll() == [{"n": 1}]

    disk.room, warnings = 0, list[str]()
    writer = LineWriter(tmp_path / "y.jsonl", warn=warnings.append)
    writer.append({"n": 1})
    writer.close()
    writer.close()
    assert len(warnings) == 2
    assert "y.jsonl: 1 line was lost, from" in warnings[1]


def test_a_folder_that_is_missing_is_not_waited_for_at_the_end_but_may_come_back(
    tmp_path: Path,
) -> None:
    clock, warnings = Clock(), list[str]()
    path = tmp_path / "no" / "x.jsonl"
    writer = LineWriter(path, warn=warnings.append, clock=clock)
    writer.append({"n": 1})
    writer.flush()
    path.parent.mkdir()
    clock.now += 1.0
    writer.tick()
    assert follower(path).poll() == [{"n": 1}]
    writer.close()
    shutil.rmtree(path.parent)
    lost = LineWriter(path, warn=warnings.append)
    lost.append({"n": 2})
    lost.close(3600.0)
    assert ["No such file" in each for each in warnings] == [True, False, True, True]


def test_a_file_that_is_replaced_while_the_disk_is_full_has_no_half_line(
    tmp_path: Path, disk: Disk
) -> None:
    path, clock, warnings = tmp_path / "x.jsonl", Clock(), list[str]()
    writer = LineWriter(path, warn=warnings.append, clock=clock)
    disk.room = 5
    for n in (1, 2):
        writer.append({"n": n})
    writer.flush()
    path.unlink()
    disk.room = 1 << 30
    clock.now += 1.0
    writer.flush()
    assert follower(path).poll() == [{"n": 2}]
    assert "1 line was lost" in warnings[1]
    writer.close()


def test_after_a_crash_the_next_record_begins_on_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2, "ha')
    writer = LineWriter(path, warn=pytest.fail)
    writer.append({"n": 3})
    writer.close()
    assert follower(path).poll() == [{"n": 1}, {"n": 3}]


def test_what_is_there_can_be_left_out_unread(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n"')
    following = follower(path)
    following.skip()
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert following.poll() == [{"n": 2}]


def test_what_is_not_an_object_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(b"\n[1]\nnull\n\xff\xfe\n" + deep + b'\n{"n": 1}\n')
    assert follower(path).poll() == [{"n": 1}]


def test_a_file_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "no" / "small.json"
    with pytest.raises(
        SmolclusterError, match=r"cannot write .*small\.json: No such file.*make the folder"
    ):
        write_whole(path, "text")


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SmolclusterError, match=r"cannot write .*pipe: what is there is no regular"):
        write_whole(pipe, "text")
    assert pipe.is_fifo()


def test_what_cannot_be_renamed_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(SmolclusterError, match="taken"):
        write_whole(path, "text")
    assert list(tmp_path.iterdir()) == [path]


def test_a_value_that_json_cannot_hold_becomes_text_and_what_is_beside_it_does_not() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    line = json_line({"circle": circle, "keys": {(1, 2): 3}, "nan": math.nan, "message": "τ"})
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "circle": [1, "[1, [...]]"],
        "keys": {"(1, 2)": 3},
        "nan": None,
        "message": "τ",
    }


def test_what_is_nested_too_deeply_for_json_becomes_text_from_some_depth_on() -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert "[[[[" in str(json.loads(json_line({"deep": deep, "beside": [1]}))["deep"])


@pytest.mark.parametrize(
    "message",
    [
        "x" * 1_000_000,
        "\x00\x01\x1b[2J\r\n\x7f\x85\u2028\u2029",
        "\udcff\udc80 \ud800",
        '<script>alert("&amp;")</script>',
    ],
)
def test_whatever_a_message_holds_it_is_one_line(message: str) -> None:
    line = json_line({"message": message})
    assert line.count(b"\n") == 1
    assert line.splitlines() == [line[:-1]]
    assert json.loads(line) == {"message": message}


def test_a_file_that_grows_too_large_is_rotated_and_no_line_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    writer = LineWriter(path, warn=pytest.fail, max_nbytes=100)
    for n in range(40):
        writer.append({"n": n})
        writer.flush()
    writer.close()
    newest, *old = rotations(path)
    assert [file.exists() for file in rotations(path)] == [True, True, True]
    assert all(file.stat().st_size <= 100 for file in rotations(path))
    records = [record for file in (*reversed(old), newest) for record in follower(file).poll()]
    assert records == [{"n": n} for n in range(records[0]["n"], 40)]
    again = LineWriter(path, warn=pytest.fail, max_nbytes=100)
    again.append({"n": "x" * 1000})
    again.flush()
    again.close()
    assert follower(path).poll() == [{"n": "x" * 1000}]
    assert follower(old[0]).poll()[-1] == {"n": 39}


def test_a_file_without_a_limit_is_never_rotated(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    writer = LineWriter(path, warn=pytest.fail)
    for _ in range(100):
        writer.append({"n": "x" * 1000})
        writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_rotated_is_told_of_once_and_at_the_end(tmp_path: Path) -> None:
    path, warnings = tmp_path / "x.log", list[str]()
    writer = LineWriter(path, warn=warnings.append, max_nbytes=10)
    (tmp_path / "x.log.1").mkdir()
    (tmp_path / "x.log.2").mkdir()
    (tmp_path / "x.log.2" / "full").touch()
    for n in range(5):
        writer.append({"n": n})
        writer.flush()
    writer.close()
    assert [f"{path}: 4 lines were lost" in each for each in warnings] == [False, True]
    assert follower(path).poll() == [{"n": 0}]
