"""Server and workers as real processes, started by hand as the README says; and how each of them ends."""

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from harness import free_port
from processes import Processes
from smolcluster.configs.spec import get_algorithm
from smolcluster.data.permutation import epoch_permutation
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.events import WorkerJoined, WorkerLost, read_events
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary
from tiers import at_night
from waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]


def applied(metrics: Path, num_samples: int, seed: int = 42) -> dict[int, Counter[int]]:
    """How often each sample was applied, by epoch."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for line in follow_metrics(metrics).poll():
        if line.record.kind == "step":
            order = epoch_permutation(seed, line.record.epoch, num_samples)
            values = line.record.values
            counts[line.record.epoch].update(
                order[int(values["start"]) : int(values["stop"])].tolist()
            )
    return dict(counts)


@pytest.mark.nightly
def test_a_waiting_server_says_how_many_workers_it_waits_for_and_how_to_start_one(
    processes: Processes,
) -> None:
    port = f"port={free_port()}"
    server = processes.server("--local", "--override", port, "min_workers=2", "num_epochs=1")
    server.wait_for("waiting until 2 of 3 workers (min_workers) have joined; 0 so far; start one")
    found = re.search(r"start one with `(?:uv run|python) (.*?)`", server.output)
    assert found
    first = processes.start(sys.executable, *shlex.split(found[1]))
    server.wait_for("have joined; 1 so far\n")
    second = processes.worker(2, "win", "--local", "--override", port)
    assert server.wait() == 0, server.output
    assert (first.wait(), second.wait()) == (0, 0)


def test_a_worker_is_killed_another_comes_late_and_every_sample_is_applied_once(
    processes: Processes,
) -> None:
    port = f"port={free_port()}"
    epochs = 60
    learning = ("learning_rate=0.003", "min_workers=3", f"num_epochs={epochs}")
    overrides = (port, *learning, "threads=1", "heartbeat_timeout_s=100")
    server = processes.server("--local", "--override", *overrides)
    workers = [
        processes.worker(rank + 1, node, "--local", "--override", port, "threads=1")
        for rank, node in enumerate(("pi5", "win", "macbook"))
    ]
    metrics = processes.runs / "latest" / "metrics.jsonl"
    eventually(lambda: {r.record.rank for r in follow_metrics(metrics).poll()} >= {0, 1, 2})
    for worker in (workers[0], workers[2]):  # or the run could be over before the late one is there
        worker.kill(signal.SIGSTOP)
    workers[1].kill(signal.SIGKILL)
    status_file = metrics.with_name("status.json")
    eventually(lambda: status_file.exists() and len(read_status(status_file).workers) == 3)
    late = processes.worker(4, "macbook", "--local", "--override", port, "threads=1")
    eventually(lambda: len(read_status(status_file).workers) == 4)
    for worker in (workers[0], workers[2]):
        worker.kill(signal.SIGCONT)
    assert server.wait() == 0, server.output
    for worker in (workers[0], workers[2], late):
        assert worker.wait() == 0, worker.output
    run = find_run(processes.runs)
    summary = read_summary(run.summary)
    assert summary.samples_applied == epochs * summary.train_samples
    assert summary.leases_returned >= 1
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy >= 0.9, "by chance it would be 0.1"
    once = Counter(range(summary.train_samples))
    assert applied(run.metrics, summary.train_samples) == dict.fromkeys(range(epochs), once)
    assert {share.rank for share in summary.workers} >= {0, 1, 2}
    status = read_status(run.status)
    assert (status.state, status.step) == ("ended", summary.steps)
    assert status.samples_applied == status.total_samples == summary.samples_applied
    assert status.val_accuracy == summary.final.val_accuracy
    states = [each.state for each in status.workers]
    assert states[:3] == ["joined", "lost", "joined"]
    assert [each.samples for each in status.workers] == [each.samples for each in summary.workers]
    assert all(each.step and each.step <= status.step for each in status.workers[:3])
    assert "Traceback" not in server.output


@pytest.mark.nightly
def test_a_worker_waits_for_the_server_and_both_leave_readable_files(
    processes: Processes,
) -> None:
    port = f"port={free_port()}"
    worker = processes.worker(1, "macbook", "--local", "--override", port)
    worker.wait_for("waiting for the server")
    server = processes.server("--local", "--override", port, "num_epochs=2", "--run-id", "mine")
    assert server.wait() == 0, server.output
    assert worker.wait() == 0, worker.output
    assert "validation accuracy" in server.output
    run = find_run(processes.runs, "mine")
    logs = sorted(path.name for path in run.logs.iterdir())
    assert logs == ["server-mini1.log", "worker-rank0-macbook.log"]
    lines = (run.logs / logs[1]).read_text().splitlines()
    begins, *told = map(json.loads, lines)
    assert "process" in begins["message"]
    first = next(line for line in told if "waiting for the server" in line["message"])
    assert first["host"] == "worker-rank0-macbook"
    assert first["rank"] == 0
    assert first["run"] == "mine"
    assert run.config.is_file()
    reference = (PROJECT / "src/smolcluster/docs/reference/files.md").read_text()
    documented = set(re.findall(r"^\| `(.+?)` \|", reference, re.MULTILINE))
    assert {path.name for path in run.root.iterdir()} <= documented


@pytest.mark.nightly
def test_workers_look_for_a_server_that_was_stopped(processes: Processes) -> None:
    port = f"port={free_port()}"
    server = processes.server(
        "--local", "--override", port, "num_epochs=5000", "reconnect_timeout_s=1"
    )
    worker = processes.worker(1, "macbook", "--local", "--override", port)
    worker.wait_for("joined run")
    server.kill(signal.SIGINT)
    assert server.wait() == 130
    assert worker.wait() == 75
    assert "trying to reconnect for 1 s" in worker.output
    assert "Traceback" not in server.output + worker.output
    status = read_status(find_run(processes.runs).status)
    assert (status.state, status.reason) == ("ended", "it was stopped")


@pytest.mark.nightly
def test_a_stopped_worker_leaves_and_the_run_goes_on(processes: Processes) -> None:
    port = f"port={free_port()}"
    server = processes.server("--local", "--override", port, "num_epochs=20", "threads=1")
    first = processes.worker(1, "macbook", "--local", "--override", port, "threads=1")
    server.wait_for("worker 1 (macbook) joined")
    first.kill(signal.SIGTERM)
    assert first.wait() == 143
    server.wait_for("left: ")
    second = processes.worker(2, "pi5", "--local", "--override", port, "threads=1")
    assert server.wait() == 0, server.output
    assert second.wait() == 0, second.output


@pytest.mark.slow
def test_a_busy_port_is_one_line_and_75(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = processes.server("--local", "--override", f"port={port}")
        assert server.wait() == 75
    assert str(port) in _only_error(server.output)


@pytest.mark.nightly
def test_a_worker_of_another_algorithm_is_told_which_one_to_start(processes: Processes) -> None:
    port = f"port={free_port()}"
    server = processes.server("--local", "--override", port)
    server.wait_for("listening")
    worker = processes.worker(1, "pi5", "--local", "--override", port, algorithm="syncps")
    assert worker.wait() == 2, worker.output
    assert f"start {get_algorithm('edp').worker}" in worker.output
    server.wait_for("worker 1 (pi5) never took part: it cannot go on: the server trains by edp")


@pytest.mark.slow
def test_an_address_of_another_machine_is_one_line_and_2(processes: Processes) -> None:
    server = processes.server("--train-config", "digits", "--override", "bind=[203.0.113.7]")
    assert server.wait() == 2
    assert "203.0.113.7" in _only_error(server.output)


@pytest.mark.slow
def test_a_secret_that_others_can_read_is_one_line_and_77(processes: Processes) -> None:
    folder = processes.folder / "config" / "smolcluster"
    folder.mkdir(parents=True)
    secret = folder / "secret"
    secret.write_text("a" * 64)
    secret.chmod(0o644)
    server = processes.server("--local", "--override", f"port={free_port()}")
    assert server.wait() == 77
    assert "chmod 600" in _only_error(server.output)
    assert "aaaa" not in server.output


@pytest.mark.nightly
def test_a_killed_worker_with_a_supervisor_is_back(processes: Processes) -> None:
    options = ("--local", "--override", f"port={free_port()}", "threads=1")
    server = processes.server(*options, "num_epochs=100000")
    worker = processes.worker(1, "pi5", "--restarts", "3", *options)
    log = processes.runs / "latest/logs/worker-rank0-pi5.log"

    def lives() -> list[int]:
        return [int(pid) for pid in re.findall(r'"process (\d+):', log.read_text())]

    status = log.parents[1] / "status.json"
    eventually(lambda: status.exists() and len(read_status(status).workers) == 1)
    os.kill(lives()[0], signal.SIGKILL)
    eventually(lambda: len(lives()) == 2 and read_status(status).workers[0].state == "joined")
    came_and_went = (WorkerJoined, WorkerLost, WorkerJoined)

    def events() -> list[type]:
        types = (type(each.event) for each in read_events(status.with_name("events.jsonl")))
        return [each for each in types if each in came_and_went]

    eventually(lambda: len(events()) >= 3)
    assert events() == [*came_and_went]
    assert "(1 of 3 times)" in log.read_text()
    worker.kill(signal.SIGTERM)
    assert worker.wait() == 143
    server.kill(signal.SIGTERM)
    assert server.wait() == 143


@pytest.mark.slow
def test_a_server_without_its_launcher_ends(processes: Processes) -> None:
    server = processes.server("--local", "--override", f"port={free_port()}", "--stop-on-stdin-eof")
    assert server.wait() == 143


def _only_error(output: str) -> str:
    """The one line that says what is wrong."""
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if "error" in line.lower()]
    assert len(lines) == 1, output
    return lines[0]


@pytest.mark.nightly
def test_logs_are_in_utc_whatever_the_zone_of_a_worker(processes: Processes) -> None:
    port = f"port={free_port()}"
    start = time.time()
    server = processes.server("--local", "--override", port, "num_epochs=1", "threads=1")
    processes.environ["TZ"] = "Asia/Kolkata"
    worker = processes.worker(1, "pi5", "--local", "--override", port, "threads=1")
    assert server.wait() == 0, server.output
    assert worker.wait() == 0, worker.output
    log = find_run(processes.runs).logs / "worker-rank0-pi5.log"
    stamps = [json.loads(line)["ts"] for line in log.read_text().splitlines()]
    assert stamps
    for stamp in stamps:
        assert stamp.endswith("Z")
        assert start - 1 < datetime.fromisoformat(stamp).timestamp() < time.time() + 1
    console = datetime.fromtimestamp(start, ZoneInfo("Asia/Kolkata"))
    hours = {f"{console + timedelta(hours=later):%H:}" for later in (0, 1)}
    assert worker.output[:3] in hours, "the console has local time"


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
    assert applied(run.metrics, summary.train_samples) == {
        epoch: Counter(range(summary.train_samples)) for epoch in range(epochs)
    }
    assert server.output.count("the store worker2 holds buckets 2 to 2 of 2") == 2
