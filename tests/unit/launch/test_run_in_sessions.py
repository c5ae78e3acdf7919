"""What a launcher makes of Ctrl-C and of a terminal that goes, and what it notes of a run."""

import io
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import summary_of
from reading import server, status_of, worker, write
from smolcluster.configs.load import find_config
from smolcluster.errors import CheckpointError, LaunchError, RunBusy
from smolcluster.launch import run as running
from smolcluster.launch.interrupts import Interrupts
from smolcluster.launch.kept import TOLD_FILE, StoredOptions, keep, request_again
from smolcluster.launch.run import Run
from smolcluster.launch.stop import StopResult
from smolcluster.runs.launched import Launched, LaunchedProcess, write_launched
from smolcluster.runs.paths import RunPaths, create_run, latest_of, point_latest
from smolcluster.runs.summary import write_summary
from waiting import DEADLINE_S


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "r1")


@pytest.fixture
def run(paths: RunPaths, console: Console) -> Run:
    processes = (server(None, str(paths.root)),)
    return Run(Launched(run_id="r1", algorithm="edp", processes=processes), paths, console)


class Terminal(io.StringIO):
    """Standard input on which lines have been typed."""

    def isatty(self) -> bool:
        return True


INT, HUP = signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("typed", "received", "leaves"),
    [
        ("l\n", [INT], True),
        ("what?\n\ns\n", [INT], False),
        ("", [INT], True),  # its end
        ("s\n", [INT, INT], False),
        ("", [INT, HUP], True),
        ("", [HUP], True),
        ("", [HUP, HUP], True),
        (None, [INT], False),
        (None, [INT, HUP], True),
    ],
)
def test_what_ctrl_c_means(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    typed: str | None,
    received: list[int],
    leaves: bool,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO() if typed is None else Terminal(typed))
    monkeypatch.setattr(select, "select", lambda files, *_: (files, [], []))
    assert run._is_to_be_left(Interrupts(received)) is leaves


def test_a_terminal_that_goes_while_it_is_asked_leaves_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Interrupts([INT])

    def nothing_typed(*_: object) -> tuple[list[object], list[object], list[object]]:
        asked.received.append(HUP)
        return [], [], []

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(select, "select", nothing_typed)
    assert run._is_to_be_left(asked)


Alive = Callable[[LaunchedProcess], "subprocess.Popen[bytes]"]


@pytest.fixture
def alive(paths: RunPaths) -> Iterator[Alive]:
    """Let a process live as if its script had started it, without tmux."""
    started: list[subprocess.Popen[bytes]] = []

    def start(process: LaunchedProcess) -> "subprocess.Popen[bytes]":
        script = f"{paths.root}/launch/{process.stem}.sh"
        argv = [sys.executable, "-c", "import time; time.sleep(600)", script]
        child = subprocess.Popen(argv, start_new_session=True)
        threading.Thread(target=child.wait, daemon=True).start()
        started.append(child)
        write(paths.root / "pids" / process.stem, f"{child.pid}\n")
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()


def resumed(paths: RunPaths, console: Console, **changes: Any) -> Run:
    """A run of two workers that was launched before, and goes on with these changes of worker 1."""
    folder = str(paths.root)
    own = server(None, folder)
    workers = [worker(rank, "pi5", None, folder) for rank in (0, 1)]
    before = Launched(run_id="r1", algorithm="edp", processes=(own, *workers))
    write_launched(paths.launched, before)
    now = (own, workers[0].model_copy(update=changes), workers[1])
    return Run(before.model_copy(update={"processes": now}), paths, console)


def test_workers_that_look_for_their_server_are_kept_when_it_is_started_again(
    paths: RunPaths, console: Console, alive: Alive, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resumed(paths, console)
    child = alive(run._launched.workers[0])
    run.keep_what_waits()
    begun: list[int | None] = []
    monkeypatch.setattr(run, "_begin", lambda each: begun.append(each.rank))
    monkeypatch.setattr(run, "_wait_for", lambda *_: [])
    run._start_workers(Interrupts([]))
    assert begun == [1]
    assert child.poll() is None
    child.kill()  # it has given up before it was let in
    child.wait()
    run._check_alive(run._launched.workers[:1], Interrupts([]))
    assert begun == [1, 0]


@pytest.mark.parametrize(
    ("ranks", "said"), [((0, 1), "all have joined"), ((0,), "not joined: worker 2 (pi5)")]
)
def test_that_all_have_joined_is_said_only_if_so(
    paths: RunPaths,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[int, ...],
    said: str,
) -> None:
    """A run may be over before a worker comes."""
    run = resumed(paths, console)
    status = status_of("ended", workers=dict.fromkeys(ranks, ("pi5", "joined")))
    monkeypatch.setattr(run, "_begin", lambda _: None)
    monkeypatch.setattr(run, "_new_status", lambda: status)
    run._start_workers(Interrupts([]))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith(said)


@pytest.mark.parametrize("changes", [{"argv": ("other",)}, {"project_dir": "~/other"}])
def test_a_worker_of_another_command_or_code_is_started_anew(
    paths: RunPaths,
    console: Console,
    alive: Alive,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    run = resumed(paths, console, **changes)
    child = alive(run._launched.workers[0])
    run.keep_what_waits()
    assert child.poll() is None, "the launch may still be refused"
    monkeypatch.setattr(Run, "_start_server", lambda *_: None)
    monkeypatch.setattr(Run, "_start_workers", lambda *_: None)
    monkeypatch.setattr(running, "close_window", lambda _: None)
    run.start()
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    assert run._kept == set()


def test_a_run_whose_server_lives_is_not_started_again(
    paths: RunPaths, console: Console, alive: Alive
) -> None:
    run = resumed(paths, console)
    child = alive(run._launched.server)
    with pytest.raises(RunBusy, match="server mini1"):
        run.keep_what_waits()
    assert child.poll() is None


def test_a_run_that_goes_on_is_told_what_its_launch_was_told(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = StoredOptions(
        environ={"SMOLCLUSTER_PORT": "6000", "SMOLCLUSTER_SEED": "7"}, overrides=("a=1",)
    )
    keep(paths, b"", b"", told)
    assert (paths.root / TOLD_FILE).stat().st_mode & 0o077 == 0
    state = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    monkeypatch.setattr(os, "environ", {"SMOLCLUSTER_SEED": "8"} | state)
    launched = Launched(run_id="r1", algorithm="edp", processes=(server(),), overrides=("b=1",))
    assert request_again(paths, launched, ["c=1"]).overrides == ("a=1", "c=1")
    assert os.environ == {"SMOLCLUSTER_PORT": "6000", "SMOLCLUSTER_SEED": "8"} | state
    (paths.root / TOLD_FILE).unlink()  # a launch of before
    assert request_again(paths, launched, ["c=1"]).overrides == ("b=1", "c=1")


def test_a_run_that_has_ended_is_told_so_before_a_machine_is_asked(paths: RunPaths) -> None:
    cluster, train = find_config("edp", "cluster"), find_config("digits", "training")
    told = StoredOptions(environ={}, overrides=())
    keep(paths, cluster.read_bytes(), train.read_bytes(), told)
    write_summary(paths.summary, summary_of(30))
    launched = Launched(run_id="r1", algorithm="edp", processes=(server(),))
    with pytest.raises(CheckpointError, match=r"r1 has ended; .* --override num_epochs=60"):
        request_again(paths, launched, ["num_epochs=30"])
    assert request_again(paths, launched, ["num_epochs=60"]).overrides == ("num_epochs=60",)


@pytest.mark.parametrize(("code", "passed_on"), [(75, 75), (77, 77), (78, 78), (1, 1), (137, 1)])
def test_the_code_of_a_process_that_says_what_to_do_is_passed_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, code: int, passed_on: int
) -> None:
    monkeypatch.setattr(running, "exit_code", lambda _: code)
    monkeypatch.setattr(running, "stderr_tail", lambda _: "port 6000 is in use")
    with pytest.raises(LaunchError, match=f"exit code {code}: port") as caught:
        run._check_alive(run._launched.processes, Interrupts([]))
    assert caught.value.exit_code == passed_on


@pytest.mark.parametrize("fails", [True, False])
def test_the_newest_run_is_one_whose_start_has_not_failed(
    run: Run, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    create_run(paths.root.parent, "before")

    def start_server(*_: object) -> None:  # it listens here, and a worker ends badly
        point_latest(paths.root.parent, "r1")
        if fails:
            raise LaunchError("worker 1 pi5 ended with exit code 1")

    monkeypatch.setattr(Run, "_start_server", start_server)
    monkeypatch.setattr(Run, "_start_workers", lambda *_: None)
    monkeypatch.setattr(Run, "_end", lambda *_, **__: StopResult([], was_over=False))
    monkeypatch.setattr(running, "close_window", lambda _: None)
    with pytest.raises(LaunchError) if fails else nullcontext():
        run.start()
    assert latest_of(paths.root.parent) == ("before" if fails else "r1")


def test_a_server_that_neither_listens_nor_logs_is_given_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = chain(["reading 1", "reading 2"], repeat("tokens"))
    said: list[str] = []
    for name, value in {"TOLD_EVERY_S": 0.0, "SERVER_SILENT_S": 0.2, "POLL_S": 0.02}.items():
        monkeypatch.setattr(running, name, value)
    monkeypatch.setattr(running, "newest_line", lambda _: next(lines))
    monkeypatch.setattr(Run, "_begin", lambda *_: None)
    monkeypatch.setattr(Run, "_check_alive", lambda *_: None)
    monkeypatch.setattr(Run, "say", lambda _, text, *__: said.append(text))
    with pytest.raises(LaunchError, match="Its last line: tokens"):
        run._start_server(Interrupts([]))
    assert said[1:3] == [f"waiting for server mini1: reading {each}" for each in (1, 2)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_is_added_gets_a_pane_and_needs_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    shown: list[tuple[str, str]] = []

    def show(run_id: str, process: LaunchedProcess) -> None:
        shown.append((run_id, process.title))
        if fails:
            raise LaunchError("tmux is not here")

    monkeypatch.setattr(running, "show_in_window", show)
    monkeypatch.setattr(Run, "_begin", lambda *_: None)
    added = worker(1, "pi5", None).model_copy(update={"role": "stage"})
    run.add(added)
    assert shown == [("r1", added.title)]
