"""What a launcher makes of Ctrl-C and of a terminal that goes, and what it notes of a run."""

import io
import os
import select
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import smolcluster.launch.run
from made_runs import summary_of
from processes import is_alive
from reading import Terminal, server, status_of, worker, write
from smolcluster.configs.load import dump_yaml, find_config, read_config
from smolcluster.configs.resolve import load_settings, save_resolved
from smolcluster.errors import CheckpointError, ConfigError, LaunchError, RunBusy
from smolcluster.launch import run_in_sessions
from smolcluster.launch.flow import LaunchOptions
from smolcluster.launch.interrupts import Interrupts
from smolcluster.launch.kept import TOLD_FILE, StoredOptions, going_on, keep, request_again
from smolcluster.launch.plan import CLUSTER_FILE, TRAIN_FILE
from smolcluster.launch.requests import settings_of
from smolcluster.launch.run import missing_workers
from smolcluster.launch.run_in_sessions import RunInSessions
from smolcluster.launch.saved import resume
from smolcluster.launch.sessions import begin, exit_code
from smolcluster.launch.stop import StopResult
from smolcluster.launch.take_in import with_worker
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched, write_launched
from smolcluster.runs.paths import RunPaths, create_run, latest_of
from smolcluster.runs.status import Presence
from smolcluster.runs.summary import write_summary
from waiting import eventually


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "r1")


@pytest.fixture
def run(paths: RunPaths, console: Console) -> RunInSessions:
    processes = (server(None, str(paths.root)),)
    return RunInSessions(
        Launched(run_id="r1", algorithm="edp", processes=processes), paths, console
    )


TOLD_NOTHING = StoredOptions(environ={}, overrides=())
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
    run: RunInSessions,
    monkeypatch: pytest.MonkeyPatch,
    typed: str | None,
    received: list[int],
    leaves: bool,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO() if typed is None else Terminal(typed))
    monkeypatch.setattr(select, "select", lambda files, *_: (files, [], []))
    assert run._is_to_be_left(Interrupts(received)) is leaves


def test_a_terminal_that_goes_while_it_is_asked_leaves_the_run(
    run: RunInSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Interrupts([INT])

    def nothing_typed(*_: object) -> tuple[list[object], list[object], list[object]]:
        asked.received.append(HUP)
        return [], [], []

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(select, "select", nothing_typed)
    assert run._is_to_be_left(asked)


SLEEPS = ("sleep", "600")
JOINED: dict[int, tuple[str, Presence]] = {0: ("pi5", "joined"), 1: ("pi5", "joined")}


def resumed(
    paths: RunPaths,
    console: Console,
    joined: dict[int, tuple[str, Presence]] = JOINED,
    **changes: Any,
) -> RunInSessions:
    """A run of two workers that was launched before, and goes on with these changes of worker 1.

    Its sessions are real. What they run does nothing, but that the server says at once who has `joined`.
    """
    folder = str(paths.root)
    told = write(paths.root / "told.json", status_of(workers=joined).model_dump_json())
    latest = f"ln -sfn {paths.root.name} {paths.root.parent}/latest"
    tells = ("sh", "-c", f"{latest}; cp {told} {paths.status}; sleep 600")
    home = {"project_dir": str(paths.root.parent)}
    own = server(None, folder).model_copy(update=home | {"argv": tells})
    workers = [
        worker(rank, "pi5", None, folder).model_copy(update=home | {"argv": SLEEPS})
        for rank in (0, 1)
    ]
    before = Launched(run_id="r1", algorithm="edp", processes=(own, *workers))
    write_launched(paths.launched, before)
    now = (own, workers[0].model_copy(update=changes), workers[1])
    return RunInSessions(before.model_copy(update={"processes": now}), paths, console)


def pid_of(process: LaunchedProcess) -> int:
    """The id of the shell that runs it, once that has come so far."""
    file = Path(process.run_dir) / "pids" / process.stem
    eventually(lambda: file.exists() and file.read_text().strip() != "")
    return int(file.read_text())


def worker_of_before(paths: RunPaths) -> int:
    """Start worker 1 as the run was launched before; returns its process id."""
    first = read_launched(paths.launched).workers[0]
    begin(first, {})
    return pid_of(first)


@pytest.mark.parametrize("before", [None, "another launch of it"])
def test_a_run_ends_with_what_was_started_in_it_since(
    run: RunInSessions, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    late = worker(1, "pi6", None, str(paths.root))
    told = run._launched.with_worker(late).model_copy(update={"before": before})
    write_launched(paths.launched, told)
    ended: list[Launched] = []

    def end(launched: Launched, **_: object) -> StopResult:
        ended.append(launched)
        return StopResult(left=[], was_over=False)

    monkeypatch.setattr(smolcluster.launch.run, "stop_processes", end)
    assert run.stop() == 0
    assert (late in ended[0].processes) is (before is None)


@pytest.mark.usefixtures("own_tmux")
def test_workers_that_look_for_their_server_are_kept_when_it_is_started_again(
    paths: RunPaths, console: Console
) -> None:
    run = resumed(paths, console)
    first, second = run._launched.workers
    waiting = worker_of_before(paths)
    run.keep_what_waits()
    write(paths.status, status_of(workers=JOINED).model_dump_json())
    run._start_workers(Interrupts([]))
    assert pid_of(first) == waiting
    assert is_alive(waiting)
    assert is_alive(pid_of(second))
    os.killpg(waiting, signal.SIGKILL)  # it has given up before it was let in
    eventually(lambda: exit_code(first) is not None)
    run._check_alive([first], Interrupts([]))
    eventually(lambda: pid_of(first) != waiting)


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize(
    ("ranks", "said"), [((0, 1), "all have joined"), ((0,), "not joined: worker 2 (pi5)")]
)
def test_that_all_have_joined_is_said_only_if_so(
    paths: RunPaths, console: Console, ranks: tuple[int, ...], said: str
) -> None:
    """A run may be over before a worker comes."""
    run = resumed(paths, console)
    status = status_of("ended", workers={rank: JOINED[rank] for rank in ranks})
    write(paths.status, status.model_dump_json())
    run._start_workers(Interrupts([]))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith(said)


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize("changes", [{"argv": ("sleep", "601")}, {"project_dir": "/"}])
def test_a_worker_of_another_command_or_code_is_started_anew(
    paths: RunPaths, console: Console, changes: dict[str, Any]
) -> None:
    run = resumed(paths, console, **changes)
    old = worker_of_before(paths)
    run.keep_what_waits()
    assert is_alive(old), "the launch may still be refused"
    run.start()
    assert not is_alive(old)
    assert run._kept == set()
    eventually(lambda: is_alive(pid_of(run._launched.workers[0])))


@pytest.mark.usefixtures("own_tmux")
def test_a_run_whose_server_lives_is_not_started_again(paths: RunPaths, console: Console) -> None:
    run = resumed(paths, console)
    begin(run._launched.server, {})
    with pytest.raises(RunBusy, match="server mini1"):
        run.keep_what_waits()
    assert is_alive(pid_of(run._launched.server))


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


@pytest.mark.parametrize(
    ("overrides", "now", "samples"),
    [
        ((), [], 96),
        (["batch_size=8"], [], 24),
        (["global_batch_size=100"], [], 100),
        ((), ["global_batch_size=64"], 64),
        ((), ["batch_size=16"], 48),
        ((), ["num_workers=2"], 96),
        (["global_batch_size=100"], ["batch_size=16", "global_batch_size=50"], 50),
    ],
)
def test_a_run_that_goes_on_without_a_machine_keeps_its_global_batch(
    paths: RunPaths, overrides: Sequence[str], now: Sequence[str], samples: int
) -> None:
    launched, name = launched_syncps(paths, overrides)
    settings = settings_of(going_on(paths, launched, now, [name]), local=False)
    assert name not in settings.cluster.workers
    assert settings.global_batch_size == samples


def launched_syncps(paths: RunPaths, overrides: Sequence[str] = ()) -> tuple[Launched, str]:
    """A run of three workers that was launched from here, and the name of the last one."""
    cluster, train = find_config("syncps", "cluster"), find_config("digits", "training")
    told = StoredOptions(environ={}, overrides=tuple(overrides))
    keep(paths, cluster.read_bytes(), train.read_bytes(), told)
    processes = (server(None, str(paths.root)),)
    launched = Launched(run_id=paths.run_id, algorithm="syncps", processes=processes)
    return launched, load_settings(cluster, train).cluster.workers[-1]


@pytest.mark.parametrize(
    ("trained", "now", "samples"),
    [
        (["batch_size=64"], [], 192),  # as the user's own loader says
        (["batch_size=64"], ["batch_size=16"], 192),
        (["global_batch_size=96"], ["batch_size=16"], 48),  # it has gone on before
    ],
)
def test_what_a_step_has_is_known_by_the_server_also_when_a_machine_has_joined(
    paths: RunPaths, trained: Sequence[str], now: Sequence[str], samples: int
) -> None:
    launched, _ = launched_syncps(paths)
    save_resolved(load_settings("syncps", "digits", None, trained), paths.config)
    file = paths.root / CLUSTER_FILE
    more = with_worker(read_config(file, "cluster"), "nas", "10.10.0.1", {})
    keep(paths, dump_yaml(more).encode(), (paths.root / TRAIN_FILE).read_bytes(), TOLD_NOTHING)
    request = going_on(paths, launched, now)
    settings = settings_of(request, local=False)
    assert (settings.cluster.num_workers, settings.global_batch_size) == (4, samples)
    assert request.overrides == tuple(now), "what the user says is kept apart"


def test_a_worker_s_batch_alone_does_not_change_a_step_whose_samples_were_said(
    paths: RunPaths,
) -> None:
    launched, _ = launched_syncps(paths, ["global_batch_size=100"])
    with pytest.raises(ConfigError, match=r"was 32 and is 16, but a step has 100 samples"):
        going_on(paths, launched, ["batch_size=16"])
    assert going_on(paths, launched, ["batch_size=16", "gradient_accumulation=2"]).kept


def test_a_run_that_has_ended_is_told_so_before_a_machine_is_asked(paths: RunPaths) -> None:
    cluster, train = find_config("edp", "cluster"), find_config("digits", "training")
    told = StoredOptions(environ={}, overrides=())
    keep(paths, cluster.read_bytes(), train.read_bytes(), told)
    write_summary(paths.summary, summary_of(epochs=30))
    launched = Launched(run_id=paths.run_id, algorithm="edp", processes=(server(),))
    write_launched(paths.launched, launched)
    with pytest.raises(CheckpointError, match=r"has ended; .* --override num_epochs=60"):
        resume(str(paths.root), None, ["num_epochs=30"], LaunchOptions())
    assert resume(str(paths.root), None, ["num_epochs=60"], LaunchOptions(dry_run=True)) == 0


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize(("code", "passed_on"), [(75, 75), (77, 77), (78, 78), (1, 1), (137, 1)])
def test_the_code_of_a_process_that_says_what_to_do_is_passed_on(
    paths: RunPaths, console: Console, code: int, passed_on: int
) -> None:
    fails = ("sh", "-c", f"echo port 6000 is in use >&2; exit {code}")
    run = resumed(paths, console, argv=fails)
    first = run._launched.workers[0]
    begin(first, {})
    eventually(lambda: exit_code(first) is not None)
    with pytest.raises(LaunchError, match=f"exit code {code}: port") as caught:
        run._check_alive([first], Interrupts([]))
    assert caught.value.exit_code == passed_on


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize("fails", [True, False])
def test_the_newest_run_is_one_whose_start_has_not_failed(
    paths: RunPaths, console: Console, fails: bool
) -> None:
    """It fails when a server that listens here has a worker that ends badly."""
    create_run(paths.root.parent, "before")
    if fails:
        run = resumed(paths, console, {1: ("pi5", "joined")}, argv=("false",))
    else:
        run = resumed(paths, console)
    with pytest.raises(LaunchError, match="ended with exit code 1") if fails else nullcontext():
        run.start()
    assert latest_of(paths.root.parent) == ("before" if fails else "r1")
    assert is_alive(pid_of(run._launched.server)) is not fails


@pytest.mark.usefixtures("own_tmux")
def test_a_run_that_was_found_dead_while_it_was_started_is_looked_at_again(
    paths: RunPaths, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resumed(paths, console)

    def look_then_begin(process: LaunchedProcess, env: dict[str, str]) -> None:
        write(paths.standing, '{"is_alive": false}')
        os.utime(paths.launched, (1.0, 1.0))
        begin(process, env)

    monkeypatch.setattr(run_in_sessions, "begin", look_then_begin)
    run._start_server(Interrupts([]))
    assert not paths.standing.exists()
    assert paths.launched.stat().st_mtime > 1.0, "who asked before notices it"


@pytest.mark.usefixtures("own_tmux")
def test_a_server_that_neither_listens_nor_logs_is_given_up(
    paths: RunPaths, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = server(None, str(paths.root)).model_copy(
        update={"argv": SLEEPS, "project_dir": str(paths.root)}
    )
    lines = ["reading 1", "reading 2", "tokens"]
    waited: list[str] = []

    class Telling(RunInSessions):
        """Its server logs the next line when the one before has been told, and none after the last."""

        def say(self, text: str, *_: object) -> None:
            if text.startswith("waiting"):
                waited.append(text)
            if len(lines) > 1 and text.endswith(lines[0]):
                lines.pop(0)
            if len(lines) == 1:
                monkeypatch.setattr(run_in_sessions, "SERVER_SILENT_S", 0.2)
            write(paths.logs / f"{own.stem}.log", f"{lines[0]}\n")

    for name, value in {"TOLD_EVERY_S": 0.0, "SERVER_SILENT_S": 60.0, "POLL_S": 0.02}.items():
        monkeypatch.setattr(run_in_sessions, name, value)
    run = Telling(Launched(run_id="r1", algorithm="edp", processes=(own,)), paths, console)
    with pytest.raises(LaunchError, match="Its last line: tokens"):
        run._start_server(Interrupts([]))
    told = list(dict.fromkeys(each for each in waited if "logged nothing" not in each))
    assert told[:2] == [f"waiting for server mini1: reading {each}" for each in (1, 2)]


def test_who_waits_for_a_worker_is_told_what_it_last_logged(
    run: RunInSessions, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, dumb = (worker(rank, "pi5", None, str(paths.root)) for rank in (0, 1))
    write(
        paths.logs / f"{late.stem}.log",
        '{"message": "no route to 10.0.0.2:65432; trying again"}\n',
    )
    said: list[str] = []

    def say(_: RunInSessions, text: str, *__: object) -> None:
        said.append(text)
        if len(said) == 2:
            there = status_of(workers={0: ("pi5", "joined"), 1: ("pi5", "joined")})
            write(paths.status, there.model_dump_json())

    monkeypatch.setattr(run_in_sessions, "TOLD_EVERY_S", 0.0)
    monkeypatch.setattr(RunInSessions, "say", say)
    assert run._wait_for([late, dumb], [], Interrupts([])) == []
    assert said == [
        "waiting for worker 1 (pi5): no route to 10.0.0.2:65432; trying again",
        "waiting for worker 2 (pi5): it has logged nothing yet",
    ]


@pytest.mark.parametrize(
    ("node", "ssh", "is_missing"),
    [("pi5", "pi@pi5", False), ("mini2", "pi@pi5", True), ("worker1", None, False)],
)
def test_who_was_left_out_is_not_the_worker_that_has_its_number_now(
    node: str, ssh: str | None, is_missing: bool
) -> None:
    status = status_of(workers={0: (node, "joined")})
    first = worker(0, "pi5", ssh)
    assert missing_workers([first], status, None) == [first] * is_missing


@pytest.mark.usefixtures("own_tmux")
@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_is_added_gets_a_pane_and_needs_none(
    paths: RunPaths, console: Console, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    run = resumed(paths, console)
    shown: list[tuple[str, str]] = []

    def show(run_id: str, process: LaunchedProcess) -> None:
        shown.append((run_id, process.title))
        if fails:
            raise LaunchError("tmux is not here")

    monkeypatch.setattr(run_in_sessions, "show_in_window", show)
    added = run._launched.workers[1].model_copy(update={"role": "stage"})
    run.add(added)
    assert shown == [("r1", added.title)]
    assert is_alive(pid_of(added))
