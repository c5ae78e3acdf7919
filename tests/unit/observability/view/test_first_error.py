from pathlib import Path

import pytest

from made_runs import BEGAN, MadeRun
from smolcluster.observability.view.first_error import (
    LINES_AFTER,
    LINES_BEFORE,
    MAX_LINE_NBYTES,
    MAX_MESSAGE,
    LogLine,
    Logs,
    Process,
    read_logs,
)
from smolcluster.runs.events import EventRecord, RunEnded, WorkerLost
from smolcluster.runs.files import utc_timestamp

SERVER, PI, WIN = (
    Process("server", "mini1"),
    Process("worker", "pi5", 0),
    Process("worker", "win", 1),
)


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path)


def logs_of(
    run: MadeRun,
    *events: EventRecord,
    expected: tuple[Process, ...] = (SERVER, PI, WIN),
    **more: object,
) -> Logs:
    values: dict[str, object] = {"offsets": {}} | more
    return read_logs(run.paths.logs, expected, events, **values)  # type: ignore[arg-type]


def lost(at_s: float) -> EventRecord:
    event = WorkerLost(rank=1, node="win", reason="silent")
    return EventRecord(utc_timestamp(BEGAN + at_s), "a1", event)


def said(logs: Logs) -> list[tuple[str, str]]:
    assert logs.trouble is not None
    return [(line.source, line.message) for line in logs.trouble.lines]


def the_one(logs: Logs) -> LogLine:
    assert logs.trouble is not None
    [line] = [line for line in logs.trouble.lines if line.is_it]
    return line


def test_the_first_error_by_time_is_found_whichever_node_has_it(run: MadeRun) -> None:
    run.now = 5
    run.says("server", "mini1", None, ("ERROR", "the second"))
    run.now = 3
    run.says("worker", "win", 1, ("INFO", "before"), ("CRITICAL", "the first"))
    run.now = 4
    run.says("worker", "pi5", 0, ("INFO", "between"))
    logs = logs_of(run)
    assert logs.trouble is not None
    assert logs.trouble.what == "worker 2 (win): the first"
    assert said(logs) == [
        ("worker 2 (win)", "before"),
        ("worker 2 (win)", "the first"),
        ("worker 1 (pi5)", "between"),
        ("server mini1", "the second"),
    ]
    assert the_one(logs).message == "the first"
    assert logs.num_errors == {"server mini1": 1, "worker 2 (win)": 1}


def test_a_clock_that_is_ahead_does_not_put_the_blame_on_others(run: MadeRun) -> None:
    """The Pi's clock is 10 s ahead: its error came first, although its file says otherwise."""
    run.now = 3
    run.says("worker", "pi5", 0, ("ERROR", "the first"), off_s=10)
    run.now = 5
    run.says("server", "mini1", None, ("ERROR", "the second"))
    assert the_one(logs_of(run, offsets={PI: 10.0})).message == "the first"
    assert the_one(logs_of(run)).message == "the second"


def test_the_clock_of_one_machine_does_not_move_what_another_of_its_rank_has_said(
    run: MadeRun,
) -> None:
    """The worker of rank 0 moved from the Pi to a machine whose clock is 10 s ahead."""
    run.now = 3
    run.says("server", "mini1", None, ("ERROR", "the first"))
    run.now = 5
    run.says("worker", "pi5", 0, ("ERROR", "the second"))
    offsets = {Process("worker", "nas", 0): 10.0}
    assert the_one(logs_of(run, offsets=offsets)).message == "the first"


def test_where_nothing_failed_the_first_warning_is_named(run: MadeRun) -> None:
    run.now = 5
    run.says("server", "mini1", None, ("WARNING", "the second"))
    run.now = 3
    run.says("worker", "win", 1, ("INFO", "before"), ("WARNING", "no space"))
    logs = logs_of(run)
    assert logs.trouble is not None
    assert logs.trouble.what.endswith("the first warning is worker 2 (win): no space")
    assert the_one(logs).message == "no space"
    assert logs.num_warnings == {"server mini1": 1, "worker 2 (win)": 1}
    run.now = 9
    run.says("server", "mini1", None, ("ERROR", "an error"))
    assert the_one(logs_of(run)).message == "an error"


def test_a_lost_worker_is_trouble_and_the_warning_of_it_is_pointed_at(run: MadeRun) -> None:
    run.now = 3
    run.says("server", "mini1", None, ("INFO", "before"), ("WARNING", "worker 2 (win) is lost"))
    run.now = 4
    run.says("server", "mini1", None, ("ERROR", "later"))
    logs = logs_of(run, lost(3.002))
    assert logs.trouble is not None
    assert logs.trouble.what == "worker 2 (win) is lost: silent"
    assert the_one(logs).message == "worker 2 (win) is lost"


def test_a_lost_worker_of_which_no_log_tells_is_trouble_too(run: MadeRun) -> None:
    logs = logs_of(run, lost(3.0), expected=(SERVER,))
    assert logs.trouble is not None
    assert logs.trouble.what == "worker 2 (win) is lost: silent"
    assert said(logs) == []
    assert (logs.read, logs.missing) == ([], ["server mini1"])


@pytest.mark.parametrize(
    ("reason", "is_trouble"), [("the run failed: no", True), ("it was stopped", False)]
)
def test_a_failure_that_no_line_tells_of_is_told_by_its_event(
    run: MadeRun, reason: str, is_trouble: bool
) -> None:
    ended = RunEnded(ok=False, reason=reason, wall_s=1.0, steps=1, samples_applied=1)
    logs = logs_of(run, EventRecord(utc_timestamp(BEGAN), "a1", ended))
    assert (logs.trouble is not None) is is_trouble


def test_last_words_count_as_a_line(run: MadeRun) -> None:
    run.says("server", "mini1", None, ("INFO", "before"))
    words = LogLine(BEGAN + 9, "server mini1", "ERROR", "no space left", "Traceback")
    logs = logs_of(run, stderr_tail=words)
    assert said(logs) == [("server mini1", "before"), ("server mini1", "no space left")]
    assert the_one(logs).exception == "Traceback"


def test_context_is_bounded_and_all_nodes_have_a_part_in_it(run: MadeRun) -> None:
    for number in range(200):
        run.now = number / 10
        node, rank = ("pi5", 0) if number % 2 else ("win", 1)
        level = "ERROR" if number == 100 else "INFO"
        run.says("worker", node, rank, (level, f"line {number}"))
    lines = said(logs_of(run))
    numbers = [int(message.split()[1]) for _, message in lines]
    assert numbers == list(range(100 - LINES_BEFORE, 100 + LINES_AFTER + 1))
    assert {source for source, _ in lines} == {"worker 1 (pi5)", "worker 2 (win)"}


def test_the_trouble_is_shown_among_however_many_lines_of_its_moment(run: MadeRun) -> None:
    many = [("INFO", f"after {number}") for number in range(3 * LINES_BEFORE)]
    run.says("server", "mini1", None, ("INFO", "before"), ("ERROR", "no"), *many)
    run.says("worker", "pi5", 0, *many)
    lines = said(logs_of(run))
    assert lines[:3] == [("server mini1", each) for each in ("before", "no", "after 0")]


def test_the_trouble_is_shown_when_the_clock_was_set_back_before_it(run: MadeRun) -> None:
    run.now = 100
    run.says("server", "mini1", None, *[("INFO", f"line {i}") for i in range(2 * LINES_AFTER)])
    run.now = 3
    run.says("server", "mini1", None, ("ERROR", "no"))
    assert the_one(logs_of(run)).message == "no"


def test_nodes_whose_logs_are_not_here_are_named(run: MadeRun) -> None:
    run.says("server", "mini1", None, ("INFO", "fine"))
    logs = logs_of(run)
    assert logs.read == ["server mini1"]
    assert logs.missing == ["worker 1 (pi5)", "worker 2 (win)"]
    assert logs.trouble is None


def test_rotated_files_are_read_and_in_order(run: MadeRun) -> None:
    file = run.paths.log_file("server", "mini1")
    for number, suffix in ((1, ".2"), (2, ".1"), (3, "")):
        run.now = number
        run.says("server", "mini1", None, ("ERROR", f"error {number}"))
        file.replace(f"{file}{suffix}")
    logs = logs_of(run, expected=(SERVER,))
    assert [message for _, message in said(logs)] == ["error 1", "error 2", "error 3"]
    assert the_one(logs).message == "error 1"
    assert logs.num_errors == {"server mini1": 3}
    assert logs.missing == []


def test_lines_that_are_no_json_or_too_long_do_no_harm(run: MadeRun) -> None:
    file = run.paths.log_file("server", "mini1")
    file.write_bytes(
        b'{"level": "ERROR", "message": "' + b"x" * 3 * MAX_LINE_NBYTES + b'"}\n\x00\xff\n'
    )
    run.now = 1
    run.says("server", "mini1", None, ("ERROR", "y" * 5 * MAX_MESSAGE))
    logs = logs_of(run)
    line = the_one(logs)
    assert line.message.startswith("y" * MAX_MESSAGE + " … (")
    assert line.message.endswith("characters more)")
    assert logs.num_errors == {"server mini1": 1}


def test_a_message_that_looks_like_a_level_is_none(run: MadeRun) -> None:
    run.says("worker", "pi5", 0, ("INFO", 'said "level": "ERROR", and all was well'))
    assert logs_of(run).trouble is None


def test_what_a_process_says_of_its_machine_is_kept(run: MadeRun) -> None:
    run.says("worker", "pi5", 0, ("DEBUG", "here"), machine={"python": "3.12"})
    run.says("worker", "win", 1, ("DEBUG", "here"), machine="none")
    assert logs_of(run).machines == {"worker 1 (pi5)": {"python": "3.12"}}
