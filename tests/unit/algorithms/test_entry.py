"""The signals of a server or worker process."""

import signal
import subprocess
import sys

import pytest

from smolcluster.errors import DataError
from waiting import DEADLINE_S

PROGRAM = """
import sys, time
from smolcluster.algorithms.entry import guarded
def body():
    print("ready", flush=True)
    time.sleep(float(sys.argv[1]))
raise SystemExit(guarded(body))
"""


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_process_in_order(signum: signal.Signals, code: int) -> None:
    argv = [sys.executable, "-c", PROGRAM, "600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signum)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (code, b"")


LOGGING = """
from rich.text import Text
from smolcluster.algorithms.entry import guarded
from smolcluster.algorithms.process import process_log
from smolcluster.errors import DataError
from smolcluster.observability import logs
from smolcluster.observability.terminal import SteadyConsole
logs.CLOSE_S = 0.1
def body():
    console = SteadyConsole(stderr=True)
    with process_log("server", "here", console=console) as log:
        for n in range(3000):
            log.logger.info("%d %s", n, "x" * 200)
        log.print(console, Text("table"))
        print("decided", flush=True)
        raise DataError("the end")
raise SystemExit(guarded(body))
"""


def test_a_terminal_that_takes_nothing_holds_up_neither_a_process_nor_its_end() -> None:
    argv = [sys.executable, "-c", LOGGING]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"decided\n"
            assert process.wait(DEADLINE_S) == DataError.exit_code
        finally:
            process.kill()


def test_under_nohup_a_process_outlives_its_terminal() -> None:
    argv = ["nohup", sys.executable, "-c", PROGRAM, "0.5"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
