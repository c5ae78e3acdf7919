"""The log lines of all processes, merged."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reading import (
    fake_ssh,
    launched_run,
    log_line,
    server,
    status_of,
    worker,
    write,
)
from smolcluster.errors import ConfigError
from smolcluster.launch.sessions import newest_line
from smolcluster.launch.watch.logs import (
    Entry,
    LogView,
    is_over,
    logs,
    parse_level,
    since_when,
)
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import write_status
from waiting import eventually

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def shown(paths: RunPaths, capsys: pytest.CaptureFixture[str], **options: object) -> list[str]:
    wishes = {"node": None, "rank": None, "level": "INFO", "follow": False, "since": None} | options
    assert logs(str(paths.root), **wishes) == 0  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run of this machine, with a server's and two workers' lines."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setenv("COLUMNS", "200")
    paths = create_run(tmp_path, "r1")
    write(paths.config, "")
    write(paths.log_file("server", "mini1"), log_line(0, "up") + log_line(3, "bad", "ERROR"))
    write(paths.log_file("worker", "pi5", 0), log_line(1, "joined") + log_line(2, "fine", "DEBUG"))
    write(paths.log_file("worker", "a-b", 1), log_line(1.5, "careful", "WARNING"))
    return paths


@pytest.fixture
def central_europe() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


def test_lines_are_merged_by_time(local: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(local, capsys) == [
        "server mini1   | 09-21 14:13:20 INFO  up",
        "worker 1 (pi5) | 09-21 14:13:21 INFO  joined",
        "worker 2 (a-b) | 09-21 14:13:21 WARN  careful",
        "server mini1   | 09-21 14:13:23 ERROR bad",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"node": "pi5"}, ["joined"]),
        ({"rank": 1}, ["careful"]),
        ({"level": "debug", "rank": 0}, ["joined", "fine"]),
        ({"level": "WARNING"}, ["careful", "bad"]),
        ({"since": "2026-09-21T14:13:22"}, ["bad"]),
        ({"since": "2026-09-21T14:13:22+00:00"}, ["bad"]),
        ({"since": "1s"}, []),
    ],
)
def test_only_what_is_asked_for(
    local: RunPaths,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, object],
    expected: list[str],
) -> None:
    assert [line.split()[-1] for line in shown(local, capsys, **options)] == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"node": "pi6"}, "it has some on: "),
        ({"rank": 5}, "--worker 6: "),
        ({"rank": 0, "node": "mini1"}, "--worker 1: the run's workers on mini1 are: none"),
        ({"level": "warnin"}, "did you mean WARNING"),
        ({"level": "\x1b[2J"}, "there are DEBUG"),
        ({"since": "yesterday"}, "say how long ago"),
        ({"since": "-3m"}, "say how long ago"),
        ({"since": "99999-01-01"}, "say how long ago"),
    ],
)
def test_wrong_wishes_are_refused_in_a_line(
    local: RunPaths, capsys: pytest.CaptureFixture[str], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        shown(local, capsys, **options)
    assert str(refused.value).isprintable()


def test_the_logs_of_a_worker_that_joined_without_ssh_are_said_to_be_on_its_machine(
    local: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(local.status, status_of(workers={2: ("laptop", "left")}))
    for options in ({"node": "laptop"}, {"rank": 2}, {"node": "laptop", "rank": 2}):
        with pytest.raises(ConfigError, match=r"worker 3 \(laptop\) .* that machine.* logs r1`"):
            shown(local, capsys, **options)
    for wrong, said in ({"node": "lap"}, "no process there"), ({"rank": 3}, "workers are"):
        with pytest.raises(ConfigError, match=said):
            shown(local, capsys, **wrong)


def test_moments() -> None:
    assert since_when("10m", NOW) == NOW.timestamp() - 600
    assert since_when("1.5 h", NOW) == NOW.timestamp() - 5400
    assert since_when(None, NOW) == 0
    assert parse_level("Error") == 40
    assert (parse_level("warn"), parse_level("FATAL")) == (30, 50), "as the console shows them"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("2026-11-22T10:00", datetime(2026, 11, 22, 9, 0, tzinfo=UTC)),
        ("2026-07-22T10:00", datetime(2026, 7, 22, 8, 0, tzinfo=UTC)),
        ("2026-07-22T10:00+00:00", datetime(2026, 7, 22, 10, 0, tzinfo=UTC)),
    ],
)
@pytest.mark.usefixtures("central_europe")
def test_a_moment_without_an_offset_has_that_of_its_date(said: str, meant: datetime) -> None:
    assert since_when(said, NOW.astimezone()) == meant.timestamp()


def test_no_log_line_moves_the_cursor_or_is_read_as_markup(
    local: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\r\u202e<script>[bold red]x[/]\ud800"
    exception = "Traceback\n  \x1b[31mValueError"
    line = log_line(1, evil, level="INFO\x1b", exception=exception)
    write(local.log_file("worker", "pi5", 0), line)
    out = "\n".join(shown(local, capsys, rank=0))
    assert r"\x1b[2J\r\u202e<script>[bold red]x[/]?" in out
    assert "Traceback" in out
    assert not any(each in out for each in ("\x1b", "\r", "\u202e"))


def test_a_huge_message_is_cut(local: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    with local.log_file("worker", "pi5", 0).open("a") as file:
        file.write(log_line(5, "y" * 500_000) + "z" * 3_000_000 + "\n" + log_line(6, "after"))
    out = shown(local, capsys, rank=0)
    assert [line[-24:] for line in out[1:3]] == [
        " (496,000 characters more)"[-24:],
        "1,044,576 characters more)"[-24:],
    ]
    assert out[3].endswith("after")


def test_a_run_without_logs_has_no_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = create_run(tmp_path, "r1")
    write(paths.config, "")
    assert shown(paths, capsys) == []


def test_lines_come_from_their_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    run_dir = "~/a 'b'; $(touch ~/oops)"
    own = [
        server(run_dir=run_dir),
        worker(0, "mini1", "pi@mini1", run_dir),
        worker(1, "win", "win"),
    ]
    paths = launched_run(tmp_path / "runs", *own)
    folder = there / run_dir[2:] / "logs"
    write(folder / "server-mini1.log", log_line(1, "one") + log_line(4, "four"))
    write(folder / "worker-rank0-mini1.log", log_line(3, "three"))
    write(there / "runs/r1/logs/worker-rank1-win.log", log_line(2, "two"))
    assert [line.split()[-1] for line in shown(paths, capsys)] == ["one", "two", "three", "four"]
    assert not (there / "oops").exists()


def of_group(node: str, ssh: str | None, run_dir: str, **told: Any) -> LaunchedProcess:
    """What has started the ranks of a machine."""
    own = {"session": "none", **told}
    return LaunchedProcess(node=node, role="ranks", ssh=ssh, run_dir=run_dir, **own)


RANKS = {"rank-host1": 1, "rank-rank1-host1": 2, "rank-rank2-host2": 3}
"""Logs of a mesh's ranks, whose machines call themselves so, and the second of their only line."""


def test_the_ranks_that_a_scheduler_has_started_have_their_logs_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = of_group("slurm", None, str(tmp_path / "r1"), scheduler="slurm")
    paths = launched_run(tmp_path, process, algorithm="mesh")
    assert shown(paths, capsys) == []  # it waits in a queue
    for stem, seconds in RANKS.items():
        write(paths.logs / f"{stem}.log", log_line(seconds, stem))
    assert [line.split()[-1] for line in shown(paths, capsys)] == list(RANKS)
    assert [line.split()[-1] for line in shown(paths, capsys, node="host2")] == [*RANKS][2:]
    [line] = shown(paths, capsys, rank=0, role="rank")
    assert line.startswith("rank 0 (host1)")
    found = [json.loads(line) for line in shown(paths, capsys, as_json=True)]
    assert [line["rank"] for line in found] == [0, 1, 2]
    [line] = shown(paths, capsys, rank=2, role="rank")
    assert line.startswith("rank 2 (host2)")
    with pytest.raises(ConfigError, match="--rank 3: the run's ranks are: rank 0"):
        shown(paths, capsys, rank=3, role="rank")
    with pytest.raises(ConfigError, match="--worker 2: the run's workers are: none"):
        shown(paths, capsys, rank=1)


def test_a_launch_waits_for_rank_0_and_says_its_newest_line(tmp_path: Path) -> None:
    process = of_group("host1", None, str(tmp_path / "r1"))
    for stem, seconds in RANKS.items():
        write(tmp_path / "r1/logs" / f"{stem}.log", log_line(seconds, stem))
    assert newest_line(process) == "rank-host1"
    pid = tmp_path / "r1/pids" / process.stem
    write(pid, "7")
    assert newest_line(process) == ""  # these lines are of an earlier start
    os.utime(pid, (1, 1))
    assert newest_line(process) == "rank-host1"


def test_ranks_on_other_machines_have_their_logs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    own = of_group("a", "a", "~/runs/a/r1"), of_group("b", "b", "~/runs/b/r1")
    paths = launched_run(tmp_path / "runs", *own, algorithm="mesh")
    for (stem, seconds), node in zip(RANKS.items(), "aab", strict=True):
        write(there / f"runs/{node}/r1/logs/{stem}.log", log_line(seconds, stem))
    assert [line.split()[-1] for line in shown(paths, capsys)] == list(RANKS)
    cut = of_group("a", "a", "~/runs/a/r1"), of_group("b", "cut", "~/runs/b/r1")
    paths = launched_run(tmp_path / "runs", *cut, algorithm="mesh", run_id="r2")
    assert logs(str(paths.root), node=None, rank=None, level="INFO", follow=False, since=None) == 1
    out, err = capsys.readouterr()
    assert [line.split()[-1] for line in out.splitlines()] == [*RANKS][:2]
    assert "b (cut): it does not answer" in err


@pytest.mark.parametrize(
    ("kind", "label"),
    [("job.batch", "app.kubernetes.io/name"), ("trainjob.trainer.kubeflow.org", "jobset-name")],
)
def test_what_pods_say_kubectl_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, label: str
) -> None:
    argv = ("kubectl", "--namespace", "team", "apply", "-f", "-")
    told = {"scheduler": "kubernetes", "session": f"{kind}/r1", "argv": argv}
    process = of_group("kubernetes", None, str(tmp_path / "r1"), **told)
    paths = launched_run(tmp_path, process, algorithm="mesh")
    with pytest.raises(ConfigError, match=f"kubectl --namespace team logs .*{label}=r1"):
        shown(paths, capsys)


def test_a_machine_that_cannot_be_reached_is_named_and_its_fetched_lines_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "cut"))
    write(there / "runs/r1/logs/server-mini1.log", log_line(1, "one"))

    def printed(follow: bool = False) -> tuple[int, str, str]:
        code = logs(str(paths.root), node=None, rank=None, level="INFO", follow=follow, since=None)
        out, err = capsys.readouterr()
        return code, out, err

    code, out, err = printed()
    assert (code, out.count("\n")) == (1, 1)
    assert "pi5 (cut): it does not answer" in err
    write(paths.logs / "worker-rank0-pi5.log", log_line(2, "copied"))
    code, out, err = printed()
    assert (code, out.count("\n")) == (1, 2)
    assert "copied" in out
    assert "were fetched before" in err
    monkeypatch.setattr("smolcluster.launch.watch.logs.is_over", lambda _: True)
    monkeypatch.setattr("smolcluster.launch.watch.tail.RETRY_S", 0.05)  # it tries many times
    code, out, err = printed(follow=True)
    assert (code, out.count("\n"), err.count("trying again")) == (0, 1, 1)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_json_has_a_shape_to_rely_on(local: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in shown(local, capsys, as_json=True)]
    assert [line["message"] for line in lines] == ["up", "joined", "careful", "bad"]
    assert lines[1] == {
        "ts": "2026-09-21T14:13:21.000Z",
        "node": "pi5",
        "role": "worker",
        "rank": 0,
        "level": "INFO",
        "message": "joined",
        "exception": None,
    }


def test_following_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi5"))
    file = write(there / "runs/r1/logs/server-mini1.log", log_line(1, "m1"))
    assert not is_over(paths), "it has not begun"
    write_status(there / "runs/r1/status.json", status_of("ended"))
    looks = iter([False, True])

    def look_then_write(_paths: RunPaths) -> bool:
        over = next(looks)
        if over:
            append(file, log_line(2, "m2"))
        return over and is_over(paths)

    monkeypatch.setattr("smolcluster.launch.watch.logs.is_over", look_then_write)
    out = shown(paths, capsys, follow=True)
    assert [line.split()[-1] for line in out] == ["m1", "m2"]


def test_following_a_group_that_waits_in_a_queue_says_so_and_shows_its_ranks_as_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = of_group("slurm", None, str(tmp_path / "r1"), scheduler="slurm")
    paths = launched_run(tmp_path, process, algorithm="mesh")
    told: list[str] = []
    show = LogView.show

    def note(view: LogView, entries: Iterable[Entry]) -> None:
        taken = list(entries)
        told.extend(line.message for _, line in taken)
        show(view, taken)

    def begin(_paths: RunPaths) -> bool:
        """Ranks begin their logs; the run is over when all have been shown."""
        for stem, seconds in RANKS.items():
            if not (log := paths.logs / f"{stem}.log").exists():
                write(log, log_line(seconds, stem))
        return set(told) == set(RANKS)

    monkeypatch.setattr(LogView, "show", note)
    monkeypatch.setattr("smolcluster.launch.watch.logs.is_over", begin)
    assert logs(str(paths.root), node=None, rank=None, level="INFO", follow=True, since=None) == 0
    out, err = capsys.readouterr()
    assert sorted(line.split()[-1] for line in out.splitlines()) == sorted(RANKS)
    assert err == "no process of run r1 has a log yet: waiting\n"


def test_following_a_local_run(
    local: RunPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C, as Python raises it in the main thread."""
    output = tmp_path / "output"

    def write_and_interrupt() -> None:
        eventually(lambda: "bad" in output.read_text())
        append(local.log_file("server", "mini1"), log_line(9, "late") + json.dumps({}) + "\n")
        eventually(lambda: "late" in output.read_text())
        signal.raise_signal(signal.SIGINT)

    with output.open("w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        writer = threading.Thread(target=write_and_interrupt)
        writer.start()
        shown(local, capsys, follow=True)
        writer.join()
    out = output.read_text().splitlines()
    assert [line.split()[-1] for line in out if line][:5] == [
        "up",
        "joined",
        "careful",
        "bad",
        "late",
    ]
