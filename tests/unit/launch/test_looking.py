"""Every way of looking at a run says the same of how it stands."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from made_runs import MadeRun
from reading import children_of, launched_run, log_line, status_of, worker, write
from reading import server as server_elsewhere
from smolcluster.launch.watch.listing import listed
from smolcluster.launch.watch.page import opened
from smolcluster.launch.watch.status import look_at
from smolcluster.launch.watch.top.source import Source
from smolcluster.observability.report.outcome import outcome_of, state_of
from smolcluster.observability.view.listing import listed as listed_on_the_page
from smolcluster.observability.view.view import View, read_view
from smolcluster.runs.launched import read_launched, write_launched
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import STOPPED, write_status


def words(paths: RunPaths, folder: Path) -> dict[str, str | None]:
    """How the run stands, by each way of looking."""
    source = Source(paths, folder / "top")
    try:
        return {
            "status": look_at(paths).state,
            "top": source.look().report.state,
            "runs": listed(paths.root.parent)[0].state,
            "page": View(opened(paths, folder / "page")).state()["state"],
            "runs of the page": listed_on_the_page(paths.root.parent)[0]["state"],
            "report": outcome_of(read_view(paths)).state,
        }
    finally:
        source.close()


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path / "runs", "r1")
    made.config()
    moment = 1.0  # long ago: not just begun
    os.utime(made.paths.config, (moment, moment))
    return made


@pytest.fixture
def server(run: MadeRun) -> Iterator["subprocess.Popen[bytes]"]:
    """A process as a launch starts it, which has not come to its lock yet."""
    program = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program, run.paths.run_id]) as process:
        children_of(run.paths, process.pid)
        yield process
        process.kill()


def waiting(run: MadeRun) -> None:
    run.status("waiting")


def training(run: MadeRun) -> None:
    run.status("training")


def stopped(run: MadeRun) -> None:
    run.status("ended", STOPPED)


@pytest.mark.parametrize(
    ("leave", "expected"),
    [
        (lambda _: None, "broken off"),
        (training, "broken off"),
        (stopped, "stopped"),
        (lambda run: run.status("failed", "the run failed: x"), "failed"),
        (lambda run: run.status("ended", "all is applied"), "ended"),
        (lambda run: run.summary(), "ended"),
        (lambda run: run.ended(), "ended"),
        (lambda run: run.ended(STOPPED, ok=False), "stopped"),
        (lambda run: run.ended("the run failed: x", ok=False), "failed"),
        (lambda run: (run.ended(), run.started()), "broken off"),
    ],
    ids=[
        *("nothing", "a status", "stopped", "failed", "ended", "a summary"),
        *("the event of its end", "that it was stopped", "that it has failed", "a later start"),
    ],
)
def test_a_run_that_is_over(
    run: MadeRun, tmp_path: Path, leave: Callable[[MadeRun], object], expected: str
) -> None:
    leave(run)
    assert set(words(run.paths, tmp_path).values()) == {expected}


def test_a_run_that_is_just_begun_is_starting_before_anybody_knows_its_processes(
    tmp_path: Path,
) -> None:
    paths = create_run(tmp_path / "runs", "r1")
    assert set(words(paths, tmp_path).values()) == {"starting"}
    assert look_at(paths).processes == ()


def test_a_run_of_another_machine_is_reported_as_it_was_when_it_was_fetched(tmp_path: Path) -> None:
    paths = launched_run(tmp_path, server_elsewhere())
    write_status(paths.status, status_of(now=1_790_000_000.0))
    told = "as its server wrote on another machine at 2026-09-21 14:13:19 UTC"
    assert state_of(read_view(paths)) == ("training", told, "live")


def test_the_page_lists_a_run_whose_workers_alone_are_elsewhere(tmp_path: Path) -> None:
    here = server_elsewhere(None, str(tmp_path / "r1"))
    paths = launched_run(tmp_path, here, worker(0, "pi5", "pi@pi5"))
    write_status(paths.status, status_of())
    assert [each["state"] for each in listed_on_the_page(tmp_path)] == ["broken off"]
    paths.launched.write_text("{")
    assert [each["state"] for each in listed_on_the_page(tmp_path)] == [None]


@pytest.mark.parametrize("leave", [waiting, training, stopped])
def test_a_run_that_goes_on_starts_until_its_server_writes(
    run: MadeRun,
    tmp_path: Path,
    server: "subprocess.Popen[bytes]",
    leave: Callable[[MadeRun], None],
) -> None:
    leave(run)
    launched = read_launched(run.paths.launched)
    write_launched(run.paths.launched, launched.model_copy(update={"before": "abc"}))
    assert set(words(run.paths, tmp_path).values()) == {"starting"}
    report = look_at(run.paths)
    assert (report.step, report.samples_per_s, report.reason) == (120, None, None)
    with run_lock(run.paths.lock):
        assert set(words(run.paths, tmp_path).values()) == {"starting"}
        write_launched(run.paths.launched, launched.model_copy(update={"before": "older"}))
        said = {"waiting": "waiting", "training": "training", "stopped": "stopped"}
        assert set(words(run.paths, tmp_path).values()) == {said[leave.__name__]}
    write_launched(run.paths.launched, launched.model_copy(update={"before": "abc"}))
    server.kill()
    server.wait()
    write(run.paths.root / "exits" / "server-mini1", "2\n")
    write(run.paths.logs / "server-mini1.log", log_line(1, "num_epochs is too small", "ERROR"))
    assert (
        look_at(run.paths).reason == "server mini1 ended with exit code 2: num_epochs is too small"
    )
    expected = "stopped" if leave is stopped else "broken off"
    assert set(words(run.paths, tmp_path).values()) == {expected}
