"""What the processes of a whole cluster tell of themselves, and where it ends up."""

import sys
from pathlib import Path

import pytest

from harness import Cluster, free_port, local_settings
from processes import Processes
from smolcluster.cli import main
from smolcluster.configs.schema import AlgorithmName
from smolcluster.configs.spec import get_algorithm
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.observability.spans import read_spans
from smolcluster.runs.events import CheckpointSaved, read_events
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary
from smolcluster.utils.meter import PHASES, STEP

pytestmark = pytest.mark.nightly

ALGORITHMS: tuple[AlgorithmName, ...] = ("edp", "syncps")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_worker_tells_where_its_time_goes(tmp_path: Path, algorithm: AlgorithmName) -> None:
    settings = local_settings("num_epochs=20", "heartbeat_timeout_s=2", algorithm=algorithm)
    cluster = Cluster(settings, tmp_path, algorithm=algorithm)
    cluster.finish(*(cluster.worker(rank + 1) for rank in range(3)))
    told = [record for record in cluster.metrics.records if record.kind == "worker"]
    assert {record.rank for record in told} == {0, 1, 2}
    for record in told:
        shares = [record.values[f"share/{phase}"] for phase in PHASES]
        assert all(0 <= share <= 1 for share in shares)
        assert 0 < sum(shares) < 1.2, "phases do not overlap"
        assert record.values["memory_bytes"] > 10_000_000
        # a worker may have told of itself before it pushed anything
        assert record.values.get("codec_ratio", 1.0) == pytest.approx(1.0)
    last = {record.rank: record.values for record in told}
    for values in last.values():
        assert values["codec_ratio"] == pytest.approx(1.0)
        assert 0 < values["rtt_s"] < 10
        assert abs(values["clock_offset_s"]) < 1.0, "it is one machine"
    assert any(record.values["share/forward"] > 0 for record in told)
    assert any(record.values["sent_bytes_per_s"] > 1e4 for record in told)
    assert any(record.values["samples_per_s"] > 0 for record in told)


def finished(processes: Processes, algorithm: str, *overrides: str) -> RunPaths:
    """A run of real processes to its end."""
    spec, port = get_algorithm(algorithm), f"port={free_port()}"
    common = ("--local", "--workers", "2", "--override", port, "metrics_port=null", "threads=1")
    training = ("heartbeat_timeout_s=2", "min_workers=2", *overrides)
    started = [processes.start(sys.executable, str(spec.server), *common, *training)]
    for number, node in enumerate(("pi5", "win"), start=1):
        argv = (sys.executable, str(spec.worker), str(number), node)
        started.append(processes.start(*argv, *common))
    for each in started:
        assert each.wait() == 0, each.output
    return find_run(processes.runs)


@pytest.mark.parametrize("algorithm", ["syncps", "edp"])
def test_a_run_leaves_process_stats_spans_and_checkpoints_behind(
    processes: Processes,
    algorithm: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = finished(processes, algorithm, "num_epochs=30")
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

    kinds = [line.record.kind for line in follow_metrics(paths.metrics).poll()]
    assert {"step", "eval", "worker", "server"} <= set(kinds)
    saved = [
        e.event.step for e in read_events(paths.events) if isinstance(e.event, CheckpointSaved)
    ]
    on_disk = {int(each.name.removeprefix("step-")) for each in paths.checkpoints.glob("step-*")}
    assert summary.steps in saved
    assert on_disk <= set(saved)

    lines = list(read_spans(paths.spans))
    with_steps = {
        (line.role, line.rank) for line in lines if any(what == STEP for what, _, _ in line.spans)
    }
    assert with_steps == {("server", None), ("worker", 0), ("worker", 1)}
    assert main(["trace", str(paths.root), "--steps", "10"]) == 0
    assert capsys.readouterr().out.startswith(f"10 steps of {paths.run_id}")
    assert paths.trace.is_file()
