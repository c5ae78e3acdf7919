"""A disk that is really full for a while: a run loses no line, and says in its files how it ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes import Processes
from smolcluster.observability.sinks.jsonl import read_metrics
from smolcluster.runs.events import RunEnded, read_events
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status

TRAIN = "from smolcluster.cli import main; raise SystemExit(main())"
OPTIONS = ("num_epochs=100000", "threads=1", "eval_steps=1000000", "checkpoint_steps=null")


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A file system of 64 MB at `path`, where the test may make one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)]
    made = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], timeout=30, check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        for size in (1 << 20, 4096, 1):
            while file.write(bytes(size)):
                pass


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_disk_that_is_full_for_a_while_costs_no_line_nor_the_end(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        processes = Processes(tmp_path)
        processes.environ["SMOLCLUSTER_RUNS_DIR"] = str(disk / "runs")
        try:
            trainer = processes.start(
                *(sys.executable, "-c", TRAIN, "train", "--config", "digits", "--run-id", "r1"),
                *(each for option in OPTIONS for each in ("--override", option)),
            )
            trainer.wait_for("samples/s")
            fill(disk / "filler")
            trainer.wait_for("metrics.jsonl: No space left on device")
            (disk / "filler").unlink()
            trainer.wait_for("metrics.jsonl is written again: no line was lost")
            fill(disk / "filler")
            trainer.kill(signal.SIGTERM)
            trainer.wait_for("waits for space")
            (disk / "filler").unlink()
            assert trainer.wait() == 128 + signal.SIGTERM
        finally:
            for child in processes.children:
                child.reap()
        paths = find_run(disk / "runs", "r1")
        ended = read_events(paths.events)[-1].event
        steps = [
            line.record.step for line in read_metrics(paths.metrics) if line.record.kind == "step"
        ]
        assert isinstance(ended, RunEnded)
        assert steps == list(range(1, ended.steps + 1))
        assert read_status(paths.status).is_over
        files = [paths.metrics, paths.events, *paths.logs.iterdir()]
        assert [list(map(json.loads, path.read_bytes().splitlines())) != [] for path in files]
        assert "metrics.jsonl is written again" in (next(paths.logs.iterdir())).read_text()
