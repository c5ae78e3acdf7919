"""What a process says of where it can be observed, and a worker of its progress."""

import io
import logging
import math
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from rich.console import Console

from harness import free_port, local_settings
from smolcluster.algorithms.observed import WorkerRun, metrics_served
from smolcluster.observability.logs import NodeLog
from smolcluster.runs.launched import Process
from smolcluster.server.process_stats import ProcessStats
from smolcluster.utils.meter import Computed, Meter
from waiting import DEADLINE_S, Clock


def test_a_second_run_says_on_which_port_its_metrics_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log, port = logging.getLogger("observed"), free_port()
    settings = local_settings(f"metrics_port={port}")
    with ExitStack() as runs:
        for _ in range(2):
            who = Process(node="mini1", role="server")
            runs.enter_context(metrics_served(settings, who, Meter(), log, run_id=lambda: "r1"))
        [record] = caplog.records
        assert record.levelno == logging.INFO
        assert "for Prometheus" in record.getMessage(), "what it is for"
        assert record.args is not None
        where, taken = record.args
        assert taken == port
        host, _, moved = str(where).partition(":")
        socket.create_connection((host, int(moved)), DEADLINE_S).close()


def shown_of(folder: Path, newest: Computed, *, is_terminal: bool) -> str:
    """What a worker shows that has taken 40 steps of 8 samples in 2 s."""
    console = Console(
        file=io.StringIO(), width=140, force_terminal=is_terminal, color_system=None, _environ={}
    )
    log, meter, clock = NodeLog("worker", "pi5", 0, console=console), Meter(), Clock()
    stats = ProcessStats(meter, clock)
    with (
        closing(log),
        closing(WorkerRun("pi5", 0, log, folder, meter=meter, console=console)) as own,
    ):
        own.begin(local_settings("num_epochs=4").run_config("r1", "edp"))
        own.take(stats.report())
        for _ in range(40):
            meter.step_done(8)
        meter.newest = newest
        clock.now = 2.0
        own.take(stats.report())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_worker_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    newest = Computed(epoch=1, stop=50, epoch_size=100, loss=0.25)
    shown = shown_of(tmp_path, newest, is_terminal=True)
    assert " 38% epoch 2/4 · step 40 · loss 0.250 · 1.6 s left · 160 samples/s now" in shown


def test_a_worker_that_knows_no_loss_shows_its_steps(tmp_path: Path) -> None:
    newest = Computed(epoch=1, stop=50, epoch_size=100, loss=math.nan)
    shown = shown_of(tmp_path, newest, is_terminal=True)
    assert "epoch 2/4 · step 40 · 1.6 s left · 160 samples/s now" in shown


def test_a_worker_shows_no_progress_in_a_file(tmp_path: Path) -> None:
    newest = Computed(epoch=1, stop=50, epoch_size=100, loss=0.25)
    assert shown_of(tmp_path, newest, is_terminal=False) == ""
