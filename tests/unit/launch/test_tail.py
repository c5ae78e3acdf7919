"""Lines of files on other machines, as they grow."""

import threading
from pathlib import Path

import pytest

from reading import fake_ssh, replace_program, write
from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host, shell_path
from smolcluster.launch.watch import tail
from smolcluster.launch.watch.tail import MAX_LINE_NBYTES, RemoteTail
from smolcluster.runs.files import rotate
from waiting import DEADLINE_S, eventually

HERE = Host("here")


def lines_of(host: Host, file: Path, newest: int | None = None) -> list[bytes]:
    found: list[bytes] = []
    RemoteTail(host, shell_path(str(file)), on_lines=found.extend, newest=newest).read()
    return [line for line in found if line]


def test_what_is_there_comes_whole_with_what_was_rotated_before(tmp_path: Path) -> None:
    file = write(tmp_path / "it's a; $(file)", "one\n")
    rotate(file)
    write(file, "two\nhal")
    assert lines_of(HERE, file) == [b"one", b"two", b"hal"]
    assert lines_of(HERE, tmp_path / "missing") == []


@pytest.mark.parametrize(("num", "expected"), [(10, 10), (100, 25)])
def test_of_a_long_file_the_newest_lines_and_some_of_the_first(
    tmp_path: Path, num: int, expected: int
) -> None:
    file = write(tmp_path / "f", "".join(f"{number}\n" for number in range(num)))
    found = lines_of(HERE, file, newest=5)
    assert len(found) == expected
    assert (found[0], found[-1]) == (b"0", b"%d" % (num - 1))


def test_a_huge_line_is_cut_and_the_next_is_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "f", "x" * (2 * MAX_LINE_NBYTES) + "\nnext\n")
    [first, second] = lines_of(HERE, file)
    assert (len(first), second) == (MAX_LINE_NBYTES, b"next")


@pytest.mark.parametrize(
    ("destination", "word"), [("cut", "does not answer"), ("strange", "broke")]
)
def test_a_machine_that_says_nothing_of_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, destination: str, word: str
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match=word):
        lines_of(Host("pi5", destination), tmp_path / "f")


def test_a_file_is_followed_over_its_rotation_and_a_break_without_repeating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "RETRY_S", 0.05)
    home = fake_ssh(tmp_path, monkeypatch)
    file = write(home / "runs/log", "one\ntwo\nhal")
    found: list[bytes] = []
    said: list[str] = []
    follower = RemoteTail(Host("pi5", "pi5"), '"$HOME"/runs/log', on_lines=found.extend)
    thread = threading.Thread(target=follower.follow, args=(said.append, lambda: said.append("")))
    thread.start()
    try:
        eventually(lambda: b"two" in found)
        with file.open("a") as log:
            log.write("f\nthree\n")
        eventually(lambda: b"three" in found)
        rotate(file)
        write(file, "four\n")
        eventually(lambda: b"four" in found)
        ssh = tmp_path / "bin/ssh"
        answering = replace_program(ssh, "#!/bin/sh\necho refused >&2; exit 255\n")
        follower.kill()
        eventually(lambda: said)
        with file.open("a") as log:
            log.write("five\n")
        replace_program(ssh, answering)
        eventually(lambda: b"five" in found)
    finally:
        follower.stop()
        thread.join(DEADLINE_S)
        follower.kill()
        thread.join(DEADLINE_S)
    assert found == [b"one", b"two", b"half", b"three", b"four", b"five"]
    assert [bool(sentence) for sentence in said] == [True, False]
    assert not thread.is_alive()
