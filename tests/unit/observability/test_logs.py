import io
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from smolcluster.observability import logs
from smolcluster.observability.logs import MAX_KEPT_LINES, NodeLog
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.files import rotations
from waiting import DEADLINE_S


def console(**options: Any) -> Console:
    return SteadyConsole(file=io.StringIO(), width=60, **options)


def printed(out: Console) -> list[str]:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def filed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail() -> None:
    raise RuntimeError("boom")


def test_a_console_line_is_readable_and_plain_where_there_is_no_terminal() -> None:
    out = console()
    log = NodeLog("worker", "macbook", 0, console=out)
    log.logger.info(
        "joined %s after %.1f s, a line that is longer than the console is wide", "r", 2
    )
    log.logger.warning("slow")
    log.close()
    first, second = printed(out)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d INFO  worker 1 \(macbook\)  joined r after 2\.0 s, .* wide", first
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARN  worker 1 \(macbook\)  slow", second)


def test_lines_below_the_level_go_to_the_file_only(tmp_path: Path) -> None:
    out = console()
    log = NodeLog("server", "mini1", level=logging.WARNING, console=out)
    log.file_logs_to(tmp_path / "x.log", "edp-1")
    log.logger.debug("detail")
    log.logger.warning("attention")
    log.close()
    assert [line["message"] for line in filed(tmp_path / "x.log")] == ["detail", "attention"]
    assert len(printed(out)) == 1


def test_a_filed_line_has_the_documented_fields(tmp_path: Path) -> None:
    log = NodeLog("worker", "mini2", 0, console=console())
    log.file_logs_to(tmp_path / "x.log", "edp-1")
    log.logger.warning("late", extra={"step": 3, "path": Path("a"), "loss": float("nan")})
    log.close()
    line = filed(tmp_path / "x.log")[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "WARNING",
        "component": "worker",
        "rank": 0,
        "node": "mini2",
        "host": "worker-rank0-mini2",
        "run": "edp-1",
        "message": "late",
        "step": 3,
        "path": "a",
        "loss": None,
    }


def test_an_extra_field_cannot_replace_the_logs_own(tmp_path: Path) -> None:
    log = NodeLog("server", "mini1", console=console())
    log.file_logs_to(tmp_path / "x.log", "edp-1")
    log.logger.info("lost", extra={"node": "mini2", "rank": 0})
    log.close()
    line = filed(tmp_path / "x.log")[0]
    assert (line["node"], line["node_"]) == ("mini1", "mini2")
    assert (line["rank"], line["rank_"]) == (None, 0)
    assert line["host"] == "server-mini1"


def test_a_long_wait_for_a_run_does_not_fill_the_memory(tmp_path: Path) -> None:
    log = NodeLog("worker", "mini2", console=console())
    for n in range(MAX_KEPT_LINES + 5):
        log.logger.debug("%d", n)
    log.file_logs_to(tmp_path / "x.log", "edp-1")
    log.close()
    messages = [line["message"] for line in filed(tmp_path / "x.log")]
    assert len(messages) == MAX_KEPT_LINES
    assert messages[-1] == str(MAX_KEPT_LINES + 4)


def test_a_traceback_goes_to_the_file_and_never_to_the_console(tmp_path: Path) -> None:
    out = console()
    log = NodeLog("server", "mini1", console=out)
    try:
        fail()
    except RuntimeError:
        log.logger.exception("evaluation failed")
    log.file_logs_to(tmp_path / "x.log", "edp-1")
    log.close()
    line = filed(tmp_path / "x.log")[0]
    assert line["exception"].startswith("Traceback")
    assert "RuntimeError: boom" in line["exception"]
    assert len(printed(out)) == 1
    assert "boom" not in printed(out)[0]


def test_two_nodes_in_one_process_do_not_mix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outs = [console(), console()]
    logs: list[NodeLog] = []
    for n, out in enumerate(outs):
        log = NodeLog("worker", f"node{n}", n, console=out)
        log.file_logs_to(tmp_path / f"{n}.log", f"run-{n}")
        logs.append(log)
    for log in logs:
        log.logger.info("hello")
    logs[0].close()
    logs[1].logger.info("still here")
    logs[1].close()
    assert [(r["node"], r["rank"], r["run"]) for r in filed(tmp_path / "0.log")] == [
        ("node0", 0, "run-0")
    ]
    assert [r["message"] for r in filed(tmp_path / "1.log")] == ["hello", "still here"]
    assert [len(printed(out)) for out in outs] == [1, 2]
    assert capfd.readouterr() == ("", "")


def test_a_closed_log_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    out = console()
    log = NodeLog("worker", "node", console=out)
    log.close()
    log.logger.error("too late")
    assert printed(out) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_line_on_the_console_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "SPACE_S", 0.0)
    out = console()
    log = NodeLog("server", "mini1", console=out)
    log.logger.info("before")
    log.file_logs_to(Path("/dev/full"), "edp-1")
    for n in range(50):
        log.logger.debug("detail %d", n)
    log.logger.info("after")
    log.close()
    lines = [line.split("mini1  ")[1] for line in printed(out)]
    told = [line for line in lines if line not in ("before", "after")]
    assert len(lines) == 4
    assert [line.partition(";")[0] for line in told[:1]] == [
        "cannot write /dev/full: No space left on device"
    ]
    assert re.match(r"/dev/full: \d+ lines were lost, from .*: No space left on device", told[1])


class Hanging(io.StringIO):
    """A terminal that takes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.is_asked.set()
        self.may.wait(60)
        return super().write(text)


def test_a_terminal_that_hangs_holds_up_nobody_and_says_later_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED", 10)
    terminal, path = Hanging(), tmp_path / "x.log"
    log = NodeLog("server", "mini1", console=SteadyConsole(file=terminal, width=200))
    log.file_logs_to(path, "edp-1")
    log.logger.info("first")
    assert terminal.is_asked.wait(DEADLINE_S)
    for n in range(50):
        log.logger.info("line %d", n)
        assert log._to_file.drain(DEADLINE_S)
    assert [line["message"] for line in filed(path)] == ["first", *(f"line {n}" for n in range(50))]
    terminal.may.set()
    assert log._to_console.drain(DEADLINE_S)
    log.logger.info("last")
    log.close()
    shown = [line.split("mini1  ")[1] for line in terminal.getvalue().splitlines()]
    assert shown == [
        *("first", *(f"line {n}" for n in range(10))),
        "missing here: 40 lines, which the terminal did not take in time",
        "last",
    ]


def test_a_disk_that_hangs_holds_up_nobody_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader hangs as a disk may."""
    for name, value in {"MAX_QUEUED": 10, "SPACE_S": 0.0, "CLOSE_S": 0.1}.items():
        monkeypatch.setattr(logs, name, value)
    path, out = tmp_path / "pipe", console()
    os.mkfifo(path)
    log = NodeLog("server", "mini1", console=out)
    log.file_logs_to(path, "edp-1")
    for n in range(50):
        log.logger.info("line %d", n)
        assert log._to_console.drain(DEADLINE_S)
    log.file_logs_to(tmp_path / "other", "edp-2")
    log.close()
    assert len(printed(out)) == 50
    with path.open("rb") as reader:
        path.unlink()  # the thread, which is freed now, does not come back to it
        assert reader.read(1)
    log._to_file.thread.join(DEADLINE_S)
    assert not log._to_file.thread.is_alive()


def test_a_message_from_a_peer_cannot_move_the_cursor_or_add_lines() -> None:
    out = console()
    log = NodeLog("server", "mini1", console=out)
    log.logger.warning("it said: %s", "a\x1b[2Jb\nc\rd [red]x[/red] \u202e")
    log.close()
    (line,) = printed(out)
    assert line.endswith(r"it said: a\x1b[2Jb\nc\rd [red]x[/red] \u202e")


def test_a_log_line_with_wrong_arguments_does_not_end_the_run() -> None:
    out = console()
    log = NodeLog("server", "mini1", console=out)
    log.logger.info("%d of %d", *[1])
    log.close()
    assert printed(out)[0].endswith("%d of %d (1,)")


def test_lines_go_to_standard_error_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    log = NodeLog("server", "mini1")
    log.logger.info("listening")
    log.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith("server mini1  listening\n")


def test_a_log_that_grows_too_large_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_NBYTES", 1000)
    log = NodeLog("worker", "mini2", 0, console=console())
    log.file_logs_to(tmp_path / "x.log", "edp-1")
    for n in range(20):
        log.logger.debug("%d", n)
    log.close()
    kept = [line for file in reversed(rotations(tmp_path / "x.log")) for line in filed(file)]
    assert [line["message"] for line in kept] == [str(n) for n in range(20)][-len(kept) :]
    assert 10 < len(kept) < 20
