"""What holds for all tests."""

import atexit
import functools
import gc
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
from skips import pytest_addoption, pytest_sessionfinish  # noqa: F401 - hooks
from smolcluster.algorithms import owner
from smolcluster.observability.curves import draw_curves, svg_of
from smolcluster.observability.report import render
from smolcluster.observability.view.curves import Curves
from smolcluster.server import worker_pool
from smolcluster.training import checkpoint
from smolcluster.utils import words
from smolcluster.utils.stopping import SIGNALS
from smolcluster.wire import acceptor, node
from smolcluster.wire.connection import listen
from smolcluster.wire.local import listen_beside

gc.disable()  # until all tests are collected: next to nothing of what that makes is garbage
atexit.register(gc.unfreeze)  # or extension modules report that their objects are never freed

for number in SIGNALS:  # nohup, for one, has its children ignore a hang-up, which the tests send
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

settings.register_profile("clockless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clockless")  # how long an example takes is the machine's affair


def own_temporary_folder() -> Path:
    """The folder of all temporary files of these tests and of the processes that they start.

    The processes of pytest-xdist have that of the one that started them. What tests have in `tmp_path` stays
    for a look where pytest keeps it.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="tests-")
        tempfile.tempdir = None  # it is asked for anew
    return Path(tempfile.gettempdir())


TEMPORARY = own_temporary_folder()
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")  # a user's own is left alone
os.environ["WANDB_MODE"] = "disabled"  # each process of a run would start one that imports wandb
for name in [name for name in os.environ if name.startswith("SMOLCLUSTER_")]:
    del os.environ[name]  # settings of this shell's user
os.environ["DOCKER_HOST"] = "unix:///no-docker-for-tests"  # launches would start Grafana in it


TESTS = Path(__file__).parent
PARTS = {
    "faults": ("faults/*",),
    "lab": ("integration/launch/*",),
    "mesh": ("integration/test_mesh*", "integration/test_orchestrator.py"),
    "jobs": ("integration/test_mesh_slurm.py", "integration/test_mesh_kubernetes.py"),
    "browser": ("integration/test_dashboard.py",),
}
"""Parts of the tests of whole processes that can be asked for by `-m`: their files."""
DEADLINES_S = {"integration": 150.0, "faults": 150.0, "mesh": 600.0}
"""Of a test in such a folder, or of such a part, on a machine that does nothing else."""
DEADLINE_S = 60.0
"""Of any other test."""


@functools.cache
def parts_and_deadline(file: Path) -> tuple[list[str], float]:
    """The parts that a file's tests are of, and their deadline in seconds."""
    path = file.relative_to(TESTS) if file.is_relative_to(TESTS) else Path("other")
    parts = [
        part for part, patterns in PARTS.items() if any(path.match(pattern) for pattern in patterns)
    ]
    deadline_s = DEADLINES_S.get(path.parts[0], DEADLINE_S)
    for part in parts:
        deadline_s = DEADLINES_S.get(part, deadline_s)
    return parts, deadline_s


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of each part, and give each a deadline: the longer, the busier the machine is.

    It will be as busy as the processes of pytest-xdist make it, though it may not be yet.
    """
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    load = max(1.0, max(num_processes, os.getloadavg()[0]) / (os.cpu_count() or 1))
    for item in items:
        parts, deadline_s = parts_and_deadline(item.path)
        for part in parts:
            item.add_marker(part)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(load * deadline_s))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector need not look through it again and again."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(TEMPORARY, ignore_errors=True)


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


@pytest.fixture(autouse=True, scope="session")
def uv_is_on_the_path() -> Iterator[None]:
    """Messages name commands in one way, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "which", lambda name: f"/usr/bin/{name}")
        yield


@pytest.fixture(autouse=True, scope="session")
def undrawn() -> Iterator[None]:
    """Runs leave no picture of their curves, and pages an empty one: to draw them takes seconds."""

    def stand_in(runs: Sequence[Curves]) -> str:
        return "<svg></svg>" if any(each.series for each in runs) else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "draw_curves", lambda _paths: None)
        patch.setattr(render, "svg_of", stand_in)
        yield


@pytest.fixture
def with_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are drawn."""
    monkeypatch.setattr(owner, "draw_curves", draw_curves)
    monkeypatch.setattr(render, "svg_of", svg_of)


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
