"""What a process says of where it can be observed."""

import logging
import socket
from contextlib import ExitStack

import pytest

from harness import free_port, local_settings
from smolcluster.algorithms.observed import metrics_served
from smolcluster.observability.exporter import ProcessLabels
from smolcluster.utils.meter import Meter


def test_a_second_run_says_on_which_port_its_metrics_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log, port = logging.getLogger("observed"), free_port()
    settings = local_settings(f"metrics_port={port}")
    with ExitStack() as runs:
        for _ in range(2):
            who = ProcessLabels("server", "mini1")
            runs.enter_context(metrics_served(settings, who, Meter(), log, run_id=lambda: "r1"))
        [record] = caplog.records
        assert record.levelno == logging.INFO
        assert record.args is not None
        where, taken = record.args
        assert taken == port
        host, _, moved = str(where).partition(":")
        socket.create_connection((host, int(moved)), 10).close()
