import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from harness import summary_of
from reading import status_of
from smolcluster.errors import LaunchError
from smolcluster.launch.run import LocalRun
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import JsonlSink
from smolcluster.runs.events import EventLog, RunEnded, WorkerJoined
from smolcluster.runs.launched import Launched
from smolcluster.runs.paths import RunPaths, create_run, latest_of
from smolcluster.runs.processes import read_processes
from smolcluster.runs.status import STOPPED, read_status, write_status
from smolcluster.runs.summary import write_summary

FakePlan = Callable[..., Launched]
IDLE = "wait_for_ever()"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "edp-1")


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def all_gone(paths: RunPaths) -> bool:
    for entry in read_processes(paths.processes):
        try:
            os.kill(entry.pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


def after_the_end_of(paths: RunPaths, rank: int) -> str:
    """A line of a server's program: wait until the launcher has noticed the end of a worker."""
    return f"""
import json
def pid():
    return next(e["pid"] for e in json.load(open({str(paths.processes)!r})) if e["rank"] == {rank})
wait_until(lambda: os.path.exists({str(paths.processes)!r}) and gone(pid()))
"""


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_servers_exit_code_is_returned_and_nothing_is_left(
    fake_plan: FakePlan, paths: RunPaths, console: Console, code: int
) -> None:
    waiting = f"wait_until(lambda: os.path.exists({str(paths.processes)!r}))"
    worker = "sys.exit(0)" if code == 0 else IDLE
    run = LocalRun(fake_plan(f"{waiting}\nsys.exit({code})", worker, worker), paths, console)
    assert run.run() == code
    assert all_gone(paths)


def test_a_server_that_fails_is_named(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    LocalRun(fake_plan("sys.exit('error: port 65432 is taken')", IDLE), paths, console).run()
    assert "server mini1   | error: port 65432 is taken" in printed(console)
    assert "server mini1 ended with exit code 1: the run has failed" in printed(console)
    assert printed(console)[-1] == f"files of the run: {paths.root}"


def test_a_run_that_somebody_else_kills_was_stopped(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    """Nothing of its server's own is left to say so."""
    write_status(paths.status, status_of())
    stop = (
        "import sys; from pathlib import Path; from smolcluster.launch.stop import stop_children; "
        "from smolcluster.runs.paths import RunPaths; stop_children(RunPaths(Path(sys.argv[1])), now=True)"
    )
    listed = f"wait_until(lambda: os.path.exists({str(paths.processes)!r}))"
    worker = (
        f"{listed}; os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, '-c', {stop!r}, "
        f"{str(paths.root)!r}]); {IDLE}"
    )
    assert LocalRun(fake_plan(IDLE, worker), paths, console).run() == 128 + signal.SIGKILL
    assert "stopped: nothing of it is left running" in printed(console)
    assert read_status(paths.status).word == "stopped"
    assert (paths.root / "exits/server-mini1").read_text() == "137\n"


def test_a_run_in_which_no_worker_took_part_is_not_the_newest(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    """Its server had listened."""
    root = paths.root.parent
    create_run(root, "before")
    listens = f"""
os.symlink('edp-1', {str(root / "beside")!r})
os.replace({str(root / "beside")!r}, {str(root / "latest")!r})
wait_for_ever()
"""
    worker = f"wait_until(lambda: os.readlink({str(root / 'latest')!r}) == 'edp-1')\nsys.exit(77)"
    with pytest.raises(LaunchError, match="no worker is left"):
        LocalRun(fake_plan(listens, worker), paths, console, patience_s=0.1).run()
    assert latest_of(root) == "before"


def test_a_server_and_a_worker_on_one_node_are_told_apart(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    plan = fake_plan("print('hello')\n" + after_the_end_of(paths, 0), "print('hello')")
    on_one = [each.model_copy(update={"node": "mini1"}) for each in plan.processes]
    LocalRun(plan.model_copy(update={"processes": tuple(on_one)}), paths, console).run()
    assert "server mini1     | hello" in printed(console)
    assert "worker 1 (mini1) | hello" in printed(console)
    entries = read_processes(paths.processes)
    assert [(entry.node, entry.role, entry.rank) for entry in entries] == [
        ("mini1", "server", None),
        ("mini1", "worker", 0),
    ]


def test_on_a_terminal_the_names_have_colours_and_elsewhere_they_have_none(
    fake_plan: FakePlan, paths: RunPaths
) -> None:
    shown = {}
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(
            file=out,
            force_terminal=terminal,
            width=120,
            color_system="standard" if terminal else None,
        )
        said = r"print('a\tb \x1b[31m[red]')"
        plan = fake_plan("print('hello')\n" + after_the_end_of(paths, 0), said)
        LocalRun(plan, paths, console).run()
        shown[terminal] = out.getvalue()
        paths.processes.unlink()
    assert "\x1b[36mserver mini1  \x1b[0m | hello" in shown[True]
    assert "\x1b[35mworker 1 (pi0)\x1b[0m | a" in shown[True]
    assert r"worker 1 (pi0) | a\tb \x1b[31m[red]" in shown[False].splitlines()
    assert "\x1b" not in shown[False]


def test_sessions_that_the_run_had_before_are_forgotten(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    paths.launched.write_text("{}")
    assert LocalRun(fake_plan(""), paths, console).run() == 0
    assert not paths.launched.exists()
    assert paths.processes.exists()


def test_when_a_worker_fails_the_run_goes_on(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    server = after_the_end_of(paths, 0) + "sys.exit(0)"
    plan = fake_plan(server, "sys.exit(3)", after_the_end_of(paths, 0))
    assert LocalRun(plan, paths, console, patience_s=0).run() == 0
    assert printed(console).count("worker 1 (pi0) ended with exit code 3") == 1


def test_when_all_workers_have_failed_the_run_is_stopped(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    run = LocalRun(fake_plan(IDLE, "sys.exit(3)", "sys.exit(77)"), paths, console, patience_s=0)
    with pytest.raises(
        LaunchError, match=r"worker 1 \(pi0\) ended with exit code 3; worker 2 \(pi1\) ended .* 77"
    ):
        run.run()
    assert all_gone(paths)


def test_a_worker_started_by_hand_keeps_the_run_alive(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    events = EventLog(paths.events, "1", warn=pytest.fail)
    events.write(WorkerJoined(rank=7, node="laptop", device="cpu", samples_per_s=1.0))
    events.close()
    server = after_the_end_of(paths, 0) + "time.sleep(0.3)"
    run = LocalRun(fake_plan(server, "sys.exit(3)"), paths, console, patience_s=0)
    assert run.run() == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(
    fake_plan: FakePlan, paths: RunPaths, console: Console, signum: int, code: int
) -> None:
    server = f"""
wait_until(lambda: os.path.exists({str(paths.processes)!r}))
os.kill(os.getppid(), {int(signum)})
wait_for_ever()
"""
    assert LocalRun(fake_plan(server, IDLE, IDLE), paths, console).run() == code
    assert all_gone(paths)
    assert "stopped: nothing of it is left running" in printed(console)
    assert not any("failed" in line for line in printed(console))


def test_a_run_that_somebody_else_stopped_has_not_failed(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    events = EventLog(paths.events, "1", warn=pytest.fail)
    events.write(RunEnded(ok=False, reason=STOPPED, wall_s=1.0, steps=1, samples_applied=1))
    events.close()
    assert LocalRun(fake_plan("sys.exit(143)", IDLE), paths, console).run() == 143
    assert "stopped: nothing of it is left running" in printed(console)
    assert not any("failed" in line for line in printed(console))


def test_a_second_ctrl_c_kills_at_once(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    server = """
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGINT)
while True:
    time.sleep(1)
"""
    begun = time.monotonic()
    assert LocalRun(fake_plan(server, IDLE), paths, console, grace_s=1000).run() == 130
    assert time.monotonic() - begun < 60


def test_what_was_started_is_stopped_when_another_cannot_be(
    fake_plan: FakePlan,
    paths: RunPaths,
    console: Console,
    ends: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []
    real = subprocess.Popen.__init__

    def note(self: subprocess.Popen[bytes], *args: object, **options: object) -> None:
        real(self, *args, **options)  # type: ignore[call-overload]
        started.append(self.pid)

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    plan = fake_plan(IDLE, IDLE)
    broken = plan.workers[0].model_copy(update={"argv": ("/no/such/python",)})
    plan = plan.model_copy(update={"processes": (plan.server, broken)})
    with pytest.raises(LaunchError, match=r"cannot start worker 1 \(pi0\)"):
        LocalRun(plan, paths, console).run()
    monkeypatch.undo()
    assert len(started) == 1
    assert ends(started[0])


def test_nobody_survives_a_launcher_that_is_killed(
    tmp_path: Path, ends: Callable[[int], bool], pid_in: Callable[[Path], int]
) -> None:
    children = [
        f"import os; open({str(tmp_path / name)!r}, 'w').write(str(os.getpid()) + chr(10))\n"
        "while os.read(0, 100): pass"
        for name in ("server", "worker0", "worker1")
    ]
    program = f"""
import sys
from pathlib import Path
from rich.console import Console
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.launch.run import LocalRun
from smolcluster.runs.paths import create_run

programs = {children!r}
processes = [
    LaunchedProcess(node=f"n{{i}}", role="worker" if i else "server", rank=i - 1 if i else None,
                    argv=(sys.executable, "-c", text))
    for i, text in enumerate(programs)
]
paths = create_run(Path({str(tmp_path)!r}), "edp-1")
plan = Launched(run_id="edp-1", algorithm="edp", processes=processes)
LocalRun(plan, paths, Console()).run()
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    pids = [pid_in(tmp_path / name) for name in ("server", "worker0", "worker1")]
    launcher.kill()
    launcher.wait()
    assert [ends(pid) for pid in pids] == [True, True, True]


@pytest.mark.parametrize("resumed", [False, True])
def test_progress_comes_from_the_runs_metrics_and_is_only_what_is_new(
    fake_plan: FakePlan, paths: RunPaths, console: Console, resumed: bool
) -> None:
    sink = JsonlSink(paths.metrics, "1", warn=pytest.fail)
    sink.log(MetricRecord("eval", 20, 0, {"val_accuracy": 0.75}))
    sink.log(MetricRecord("step", 21, 1, {"loss": 0.5}))
    sink.close()
    LocalRun(fake_plan("", ""), paths, console, num_epochs=3, resumed=resumed).run()
    is_shown = "epoch 2/3 · step 21 · loss 0.500 · acc 0.750" in printed(console)
    assert is_shown != resumed


def test_at_the_end_there_is_a_table(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    summary = summary_of(3, val_accuracy=0.9722)
    write_summary(paths.summary, summary)
    assert LocalRun(fake_plan("", ""), paths, console).run() == 0
    assert any(line.endswith("accuracy  0.9722") for line in map(str.rstrip, printed(console)))


def test_a_full_disk_does_not_keep_a_run_from_starting(
    fake_plan: FakePlan, paths: RunPaths, console: Console
) -> None:
    paths.processes.mkdir()
    assert LocalRun(fake_plan("", ""), paths, console).run() == 0
    assert any("processes.json" in line and "goes on" in line for line in printed(console))
