"""The report that a real run leaves: its numbers are those of the other files, whatever becomes of it."""

import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness import free_port
from processes import Child, Processes
from smolcluster.observability.report.page import write_report
from smolcluster.observability.report.render import loss
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary
from waiting import eventually

pytestmark = pytest.mark.nightly

NODES = ("pi5", "win", "macbook")


class Text(HTMLParser):
    """What a page says, and the cells of its rows."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(page.read_text())
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag == "td"

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._in_cell:
            self.rows[-1].append(data)
            self._in_cell = False

    def row(self, *first: str) -> list[str]:
        """The first row that begins with these cells."""
        return next(row for row in self.rows if tuple(row[: len(first)]) == first)


def begin(processes: Processes, *overrides: str) -> tuple[Child, list[Child]]:
    """A server and three workers on this machine."""
    common = ("--local", "--override", f"port={free_port()}", "metrics_port=null", "threads=1")
    server = processes.server(*common, *overrides)
    return server, [processes.worker(i + 1, node, *common) for i, node in enumerate(NODES)]


def test_a_run_whose_worker_was_killed_leaves_a_report_that_agrees_with_its_files(
    processes: Processes,
) -> None:
    server, workers = begin(processes, "num_epochs=60", "eval_steps=500", "min_workers=3")
    metrics = processes.runs / "latest" / "metrics.jsonl"
    eventually(lambda: {line.record.rank for line in follow_metrics(metrics).poll()} >= {0, 1, 2})
    workers[1].kill(signal.SIGKILL)
    assert server.wait() == 0, server.output
    run = find_run(processes.runs)
    summary = read_summary(run.summary)
    page = Text(run.report)
    final = summary.final
    assert final.train_loss is not None
    assert final.val_loss is not None
    assert final.val_accuracy is not None
    numbers = (loss(final.train_loss), loss(final.val_loss), f"{final.val_accuracy:.1%}")
    for said in (*numbers, f"{summary.steps:,}", f"{summary.samples_applied:,}"):
        assert said in page.text
    for share in summary.workers:
        row = page.row(f"worker {share.rank + 1} ({share.node})")
        assert row[2:5] == [
            f"{share.samples:,}",
            f"{share.share:.1%}",
            f"{share.mean_staleness:.2f}",
        ]
    assert page.row("worker 2 (win)")[1] == "lost"
    applied = [
        r.record.values for r in follow_metrics(run.metrics).poll() if r.record.kind == "step"
    ]
    assert sum(values["stop"] - values["start"] for values in applied) == summary.samples_applied
    trouble = page.text.partition("What went wrong first")[2].partition("Curves")[0]
    assert "worker 2 (win) is lost" in trouble
    assert "epoch" in trouble  # what others said around it
    for worker in (workers[0], workers[2]):
        assert worker.wait() == 0, worker.output


def test_a_run_that_fails_leaves_a_report_with_the_first_error(processes: Processes) -> None:
    server, workers = begin(
        processes, "learning_rate=1e30", "optimizer=sgd", "gradient_clipping.enabled=false"
    )
    assert server.wait() == 1, server.output
    for worker in workers:
        worker.wait()
    run = find_run(processes.runs)
    assert read_status(run.status).state == "failed"
    before = Text(run.report).text
    assert "failed" in before
    assert "lower learning_rate" in before
    assert "What is not the default" in before
    again = Text(write_report(run)).text  # now with the last lines of all logs
    head = again.partition("What went wrong first")[2].partition("Traceback")[0]
    assert "loss is" in head
    assert "worker" in head  # it was a worker that met it first


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_a_report(
    processes: Processes, signum: signal.Signals
) -> None:
    server, _ = begin(processes, "num_epochs=5000")
    metrics = processes.runs / "latest" / "metrics.jsonl"
    eventually(lambda: any(line.record.kind == "step" for line in follow_metrics(metrics).poll()))
    server.kill(signum)
    assert server.wait() == 128 + signum, server.output
    run = find_run(processes.runs)
    page = Text(run.report).text
    assert "stopped" in page
    assert "Curves" in page


def test_a_run_that_is_killed_has_a_report_when_it_is_asked_for(processes: Processes) -> None:
    server, _ = begin(processes, "num_epochs=5000")
    folder = processes.runs / "latest"
    eventually(
        lambda: any(
            r.record.kind == "step" for r in follow_metrics(folder / "metrics.jsonl").poll()
        )
    )
    eventually((folder / "status.json").is_file)
    live = Text(write_report(RunPaths(folder.resolve()))).text
    assert "it goes on; this is how it stood" in live
    server.kill(signal.SIGKILL)
    server.wait()
    page = Text(write_report(find_run(processes.runs))).text
    assert "broken off" in page
    assert "Curves" in page
