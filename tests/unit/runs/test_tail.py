"""Whole lines of a growing file, a piece at a time."""

from pathlib import Path

from smolcluster.runs.tail import Line, Tail


def texts(lines: list[Line]) -> list[bytes]:
    return [line.data for line in lines]


def test_a_line_comes_when_it_is_whole_with_the_place_where_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.poll() == []
    path.write_bytes(b"one\ntw")
    assert tail.poll() == [Line(0, b"one")]
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.poll() == [Line(4, b"two"), Line(8, b"three")]


def test_a_large_file_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%05d\n" % number for number in range(100)))
    tail = Tail(path, max_piece_nbytes=64)
    seen: list[bytes] = []
    while lines := tail.poll():
        assert sum(map(len, texts(lines))) <= 64
        seen += texts(lines)
    assert seen == [b"%05d" % number for number in range(100)]


def test_of_a_line_longer_than_a_piece_the_beginning_comes_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 1000 + b"\nnext\n")
    tail = Tail(path, max_piece_nbytes=64)
    seen: list[bytes] = []
    while lines := tail.poll():
        seen += texts(lines)
    assert seen == [b"x" * 64, b"next"]


def test_a_file_that_became_shorter_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a long first line\n")
    tail = Tail(path)
    tail.poll()
    path.write_bytes(b"new\n")
    assert tail.poll() == [Line(0, b"new")]


def test_of_a_file_that_was_rotated_the_rest_comes_before_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\nsecond\n")
    tail = Tail(path)
    tail.poll()
    with path.open("ab") as file:
        file.write(b"before it was rotated\n")
    path.rename(tmp_path / "log.1")
    assert tail.poll() == []
    path.write_bytes(b"new\n")
    assert [*texts(tail.poll()), *texts(tail.poll()), *texts(tail.poll())] == [
        *(b"before it was rotated", b"new")
    ]


def test_a_file_of_before_that_was_not_read_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    (tmp_path / "log.1").write_bytes(b"much older than what was read\n")
    path.write_bytes(b"first\nsecond\n")
    tail = Tail(path)
    tail.poll()
    path.write_bytes(b"new\n")
    assert texts(tail.poll()) == [b"new"]
