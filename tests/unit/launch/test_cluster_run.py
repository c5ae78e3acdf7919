"""What a launcher makes of Ctrl-C and of a terminal that goes, and what it notes of a run."""

import io
import select
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from reading import server
from smolcluster.errors import LaunchError
from smolcluster.launch import cluster_run
from smolcluster.launch.cluster_run import Choice, ClusterRun
from smolcluster.launch.interrupts import Interrupts
from smolcluster.launch.stop import StopResult
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.paths import RunPaths, create_run, latest_of, point_latest


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "r1")


@pytest.fixture
def run(paths: RunPaths, console: Console) -> ClusterRun:
    processes = (server(None, str(paths.root)),)
    return ClusterRun(
        Launched(run_id="r1", algorithm="edp", processes=processes), {}, paths, console
    )


class Terminal(io.StringIO):
    """Standard input on which lines have been typed."""

    def isatty(self) -> bool:
        return True


INT, HUP = signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("typed", "received", "choice"),
    [
        ("l\n", [INT], Choice.LEAVE),
        ("what?\n\ns\n", [INT], Choice.STOP),
        ("", [INT], Choice.LEAVE),  # its end
        ("s\n", [INT, INT], Choice.STOP),
        ("", [INT, HUP], Choice.LEAVE),
        ("", [HUP], Choice.LEAVE),
        ("", [HUP, HUP], Choice.LEAVE),
        (None, [INT], Choice.STOP),
        (None, [INT, HUP], Choice.LEAVE),
    ],
)
def test_what_ctrl_c_means(
    run: ClusterRun,
    monkeypatch: pytest.MonkeyPatch,
    typed: str | None,
    received: list[int],
    choice: Choice,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO() if typed is None else Terminal(typed))
    monkeypatch.setattr(select, "select", lambda files, *_: (files, [], []))
    assert run._ask(Interrupts(received)) is choice


def test_a_terminal_that_goes_while_it_is_asked_leaves_the_run(
    run: ClusterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Interrupts([INT])

    def nothing_typed(*_: object) -> tuple[list[object], list[object], list[object]]:
        asked.received.append(HUP)
        return [], [], []

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(select, "select", nothing_typed)
    assert run._ask(asked) is Choice.LEAVE


def test_child_processes_that_the_run_had_before_are_forgotten(
    run: ClusterRun, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.processes.write_text("[]")
    monkeypatch.setattr(ClusterRun, "_start_server", lambda *_: None)
    monkeypatch.setattr(ClusterRun, "_start_workers", lambda *_: None)
    monkeypatch.setattr(cluster_run, "close_window", lambda _: None)
    run.start()
    assert read_launched(paths.launched).run_id == "r1"
    assert not paths.processes.exists()


@pytest.mark.parametrize(("code", "passed_on"), [(75, 75), (77, 77), (78, 78), (1, 1), (137, 1)])
def test_the_code_of_a_process_that_says_what_to_do_is_passed_on(
    run: ClusterRun, monkeypatch: pytest.MonkeyPatch, code: int, passed_on: int
) -> None:
    monkeypatch.setattr(cluster_run, "exit_code", lambda _: code)
    monkeypatch.setattr(cluster_run, "last_words", lambda _: "port 6000 is in use")
    with pytest.raises(LaunchError, match=f"exit code {code}: port") as caught:
        run._check_alive(run._launched.processes, Interrupts([]))
    assert caught.value.exit_code == passed_on


@pytest.mark.parametrize("fails", [True, False])
def test_the_newest_run_is_one_whose_start_has_not_failed(
    run: ClusterRun, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    create_run(paths.root.parent, "before")

    def start_server(*_: object) -> None:  # it listens here, and a worker ends badly
        point_latest(paths.root.parent, "r1")
        if fails:
            raise LaunchError("worker 1 pi5 ended with exit code 1")

    monkeypatch.setattr(ClusterRun, "_start_server", start_server)
    monkeypatch.setattr(ClusterRun, "_start_workers", lambda *_: None)
    monkeypatch.setattr(ClusterRun, "_end", lambda _: StopResult([], was_over=False))
    monkeypatch.setattr(cluster_run, "close_window", lambda _: None)
    with pytest.raises(LaunchError) if fails else nullcontext():
        run.start()
    assert latest_of(paths.root.parent) == ("before" if fails else "r1")
