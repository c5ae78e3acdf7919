"""A run of child processes, from its start to its end, and what its launcher makes of signals."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from made_runs import summary_of
from processes import is_alive, pid_in
from reading import status_of
from smolcluster.errors import LaunchError
from smolcluster.launch.run_of_children import RunOfChildren
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import JsonlSink
from smolcluster.runs.asked import ASKED, why_asked
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.paths import RunPaths, create_run, latest_of
from smolcluster.runs.status import STATUS, STOPPED, RunStatus, read_status, write_status
from smolcluster.runs.summary import Final, write_summary
from waiting import DEADLINE_S, eventually

FakePlan = Callable[..., Launched]
IDLE = "wait_for_ever()"
STOPPED_LINE = "stopped: nothing of it is left running"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "edp-1")


Launch = Callable[..., int]


@pytest.fixture
def launch(fake_plan: FakePlan, paths: RunPaths, console: Console) -> Launch:
    """Run these programs, the server's first, to their end: `launch(server, worker, …)`."""

    def carry_out(*programs: str, **options: Any) -> int:
        run = RunOfChildren(fake_plan(*programs), paths, console)
        for name, value in ({"patience_s": DEADLINE_S} | options).items():
            setattr(run, name, value)
        run.start()
        return run.follow()

    return carry_out


@pytest.fixture
def printed(console: Console) -> Callable[[], list[str]]:
    def lines() -> list[str]:
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().splitlines()

    return lines


def all_gone(paths: RunPaths) -> bool:
    for process in read_launched(paths.launched).processes:
        assert process.pid is not None
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


def begun(paths: RunPaths) -> str:
    """A line of a program: wait until all have been started."""
    return f"wait_until(lambda: os.path.exists({str(paths.launched)!r}))\n"


def after_the_end_of(paths: RunPaths, rank: int) -> str:
    """Lines of a server's program: wait until the launcher has noticed the end of a worker."""
    return f"""{begun(paths)}
import json
processes = json.load(open({str(paths.launched)!r}))["processes"]
wait_until(lambda: gone(next(each["pid"] for each in processes if each["rank"] == {rank})))
"""


def writes(paths: RunPaths, status: RunStatus) -> str:
    """A line of a server's program."""
    return f"open({str(paths.status)!r}, 'wb').write({STATUS.text(status)!r})\n"


@pytest.mark.parametrize("code", [0, 75])
def test_the_servers_exit_code_is_returned_and_nothing_is_left(
    launch: Launch, paths: RunPaths, code: int
) -> None:
    worker = "sys.exit(0)" if code == 0 else IDLE
    assert launch(f"{begun(paths)}sys.exit({code})", worker, worker) == code
    assert all_gone(paths)
    assert (paths.root / "exits/server-mini1").read_text() == f"{code}\n"


def test_a_server_that_fails_is_named(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    assert launch("sys.exit('error: port 65432 is taken')", IDLE) == 1
    assert "server mini1   | error: port 65432 is taken" in printed()
    assert "server mini1 ended with exit code 1: the run has failed" in printed()
    assert printed()[-1] == f"files of the run: {paths.root}"


def test_the_closing_words_say_why_a_run_has_failed(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    reason = "the run failed: worker 1 (pi5): loss (train.py:17): KeyError: 'y'"
    assert launch(writes(paths, status_of("failed", reason=reason)) + "sys.exit(3)", IDLE) == 3
    assert f"server mini1 ended with exit code 3: {reason}" in printed()


def test_a_run_that_somebody_else_kills_was_stopped(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    """Nothing of its server's own is left to say so."""
    stop = [sys.executable, "-m", "smolcluster.cli", "stop", str(paths.root), "--now"]
    server = writes(paths, status_of()) + IDLE
    own = "start_new_session=True"  # or it is killed with the worker
    worker = f"{begun(paths)}import subprocess; subprocess.Popen({stop!r}, {own}); {IDLE}"
    assert launch(server, worker) == 128 + signal.SIGKILL
    assert STOPPED_LINE in printed()
    eventually(lambda: read_status(paths.status).word == "stopped")  # by the other one
    assert (paths.root / "exits/server-mini1").read_text() == "137\n"


def test_a_run_in_which_no_worker_took_part_is_not_the_newest(
    launch: Launch, paths: RunPaths
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
        launch(listens, worker, patience_s=0.1)
    assert latest_of(root) == "before"


def test_on_a_terminal_each_process_has_a_colour_and_what_it_says_none(
    fake_plan: FakePlan, paths: RunPaths
) -> None:
    """Also a server and a worker on one node."""
    said = r"print('a\tb \x1b[31m[red]')"
    plan = fake_plan("print('hello')\n" + after_the_end_of(paths, 0), said)
    on_one = tuple(each.model_copy(update={"node": "mini1"}) for each in plan.processes)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system="standard")
    run = RunOfChildren(plan.model_copy(update={"processes": on_one}), paths, console)
    run.start()
    run.follow()
    shown = out.getvalue()
    assert "\x1b[36mserver mini1    \x1b[0m | hello" in shown
    assert "\x1b[35mworker 1 (mini1)\x1b[0m | " + r"a\tb \x1b[31m[red]" in shown


def test_when_a_worker_fails_the_run_goes_on(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    server = after_the_end_of(paths, 0) + "sys.exit(0)"
    assert launch(server, "sys.exit(3)", after_the_end_of(paths, 0), patience_s=0) == 0
    assert printed().count("worker 1 (pi0) ended with exit code 3") == 1


@pytest.mark.parametrize(("code", "launch_code"), [(78, 78), (2, 1)])
def test_a_worker_that_can_never_take_part_ends_its_launch_with_its_sentence(
    launch: Launch, paths: RunPaths, code: int, launch_code: int
) -> None:
    """Also while another one takes part, and waits for it."""
    server = writes(paths, status_of(workers={1: ("pi1", "joined")})) + IDLE
    refused = f"print('error: sample 0 is another one'); print('bye'); sys.exit({code})"
    worker = f"wait_until(lambda: os.path.exists({str(paths.status)!r})); {refused}"
    with pytest.raises(LaunchError) as caught:
        launch(server, worker, IDLE)
    said = f"worker 1 (pi0) ended with exit code {code}: "
    assert str(caught.value).startswith(said)
    assert caught.value.exit_code == launch_code
    assert all_gone(paths)
    failed = read_status(paths.status)
    assert (failed.word, failed.reason) == (
        "failed",
        f"the run failed: {said}error: sample 0 is another one",
    )
    why = next((paths.root / ASKED).glob("server-*"))
    assert why_asked(paths.root) == why.read_text() == f"{said}error: sample 0 is another one"


def test_a_sentence_that_several_children_say_is_shown_once(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    says = "print('12:00:00 ERROR sample 0 is another one', flush=True)"
    ended = after_the_end_of(paths, 0) + after_the_end_of(paths, 1)
    launch(f"{ended}sys.exit(0)", says, says)
    assert sum("sample 0 is another one" in line for line in printed()) == 1
    assert sum("12:00:00 ERROR the same as worker" in line for line in printed()) == 1


def test_a_worker_that_took_part_may_be_refused_later(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    status = status_of(workers={0: ("pi0", "left"), 1: ("pi1", "joined")})
    server = writes(paths, status) + after_the_end_of(paths, 0) + "sys.exit(0)"
    worker = f"wait_until(lambda: os.path.exists({str(paths.status)!r})); sys.exit(78)"
    assert launch(server, worker, after_the_end_of(paths, 0)) == 0
    assert printed().count("worker 1 (pi0) ended with exit code 78") == 1


def test_when_all_workers_have_failed_the_run_is_stopped(launch: Launch, paths: RunPaths) -> None:
    with pytest.raises(
        LaunchError, match=r"worker 1 \(pi0\) ended with exit code 3; worker 2 \(pi1\) ended .* 77"
    ):
        launch(IDLE, "sys.exit(3)", "sys.exit(77)", patience_s=0)
    assert all_gone(paths)
    assert read_status(paths.status).word == "failed"


def test_a_worker_started_by_hand_keeps_the_run_alive(launch: Launch, paths: RunPaths) -> None:
    status = status_of(workers={7: ("laptop", "joined")})
    server = writes(paths, status) + after_the_end_of(paths, 0) + "time.sleep(0.3)"
    worker = f"wait_until(lambda: os.path.exists({str(paths.status)!r})); sys.exit(3)"
    assert launch(server, worker, patience_s=0) == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]], signum: int, code: int
) -> None:
    server = f"{begun(paths)}os.kill(os.getppid(), {int(signum)}); {IDLE}"
    assert launch(server, IDLE, IDLE) == code
    assert all_gone(paths)
    assert "run edp-1: stopped; nothing of it is left running" in printed()
    assert not any("failed" in line for line in printed())


def test_a_run_that_was_complete_when_it_was_interrupted_is_not_to_be_resumed(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    (paths.checkpoints / "step-00000080").mkdir(parents=True)
    complete = status_of("ended", reason="every sample of every epoch has been applied")
    ends = f"os.kill(os.getppid(), {int(signal.SIGINT)}); time.sleep(0.5)"
    server = f"{begun(paths)}signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    assert launch(server + writes(paths, complete) + f"{ends}; {IDLE}", IDLE) == 0
    assert not any("resume" in line for line in printed())


def test_a_run_that_somebody_else_stopped_has_not_failed(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    assert launch(writes(paths, status_of("ended", reason=STOPPED)) + "sys.exit(143)", IDLE) == 143
    assert STOPPED_LINE in printed()
    assert not any("failed" in line for line in printed())


TROUBLE = "step 120 is not saved: no space is left on the disk of mini1"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(0)", 1),
        ("sys.exit(143)", 1),  # somebody else has stopped it
        ("os.kill(os.getppid(), signal.SIGINT)", 1),
        ("sys.exit(3)", 3),
    ],
)
def test_a_run_whose_end_is_not_saved_is_told_so_and_does_not_end_well(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]], ending: str, code: int
) -> None:
    """Its server has ended by itself, and the launcher was asked to end it, or was not."""
    (paths.checkpoints / "step-00000080").mkdir(parents=True)
    reason = {"sys.exit(0)": "every sample has been applied", "sys.exit(3)": "x"}.get(
        ending, STOPPED
    )
    status = status_of("failed" if code == 3 else "ended", reason=reason)
    status = status.model_copy(update={"trouble": TROUBLE})
    assert launch(begun(paths) + writes(paths, status) + ending, "sys.exit(0)") == code
    told = [line for line in printed() if TROUBLE in line]
    assert len(told) == 1
    assert told[0].endswith(f"{TROUBLE}; the newest checkpoint is of step 80")
    assert any("resume" in line and line.endswith("goes on with it") for line in printed())


def test_what_a_run_that_goes_on_said_before_is_of_before(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    """Its status, its progress, and that it was asked to end."""
    write_status(paths.status, status_of("ended", reason=STOPPED))
    sink = JsonlSink(paths.metrics, "1", warn=pytest.fail)
    sink.log(MetricRecord("step", 21, 1, {"loss": 0.5}))
    sink.close()
    (paths.root / "asked").mkdir()
    (paths.root / "asked/server-mini1.4711").touch()
    paths.processes.write_text("[]")
    assert launch(begun(paths) + "sys.exit(1)", IDLE) == 1
    assert "server mini1 ended with exit code 1: the run has failed" in printed()
    assert not any("step 21" in line for line in printed())
    assert not paths.processes.exists()
    assert read_launched(paths.launched).before == "abc", "whoever looks knows it as well"


def test_a_second_ctrl_c_kills_at_once(launch: Launch) -> None:
    server = """
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGINT)
while True:
    time.sleep(1)
"""
    assert launch(server, IDLE, server_grace_s=1e6) == 130


def test_what_was_started_is_stopped_when_another_cannot_be(
    fake_plan: FakePlan,
    paths: RunPaths,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []
    real = subprocess.Popen.__init__

    def note(self: subprocess.Popen[bytes], *args: object, **options: object) -> None:
        real(self, *args, **options)  # type: ignore[call-overload]
        started.append(self.pid)

    plan = fake_plan(IDLE, IDLE)
    broken = plan.workers[0].model_copy(update={"argv": ("/no/such/python",)})
    plan = plan.model_copy(update={"processes": (plan.server, broken)})
    run = RunOfChildren(plan, paths, console)
    run.keep_what_waits()
    monkeypatch.setattr("smolcluster.launch.child.subprocess.Popen.__init__", note)
    with pytest.raises(LaunchError, match=r"cannot start worker 1 \(pi0\)"):
        run.start()
    monkeypatch.undo()
    assert run._children["server-mini1"].pid in started
    eventually(lambda: not any(map(is_alive, started)))


def test_nobody_survives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    names = ("server", "worker0", "worker1")
    children = [
        f"import os; open({str(tmp_path / name)!r}, 'w').write(str(os.getpid()) + chr(10))\n"
        "while os.read(0, 100): pass"
        for name in names
    ]
    program = f"""
import sys
from pathlib import Path
from rich.console import Console
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.launch.run_of_children import RunOfChildren
from smolcluster.runs.paths import create_run

paths = create_run(Path({str(tmp_path)!r}), "edp-1")
processes = [
    LaunchedProcess(node=f"n{{i}}", role="worker" if i else "server", rank=i - 1 if i else None,
                    run_dir=str(paths.root), argv=(sys.executable, "-c", text))
    for i, text in enumerate({children!r})
]
run = RunOfChildren(Launched(run_id="edp-1", algorithm="edp", processes=processes), paths, Console())
run.start()
run.follow()
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    pids = [pid_in(tmp_path / name) for name in names]
    launcher.kill()
    launcher.wait()
    eventually(lambda: not any(map(is_alive, pids)))


def test_progress_comes_from_the_runs_metrics(
    fake_plan: FakePlan, paths: RunPaths, console: Console, printed: Callable[[], list[str]]
) -> None:
    run = RunOfChildren(fake_plan("", ""), paths, console, num_epochs=3)
    run.start()
    sink = JsonlSink(paths.metrics, "1", warn=pytest.fail)
    sink.log(MetricRecord("eval", 20, 0, {"val_accuracy": 0.75}))
    sink.log(MetricRecord("step", 21, 1, {"loss": 0.5}))
    sink.close()
    write_summary(paths.summary, summary_of(epochs=3, final=Final(val_accuracy=0.9722)))
    assert run.follow() == 0
    assert "epoch 2/3 · step 21 · loss 0.500 · acc 0.750" in printed()
    assert any(line.endswith("accuracy  0.9722") for line in map(str.rstrip, printed()))


def test_a_full_disk_does_not_keep_a_run_from_starting(
    launch: Launch, paths: RunPaths, printed: Callable[[], list[str]]
) -> None:
    paths.launched.mkdir()
    assert launch("", "") == 0
    assert any("launch.json" in line and "goes on" in line for line in printed())
