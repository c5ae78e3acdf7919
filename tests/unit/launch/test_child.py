import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import is_alive
from smolcluster.launch.child import Child
from smolcluster.runs.launched import LaunchedProcess
from waiting import eventually

Spawn = Callable[..., Child]


def child_of(argv: tuple[str, ...], folder: Path, say: Callable[[str], None]) -> Child:
    own = LaunchedProcess(node="pi5", role="worker", rank=0, run_dir=str(folder), argv=argv)
    return Child(own, say)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def spawn(said: list[str], tmp_path: Path) -> Iterator[Spawn]:
    spawned: list[Child] = []

    def start(program: str) -> Child:
        argv = (sys.executable, "-c", "import os, signal, subprocess, sys, time\n" + program)
        spawned.append(child_of(argv, tmp_path, said.append))
        return spawned[-1]

    yield start
    for child in spawned:
        child.close()


def test_its_lines_are_heard_from_both_outputs(spawn: Spawn, said: list[str]) -> None:
    child = spawn(
        "print('one'); print(sys.argv[1:], file=sys.stderr); sys.stdout.flush()\n"
        r"sys.stdout.buffer.write('zwei ü\n'.encode() + b'\xff\xfe no text\n'); "
        "sys.stdout.write('no newline')"
    )
    eventually(lambda: child.exit_code is not None)
    child.close()
    told = ["['--stop-on-stdin-eof']", "no newline", "one", "zwei ü", "\ufffd\ufffd no text"]
    assert sorted(said) == told


@pytest.mark.parametrize(
    ("program", "code", "ending"),
    [
        ("sys.exit(0)", 0, "ended with exit code 0"),
        ("sys.exit(75)", 75, "ended with exit code 75"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
    ],
)
def test_how_it_ended_is_known(
    spawn: Spawn, tmp_path: Path, program: str, code: int, ending: str
) -> None:
    child = spawn(program)
    eventually(lambda: child.exit_code is not None)
    assert (child.exit_code, child.ending) == (code, ending)
    child.close()
    assert (tmp_path / "exits/worker-rank0-pi5").read_text() == f"{code}\n"


def test_it_has_a_group_of_its_own_which_ends_with_it(spawn: Spawn, said: list[str]) -> None:
    """Ctrl-C at the terminal does not reach it."""
    child, other = (
        spawn(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print(subprocess.Popen(['sleep', '1000']).pid, flush=True)\nsys.stdin.read()"
        )
        for _ in range(2)
    )
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    assert (child.exit_code, child.ending) == (None, "still runs")
    eventually(lambda: len(said) == 2)
    other.close()
    assert child.exit_code is None
    child.close()
    eventually(lambda: not any(is_alive(int(pid)) for pid in said))


def test_texts_have_the_same_hash_in_all_children(
    spawn: Spawn, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    alike = [spawn("print(hash('word'))") for _ in range(2)]
    eventually(lambda: all(child.exit_code is not None for child in alike))
    for child in alike:
        child.close()
    assert len(said) == 2
    assert said[0] == said[1]


def test_an_output_that_outlives_it_is_closed_in_the_end(
    spawn: Spawn, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that it began in a session of its own writes on."""
    monkeypatch.setattr("smolcluster.launch.child.OUTPUT_TIMEOUT_S", 0.0)
    child = spawn(
        "print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True)"
    )
    eventually(lambda: child.exit_code is not None and said)
    child.close()
    output = child._popen.stdout
    assert output is not None
    assert not output.closed
    os.kill(int(said[0]), signal.SIGKILL)
    eventually(lambda: output.closed)
