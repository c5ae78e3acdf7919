"""What holds for all tests."""

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from processes import Processes
from smolcluster.server import worker_pool
from smolcluster.training import checkpoint
from smolcluster.utils.stopping import SIGNALS
from smolcluster.wire import acceptor, node
from smolcluster.wire.connection import listen
from smolcluster.wire.local import listen_beside

for number in SIGNALS:  # nohup, for one, has its children ignore a hang-up, which the tests send
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

settings.register_profile("clockless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clockless")  # how long an example takes is the machine's affair

STATE = tempfile.mkdtemp(prefix="smolcluster-state-")
"""What runs of the tests note outside their folders is no user's."""
os.environ["XDG_STATE_HOME"] = STATE
os.environ["DOCKER_HOST"] = "unix:///no-docker-for-tests"  # launches would start Grafana in it


WITH_PROCESSES = tuple(
    f"{Path(__file__).parent / name}{os.sep}" for name in ("integration", "faults")
)
"""Folders of tests that depend on when the system lets processes, browsers and connections go on."""
TIMEOUT = pytest.StashKey[object]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have such tests run once more when they fail; the summary shows the first failure too."""
    for item in items:
        if str(item.path).startswith(WITH_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE, ignore_errors=True)


def pytest_timeout_set_timer(item: pytest.Item, settings: object) -> None:
    """Keep the test's time-out for `pytest_runtest_setup`; pytest-timeout itself sets the timer."""
    item.stash[TIMEOUT] = settings


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a test that is run once more its time-out again: pytest-timeout ends it at a failure."""
    if getattr(item, "execution_count", 1) > 1 and TIMEOUT in item.stash:
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[TIMEOUT])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how the checks beside pytest went (`scripts/test.sh`): pytest's own summary is the last line."""
    if (folder := os.environ.get("CHECKS_BESIDE")) is None:
        return
    beside = Path(folder)
    while not (beside / "done").exists():
        time.sleep(0.1)
    for name in ("said", "failed"):
        if (beside / name).exists():
            terminalreporter.write_line((beside / name).read_text())
    (beside / "shown").touch()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes and reaps them."""
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def closed_doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For servers that listen and never serve: a process would end then, and its sockets with it."""
    opened: list[socket.socket] = []

    def recorded(addresses: Sequence[str], port: int) -> list[socket.socket]:
        opened.extend(listeners := listen(addresses, port))
        return listeners

    def recorded_beside(listeners: Iterable[socket.socket]) -> list[socket.socket]:
        opened.extend(beside := listen_beside(listeners))
        return beside

    monkeypatch.setattr(node, "listen", recorded)
    monkeypatch.setattr(acceptor, "listen_beside", recorded_beside)
    yield
    for listener in opened:
        listener.close()


@pytest.fixture(autouse=True)
def same_weights_each_time() -> None:
    """Models that a test makes without a seed are the same in every run of the tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Small models are slower on several threads, and far slower where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def signal_handlers_are_put_back() -> Iterator[None]:
    """Or a later test, whose processes inherit ignored signals, would fail instead of the one that did it."""
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield
    after = [signal.getsignal(signum) for signum in SIGNALS]
    for signum, handler in zip(SIGNALS, before, strict=True):
        signal.signal(signum, handler)
    assert after == before, "the test needs `as_a_process`"


@pytest.fixture
def as_a_process() -> Iterator[None]:
    """What a process changes for its own rest of life is put back."""
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    interval, hook = sys.getswitchinterval(), threading.excepthook
    yield
    sys.setswitchinterval(interval)
    threading.excepthook = hook
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk itself does cannot be tested here, and it is slow."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.setattr(checkpoint, "_full_sync", lambda _descriptor: False)


@pytest.fixture
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker pool whose run is over does not wait long for those who do not leave."""
    monkeypatch.setattr(worker_pool, "SHUTDOWN_TIMEOUT_S", 0.05)
