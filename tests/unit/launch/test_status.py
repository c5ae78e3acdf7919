"""How a run stands: what is seen of its processes, with what its server wrote."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from exporting import GPU
from reading import (
    NOW,
    children_of,
    fake_ssh,
    launched_run,
    log_line,
    said,
    server,
    status_of,
    worker,
    write,
)
from smolcluster.cli import main
from smolcluster.errors import ConfigError, DataError
from smolcluster.launch.host import Host, TookTooLong
from smolcluster.launch.watch.probe import Ask, look, look_at_script
from smolcluster.launch.watch.status import gpu_cell, head, look_at, notes, row, status
from smolcluster.observability.view.report import RunReport, report_of
from smolcluster.observability.view.snapshot import Liveness, ProcessReport, Snapshot, State
from smolcluster.observability.view.stages import numbers_of
from smolcluster.runs.launched import Launched
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import (
    STOPPED,
    RankStatus,
    RunState,
    RunStatus,
    instant,
    unbegun,
    write_status,
)


def test_gpus_have_a_column_where_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"), worker(1, "win", "win"))
    written = status_of(now=NOW, workers={0: ("pi5", "joined"), 1: ("win", "joined")})
    answers = {name: said(["running"]) for name in ("pi5", "win")}

    def shown_with(process_stats: dict[str, float]) -> str:
        [pi5, win] = written.workers
        workers = [pi5, win.model_copy(update={"process_stats": process_stats})]
        answers["mini1"] = said(["running"], written.model_copy(update={"workers": workers}))
        ask: Ask = lambda host, _: answers[host.node]  # noqa: E731
        assert status(str(paths.root), as_json=False, watch=False, ask=ask) == 0
        [told] = [each.gpu for each in look_at(paths, ask).processes if each.rank == 1]
        assert told == {name.removeprefix("gpu/"): value for name, value in process_stats.items()}
        return capsys.readouterr().out

    assert "gpu" not in shown_with({})
    assert (
        gpu_cell({str(name): value for name, value in GPU.items()})
        == "88%, 12.5 GB of 80.0 GB, 61 °C, 240 W"
    )
    assert gpu_cell({"utilization": 0.2, "memory_bytes": 633618432}) == "20%, 633.6 MB"
    table = shown_with({f"gpu/{name}": value for name, value in GPU.items()})
    assert "gpu" in table
    assert "88%" in table


def test_what_each_stage_of_a_pipeline_does_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"))
    written = status_of(now=NOW, workers={0: ("pi5", "joined")})
    numbers = numbers_of({1: (4, 10)}, {"forward": 0.1, "backward": 0.2}, 0.25, {1: 2e6})
    [pi5] = [each.model_copy(update={"process_stats": numbers}) for each in written.workers]
    answers = {
        "mini1": said(["running"], written.model_copy(update={"workers": [pi5]})),
        "pi5": said(["running"]),
    }
    ask: Ask = lambda host, _: answers[host.node]  # noqa: E731
    assert status(str(paths.root), as_json=False, watch=False, ask=ask) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "worker 1 (pi5) has layers 4-9; a step: forward 0.1 s, backward 0.2 s" in shown
    assert "waits 25%; sends 2 MB/s to 2" in shown
    assert status(str(paths.root), as_json=True, watch=False, ask=ask) == 0
    [_, told] = json.loads(capsys.readouterr().out)["processes"]
    assert told["stage"]["layers"] == [[4, 10]]
    assert told["stage"]["sends"] == {"1": 2e6}


def test_the_text_of_a_run_steers_no_terminal_by_json_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched_run(tmp_path, server())
    write_status(paths.status, status_of("failed").model_copy(update={"reason": "\x9b2J\u202e"}))
    assert status(str(paths.root), as_json=True, watch=False) == 0
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert r"\u009b2J\u202e" in shown


def test_a_cluster_is_shown_with_the_age_of_each_heartbeat_by_the_servers_clock(
    tmp_path: Path,
) -> None:
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"), worker(1, "win", "win"))
    written = status_of(now=NOW, workers={0: ("pi5", "joined"), 1: ("win", "lost")})
    answers = {
        "mini1": said(["running"], written),
        "pi5": said(["running"]),
        "win": said(["ended 137"]),
    }
    report = look_at(paths, lambda host, _: answers[host.node])
    assert [row(each, report.state) for each in report.processes] == [
        ["server mini1", "running", "120", "0.25", "512", "0.2 s ago"],
        ["worker 1 (pi5)", "running", "119", "0.27", "256", "0.4 s ago"],
        ["worker 2 (win)", "ended with code 137", "119", "0.27", "256", "0.4 s ago"],
    ]
    assert head(report) == [
        *(
            "r1",
            "edp",
            "training",
            "step 120 of 400",
            "epoch 2 of 4",
            "training loss 0.25 (last step)",
            "validation loss 0.5",
        ),
        *("acc 0.900", "512 samples/s now"),
    ]


def test_who_has_ended_as_stop_asked_is_stopped_in_a_run_that_was_stopped_alone() -> None:
    def states(state: State) -> list[str]:
        ended = partial(ProcessReport, node="pi5", role="worker", rank=0, process="ended")
        return [row(ended(exit_code=code), state)[1] for code in (0, 143, 130, 1)]

    assert states("stopped") == ["ended with code 0", "stopped", "stopped", "ended with code 1"]
    assert states("ended")[1] == "ended with code 143"


def test_a_machine_that_cannot_be_reached_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch) / "runs/r1"
    paths = launched_run(
        tmp_path / "runs",
        server(),
        worker(0, "pi5", "pi@cut"),
        worker(1, "win", "win"),
        worker(2, "odd", "strange"),
    )
    write(there / "exits/worker-rank1-win", "1\n")
    written = status_of(workers={0: ("pi5", "joined"), 1: ("win", "left")})
    write_status(there / "status.json", written)
    assert status(str(paths.root), as_json=True, watch=False) == 0
    document = json.loads(capsys.readouterr().out)
    found = [(each["node"], each["process"], each["exit_code"]) for each in document["processes"]]
    assert found == [
        ("mini1", "gone", None),
        ("pi5", "unreachable", None),
        ("win", "ended", 1),
        ("odd", "unreachable", None),
    ]
    assert document["processes"][1]["why"] == "it does not answer"
    assert document["state"] == "broken off"
    assert status(str(paths.root), as_json=False, watch=False) == 0
    shown = capsys.readouterr().out
    assert "lost contact: it does not answer" in shown
    assert "pi5 (pi@cut): it does not answer: switch it on" in " ".join(shown.split())


def test_a_server_that_crashed_is_told_with_its_code_and_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch) / "runs/r1"
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi5"))
    write(there / "exits/server-mini1", "134\n")
    write_status(there / "status.json", status_of())
    write(there / "logs/server-mini1.console.txt", "step 120\nFatal Python error: Aborted\n\n$\n")
    report = look_at(paths)
    assert report.state == "broken off"
    assert report.reason == "server mini1 ended with exit code 134: Fatal Python error: Aborted"
    assert status(str(paths.root), as_json=False, watch=False) == 0
    assert "has not said why" not in capsys.readouterr().out
    write(there / "exits/server-mini1", "137\n")
    write(there / "logs/server-mini1.console.txt", "1% step 120/400 14 MB/sKilled\n")
    assert "137: it was killed" in str(look_at(paths).reason)


def test_a_machine_that_takes_too_long_has_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.launch.watch.probe.LIMIT_S", 5.0)
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"))

    def ask(host: Host, script: str) -> str:
        if host.node == "pi5":
            raise TookTooLong("pi5 (pi5): a command did not end within 5 s")
        return said(["running"], status_of("waiting", now=NOW))

    report = look_at(paths, ask)
    assert report.state == "waiting"
    assert row(report.processes[1], report.state)[1] == "lost contact: no answer within 5 s"


def test_without_the_servers_machine_what_was_fetched_is_shown(tmp_path: Path) -> None:
    paths = launched_run(tmp_path, server("cut"), worker(0, "pi5", "pi5"))

    def ask(host: Host, script: str) -> str:
        if host.node == "mini1":
            raise host.unreachable("Connection timed out")
        return said(["ended 0"])

    assert look_at(paths, ask).state == "unknown"
    write_status(paths.status, status_of(age_s=100.0))
    report = look_at(paths, ask)
    assert (report.state, report.step) == ("unknown", 120)
    assert report.age_s is not None
    assert report.age_s > 90
    write_status(paths.status, status_of("ended", reason="all done"))
    assert look_at(paths, ask).state == "ended"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", ("unreachable", None)),
        ("garbage", ("unreachable", None)),
        ("::process 0\n", ("unreachable", None)),
        ("::process 0\nended 12345678\n", ("gone", None)),
        ("::process 0\nended x; rm -rf /\n", ("gone", None)),
        ("::process 0\nended 0\n", ("ended", 0)),
        ("Last login\n\x1b[31m\n::process 0\nrunning\n", ("running", None)),
        ("::process 0\nrunning\n::status.json\n{broken\n::now\nyesterday", ("running", None)),
    ],
)
def test_whatever_a_machine_answers_is_no_traceback(
    tmp_path: Path, answer: str, expected: tuple[str, int | None]
) -> None:
    paths = launched_run(tmp_path, server())
    [seen] = look(paths, lambda _host, _script: answer).seen
    assert (seen.process, seen.exit_code) == expected


def probed(*seen: ProcessReport, written: RunStatus, algorithm: str = "edp") -> Snapshot:
    launched = Launched(run_id="r1", algorithm=algorithm, processes=(server(),))
    return Snapshot(RunPaths(Path("r1")), launched, written, seen=seen, now=instant(NOW))


@pytest.mark.parametrize(
    ("state", "hint"),
    [("training", None), ("broken off", "resume r1"), ("stopped", "resume r1"), ("ended", None)],
)
def test_what_goes_on_with_a_run_is_said_where_it_can_be(state: State, hint: str | None) -> None:
    said = notes(RunReport(run_id="r1", state=state, total_steps=9, processes=()))
    assert [line for line in said if "resume" in line] == (
        [] if hint is None else [f"`uv run smolcluster {hint}` goes on with it"]
    )
    unknown = RunReport(run_id="r1", state=state, processes=())
    assert not [line for line in notes(unknown) if "resume" in line]


@pytest.mark.parametrize("state", ["ended", "failed"])
def test_a_run_that_ended_before_it_began_has_no_steps_to_go_on_with(state: RunState) -> None:
    left = unbegun("r1", "edp", state, STOPPED)
    report = report_of(Snapshot(RunPaths(Path("r1")), status=left))
    assert head(report) == ["r1", "edp", left.word]
    assert notes(report) == [STOPPED]


def test_a_full_disk_of_the_server_is_told(tmp_path: Path) -> None:
    """Whether the server could write so, or nothing any more."""
    paths = launched_run(tmp_path, server())
    written = status_of(now=NOW)
    small = "step 9 is not saved: no space is left on the disk of mini1"
    for status_of_server, free, expected in (
        (written, "1000000", []),
        (written.model_copy(update={"trouble": small}), "1000000", [small]),
        (written, "0", ["nothing is saved: no space is left on the disk of mini1"]),
    ):
        answer = said(["running"], status_of_server) + f"::free\n{free}\n"
        ask: Ask = partial(lambda answer, _host, _script: answer, answer)
        told = notes(look_at(paths, ask))
        assert [line for line in told if "saved" in line] == expected


@pytest.mark.parametrize(
    ("process", "is_told"),
    [("gone", True), ("ended", True), ("running", False), ("unknown", False)],
)
def test_what_brings_a_worker_back_is_said_when_its_process_is_no_more(
    process: Liveness, is_told: bool
) -> None:
    server = ProcessReport(node="mini1", role="server", rank=None, process="gone")
    worker = ProcessReport(node="win", role="worker", rank=1, process=process)
    said = notes(RunReport(run_id="r1", state="training", processes=(server, worker)))
    joins = ["`uv run smolcluster join r1 --name win` brings worker 2 (win) back"]
    assert said == (joins if is_told else [])


def test_of_a_run_that_broke_off_nothing_is_shown_as_if_it_were_now() -> None:
    owner = ProcessReport(node="mini1", role="server", process="ended", exit_code=137)
    alive = ProcessReport(node="pi5", role="worker", rank=0, process="running")
    written = status_of(now=NOW, workers={0: ("pi5", "joined")})
    report = report_of(probed(owner, alive, written=written))
    assert report.state == "broken off"
    assert [row(each, report.state) for each in report.processes] == [
        ["server mini1", "ended with code 137", "120", "0.25", "", ""],
        ["worker 1 (pi5)", "running", "119", "0.27", "", ""],
    ]
    assert [each.process_stats for each in report.processes] == [{}, {}]


def test_a_worker_that_came_by_itself_is_shown_too() -> None:
    owner = ProcessReport(node="mini1", role="server", process="running")
    written = status_of(workers={7: ("mac", "joined")})
    for state, word in (("training", "joined"), ("ended", "left")):
        report = report_of(probed(owner, written=written.model_copy(update={"state": state})))
        assert row(report.processes[1], report.state)[:2] == ["worker 8 (mac)", word]


def test_a_mesh_has_a_row_a_rank_which_lives_as_what_started_it() -> None:
    started = tuple(
        ProcessReport(node=node, role="ranks", rank=None, process=process)
        for node, process in (("a", "running"), ("b", "unreachable"), ("c", "running"))
    )
    heard = {0: "a", 1: "a", 2: "b"}
    ranks = [
        RankStatus(
            rank=rank,
            node=node,
            process_stats={"samples_per_s": 10.0 + rank},
            last_seen=instant(NOW - 2),
        )
        for rank, node in heard.items()
    ]
    written = status_of(now=NOW).model_copy(update={"algorithm": "single", "ranks": ranks})
    report = report_of(probed(*started, written=written, algorithm="mesh"))
    assert report.algorithm == "mesh", "its owner writes its status as one process does"
    assert [
        row(each, report.state)[:1] + row(each, report.state)[4:] for each in report.processes
    ] == [
        ["rank 0 (a)", "10", "2 s ago"],
        ["rank 1 (a)", "11", "2 s ago"],
        ["rank 2 (b)", "12", "2 s ago"],
        ["ranks c", "", ""],
    ]
    assert [each.process for each in report.processes] == [
        *("running", "running", "unreachable", "running")
    ]
    assert not [line for line in notes(report) if "join" in line]


def test_each_machine_is_asked_once_and_only_the_servers_for_the_files(tmp_path: Path) -> None:
    own = worker(0, "mini1", "pi@mini1", session="it's; rm -rf ~")
    script = look_at_script([server(run_dir="~/a b; reboot"), own], server(run_dir="~/a b; reboot"))
    assert script.count("status.json") == 2
    assert """'=it'"'"'s; rm -rf ~'""" in script
    assert """"$HOME"/'a b; reboot'/status.json""" in script
    assert "status.json" not in look_at_script([own], server())
    asked: list[str] = []
    paths = launched_run(tmp_path, server(), own, worker(1, "pi5", "pi5"))

    def ask(host: Host, script: str) -> str:
        asked.append(host.node)
        return said(["running", "running"])

    look(paths, ask)
    assert sorted(asked) == ["mini1", "pi5"]


@pytest.mark.parametrize("command", [["status"], ["top", "--once"], ["logs"], ["fetch"]])
def test_a_list_that_is_damaged_and_a_run_that_is_not_there_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    paths = launched_run(tmp_path, server())
    paths.launched.write_text("{")
    assert main([*command, str(paths.root)]) == DataError.exit_code
    assert "launch.json is damaged" in capsys.readouterr().err
    assert main([*command, "nothing"]) == ConfigError.exit_code
    assert "no run 'nothing'" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert main([*command, str(tmp_path / "other")]) == ConfigError.exit_code
    assert "is not the folder of a run" in capsys.readouterr().err


def test_flags_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="--json prints one document"):
        status("latest", as_json=True, watch=True)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[tuple[RunPaths, "subprocess.Popen[bytes]"]]:
    """A local run whose server lives, and whose worker's process id is somebody else's now."""
    paths = create_run(tmp_path, "r1")
    program = "import time; time.sleep(600)"
    with (
        subprocess.Popen([sys.executable, "-c", program, "r1"]) as process,
        subprocess.Popen(["sleep", "600"]) as other,
    ):
        children_of(paths, process.pid, other.pid)
        write(paths.config, "")
        yield paths, process
        process.kill()
        other.kill()


def test_a_local_run_is_looked_at_here(
    local: tuple[RunPaths, "subprocess.Popen[bytes]"],
) -> None:
    paths, process = local
    write_status(paths.status, status_of(workers={0: ("pi5", "lost")}))
    report = look_at(paths)
    assert report.state == "training"
    assert [each.process for each in report.processes] == ["running", "gone"]
    process.kill()
    process.wait()
    assert look_at(paths).state == "broken off"
    write_status(paths.status, status_of("ended"))
    assert [each.process for each in look_at(paths).processes] == ["ended", "ended"]
    write_status(paths.status, status_of("ended", workers={0: ("pi5", "lost")}))
    assert [each.process for each in look_at(paths).processes] == ["ended", "gone"]


def test_a_server_of_this_machine_that_crashed_is_told_with_its_code_and_last_words(
    local: tuple[RunPaths, "subprocess.Popen[bytes]"],
) -> None:
    paths, process = local
    write_status(paths.status, status_of())
    process.kill()
    process.wait()
    assert look_at(paths).reason is None
    write(
        paths.logs / "server-mini1.log", log_line(1, "the disk is gone", "ERROR") + log_line(2, "x")
    )
    assert look_at(paths).reason == "the disk is gone"
    write(paths.root / "exits/server-mini1", "1\n")
    report = look_at(paths)
    assert report.reason == "server mini1 ended with exit code 1: the disk is gone"
    assert report.processes[0].exit_code == 1


def test_a_run_of_one_process_is_known_by_its_lock(tmp_path: Path) -> None:
    paths = create_run(tmp_path, "single-1")
    os.utime(write(paths.config, ""), (1, 1))
    [only] = look_at(paths).processes
    assert (only.role, only.process) == ("trainer", "gone")
    with run_lock(paths.lock):
        assert look_at(paths).processes[0].process == "running"
    assert look_at(paths).processes[0].process == "gone"


def test_names_from_elsewhere_move_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    evil = worker(0, "pi\x1b[2J[red]<b>", None)
    paths = launched_run(tmp_path / "runs", server(None, run_dir=str(tmp_path)), evil)
    status(str(paths.root), as_json=False, watch=False)
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert "[red]<b>" in shown


def test_watching_ends_with_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = create_run(tmp_path, "single-1")
    write(paths.config, "")

    monkeypatch.setattr(time, "sleep", Mock(side_effect=KeyboardInterrupt))
    assert status(str(paths.root), as_json=False, watch=True) == 0
    assert "single-1" in capsys.readouterr().out


def test_watching_ends_when_nobody_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = create_run(tmp_path, "single-1")
    write(paths.config, "")
    read_end, write_end = os.pipe()
    os.close(read_end)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setattr(time, "sleep", Mock(side_effect=[None] * 5))
    with os.fdopen(write_end, "w", buffering=1) as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert status(str(paths.root), as_json=False, watch=True) == 0
