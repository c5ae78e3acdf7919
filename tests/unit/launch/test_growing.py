"""Files that are read as they grow."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.watch.growing import (
    FRAME_NBYTES,
    MAX_LINE_NBYTES,
    BadFrame,
    Lines,
    Piece,
    Reader,
    ReadPosition,
    growing_script,
    pieces,
)
from smolcluster.runs.files import rotate


class Chunks:
    """An output that comes in these chunks."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks: Iterator[bytes] = iter(chunks)

    def read(self, most: int) -> bytes:  # noqa: ARG002
        return next(self._chunks, b"")


@given(st.binary(max_size=200), st.lists(st.integers(1, 30), max_size=20))
def test_lines_are_whole_however_their_bytes_come(data: bytes, cuts: list[int]) -> None:
    lines, taken, place = Lines(), [], 0
    for cut in [*cuts, len(data)]:
        taken += lines.take(Piece(0, 7, place, data[place : place + cut]))
        place = min(len(data), place + cut)
    assert taken == data.split(b"\n")[:-1]
    assert lines.offset == len(data) - len(data.split(b"\n")[-1])
    assert b"".join(lines.rest()) == data.split(b"\n")[-1]


@given(st.binary(max_size=100), st.integers(0, 100))
def test_a_half_line_is_read_again_after_a_break(data: bytes, cut: int) -> None:
    cut = min(cut, len(data))
    lines = Lines()
    taken = lines.take(Piece(0, 7, 0, data[:cut]))
    again = lines.forget_half().offset
    taken += lines.take(Piece(0, 7, again, data[again:]))
    assert taken == data.split(b"\n")[:-1]


def test_a_huge_line_is_cut_and_the_next_is_whole() -> None:
    lines = Lines()
    huge = b"x" * (3 * MAX_LINE_NBYTES)
    assert lines.take(Piece(0, 7, 0, huge)) == []
    [first, second] = lines.take(Piece(0, 7, len(huge), b"yy\nnext\n"))
    assert (len(first), second) == (MAX_LINE_NBYTES, b"next")
    assert lines.offset == len(huge) + len(b"yy\nnext\n")


def test_a_file_that_begins_anew_is_read_from_its_beginning() -> None:
    lines = Lines()
    assert lines.take(Piece(0, 7, 0, b"one\ntw")) == [b"one"]
    assert lines.take(Piece(0, 7, 0, b"1\n")) == [b"1"]
    assert lines.offset == 2
    assert lines.take(Piece(0, 8, 2, b"two\n")) == [b"two"]
    assert lines.forget_half() == ReadPosition(8, 6)


def test_what_a_login_shell_says_is_no_frame() -> None:
    output = Chunks(
        b"Welcome\n::data 0 4 0 5\n::re",
        b"ady\n::data 1 4 7 3\nab",
        b"\n::sent\n::who",
        b"le\n::beat\n",
    )
    assert list(pieces(output)) == [Piece(1, 4, 7, b"ab\n"), Piece(None)]


def test_of_a_frame_that_is_void_or_torn_nothing_is_taken() -> None:
    output = Chunks(
        b"::ready\n::data 0 4 0 2\n\0\0::void\n::data 0 4 0 2\na\n::sent\n::data 0 4 2 2\nb"
    )
    assert list(pieces(output)) == [Piece(0, 4, 0, b"a\n")]


@pytest.mark.parametrize(
    "said",
    [
        b"::data 0 0\n",
        b"hello\n",
        b"::data x y z q\n",
        b"x" * 200_000,
        b"::data 0 0 0 -1\n",
        b"::data 0 0 0 1\nx::beat\n",
    ],
)
def test_what_makes_no_sense_is_refused(said: bytes) -> None:
    with pytest.raises(BadFrame):
        list(pieces(Chunks(b"::ready\n", said)))


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_script_sends_what_is_new(tmp_path: Path, shell: str) -> None:
    one, two = tmp_path / "it's a; file", tmp_path / "missing"
    one.write_bytes(b"0123456789\n\xff\x00\n")
    files = [shell_path(str(one)), shell_path(str(two))]
    inode = one.stat().st_ino

    def sent(*offsets: int) -> list[Piece]:
        places = [ReadPosition(inode if offset else 0, offset) for offset in offsets]
        script = growing_script(files, places, follow=False)
        done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
        assert done.stderr == b""
        return list(pieces(Chunks(done.stdout)))

    assert sent(0, 0) == [Piece(0, inode, 0, b"0123456789\n\xff\x00\n"), Piece(None)]
    assert sent(11, 5) == [Piece(0, inode, 11, b"\xff\x00\n"), Piece(None)]
    assert sent(14, 0) == [Piece(None)]
    assert sent(99, 0)[0].offset == 0, "it has become shorter"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_script_reads_through_rotated_files_in_order(tmp_path: Path, shell: str) -> None:
    log = tmp_path / "it's a; log"
    inodes = []

    def write(text: bytes) -> None:
        if log.exists():
            rotate(log)
        log.write_bytes(text)
        inodes.append(log.stat().st_ino)

    def sent(place: ReadPosition) -> list[Piece]:
        script = growing_script([shell_path(str(log))], [place], follow=False)
        done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
        assert done.stderr == b""
        return list(pieces(Chunks(done.stdout)))[:-1]

    for text in (b"one\n", b"two\n", b"three\n"):
        write(text)
    everything = [
        Piece(0, inodes[0], 0, b"one\n"),
        Piece(0, inodes[1], 0, b"two\n"),
        Piece(0, inodes[2], 0, b"three\n"),
    ]
    assert sent(ReadPosition()) == everything
    assert sent(ReadPosition(inodes[0], 4)) == everything[1:]
    assert sent(ReadPosition(inodes[1], 2)) == [Piece(0, inodes[1], 2, b"o\n"), everything[2]]
    assert sent(ReadPosition(inodes[2], 6)) == []
    write(b"four\n")
    assert sent(ReadPosition(inodes[2], 4)) == [
        Piece(0, inodes[2], 4, b"e\n"),
        Piece(0, inodes[3], 0, b"four\n"),
    ]
    log.rename(tmp_path / "gone")
    assert sent(ReadPosition(inodes[2], 6)) == []


@pytest.mark.parametrize("tool", ["wc", "tail", "ls"])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_file_that_is_rotated_while_it_is_read_is_read_whole_and_once(
    tmp_path: Path, tool: str, at: int
) -> None:
    """It is rotated just before the script starts one of its tools for the `at`-th time."""
    log, tools = tmp_path / "log", tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "log.1").write_bytes(b"zero\n")
    log.write_bytes(b"one\ntwo\nthree\n" * 10)
    shim = tools / tool
    shim.write_text(
        "#!/bin/sh\n"
        f'echo >> "{tmp_path}/calls"; read -r num << END\n$(grep -c "" "{tmp_path}/calls")\nEND\n'
        f'if [ "$num" = {at} ]; then cd "{tmp_path}"; mv log.1 log.2; mv log log.1; echo four > log; fi\n'
        f'exec {shutil.which(tool)} "$@"\n'
    )
    shim.chmod(0o755)
    script = growing_script([shell_path(str(log))], [ReadPosition()], follow=False)
    environ = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True, env=environ)
    lines = Lines()
    found = [line for piece in list(pieces(Chunks(done.stdout)))[:-1] for line in lines.take(piece)]
    whole = [b"zero", *[b"one", b"two", b"three"] * 10]
    assert found in (whole, [*whole, b"four"])
    assert done.stderr == b""


def test_a_large_file_comes_in_frames(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (2 * FRAME_NBYTES + 5))
    script = growing_script([shell_path(str(log))], [ReadPosition()], follow=False)
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    *parts, end = pieces(Chunks(done.stdout))
    assert [(each.offset, len(each.data)) for each in parts] == [
        *((0, FRAME_NBYTES), (FRAME_NBYTES, FRAME_NBYTES)),
        (2 * FRAME_NBYTES, 5),
    ]
    assert end == Piece(None)


def test_following_ends_and_leaves_nothing_behind(tmp_path: Path) -> None:
    import threading

    file = tmp_path / "log"
    file.write_bytes(b"one\nhal")
    taken: list[bytes] = []
    came = threading.Condition()

    def take(_file: int, lines: list[bytes]) -> None:
        with came:
            taken.extend(lines)
            came.notify()

    reader = Reader(Host("here"), [shell_path(str(file))], on_lines=take)
    words: list[str] = []
    thread = threading.Thread(target=reader.follow, args=(words.append, lambda: None))
    thread.start()
    with came:
        assert came.wait_for(lambda: taken == [b"one"], 10)
    with file.open("ab") as growing:
        growing.write(b"f\ntwo\n")
    with came:
        assert came.wait_for(lambda: taken == [b"one", b"half", b"two"], 10)
    reader.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert words == []
    listed = subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=True).stdout
    assert str(file) not in listed
