"""`smolcluster ship` as a process."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from loki import Fault, Receiver, receiving
from smolcluster.cli import main
from smolcluster.observability.shipping import command
from smolcluster.observability.shipping.spool import STATE, Spool
from tiers import at_night

TIMEOUT_S = 90.0
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "edp-1" / "logs"
    folder.mkdir(parents=True)
    (folder / "server-mini1.log").write_bytes(b"one\ntwo\n")
    return folder


@pytest.fixture
def start(logs: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(url: str, *words: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "smolcluster.cli",
                "ship",
                str(logs.parent),
                "--loki",
                url,
                *words,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"HOME": str(logs)},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, None, *at_night(signal.SIGINT, signal.SIGHUP)])
def test_told_to_end_it_ships_the_last_lines_first(
    start: Start, logs: Path, receiver: Receiver, signum: int | None
) -> None:
    shipper = start(receiver.url, "--stop-on-stdin-eof")
    receiver.wait_for(lambda: receiver.received.texts() == ["one", "two"])
    with (logs / "server-mini1.log").open("ab") as log:
        log.write(b"the last\nwithout an end")
    if signum is None:
        said, _ = shipper.communicate(timeout=TIMEOUT_S)
    else:
        shipper.send_signal(signum)
        said = shipper.stdout.read() if shipper.stdout else ""
    assert (shipper.wait(TIMEOUT_S), said) == (0, "")
    assert receiver.received.texts() == ["one", "two", "the last", "without an end"]


def test_a_receiver_that_is_down_delays_no_end(start: Start, receiver: Receiver) -> None:
    receiver.down()
    shipper = start(receiver.url)
    assert shipper.stdout is not None
    assert "Loki does not take the logs, which wait" in shipper.stdout.readline()
    shipper.terminate()
    said, _ = shipper.communicate(timeout=TIMEOUT_S)
    assert shipper.returncode == 0
    assert f"warning: 8 B of logs have not been pushed to {receiver.url}; " in said
    assert said.endswith("smolcluster ship --once` does it later\n")


def test_a_receiver_that_says_nothing_delays_no_end(start: Start, receiver: Receiver) -> None:
    is_over = threading.Event()
    receiver.faults.append(Fault(204, before=is_over.wait))
    shipper = start(receiver.url)
    receiver.wait_for(lambda: not receiver.faults)
    shipper.terminate()
    said, _ = shipper.communicate(timeout=TIMEOUT_S)
    is_over.set()
    assert shipper.returncode == 0
    [line] = said.splitlines()
    assert "8 B of logs have not been pushed" in line


def test_two_never_ship_the_same_logs(
    start: Start, logs: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    shipper = start(receiver.url)
    receiver.wait_for(lambda: receiver.received.num_requests == 1)
    assert main(["ship", str(logs.parent), "--loki", receiver.url, "--once"]) == 75
    assert f"process {shipper.pid} ships the logs in {logs} already" in capsys.readouterr().err


def test_once_ships_what_is_there_of_the_newest_run(
    logs: Path,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (logs.parent / "config.yaml").touch()
    (logs / "worker-rank0-pi5.log").write_bytes(b"three\n")
    (logs.parent.parent / "latest").symlink_to("edp-1")
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(logs.parent.parent))
    assert main(["ship", "--loki", receiver.url, "--once", "--only", "worker-rank0-pi5"]) == 0
    assert receiver.received.texts() == ["three"]
    assert main(["ship", str(logs.parent), "--loki", receiver.url, "--once"]) == 0
    assert receiver.received.texts() == ["three", "one", "two"]
    assert receiver.received.num_repeated == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads((logs / STATE).read_text())["places"]


def test_once_says_when_loki_is_not_there(
    logs: Path,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "ONCE_S", 0.2)
    receiver.down()
    assert main(["ship", str(logs.parent), "--loki", receiver.url, "--once"]) == 75
    warning, error = capsys.readouterr().err.splitlines()
    assert " warning: Loki does not take the logs" in warning
    assert error == f"error: 8 B of logs have not been pushed to {receiver.url}: is Loki up?"


def test_once_fails_where_loki_refuses_lines_and_tries_them_again(
    logs: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.faults.append(Fault(400, body=b"entry too far behind"))
    assert main(["ship", str(logs.parent), "--loki", receiver.url, "--once"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{receiver.url} has refused some of the logs in {logs}" in error
    assert "entry too far behind" in error
    assert not (logs / STATE).exists()
    assert main(["ship", str(logs.parent), "--loki", receiver.url, "--once"]) == 0
    assert receiver.received.texts() == ["one", "two"]


def test_once_fails_where_a_log_cannot_be_read(
    logs: Path,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(Spool, "next_batch", denied)
    assert main(["ship", str(logs.parent), "--loki", receiver.url, "--once"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: the logs in {logs} cannot be read: Permission denied"


@pytest.mark.parametrize(
    "url", ["192.168.1.10:3100", "http://user:sentinel@127.0.0.1:3100", "http://127.0.0.1:x"]
)
def test_a_wrong_address_is_one_line_and_2(
    logs: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert main(["ship", str(logs.parent), "--loki", url, "--once"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "Loki's address" in line
    assert "sentinel" not in line
