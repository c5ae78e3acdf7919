"""Server and workers as real processes, started by hand as the README says; and how each of them ends."""

import json
import re
import shlex
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from exporting import free_ports
from harness import assert_applied_once, free_port, steps_in
from processes import Processes
from smolcluster.cli import main
from smolcluster.configs.spec import get_algorithm
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.observability.spans import read_spans
from smolcluster.runs.events import CheckpointSaved, WorkerJoined, read_events
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary
from smolcluster.utils.meter import PHASES, STEP
from tiers import at_night
from waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]


def scraped(port: int) -> str:
    """What Prometheus finds there; nothing as long as nobody listens."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        return str(reply.read().decode())
    return ""


def test_a_worker_is_killed_another_comes_late_and_every_sample_is_applied_once(
    processes: Processes,
) -> None:
    metrics_port = free_ports(5)
    by_hand = ("--local", "--override", f"port={free_port()}", f"metrics_port={metrics_port}")
    epochs = 60
    learning = ("learning_rate=0.003", "min_workers=3", f"num_epochs={epochs}")
    overrides = (*learning, "threads=1", "heartbeat_timeout_s=100")
    server = processes.server(*by_hand, *overrides)
    workers = [
        processes.worker(rank + 1, node, *by_hand, "threads=1")
        for rank, node in enumerate(("pi5", "win", "macbook"))
    ]
    metrics = processes.runs / "latest" / "metrics.jsonl"
    eventually(lambda: {r.record.rank for r in steps_in(metrics)} >= {0, 1, 2})
    for worker in (workers[0], workers[2]):  # or the run could be over before the late one is there
        worker.kill(signal.SIGSTOP)
    assert "smolcluster_process_steps_total{" in scraped(metrics_port + 2)
    workers[1].kill(signal.SIGKILL)
    status_file = metrics.with_name("status.json")
    eventually(lambda: status_file.exists() and len(read_status(status_file).workers) == 3)
    is_down = re.compile(r'^smolcluster_worker_up\{.*node="win".*\} 0', re.MULTILINE)
    eventually(lambda: is_down.search(scraped(metrics_port)))
    late = processes.worker(4, "macbook", *by_hand, "threads=1")
    eventually(lambda: len(read_status(status_file).workers) == 4)
    for worker in (workers[0], workers[2]):
        worker.kill(signal.SIGCONT)
    assert server.wait() == 0, server.output
    for worker in (workers[0], workers[2], late):
        assert worker.wait() == 0, worker.output
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", metrics_port), 5)
    run = find_run(processes.runs)
    summary = read_summary(run.summary)
    assert summary.samples_applied == epochs * summary.train_samples
    assert summary.leases_returned >= 1
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy >= 0.9, "by chance it would be 0.1"
    records = [line.record for line in steps_in(run.metrics)]
    assert len(records) == summary.steps
    assert_applied_once(records, summary.train_samples, epochs)
    assert {share.rank for share in summary.workers if share.samples} == {0, 1, 2, 3}
    status = read_status(run.status)
    assert (status.state, status.step) == ("ended", summary.steps)
    assert status.samples_applied == status.total_samples == summary.samples_applied
    assert status.val_accuracy == summary.final.val_accuracy
    states = [each.state for each in status.workers]
    assert states[:3] == ["joined", "lost", "joined"]
    assert [each.samples for each in status.workers] == [each.samples for each in summary.workers]
    assert all(each.step and each.step <= status.step for each in status.workers[:3])
    assert "Traceback" not in server.output
    report = run.report.read_text()
    for number in (f"{summary.final.val_accuracy:.1%}", f"{summary.steps:,}"):
        assert number in report
    assert "worker 2 (win) is lost" in report.partition("What went wrong first")[2]


@pytest.mark.nightly
def test_who_is_first_waits_for_the_other_and_both_leave_readable_files(
    processes: Processes,
) -> None:
    """Logs are in UTC, and consoles have local time."""
    port, start = f"port={free_port()}", time.time()
    common = ("--local", "--override", port, "threads=1")
    processes.environ["TZ"] = "Asia/Kolkata"
    worker = processes.worker(1, "macbook", *common)
    worker.wait_for("waiting for the server")
    server = processes.server("--run-id", "mine", *common, "min_workers=2", "num_epochs=2")
    server.wait_for("waiting until 2 of 3 workers (min_workers) have joined; 1 so far")
    second = processes.worker(2, "win", *common)
    assert server.wait() == 0, server.output
    assert (worker.wait(), second.wait()) == (0, 0)
    assert "validation accuracy" in server.output
    console = datetime.fromtimestamp(start, ZoneInfo("Asia/Kolkata"))
    hours = {f"{console + timedelta(hours=later):%H:}" for later in (0, 1)}
    assert worker.output[:3] in hours
    run = find_run(processes.runs, "mine")
    assert {"server-mini1.log", "worker-rank0-macbook.log"} < {
        each.name for each in run.logs.iterdir()
    }
    lines = (run.logs / "worker-rank0-macbook.log").read_text().splitlines()
    begins, *told = map(json.loads, lines)
    assert "process" in begins["message"]
    first = next(line for line in told if "waiting for the server" in line["message"])
    assert [first[name] for name in ("host", "rank", "run")] == ["worker-rank0-macbook", 0, "mine"]
    for line in told:
        assert line["ts"].endswith("Z")
        assert start - 1 < datetime.fromisoformat(line["ts"]).timestamp() < time.time() + 1
    assert run.config.is_file()
    reference = (PROJECT / "src/smolcluster/docs/reference/files.md").read_text()
    documented = set(re.findall(r"^\| `(.+?)` \|", reference, re.MULTILINE))
    assert {path.name for path in run.root.iterdir()} <= documented


@pytest.mark.nightly
def test_a_waiting_server_says_how_to_start_a_worker_and_sends_those_of_others_away(
    processes: Processes,
) -> None:
    port = f"port={free_port()}"
    server = processes.server("--local", "--override", port, "min_workers=2")
    server.wait_for("waiting until 2 of 3 workers (min_workers) have joined; 0 so far; start one")
    found = re.search(r"start one with `(?:uv run|python) (.*?)`", server.output)
    assert found
    processes.start(sys.executable, *shlex.split(found[1]))
    server.wait_for("have joined; 1 so far\n")
    worker = processes.worker(2, "win", "--local", "--override", port, algorithm="syncps")
    assert worker.wait() == 2, worker.output
    assert f"start {get_algorithm('edp').worker}" in worker.output
    server.wait_for("worker 2 (win) never took part: it cannot go on: the server trains by edp")


@pytest.mark.slow
def test_a_server_without_its_launcher_ends(processes: Processes) -> None:
    server = processes.server("--local", "--override", f"port={free_port()}", "--stop-on-stdin-eof")
    assert server.wait() == 143


@pytest.mark.nightly
@pytest.mark.parametrize(
    "algorithm",
    ["syncps", *at_night("edp", "diloco")],
)
def test_a_store_is_killed_another_is_started_and_every_sample_is_applied_once(
    processes: Processes, algorithm: str
) -> None:
    port, epochs = f"port={free_port()}", 12
    overrides = ("servers=[mini1, win]", f"num_epochs={epochs}", "model.hidden=4096", "threads=1")
    server = processes.server("--local", "--override", port, *overrides, algorithm=algorithm)
    by_hand = ("--local", "--override", port, "threads=1")
    store = processes.store("win", *by_hand, algorithm=algorithm)
    worker = processes.worker(1, "macbook", *by_hand, algorithm=algorithm)
    status_file = processes.runs / "latest" / "status.json"
    eventually(lambda: status_file.exists() and read_status(status_file).step > 20)
    store.kill(signal.SIGKILL)
    server.wait_for("the store worker2 is lost")
    again = processes.store("win", *by_hand, algorithm=algorithm)
    for each in (server, worker, again):
        assert each.wait() == 0, each.output
    run = find_run(processes.runs)
    summary = read_summary(run.summary)
    records = [line.record for line in steps_in(run.metrics)]
    assert len(records) == summary.steps
    assert_applied_once(records, summary.train_samples, epochs)
    assert server.output.count("the store worker2 holds buckets 2 to 2 of 2") == 2


PROGRAM = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from smolcluster import Workload

CALLS = iter(range(1_000_000))
FLAG = Path(__file__).with_name("flag")

def loss(model, batch):
    if model.training and next(CALLS) == 20 and not FLAG.exists():
        {happens}
    return model(batch[0]).square().mean()

def workload():
    data = TensorDataset(torch.randn(640, 4))
    return Workload(lambda: nn.Linear(4, 1000), loss, data, data)
"""
FAILS = "FLAG.touch(); raise RuntimeError('CUDA error: an illegal memory access')"
IS_HELD = "while not FLAG.exists(): time.sleep(0.05)"


def training(processes: Processes, happens: str, num_workers: int) -> tuple[str, ...]:
    """What server and workers are told of a workload in whose 21st batch something happens."""
    program = processes.folder / "train.py"
    program.write_text(PROGRAM.format(happens=happens))
    common = ("--local", "--workers", str(num_workers), "--workload", f"{program}:workload")
    return (*common, "--override", f"port={free_port()}", "threads=1")


@pytest.mark.nightly
def test_a_run_leaves_process_stats_spans_and_checkpoints_behind(
    processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its workers are held until each of them has told how it does."""
    common = training(processes, IS_HELD, 2)
    own = ("heartbeat_timeout_s=2", "min_workers=2", "num_epochs=30")
    started = [processes.server(*common, *own, algorithm="syncps")]
    for number, node in enumerate(("pi5", "win"), start=1):
        started.append(processes.worker(number, node, *common, algorithm="syncps"))
    metrics = processes.runs / "latest" / "metrics.jsonl"

    def told() -> dict[int | None, Mapping[str, float]]:
        records = [line.record for line in follow_metrics(metrics).poll()]
        return {r.rank: r.values for r in records if r.kind == "worker" and "rtt_s" in r.values}

    eventually(lambda: sum("codec_ratio" in values for values in told().values()) == 2)
    for values in told().values():
        assert values["codec_ratio"] == pytest.approx(1.0, rel=0.01)
        assert 0 < values["rtt_s"] < 10
        assert abs(values["clock_offset_s"]) < 1, "it is one machine"
        shares = sum(values[f"share/{phase}"] for phase in PHASES)
        assert 0 < shares < 1.2, "phases do not overlap"
    (processes.folder / "flag").touch()
    for each in started:
        assert each.wait() == 0, each.output
    paths = find_run(processes.runs)
    status, summary = read_status(paths.status), read_summary(paths.summary)
    assert status.pushes["applied"] == summary.pushes.applied
    for worker in status.workers:
        assert worker.address == "127.0.0.1"
        assert sum(worker.staleness) > 0
        # Its last interval may have ended before a step did; each step's spans are looked at below.
        assert {"cpu", "share/wait"} <= set(worker.process_stats)
    moved = [worker.sent_bytes + worker.received_bytes for worker in status.workers]
    total = summary.bytes.sent + summary.bytes.received
    assert sum(moved) == pytest.approx(total, rel=0.01), "the farewell came later"

    kinds = {line.record.kind for line in follow_metrics(paths.metrics).poll()}
    assert {"step", "eval", "worker", "server"} <= kinds
    events = [record.event for record in read_events(paths.events)]
    saved = {event.step for event in events if isinstance(event, CheckpointSaved)}
    on_disk = {int(each.name.removeprefix("step-")) for each in paths.checkpoints.glob("step-*")}
    assert {summary.steps} <= on_disk <= saved

    lines = list(read_spans(paths.spans))
    with_steps = {
        (line.role, line.rank) for line in lines if any(what == STEP for what, _, _ in line.spans)
    }
    assert with_steps == {("server", None), ("worker", 0), ("worker", 1)}
    assert main(["trace", str(paths.root), "--steps", "10"]) == 0
    assert capsys.readouterr().out.startswith(f"10 steps of {paths.run_id}")
    assert paths.trace.is_file()


@pytest.mark.nightly
def test_a_worker_whose_device_fails_is_started_again_under_its_number(
    processes: Processes,
) -> None:
    options = training(processes, FAILS, 1)
    server = processes.server(*options, "num_epochs=20")
    worker = processes.worker(1, "pi5", *options, "--restarts", "3")
    assert server.wait() == 0, server.output
    assert worker.wait() == 0, worker.output
    assert "the device failed: CUDA error: an illegal memory access" in worker.output
    assert "lost its device; it is started again" in worker.output
    run = find_run(processes.runs)
    joined = [r.event for r in read_events(run.events) if isinstance(r.event, WorkerJoined)]
    assert [(each.rank, each.node) for each in joined] == [(0, "pi5")] * 2
    status = read_status(run.status)
    assert status.samples_applied == status.total_samples == 20 * 640
