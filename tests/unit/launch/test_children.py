import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smolcluster.errors import LaunchError
from smolcluster.launch.children import Child, stop, wait_for
from smolcluster.runs.launched import LaunchedProcess

Spawn = Callable[..., Child]
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n"


def never() -> bool:
    return False


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def spawn(said: list[str]) -> Iterator[Spawn]:
    children: list[Child] = []

    def start(program: str) -> Child:
        argv = (sys.executable, "-c", "import os, signal, subprocess, sys, time\n" + program)
        children.append(
            Child(LaunchedProcess(node="pi5", role="worker", rank=0, argv=argv), said.append)
        )
        return children[-1]

    yield start
    stop(children, 0, never)


def wait_for_line(child: Child, said: list[str], line: str) -> None:
    wait_for([child], 20, lambda: line in said)
    assert line in said


def test_its_lines_are_heard_from_both_outputs(spawn: Spawn, said: list[str]) -> None:
    child = spawn(
        "print('one'); print('zwei ü', file=sys.stderr); sys.stdout.flush()\n"
        r"sys.stdout.buffer.write(b'\xff\xfe no text\n'); sys.stdout.write('no newline')"
    )
    wait_for([child], 20, never)
    child.close()
    assert sorted(said) == ["no newline", "one", "zwei ü", "\ufffd\ufffd no text"]


@pytest.mark.parametrize(
    ("program", "code", "ending"),
    [
        ("sys.exit(0)", 0, "ended with exit code 0"),
        ("sys.exit(75)", 75, "ended with exit code 75"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
    ],
)
def test_how_it_ended_is_known(spawn: Spawn, program: str, code: int, ending: str) -> None:
    child = spawn(program)
    wait_for([child], 20, never)
    assert (child.exit_code, child.ending) == (code, ending)


def test_a_program_that_is_not_there_is_named() -> None:
    argv = ("/no/such/python", "worker.py")
    process = LaunchedProcess(node="pi5", role="worker", rank=0, argv=argv)
    with pytest.raises(
        LaunchError, match=r"cannot start worker 1 \(pi5\): /no/such/python: No such"
    ):
        Child(process, print)


def test_it_is_told_to_stop_when_its_input_ends(spawn: Spawn, said: list[str]) -> None:
    child = spawn("print(sys.argv[1:])")
    wait_for([child], 20, never)
    child.close()
    assert said == ["['--stop-on-stdin-eof']"]


def test_ctrl_c_at_the_terminal_does_not_reach_it(spawn: Spawn) -> None:
    child = spawn("sys.stdin.read()")
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    assert (child.exit_code, child.ending) == (None, "still runs")


def test_stop_lets_it_clean_up(spawn: Spawn, said: list[str]) -> None:
    child = spawn(
        "def leave(*_): print('cleaning up'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('ready')\nsys.stdin.read()"
    )
    wait_for_line(child, said, "ready")
    stop([child], 20, never)
    assert said == ["ready", "cleaning up"]
    assert child.exit_code == 0


@pytest.mark.parametrize(("grace_s", "hurry"), [(0.2, False), (1000, True)])
def test_what_does_not_stop_is_killed_after_the_grace_or_in_a_hurry_at_once(
    spawn: Spawn, said: list[str], grace_s: float, hurry: bool
) -> None:
    child = spawn(STUBBORN + "sys.stdin.read()")
    wait_for_line(child, said, "ready")
    stop([child], grace_s, lambda: hurry)
    assert child.exit_code == 137


def test_what_a_killed_child_had_started_goes_with_it(
    spawn: Spawn, said: list[str], ends: Callable[[int], bool]
) -> None:
    child = spawn(
        STUBBORN + "inner = subprocess.Popen(['sleep', '1000'])\nprint(inner.pid)\nsys.stdin.read()"
    )
    wait_for([child], 20, lambda: len(said) == 2)
    stop([child], 0, never)
    assert ends(int(said[1]))


def test_a_neighbour_is_left_alone(spawn: Spawn, said: list[str], tmp_path: Path) -> None:
    one, other = spawn("sys.stdin.read()"), spawn("sys.stdin.read()")
    stop([one], 20, never)
    assert one.exit_code == 143
    assert other.exit_code is None
