"""The signals of a server or worker process."""

import signal
import subprocess
import sys

import pytest

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
    argv = [sys.executable, "-c", PROGRAM, "60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signum)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (code, b"")


def test_under_nohup_a_process_outlives_its_terminal() -> None:
    argv = ["nohup", sys.executable, "-c", PROGRAM, "0.5"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    assert process.returncode == 0
