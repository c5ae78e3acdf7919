from pathlib import Path

import pytest

from made_runs import BEGAN, MadeRun
from smolcluster.observability.parsing import LogLine
from smolcluster.observability.view.first_error import (
    LINES_AFTER,
    LINES_BEFORE,
    MAX_LINE_NBYTES,
    MAX_MESSAGE,
    Logs,
    read_logs,
)
from smolcluster.runs.events import Event, EventRecord, RunEnded, WorkerLost
from smolcluster.runs.files import utc_timestamp
from smolcluster.runs.launched import Process

SERVER, PI, WIN = (
    Process(role="server", node="mini1"),
    Process(role="worker", node="pi5", rank=0),
    Process(role="worker", node="win", rank=1),
)
LOST = WorkerLost(rank=1, node="win", reason="silent")
Said = tuple[float, Process, str, str]
"""When a process has said something by its own clock, at which level, and what."""


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path)


def say(run: MadeRun, *lines: Said) -> None:
    for at_s, who, level, message in lines:
        run.now = at_s
        run.says(who.role, who.node, who.rank, (level, message))


def event(at_s: float, what: Event) -> EventRecord:
    return EventRecord(utc_timestamp(BEGAN + at_s), "a1", what)


def ended(reason: str) -> RunEnded:
    return RunEnded(ok=False, reason=reason, wall_s=1.0, steps=1, samples_applied=1)


def logs_of(
    run: MadeRun,
    *events: EventRecord,
    offsets: dict[str, float] | None = None,
    stderr_tail: LogLine | None = None,
) -> Logs:
    return read_logs(run.paths.logs, (SERVER, PI, WIN), events, offsets or {}, stderr_tail)


def context(logs: Logs) -> list[tuple[str, str]]:
    assert logs.trouble is not None
    return [(line.source, line.message) for line in logs.trouble.lines]


def the_one(logs: Logs) -> LogLine:
    assert logs.trouble is not None
    assert logs.trouble.place is not None
    return logs.trouble.lines[logs.trouble.place]


SECOND: Said = (5, SERVER, "ERROR", "the second")


@pytest.mark.parametrize(
    ("lines", "events", "offsets", "expected"),
    [
        ([SECOND, (3, WIN, "CRITICAL", "the first")], [], {}, "the first"),
        # the Pi's clock is 10 s ahead: its error came first, although its file says otherwise
        ([(13, PI, "ERROR", "the first"), SECOND], [], {PI.title: 10.0}, "the first"),
        ([(13, PI, "ERROR", "the first"), SECOND], [], {}, "the second"),
        # a machine that had the Pi's rank before it: its clock moves nobody else's lines
        ([(6, PI, "ERROR", "later"), SECOND], [], {"worker 1 (nas)": 10.0}, "the second"),
        ([(5, SERVER, "WARNING", "later"), (3, WIN, "WARNING", "no space")], [], {}, "no space"),
        ([(3, WIN, "WARNING", "no space"), SECOND], [], {}, "the second"),
        ([(3, SERVER, "WARNING", "is lost"), SECOND], [event(3.002, LOST)], {}, "is lost"),
        (
            [*[(100.0, SERVER, "INFO", f"{i}") for i in range(20)], (3, SERVER, "ERROR", "no")],
            *([], {}, "no"),
        ),
    ],
)
def test_the_line_that_tells_what_went_wrong_first(
    run: MadeRun,
    lines: list[Said],
    events: list[EventRecord],
    offsets: dict[str, float],
    expected: str,
) -> None:
    say(run, (1, SERVER, "INFO", "before"), *lines)
    assert the_one(logs_of(run, *events, offsets=offsets)).message == expected


@pytest.mark.parametrize(
    ("lines", "events", "what"),
    [
        ([(3, WIN, "ERROR", "no"), SECOND], [], "worker 2 (win): no"),
        (
            [(3, WIN, "WARNING", "no space")],
            [],
            "no error and no lost worker; the first warning is worker 2 (win): no space",
        ),
        ([SECOND], [event(3, LOST)], "worker 2 (win) is lost: silent"),
        ([], [event(3, LOST)], "worker 2 (win) is lost: silent"),
        ([], [event(3, ended("the run failed: no"))], "the run failed: no"),
        ([], [event(3, ended("it was stopped"))], None),
        ([(1, PI, "INFO", 'said "level": "ERROR", and all was well')], [], None),
    ],
)
def test_what_went_wrong_is_a_sentence(
    run: MadeRun, lines: list[Said], events: list[EventRecord], what: str | None
) -> None:
    say(run, *lines)
    trouble = logs_of(run, *events).trouble
    assert (trouble and trouble.what) == what


def test_the_lines_around_it_are_of_all_nodes_by_time_and_serious_ones_are_counted(
    run: MadeRun,
) -> None:
    first, between = (3, WIN, "CRITICAL", "the first"), (4, PI, "INFO", "between")
    say(run, SECOND, (3, WIN, "INFO", "before"), first, between, (9, WIN, "WARNING", "later"))
    logs = logs_of(run)
    assert context(logs) == [
        ("worker 2 (win)", "before"),
        ("worker 2 (win)", "the first"),
        ("worker 1 (pi5)", "between"),
        ("server mini1", "the second"),
        ("worker 2 (win)", "later"),
    ]
    assert logs.num_errors == {"server mini1": 1, "worker 2 (win)": 1}
    assert logs.num_warnings == {"worker 2 (win)": 1}


def test_last_words_count_as_a_line(run: MadeRun) -> None:
    say(run, (0, SERVER, "INFO", "before"))
    words = LogLine(BEGAN + 9, "ERROR", "no space left", "Traceback", source="server mini1")
    logs = logs_of(run, stderr_tail=words)
    assert context(logs) == [("server mini1", "before"), ("server mini1", "no space left")]
    assert the_one(logs).exception == "Traceback"


def test_context_is_bounded_and_all_nodes_have_a_part_in_it(run: MadeRun) -> None:
    for number in range(200):
        level = "ERROR" if number == 100 else "INFO"
        say(run, (number / 10, PI if number % 2 else WIN, level, f"line {number}"))
    lines = context(logs_of(run))
    numbers = [int(message.split()[1]) for _, message in lines]
    assert numbers == list(range(100 - LINES_BEFORE, 100 + LINES_AFTER + 1))
    assert {source for source, _ in lines} == {"worker 1 (pi5)", "worker 2 (win)"}


def test_the_trouble_is_shown_among_however_many_lines_of_its_moment(run: MadeRun) -> None:
    many = [("INFO", f"after {number}") for number in range(3 * LINES_BEFORE)]
    run.says("server", "mini1", None, ("INFO", "before"), ("ERROR", "no"), *many)
    run.says("worker", "pi5", 0, *many)
    lines = context(logs_of(run))
    assert lines[:3] == [("server mini1", each) for each in ("before", "no", "after 0")]


def test_rotated_files_are_read_in_order_and_logs_that_are_not_here_are_named(
    run: MadeRun,
) -> None:
    file = run.paths.log_file("server", "mini1")
    for number, suffix in ((1, ".2"), (2, ".1"), (3, "")):
        say(run, (number, SERVER, "ERROR", f"error {number}"))
        file.replace(f"{file}{suffix}")
    logs = logs_of(run)
    assert [message for _, message in context(logs)] == ["error 1", "error 2", "error 3"]
    assert the_one(logs).message == "error 1"
    assert logs.num_errors == {"server mini1": 3}
    assert (logs.read, logs.missing) == (["server mini1"] * 3, [PI.title, WIN.title])


def test_a_node_may_be_called_like_a_log_file(run: MadeRun) -> None:
    say(run, (1, SERVER, "ERROR", "error 1"))
    run.paths.log_file("server", "mini1").replace(run.paths.log_file("server", "gpu.login1"))
    logs = logs_of(run)
    assert (the_one(logs).message, logs.read) == ("error 1", ["server gpu.login1"])


def test_lines_that_are_no_json_or_too_long_do_no_harm(run: MadeRun) -> None:
    file = run.paths.log_file("server", "mini1")
    file.write_bytes(
        b'{"level": "ERROR", "message": "' + b"x" * 3 * MAX_LINE_NBYTES + b'"}\n\x00\xff\n'
    )
    say(run, (1, SERVER, "ERROR", "y" * 5 * MAX_MESSAGE))
    logs = logs_of(run)
    line = the_one(logs)
    assert line.message.startswith("y" * MAX_MESSAGE + " … (")
    assert line.message.endswith("characters more)")
    assert logs.num_errors == {"server mini1": 1}


def test_what_a_process_says_of_its_machine_is_kept(run: MadeRun) -> None:
    run.says("worker", "pi5", 0, ("DEBUG", "here"), machine={"python": "3.12"})
    run.says("worker", "win", 1, ("DEBUG", "here"), machine="none")
    assert logs_of(run).machines == {"worker 1 (pi5)": {"python": "3.12"}}


@pytest.mark.parametrize(
    ("reason", "is_trouble"), [("it was stopped", False), ("the run failed: no space", True)]
)
def test_what_is_warned_of_when_a_run_is_stopped_is_no_trouble(
    run: MadeRun, reason: str, is_trouble: bool
) -> None:
    say(run, (10.1, PI, "WARNING", "the server has left"))
    logs = logs_of(run, event(10.0, ended(reason)))
    assert (logs.trouble is not None) == is_trouble
    assert logs.num_warnings == {"worker 1 (pi5)": 1}
    say(run, (5.0, WIN, "WARNING", "the link is slow"))
    logs = logs_of(run, event(10.0, ended(reason)))
    assert logs.trouble is not None
