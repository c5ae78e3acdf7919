"""The table of all runs, and which of them a command means that names none."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from made_runs import summary_of
from reading import Terminal, children_of, launched_run, said, server, status_of, worker, write
from smolcluster.errors import ConfigError
from smolcluster.launch.find import find
from smolcluster.launch.host import Host, TookTooLong
from smolcluster.launch.watch import listing
from smolcluster.launch.watch.listing import listed, living, row, runs
from smolcluster.launch.watch.probe import Ask
from smolcluster.observability.view.listing import ListedRun
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RUNS_DIR, RunPaths, create_run
from smolcluster.runs.status import STOPPED, RunStatus, instant, write_status
from smolcluster.runs.summary import Final, Summary, write_summary


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNS_DIR, str(tmp_path))


def summary(run_id: str) -> Summary:
    final = Final(train_loss=0.125)
    return summary_of(run_id, algorithm="syncps", wall_s=75.0, steps=1000, final=final)


def run_of(root: Path, run_id: str, began: float) -> RunPaths:
    paths = create_run(root, run_id)
    os.utime(write(paths.config, ""), (began, began))
    return paths


def test_runs_are_listed_the_newest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
        ["b", "ended", "1,000", "~0.125", "1 min 15 s", "local"],
        ["a", "failed", "120", "0.25", "1 min", "local"],
    ]
    assert runs() == 0
    shown = capsys.readouterr().out
    assert shown.index("empty") < shown.index("1,000") < shown.index("failed")


def listed_run(root: Path) -> ListedRun:
    name = "syncps-20261122-175014-1771"
    write_summary(run_of(root, name, 10).summary, summary(name))
    [run] = listed(root)
    large = {"state": "stopped", "steps": 163_285, "loss": 7.451e-09, "wall_s": 430.0}
    return run.model_copy(update={**large, "nodes": ("mini1", "mini2", "pi5", "laptop")})


@pytest.mark.parametrize("width", [28, 40, 60, 80])
def test_the_names_of_runs_are_whole_on_narrow_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    name = "syncps-20261120-135025-3f9c"
    write_summary(run_of(tmp_path, name, 10).summary, summary(name))
    assert runs() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == [name] for line in lines)
    assert max(map(len, lines)) <= width


def test_no_machine_is_left_out_where_there_is_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = listed_run(tmp_path)
    monkeypatch.setattr(listing, "listed", lambda *_, **__: [run])
    assert runs() == 0
    shown = capsys.readouterr().out
    assert [node for node in run.nodes if node not in shown] == []


def test_a_run_that_is_written_now_says_so(tmp_path: Path) -> None:
    paths = run_of(tmp_path, "a", 1)
    with run_lock(paths.lock):
        assert listed(tmp_path)[0].state == "starting"
        write_status(paths.status, status_of("waiting"))
        assert listed(tmp_path)[0].state == "waiting"
        write_summary(paths.summary, summary("a"))  # it goes on after an end
        assert listed(tmp_path)[0].steps == 120
    assert listed(tmp_path)[0].state == "broken off"


def test_a_run_that_has_just_been_started_is_not_broken_off(tmp_path: Path) -> None:
    paths = create_run(tmp_path, "a")
    children_of(paths, 2**22 + 1)
    assert listed(tmp_path)[0].state == "starting"
    os.utime(paths.launched, (1.0, 1.0))
    assert listed(tmp_path)[0].state == "broken off"


def answering(*processes: str, status: RunStatus | None = None) -> tuple[Ask, list[str]]:
    """Machines that say so of their processes, one each, the server's first; and a list of who was asked."""
    asked: list[str] = []

    def ask(host: Host, _script: str) -> str:
        asked.append(host.node)
        if not processes:
            raise TookTooLong("it takes long")
        is_server = host.node == "mini1"
        process = processes[0] if is_server else processes[-1]
        return said([process], status if is_server else None, time.time())

    return ask, asked


def test_a_run_on_other_machines_is_asked_for_until_it_is_over(tmp_path: Path) -> None:
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"))
    silent, _ = answering()
    assert row(listed(tmp_path, silent)[0]) == ["r1", "unknown", "", "", "", "mini1, pi5"]
    alive, _ = answering("running", status=status_of())
    [run] = listed(tmp_path, alive)
    assert (run.is_alive, row(run)[1:4]) == (True, ["training", "120", "0.25"])
    [run] = listed(tmp_path, silent)  # what they said last
    assert (run.is_alive, run.state, run.steps) == (None, "training", 120)
    later = run.model_copy(update={"as_of": instant(time.time() - 720)})
    assert row(later)[1] == "training, 12 min ago"
    over, asked = answering("ended 0", status=status_of("ended", reason=STOPPED))
    for _ in range(2):
        [run] = listed(tmp_path, over)
        assert (run.is_alive, run.state, run.steps) == (False, "stopped", 120)
    assert sorted(asked) == ["mini1", "pi5"], "once"
    paths.standing.unlink()  # it goes on
    assert listed(tmp_path, alive)[0].state == "training"


def test_a_run_that_is_started_while_its_machines_are_asked_is_asked_for_again(
    tmp_path: Path,
) -> None:
    paths = launched_run(tmp_path, server())
    gone, _ = answering("gone")

    def start_meanwhile(host: Host, script: str) -> str:
        os.utime(paths.launched, (1.0, 1.0))
        return gone(host, script)

    assert listed(tmp_path, start_meanwhile)[0].is_alive is False
    alive, _ = answering("running", status=status_of())
    assert listed(tmp_path, alive)[0].is_alive is True


def test_a_run_on_other_machines_that_was_fetched_is_not_asked_for(tmp_path: Path) -> None:
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"))
    write_status(paths.status, status_of("ended"))
    ask, asked = answering("running")
    assert [run.state for run in listed(tmp_path, ask)] == ["ended"]
    assert asked == []


def test_json_has_a_shape_to_rely_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(run_of(tmp_path, "b", 10).summary, summary("b"))
    assert runs(as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "run_id": "b",
            "algorithm": "syncps",
            "state": "ended",
            "is_alive": False,
            "steps": 1000,
            "loss": 0.125,
            "loss_is": "mean of the last epoch",
            "val_loss": None,
            "wall_s": 75.0,
            "nodes": [],
            "began_at": "1970-01-01T00:00:10.000Z",
            "as_of": None,
        }
    ]


# which run is meant


def test_the_run_that_lives_is_meant_before_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_of(tmp_path, "first", 1), run_of(tmp_path, "second", 2)
    assert find("latest") == second
    with run_lock(first.lock):
        assert find("latest", acts=True) == first
        assert "first" in capsys.readouterr().err
        with run_lock(second.lock):
            assert find("latest") == second
            assert "first" in capsys.readouterr().err
            assert find("first", acts=True) == first
            with pytest.raises(ConfigError, match="second, first"):
                find("latest", acts=True)
            for answer, meant in (("2\n", first), ("second\n", second)):
                monkeypatch.setattr(sys, "stdin", Terminal(answer))
                monkeypatch.setattr(sys, "stderr", Terminal())
                assert find("latest", acts=True) == meant
    assert find("latest") == second


def test_a_run_on_other_machines_lives_if_they_say_so(tmp_path: Path) -> None:
    launched_run(tmp_path, server(), worker(0, "pi5", "pi5"))
    alive, asked = answering("gone", "running")
    assert [paths.run_id for paths in living(tmp_path, alive)] == ["r1"]
    assert asked == [], "it is the newest, and no other can live"
    run_of(tmp_path, "newer", time.time())
    assert [paths.run_id for paths in living(tmp_path, alive)] == ["r1"], "a worker does"
    silent, _ = answering()
    assert living(tmp_path, silent) == []
    gone, _ = answering("gone")
    assert living(tmp_path, gone) == []


@contextmanager
def session(run_dir: Path, stem: str) -> Iterator[None]:
    """A process of the run `r1` as its session starts it."""
    program = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program, run_dir.name]) as process:
        write(run_dir / "pids" / stem, f"{process.pid}\n")
        yield
        process.kill()


def test_a_run_of_this_machine_lives_as_long_as_its_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    own = worker(0, "mini1", None, str(folder))
    launched_run(tmp_path, server(None, str(folder)), own)
    with session(folder, own.stem):
        assert [paths.run_id for paths in living(tmp_path)] == ["r1"]
    assert living(tmp_path) == []
    write(folder / "pids" / own.stem, f"{os.getpid()}\n")
    assert living(tmp_path) == [], "it is the number of another process now"


def test_a_run_whose_server_is_elsewhere_stands_as_that_says_while_a_worker_lives_here(
    tmp_path: Path,
) -> None:
    own = worker(0, "laptop", None, str(tmp_path / "r1"))
    launched_run(tmp_path, server(), own)
    with session(tmp_path / "r1", own.stem):
        alive, _ = answering("running", status=status_of())
        [run] = listed(tmp_path, alive)
        assert (run.state, run.steps, run.is_alive) == ("training", 120, True)
        silent, _ = answering()
        [run] = listed(tmp_path, silent)
        assert (run.state, run.is_alive) == ("training", True), "as it was heard last"


def test_damaged_files_hide_no_run(tmp_path: Path) -> None:
    paths = create_run(tmp_path, "a")
    for file in (paths.launched, paths.status, paths.summary, paths.events, paths.config):
        file.write_bytes(b"\xff{")
    [run] = listed(tmp_path)
    assert (run.run_id, run.state) == ("a", "unknown")
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
