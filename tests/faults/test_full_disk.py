"""A disk that is really full for a while: a run loses no line, and says in its files how it ended."""

import json
import signal
import sys
from pathlib import Path

import pytest

from harness import steps_in
from processes import Processes, fill_disk, small_disk
from smolcluster.runs.events import RunEnded, read_events
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status

pytestmark = pytest.mark.nightly

TRAIN = "from smolcluster.cli import main; raise SystemExit(main())"
OPTIONS = ("num_epochs=100000", "threads=1", "eval_steps=1000000", "checkpoint_steps=null")


def test_a_disk_that_is_full_for_a_while_costs_no_line_nor_the_end(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "64m"):
        with Processes(tmp_path) as processes:
            processes.environ["SMOLCLUSTER_RUNS_DIR"] = str(disk / "runs")
            trainer = processes.start(
                *(sys.executable, "-c", TRAIN, "train", "--config", "digits", "--run-id", "r1"),
                *(each for option in OPTIONS for each in ("--override", option)),
            )
            trainer.wait_for("samples/s")
            fill_disk(disk / "filler")
            trainer.wait_for("metrics.jsonl: No space left on device")
            (disk / "filler").unlink()
            trainer.wait_for("metrics.jsonl is written again: no line was lost")
            fill_disk(disk / "filler")
            trainer.kill(signal.SIGTERM)
            trainer.wait_for("waits for space")
            (disk / "filler").unlink()
            assert trainer.wait() == 128 + signal.SIGTERM
        paths = find_run(disk / "runs", "r1")
        ended = read_events(paths.events)[-1].event
        steps = [line.record.step for line in steps_in(paths.metrics)]
        assert isinstance(ended, RunEnded)
        assert steps == list(range(1, ended.steps + 1))
        assert read_status(paths.status).is_over
        files = [paths.metrics, paths.events, *paths.logs.iterdir()]
        assert [list(map(json.loads, path.read_bytes().splitlines())) != [] for path in files]
        assert "metrics.jsonl is written again" in (next(paths.logs.iterdir())).read_text()
