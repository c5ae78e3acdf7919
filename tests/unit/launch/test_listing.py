"""The table of all runs."""

import os
import time
from pathlib import Path

import pytest

from reading import launched_run, server, status_of, worker, write
from smolcluster.launch.find import RUNS_DIR
from smolcluster.launch.watch.listing import ELSEWHERE, listed, row, runs
from smolcluster.runs.lock import RunLock
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import STOPPED, write_status
from smolcluster.runs.summary import Final, Pushes, Summary, Traffic, write_summary


def summary(run_id: str) -> Summary:
    return Summary(
        algorithm="syncps",
        run_id=run_id,
        wall_s=75.0,
        epochs=4,
        steps=1000,
        train_samples=100,
        samples_applied=400,
        codec="fp32",
        pushes=Pushes(),
        leases_returned=0,
        final=Final(train_loss=0.125),
        bytes=Traffic(),
        workers=[],
    )


def run_of(root: Path, run_id: str, began: float) -> RunPaths:
    paths = create_run(root, run_id)
    os.utime(write(paths.config, ""), (began, began))
    return paths


def test_runs_are_listed_the_newest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_DIR, str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert runs() == 0
    assert "no runs yet" in capsys.readouterr().out
    write_summary(run_of(tmp_path, "b", 10).summary, summary("b"))
    write_status(run_of(tmp_path, "a", 20).status, status_of("failed", reason="it broke"))
    write_status(run_of(tmp_path, "c", 5).status, status_of())
    run_of(tmp_path, "empty", 1)
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "file", "")
    assert [row(run) for run in listed(tmp_path)] == [
        ["empty", "broken off", "", "", "", "local"],
        ["c", "broken off", "120", "0.25", "1 min", "local"],
        ["b", "ended", "1,000", "0.125", "1 min 15 s", "local"],
        ["a", "failed", "120", "0.25", "1 min", "local"],
    ]
    assert runs() == 0
    shown = capsys.readouterr().out
    assert shown.index("empty") < shown.index("1,000") < shown.index("failed")


def test_a_run_that_is_written_now_says_so(tmp_path: Path) -> None:
    paths = run_of(tmp_path, "a", 1)
    with RunLock(paths.lock):
        assert listed(tmp_path)[0].state == "starting"
        write_status(paths.status, status_of("waiting"))
        assert listed(tmp_path)[0].state == "waiting"
        write_summary(paths.summary, summary("a"))  # it goes on after an end
        assert listed(tmp_path)[0].steps == 120
    assert listed(tmp_path)[0].state == "broken off"


def test_a_run_that_was_stopped_says_so(tmp_path: Path) -> None:
    write_status(create_run(tmp_path, "a").status, status_of("ended", reason=STOPPED))
    assert listed(tmp_path)[0].state == "stopped"


def test_a_run_that_has_just_been_started_is_not_broken_off(tmp_path: Path) -> None:
    paths = create_run(tmp_path, "a")
    write(paths.processes, "[]")
    assert listed(tmp_path)[0].state == "starting"
    os.utime(paths.processes, (1.0, 1.0))
    assert listed(tmp_path)[0].state == "broken off"


def test_a_run_on_other_machines(tmp_path: Path) -> None:
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"), worker(1, "mini1", None))
    [run] = listed(tmp_path)
    assert row(run) == ["r1", ELSEWHERE, "", "", "", "mini1, pi5"]
    write_status(paths.status, status_of("ended"))
    assert listed(tmp_path)[0].state == "ended"


def test_damaged_files_hide_no_run(tmp_path: Path) -> None:
    paths = create_run(tmp_path, "a")
    for file in (paths.launched, paths.status, paths.summary, paths.events, paths.config):
        file.write_bytes(b"\xff{")
    [run] = listed(tmp_path)
    assert (run.run_id, run.state) == ("a", ELSEWHERE)
    paths.status.unlink()
    paths.status.mkdir()
    assert len(listed(tmp_path)) == 1


def test_a_thousand_runs_take_no_time(tmp_path: Path) -> None:
    text = status_of("ended").model_dump_json()
    for number in range(1000):
        write(tmp_path / f"r{number}" / "status.json", text)
        write(tmp_path / f"r{number}" / "summary.json", summary("r").model_dump_json())
    begin = time.process_time()
    assert len(listed(tmp_path)) == 1000
    assert time.process_time() - begin < 20.0
