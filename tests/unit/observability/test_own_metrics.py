"""A workload's own metrics are seen wherever the built-in ones are."""

import io
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from exporting import METER, NOW, a_status
from made_runs import MadeRun, summary_of
from smolcluster.launch.run_in_sessions import progress_line
from smolcluster.launch.watch.status import head
from smolcluster.observability.exporter import RunCollector
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.report.comparison import comparison_of
from smolcluster.observability.report.page import write_report
from smolcluster.observability.sinks.console import measured
from smolcluster.observability.view.measured import columns_of
from smolcluster.observability.view.report import report_of
from smolcluster.observability.view.snapshot import Snapshot
from smolcluster.observability.view.view import read_view
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.series import SeriesFile
from smolcluster.runs.status import RunStatus
from smolcluster.runs.summary import Final, table

VALUES = {"val_loss": 0.5, "val_hits": 0.4321, "val_f1 macro": 12.5}


def a_status_with_metrics() -> RunStatus:
    return RunStatus.model_validate(a_status().model_dump() | {"val_accuracy": None} | VALUES)


@pytest.fixture
def folder(tmp_path: Path) -> RunPaths:
    run = MadeRun(tmp_path)
    run.config()
    run.started()
    run.steps(1, 20)
    run.metric(MetricRecord("eval", 10, 0, VALUES), MetricRecord("eval", 20, 1, VALUES))
    run.summary(final=Final.model_validate({"train_loss": 0.1, **VALUES}))
    return run.paths


def test_on_the_terminal() -> None:
    assert measured(MetricRecord("eval", 1, 0, VALUES)) == "hits 0.4321 · f1 macro 12.5"
    status = a_status_with_metrics()
    report = report_of(Snapshot(RunPaths(Path("r1")), None, status, now=NOW))
    assert {"validation loss 0.5", "hits 0.4321", "f1 macro 12.5"} <= set(head(report))
    assert report.model_dump()["val_hits"] == 0.4321
    assert "validation hits 0.4321" in progress_line(status)


def test_in_the_closing_table() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(table(summary_of(final=Final.model_validate({"train_loss": 0.1, **VALUES}))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "validation hits" in text
    assert "0.4321" in text
    assert "accuracy" not in text


def test_in_prometheus() -> None:
    status = a_status_with_metrics()
    registry = CollectorRegistry()
    who = Process(node="mini1", role="server")
    registry.register(RunCollector(who, METER, Path("/"), status=lambda: status, now=lambda: NOW))
    text = generate_latest(registry).decode()
    assert 'smolcluster_validation_metric{metric="hits"} 0.4321' in text


@pytest.mark.usefixtures("with_curves")
def test_in_curves_report_and_comparison(folder: RunPaths, tmp_path: Path) -> None:
    curves = read_view(folder).curves
    assert curves.series["val_hits"].y == [0.4321, 0.4321]
    assert curves.panels[0] == ["loss", "val_hits", "val_f1 macro"]
    write_report(folder)
    page = folder.report.read_text()
    assert "validation hits" in page  # in the curves
    assert "Hits" in page
    assert "0.4321" in page
    other = MadeRun(tmp_path / "other", "edp-2")
    other.summary()
    rows = comparison_of([read_view(folder), read_view(other.paths)]).outcomes
    assert rows["hits"] == ["0.4321", "–"]


def test_in_the_small_file_that_the_page_reads(folder: RunPaths) -> None:
    file = SeriesFile(folder, warn=pytest.fail)
    file.close()
    folder.metrics.unlink()
    shown = columns_of(read_view(folder).series)
    assert shown["evaluations"]["val_f1 macro"] == [12.5, 12.5]
