"""Copies of a run that goes on elsewhere."""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from made_runs import MadeRun
from reading import NOW, fake_ssh, launched_run, log_line, said, server, status_of, worker, write
from smolcluster.errors import DataError
from smolcluster.launch.host import Host
from smolcluster.launch.watch import mirror as mirroring
from smolcluster.launch.watch import tail as tailing
from smolcluster.launch.watch.mirror import Mirror
from smolcluster.launch.watch.page import opened
from smolcluster.launch.watch.top.source import Source
from smolcluster.observability.dashboard.app import Views
from smolcluster.observability.view.view import View
from smolcluster.runs.launched import read_launched
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import SeriesFile
from smolcluster.runs.status import write_status
from waiting import eventually


def step_line(step: int) -> str:
    fields = f'"kind": "step", "incarnation": "abc", "step": {step}, "epoch": 0, "loss": 0.5'
    return f'{{"ts": "2026-11-22T06:00:00.000Z", {fields}}}\n'


def keep_series(paths: RunPaths, num_steps: int) -> None:
    """What the owner's machine keeps; its `metrics.jsonl` is asked for by nobody."""
    write(paths.metrics, "".join(map(step_line, range(1, num_steps + 1))))
    paths.series.unlink(missing_ok=True)
    SeriesFile(paths, warn=pytest.fail).close()
    paths.metrics.unlink()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """The run's folder on the server's machine."""
    there = RunPaths(fake_ssh(tmp_path, monkeypatch) / "runs" / "r1")
    there.logs.mkdir(parents=True)
    write_status(there.status, status_of(workers={0: ("pi5", "joined")}))
    keep_series(there, 2)
    write(there.logs / "server-mini1.log", log_line(1, "listening"))
    write(there.logs / "worker-rank0-pi5.log", log_line(2, "joined"))
    return there


def test_a_run_on_other_machines_is_read_there_as_it_goes_on(
    tmp_path: Path, elsewhere: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "SERIES_EVERY_S", 0.0)
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi@pi5"))
    before = sorted(paths.root.rglob("*"))
    view = View(opened(paths, tmp_path / "copies"), clock=lambda: time.monotonic() * 10)
    try:
        eventually(lambda: view.state().get("step") == 120)
        eventually(lambda: view.columns()["steps"]["step"] == [1, 2])
        keep_series(elsewhere, 3)
        eventually(lambda: view.columns()["steps"]["step"] == [1, 2, 3])
        eventually(lambda: sorted(view.log_files()) == ["server-mini1", "worker-rank0-pi5"])
        state = view.state()
        assert (state["problems"], state["state"]) == ([], "broken off"), "its server is gone"
    finally:
        view.folder.close()
    assert list((tmp_path / "copies").iterdir()) == []
    assert sorted(paths.root.rglob("*")) == before


@pytest.mark.parametrize("num_events", [2, 4])
def test_where_not_all_events_come_their_counts_are_at_least(
    tmp_path: Path, elsewhere: RunPaths, monkeypatch: pytest.MonkeyPatch, num_events: int
) -> None:
    monkeypatch.setattr(mirroring, "NUM_EVENTS", num_events)
    monkeypatch.setattr(tailing, "NUM_FIRST", 0)
    run = MadeRun(elsewhere.root.parent, "r1")
    run.started()
    run.joined(0)
    run.joined(1)
    paths = launched_run(tmp_path / "runs", server())
    view = View(opened(paths, tmp_path / "copies"), clock=lambda: time.monotonic() * 10)
    try:
        eventually(lambda: view.events()["counts"].get("worker_joined") == 2)
        assert view.events()["has_older"] == (num_events == 2)
    finally:
        view.folder.close()


def test_a_machine_that_joins_later_is_heard_too(tmp_path: Path, elsewhere: RunPaths) -> None:
    paths = launched_run(tmp_path / "runs", server())
    mirror = Mirror(paths, tmp_path / "copies" / "r1")
    try:
        launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi@pi5"))
        mirror.look()
        eventually(lambda: "worker-rank0-pi5" in View(mirror).log_files())
    finally:
        mirror.close()


def test_a_resumed_runs_old_summary_goes_away(tmp_path: Path, elsewhere: RunPaths) -> None:
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi@pi5"))
    MadeRun(elsewhere.root.parent, "r1").summary()
    mirror = Mirror(paths, tmp_path / "copies" / "r1")
    view = View(mirror)

    def looked() -> View:
        mirror.look()
        view.read()
        return view

    try:
        assert looked().summary is not None
        elsewhere.summary.unlink()
        assert looked().summary is None
        elsewhere.status.unlink()
        assert looked().status is not None, "what it wrote last is still known"
    finally:
        mirror.close()


def test_a_machine_that_cannot_be_reached_is_named_and_the_others_are_shown(
    tmp_path: Path, elsewhere: RunPaths
) -> None:
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi@cut"))
    view = View(opened(paths, tmp_path / "copies"), clock=lambda: time.monotonic() * 10)
    try:
        eventually(lambda: view.state().get("step") == 120)
        eventually(lambda: view.state()["problems"])
        [problem] = view.state()["problems"]
        assert problem.startswith("pi5 (pi@cut): it does not answer")
    finally:
        view.folder.close()


def test_a_server_that_cannot_be_asked_stands_as_it_was_heard_last(
    tmp_path: Path, elsewhere: RunPaths
) -> None:
    paths = launched_run(tmp_path / "runs", server("pi@cut"))
    write_status(paths.status, status_of())
    mirror = Mirror(paths, tmp_path / "copies" / "r1")
    try:
        mirror.look()
        assert mirror.snapshot().state == "unknown"
        assert View(mirror).state()["state"] == "training"
    finally:
        mirror.close()


def test_a_server_that_does_not_answer_once_stands_as_it_was_heard_last_by_its_own_clock(
    tmp_path: Path, elsewhere: RunPaths
) -> None:
    paths = launched_run(tmp_path / "runs", server())
    answers = [said(["running"], status_of(now=NOW))]

    def ask(host: Host, _script: str) -> str:
        if not answers:
            raise host.unreachable("Connection timed out")
        return answers.pop()

    looking = Source(paths, tmp_path / "copies", ask)
    try:
        assert looking.look().report.state == "training"
        cut = looking.look().report
        assert (cut.state, cut.processes[0].process) == ("training", "unreachable")
        assert cut.age_s is not None
        assert cut.age_s < 60, "its clock is behind this one"
    finally:
        looking.close()


def test_a_look_that_fails_takes_nothing_away_that_was_seen(
    tmp_path: Path, elsewhere: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = launched_run(tmp_path / "runs", server())
    mirror = Mirror(paths, tmp_path / "copies" / "r1")
    try:
        mirror.look()
        assert mirror.snapshot().status is not None
        monkeypatch.setattr(mirroring, "LOOK_ELSEWHERE_EVERY_S", 0.0)
        monkeypatch.setattr(mirroring, "look", Mock(side_effect=DataError("it is damaged")))
        mirror.keep_looking()
        eventually(mirror.problems)
        assert "it is damaged" in mirror.problems()
        assert mirror.snapshot().status is not None
    finally:
        mirror.close()


def test_a_run_that_was_fetched_is_read_here_until_it_is_resumed(
    tmp_path: Path, elsewhere: RunPaths
) -> None:
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi@cut"))
    write_status(paths.status, status_of("ended", reason="all is applied"))
    write(paths.metrics, step_line(1))
    for process in read_launched(paths.launched).processes:
        write(paths.logs / f"{process.stem}.log", log_line(1, "hello"))
    views = Views(paths.root.parent, lambda chosen: opened(chosen, tmp_path / "copies"))
    try:
        fetched = views.get("r1")
        assert fetched.folder.served == paths
        assert views.get("r1") is fetched
        paths.status.unlink()  # as a launch does with what it lets go on
        assert views.get("r1").folder.served != paths
    finally:
        views.close()


def test_a_server_here_is_read_here_and_only_the_others_logs_are_copied(
    tmp_path: Path, elsewhere: RunPaths
) -> None:
    root = tmp_path / "runs"
    here = server(None, str(root / "r1"))
    paths = launched_run(root, here, worker(0, "pi5", "pi@pi5"))
    write_status(paths.status, status_of())
    write(paths.logs / "server-mini1.log", log_line(1, "listening"))
    copied = Mirror(paths, tmp_path / "copies" / "r1")
    copied.keep_looking()
    try:
        assert (copied.served, copied.is_here) == (paths, True)
        view = View(copied)
        eventually(lambda: sorted(view.log_files()) == ["server-mini1", "worker-rank0-pi5"])
        eventually(copied.has_looked)
        first, later = copied.snapshot(), copied.snapshot()
        assert first.now < later.now, "it is older by now"
    finally:
        copied.close()
