"""The report of a real run, whatever becomes of it; `test_processes` has that of one that ends well."""

import signal
from collections.abc import Sequence

import pytest

from harness import free_port, steps_in
from processes import Processes
from smolcluster.observability.report.page import write_report
from smolcluster.runs.paths import RunPaths, find_run
from waiting import eventually

DIVERGING = ("learning_rate=1e30", "optimizer=sgd", "gradient_clipping.enabled=false")
ENDLESS = ("num_epochs=5000",)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overrides", "signum", "code", "told"),
    [
        (DIVERGING, None, 1, ("failed", "lower learning_rate", "loss is", "not the default")),
        (ENDLESS, signal.SIGINT, 130, ("stopped", "Curves")),
        (ENDLESS, signal.SIGKILL, -9, ("broken off", "Curves")),
    ],
)
def test_a_run_has_a_report_however_it_ends(
    processes: Processes,
    overrides: Sequence[str],
    signum: int | None,
    code: int,
    told: Sequence[str],
) -> None:
    common = ("--local", "--override", f"port={free_port()}", "metrics_port=null", "threads=1")
    server = processes.server(*common, *overrides)
    processes.worker(1, "pi5", *common)
    folder = processes.runs / "latest"
    if signum is not None:
        metrics, status = folder / "metrics.jsonl", folder / "status.json"
        eventually(lambda: steps_in(metrics))
        eventually(status.is_file)
        page = write_report(RunPaths(folder.resolve())).read_text()
        assert "it goes on; this is how it stood" in page
        server.kill(signum)
    assert server.wait() == code, server.output
    run = find_run(processes.runs)
    page = (write_report(run) if code < 0 else run.report).read_text()
    assert [words for words in told if words not in page] == []
