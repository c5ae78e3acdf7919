"""The most memory by phase: measured where the configuration asks for it, and seen on every screen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from exporting import METER
from harness import digits_config
from made_runs import MadeRun, worker_status
from reading import NOW, launched_run, said, server, status_of, worker
from smolcluster.configs.schema import DatasetPlace
from smolcluster.launch.host import Host
from smolcluster.launch.watch.status import look_at, peak_lines, status
from smolcluster.observability.exporter import RunCollector
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.report.page import write_report
from smolcluster.runs.launched import Process
from smolcluster.training.build import build

PEAKS = {"peak_bytes/forward": 1.5e9, "peak_bytes/backward": 2.5e9}
TOLD = "peak memory of worker 1 (pi5): forward 1.5 GB, backward 2.5 GB"


@pytest.mark.parametrize("is_wanted", [False, True])
def test_the_configuration_turns_it_on(is_wanted: bool) -> None:
    train = digits_config(memory_profiling=is_wanted)
    training = build(train, 0, DatasetPlace(), torch.device("cpu"))
    training.compute(torch.arange(4))
    phases = {"data", "forward", "backward"} if is_wanted else set()
    assert set(training.replica.meter.peaks) == phases


def test_in_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = launched_run(tmp_path, server(), worker(0, "pi5", "pi5"))
    written = status_of("training", now=NOW, workers={0: ("pi5", "joined")})
    told = [worker_status(0, process_stats=PEAKS)]
    written = written.model_copy(update={"workers": told})

    def ask(host: Host, _: str) -> str:
        return said(["running"], written if host.node == "mini1" else None)

    assert peak_lines(look_at(paths, ask)) == [TOLD]
    assert status(str(paths.root), as_json=False, watch=False, ask=ask) == 0
    assert TOLD in capsys.readouterr().out


def test_in_the_report(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started()
    run.joined(0)
    run.steps(1, 10)
    run.metric(MetricRecord("worker", 10, 0, {"memory_bytes": 1e9, **PEAKS}, rank=0, node="pi5"))
    run.ended()
    write_report(run.paths)
    page = run.paths.report.read_text()
    assert "Peak memory by phase" in page
    assert "2.5 GB" in page


def test_in_prometheus() -> None:
    meter = replace(METER, peak_bytes=[0, 1500, 2500, 0, 0, 0, 0])
    registry = CollectorRegistry()
    registry.register(RunCollector(Process(node="pi5", role="worker", rank=0), meter, Path("/")))
    text = generate_latest(registry).decode()
    named = (
        'smolcluster_phase_peak_memory_bytes{node="pi5",phase="backward",rank="0",role="worker"}'
    )
    assert f"{named} 2500.0" in text
