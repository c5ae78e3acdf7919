"""Real processes of the project, with a deadline, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil
import pytest

import preloaded
from smolcluster.configs.spec import get_algorithm
from waiting import DEADLINE_S, eventually


class Child:
    """A process of the test; its output is in a file. If it may be `forked`, it begins faster."""

    def __init__(
        self, argv: Sequence[str], output: Path, environ: dict[str, str], *, forked: bool
    ) -> None:
        self.argv = argv
        self.process: preloaded.Forked | subprocess.Popen[bytes]
        self._output = output
        with output.open("wb") as sink:
            if forked and preloaded.can_fork(argv, environ):
                self.process = preloaded.fork(argv, sink.fileno(), environ)
                return
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")  # half a character may be there yet

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while True:
            has_ended = self.process.poll() is not None  # first: it may print and end at any time
            if text in self.output:
                return
            assert not has_ended, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < end, f"{text!r} was not printed:\n{self.output}"
            time.sleep(0.02)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)

    def reap(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of so many bytes (`64m`) at `path`, where the test may make one: root, Linux."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if (
        sys.platform != "linux"
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("no small disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_disk(file: Path) -> None:
    """Write to the file until its disk is full."""
    for size in (1 << 20, 512):
        with suppress(OSError), file.open("ab", buffering=0) as sink:
            while sink.write(bytes(size)):
                pass


class Processes:
    """Starts processes whose runs and secrets lie in a folder of the test; they end with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOL")}
        self.environ = kept | {
            "XDG_CONFIG_HOME": str(folder / "config"),
            "SMOLCLUSTER_RUNS_DIR": str(self.runs),
            "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.reap()

    def start(self, *argv: str, forked: bool = True) -> Child:
        """Start a command; a Python program that must load PyTorch itself must not be `forked`."""
        output = self.folder / f"output-{len(self.children)}.txt"
        child = Child(argv, output, self.environ, forked=forked)
        self.children.append(child)
        return child

    def smolcluster(self, *words: str, forked: bool = True) -> Child:
        """Start a command of `smolcluster`."""
        return self.start(sys.executable, "-m", "smolcluster.cli", *words, forked=forked)

    def ended(self, *words: str, forked: bool = True) -> str:
        """What a command of `smolcluster` has printed that ended well."""
        child = self.smolcluster(*words, forked=forked)
        assert child.wait() == 0, child.output
        return child.output

    def server(self, *arguments: str, algorithm: str = "edp") -> Child:
        """Start EDP's server file, as a person would."""
        return self.start(sys.executable, str(get_algorithm(algorithm).server), *arguments)

    def worker(self, worker_id: int, node: str, *arguments: str, algorithm: str = "edp") -> Child:
        """Start EDP's worker file, as a person would."""
        file = get_algorithm(algorithm).worker
        return self.start(sys.executable, str(file), str(worker_id), node, *arguments)

    def stage(self, node: str, *arguments: str, algorithm: str = "diloco") -> Child:
        """Start the file of a stage of a worker, as a person would."""
        spec = get_algorithm(algorithm)
        file = spec.folder / spec.roles["stage"]
        return self.start(sys.executable, str(file), node, *arguments)

    def store(self, node: str, *arguments: str, algorithm: str = "edp") -> Child:
        """Start EDP's store file, as a person would."""
        spec = get_algorithm(algorithm)
        file = spec.folder / spec.roles["store"]
        return self.start(sys.executable, str(file), node, *arguments)


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def pid_in(path: Path) -> int:
    """The process id that a program writes into a file, as soon as it is there."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())
