"""The supervisor of a worker: what it decides, and what it does to a process that dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smolcluster.algorithms.supervision import AWAY_DELAY_S, AWAY_S, SETTLED_S, Decision, decide
from waiting import eventually

DEADLINE_S = 60
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from smolcluster.algorithms import supervision
from smolcluster.algorithms.entry import guarded
from smolcluster.utils.stopping import Interrupted
folder, ending = Path(sys.argv[1]), sys.argv[2]
def body():
    os.write(int(sys.argv[-1]), os.fsencode(folder) + b"\\0")
    if ending != "early bug":
        os.write(int(sys.argv[-1]), supervision.TOOK_PART + b"\\0")
    try:
        with (folder / "lives").open("a") as file:
            file.write(f"{os.getpid()} ")
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif ending.endswith("bug"):
            1 / 0
        elif ending.isdigit():
            raise SystemExit(int(ending))
        time.sleep(600)
    except Interrupted:
        time.sleep(0.5)
        (folder / "goodbye").touch()
        raise
if supervision.SUPERVISED in sys.argv:
    raise SystemExit(guarded(body, stop_on_stdin_eof=True, supervised=True))
supervision.FIRST_DELAY_S = float(sys.argv[3])
supervision.FACTOR = 1
supervision.AWAY_DELAY_S = float(sys.argv[3])
raise SystemExit(supervision.supervise("worker", "pi5", 0, 3))
"""


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT, 70, 71])
def test_who_died_is_started_again_ever_later(code: int) -> None:
    delays = [decide(code, 5.0, done, 3).delay_s for done in range(4)]
    assert delays == [1.0, 4.0, 16.0, None]
    assert decide(code, 5.0, 3, 3).reason


@pytest.mark.parametrize(
    "code", [0, 1, 2, 3, 75, 77, 78, 130, 143, -signal.SIGTERM, -signal.SIGINT]
)
def test_who_says_why_it_ends_or_was_asked_to_is_not(code: int) -> None:
    assert decide(code, 5.0, 0, 3) == Decision(None, 0)


def test_who_took_part_looks_for_its_server_for_an_hour() -> None:
    assert decide(75, 60.0, 2, 3, away_s=0.0) == Decision(AWAY_DELAY_S, 2, "has lost its server")
    assert decide(75, 60.0, 3, 3, away_s=AWAY_S - 1).delay_s == AWAY_DELAY_S
    assert decide(75, 60.0, 0, 3, away_s=AWAY_S) == Decision(None, 0)
    assert decide(75, 60.0, 0, 0, away_s=0.0) == Decision(None, 0)


def test_a_long_life_begins_the_count_anew() -> None:
    decision = decide(-signal.SIGKILL, SETTLED_S, 3, 3)
    assert (decision.delay_s, decision.num_restarts) == (1.0, 1)


class Supervised:
    """A supervisor in a process group of its own."""

    def __init__(self, folder: Path, ending: str, delay_s: float) -> None:
        self.folder = folder
        file = folder / "worker.py"
        file.write_text(PROGRAM)
        (folder / "logs").mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(file), str(folder), ending, str(delay_s)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def lives(self) -> list[int]:
        file = self.folder / "lives"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def wait_for_lives(self, number: int) -> None:
        eventually(lambda: len(self.lives) >= number)

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, said


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def begin(ending: str, delay_s: float = 0.01) -> Supervised:
        started.append(Supervised(tmp_path, ending, delay_s))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait(DEADLINE_S)


@pytest.mark.parametrize(("ending", "code"), [("killed", 137), ("bug", 70)])
def test_after_so_many_restarts_it_gives_up_and_says_so_in_the_log(
    start: Start, tmp_path: Path, ending: str, code: int
) -> None:
    supervised = start(ending)
    ended, said = supervised.end()
    assert (ended, len(supervised.lives)) == (code, 4)
    assert "not started again" in said.splitlines()[-1]
    log = (tmp_path / "logs/worker-rank0-pi5.log").read_text().splitlines()
    assert [json.loads(line)["level"] for line in log] == ["WARNING"] * 3 + ["ERROR"]


def test_who_meets_an_internal_error_before_he_takes_part_is_not_started_again(
    start: Start,
) -> None:
    supervised = start("early bug")
    ended, said = supervised.end()
    assert (ended, len(supervised.lives)) == (70, 1)
    assert "before it took part, and is not started again" in said.splitlines()[-1]


def test_one_that_took_part_and_lost_its_server_is_back_until_it_is_asked_to_stop(
    start: Start,
) -> None:
    supervised = start("75")
    supervised.wait_for_lives(2)
    supervised.process.terminate()
    _, said = supervised.end()
    assert "has lost its server; it is started again in 10 ms (for 1 h)" in said.splitlines()[0]


@pytest.mark.parametrize("code", [0, 2, 77, 78])
def test_a_refusal_is_the_end_and_needs_no_word(start: Start, code: int) -> None:
    supervised = start(str(code))
    assert supervised.end() == (code, "")
    assert len(supervised.lives) == 1


@pytest.mark.parametrize("whom", [os.kill, os.killpg])
def test_who_is_asked_to_stop_says_goodbye_and_is_not_started_again(
    start: Start, tmp_path: Path, whom: Callable[[int, int], None]
) -> None:
    """Whether the supervisor alone is asked, or the whole group as `stop` does."""
    supervised = start("lives")
    supervised.wait_for_lives(1)
    whom(supervised.process.pid, signal.SIGTERM)
    assert supervised.end()[0] == 143
    assert (tmp_path / "goodbye").exists()
    assert len(supervised.lives) == 1


def test_a_stop_between_two_lives_is_the_end(start: Start) -> None:
    supervised = start("killed", 600.0)
    assert supervised.process.stderr is not None
    assert "1 of 3" in supervised.process.stderr.readline()
    supervised.process.terminate()
    assert supervised.end()[0] == 143
    assert len(supervised.lives) == 1


def test_a_worker_whose_supervisor_was_killed_stops(start: Start, tmp_path: Path) -> None:
    supervised = start("lives")
    supervised.wait_for_lives(1)
    os.kill(supervised.process.pid, signal.SIGKILL)
    supervised.end()
    assert (tmp_path / "goodbye").exists()
