"""The local tmux window of a run, with a tmux server of the test's own."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reading import server, worker
from smolcluster.errors import LaunchError
from smolcluster.launch import tmux
from smolcluster.launch.host import Host
from smolcluster.launch.tmux import (
    close_window,
    is_stopping,
    open_window,
    show_in_window,
    show_window,
    start,
    window_commands,
)
from smolcluster.runs.launched import LaunchedProcess
from waiting import eventually

PROCESSES = [server(None), worker(0, "odd;", None), worker(1, "pi5", None)]


def output(*words: str) -> str:
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=False).stdout


@pytest.mark.usefixtures("own_tmux")
def test_panes_that_end_at_once_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = PROCESSES[1]
    monkeypatch.setattr(
        tmux, "pane_command", lambda each: "sleep 600" if each == lives else "exit 3"
    )
    for number in range(5):
        name = open_window(f"r{number}", PROCESSES, "true")
        shown = output("list-panes", "-t", f"={name}:", "-F", "#{@process}").splitlines()
        assert sorted(shown) == ["server mini1", "worker 1 (odd;)", "worker 2 (pi5)"]
        widths = output("list-panes", "-t", f"={name}:", "-F", "#{pane_width}").split()
        assert set(widths) == {str(tmux.COLUMNS)}, "lines of logs are long"
        assert open_window(f"r{number}", PROCESSES, "true") == name
        close_window(f"r{number}")
    assert output("list-sessions") == ""


EXITING = """#!/bin/sh
# tmux, whose server is just exiting the first time that a session is begun.
case "$1" in
  new-session) mkdir "{once}" 2>/dev/null && echo 'server exited unexpectedly' >&2 && exit 1 ;;
esac
exec "{tmux}" "$@"
"""


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize("opens", ["window", "session"])
def test_what_a_server_did_not_do_that_was_exiting_is_done_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opens: str
) -> None:
    monkeypatch.setattr(tmux, "pane_command", lambda _: "sleep 600")
    real, fake = str(shutil.which("tmux")), tmp_path / "bin" / "tmux"
    once = tmp_path / "once"
    fake.parent.mkdir()
    fake.write_text(EXITING.replace("{once}", str(once)).replace("{tmux}", real))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "run.sh").write_text("sleep 600\n")
    if opens == "window":
        open_window("r", PROCESSES, "true")
    else:
        start(Host("mini1", None), server(None), str(tmp_path / "run.sh"))
    assert once.is_dir()
    assert len(output("list-sessions").splitlines()) == 1


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize("seconds", ["0", "0.5"], ids=["at once", "later"])
def test_a_window_that_nobody_looks_at_ends_with_its_run(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.setattr(tmux, "pane_command", lambda _: f"sleep {seconds}")
    open_window("r", PROCESSES, "true")
    eventually(lambda: output("list-sessions") == "")


@pytest.mark.usefixtures("own_tmux")
def test_a_window_ends_with_its_run_even_if_tmux_misses_the_end_of_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before version 3.6 it may: that of any pane, and then it runs no hook."""

    def wait_for(process: LaunchedProcess) -> str:
        return f"until [ -e {tmp_path / str(process.rank)} ]; do sleep 0.05; done; exit 3"

    monkeypatch.setattr(tmux, "pane_command", wait_for)
    name = open_window("r", PROCESSES, "true")
    output("set-hook", "-u", "-t", f"={name}:", "pane-died")
    *others, last = PROCESSES  # the active pane is the first one's
    for process in others:
        (tmp_path / str(process.rank)).touch()
    eventually(lambda: [panes_of(name)[each.title] for each in others] == ["", ""])
    (tmp_path / str(last.rank)).touch()
    eventually(lambda: output("list-sessions") == "")


@pytest.mark.usefixtures("own_tmux")
def test_a_window_that_somebody_looks_at_shows_the_end_until_he_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    wait = f"until [ -e {over} ]; do sleep 0.05; done"
    monkeypatch.setattr(tmux, "pane_command", lambda _: wait)
    name = open_window("r", PROCESSES, "true")
    with looked_at(name):
        over.touch()
        eventually(lambda: set(panes_of(name).values()) == {""})


@contextmanager
def looked_at(name: str) -> Iterator[None]:
    """Somebody looks at a window, whose run ends meanwhile; nothing is left when he leaves."""
    look = f"unset TMUX; exec tmux attach-session -t ={name}"
    output("-L", "outer", "new-session", "-d", "-s", "people", "sh", "-c", look)
    try:
        eventually(lambda: output("list-clients"))
        yield
        output("detach-client", "-s", f"={name}")
        eventually(lambda: output("list-sessions") == "")
    finally:
        output("-L", "outer", "kill-server")


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize("is_found", [False, True], ids=["opened", "found"])
def test_a_window_whose_run_ends_before_it_is_shown_stays_until_it_has_been(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_found: bool
) -> None:
    over = tmp_path / "over"
    wait = f"until [ -e {over} ]; do sleep 0.05; done"
    monkeypatch.setattr(tmux, "pane_command", lambda _: wait)
    if is_found:
        open_window("r", PROCESSES, "true")
    else:
        over.touch()
    name = open_window("r", PROCESSES, "true", is_shown=True)
    over.touch()
    eventually(lambda: set(panes_of(name).values()) == {""})
    with looked_at(name):
        assert set(panes_of(name).values()) == {""}


def panes_of(name: str) -> dict[str, str]:
    """What is alive, by its pane's title: its command's process id; empty: it has ended."""
    form = "#{@process}=#{?pane_dead,,#{pane_pid}}"
    lines = output("list-panes", "-t", f"={name}:", "-F", form).splitlines()
    assert len(set(lines)) == len(lines)
    return dict(line.split("=") for line in lines)


@pytest.mark.usefixtures("own_tmux")
def test_a_process_that_joins_gets_a_pane_and_one_that_comes_back_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tmux, "pane_command", lambda _: "sleep 600;")
    joined = worker(2, "late", None)
    show_in_window("r", joined)
    assert output("list-sessions") == "", "no window is opened for it"
    name = open_window("r", PROCESSES, "true")
    before = panes_of(name)
    show_in_window("r", joined)
    with_joined = panes_of(name)
    assert with_joined.keys() == {*before, "worker 3 (late)"}
    assert {title: with_joined[title] for title in before} == before
    show_in_window("r", joined)
    again = panes_of(name)
    assert again.keys() == with_joined.keys()
    assert again["worker 3 (late)"] not in ("", with_joined["worker 3 (late)"])


@pytest.mark.usefixtures("own_tmux")
def test_a_process_s_session_takes_its_pane_s_size_and_hears_no_key(tmp_path: Path) -> None:
    typed = tmp_path / "typed"
    output("new-session", "-d", "-s", "smol-s", "-x", "200", "-y", "50", f"cat > {typed}")
    script = tmux.attach_script("smol-s")
    output("new-session", "-d", "-s", "outer", "-x", "90", "-y", "20", "sleep 600")
    people = "unset TMUX; exec tmux attach-session -t =outer"  # whose size counts before "-r" ones
    output("new-session", "-d", "-s", "people", "-x", "90", "-y", "21", "sh", "-c", people)
    eventually(lambda: output("list-clients"))
    output("respawn-pane", "-k", "-t", "=outer:", "sh", "-c", script)
    eventually(
        lambda: output("list-panes", "-t", "=smol-s:", "-F", "#{pane_width}").strip() == "90"
    )
    output("send-keys", "-t", "=outer:", "hello", "Enter")
    output("send-keys", "-t", "=smol-s:", "last", "Enter")
    eventually(lambda: typed.read_text() == "last\n")


@pytest.mark.usefixtures("own_tmux")
def test_who_opens_the_window_again_finds_all_panes_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = PROCESSES[2]
    monkeypatch.setattr(
        tmux, "pane_command", lambda each: "exit 3" if each == ended else "sleep 600"
    )
    name = open_window("r", PROCESSES, "true")
    eventually(lambda: panes_of(name)[ended.title] == "")
    before = panes_of(name)
    monkeypatch.setattr(tmux, "pane_command", lambda _: "sleep 600")
    open_window("r", PROCESSES, "true")
    after = panes_of(name)
    assert after.pop(ended.title) != ""
    assert after == {title: pid for title, pid in before.items() if title != ended.title}


@pytest.mark.usefixtures("own_tmux")
def test_a_window_that_does_not_open_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmux, "_ask_on_ctrl_c", lambda: ["bind-key", "no-such-key", "detach"])
    with pytest.raises(LaunchError, match="no-such-key"):
        open_window("r1", PROCESSES, "true")
    assert output("list-sessions") == ""


def test_no_call_of_tmux_is_longer_than_it_can_be() -> None:
    many = [server("pi@mini1"), *(worker(rank, "pi5", "pi@pi5") for rank in range(30))]
    for call in window_commands("r1", many, "true"):
        assert sum(len(word) + 1 for word in call) < 16_000


@pytest.fixture
def press(own_tmux: None, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Open a window whose processes sleep, show it on a terminal, and press keys there."""
    screen = ["tmux", "-L", "outer"]
    env = {name: value for name, value in os.environ.items() if name != "TMUX"}

    def shown() -> str:
        return output("-L", "outer", "capture-pane", "-p")

    def keys(command: str) -> None:
        begin = [*screen, "new-session", "-d", "-s", "outer", "-x", "120", "-y", "40"]
        inner = f"unset TMUX; {command}"
        subprocess.run([*begin, "sh", "-c", inner], env=env, check=True)
        eventually(lambda: "mini1" in shown() and output("list-clients") != "")
        for _ in range(5):  # a client that has just begun may lose a key
            subprocess.run([*screen, "send-keys", "C-c"], env=env, check=True)
            if holds(lambda: "and the run?" in shown(), 10):
                break
        subprocess.run([*screen, "send-keys", "C-c"], env=env, check=True)

    yield keys
    output("-L", "outer", "kill-server")


def holds(condition: Callable[[], object], within_s: float) -> bool:
    """Whether it holds at last."""
    end = time.monotonic() + within_s
    while not (held := bool(condition())) and time.monotonic() < end:
        time.sleep(0.05)
    return held


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize("is_followed", [True, False])
def test_who_chooses_stop_is_served_once(
    press: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_followed: bool
) -> None:
    """By the launcher that waits for the window to be left; where none does, by tmux."""
    monkeypatch.setattr(tmux, "pane_command", lambda _: "sleep 60")
    stop = f"sh -c 'echo \"$0\" > {tmp_path}/stopped' it"
    name = open_window("r1", [server(None)], stop)
    if is_followed:  # the terminal is the other one's: only the mark of who follows is wanted here
        monkeypatch.setattr(subprocess, "call", lambda _: 0)
        show_window(name)
    press(f"tmux attach-session -t ={name}")
    eventually(lambda: is_stopping("r1"))
    eventually(lambda: output("list-clients", "-t", f"={name}") == "")
    if is_followed:
        output("run-shell", "true")  # what tmux was asked for before has begun
        assert not (tmp_path / "stopped").exists()
    else:
        eventually((tmp_path / "stopped").exists)
