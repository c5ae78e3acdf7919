"""An algorithm that no file of the package names trains, and is shown, as the two of the package are."""

from functools import partial
from html import unescape
from pathlib import Path

import pytest

from harness import assert_applied_once, free_port, steps_in
from processes import Processes
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary

pytestmark = pytest.mark.nightly

TESTS = Path(__file__).resolve().parents[1]
EPOCHS = 2


def install(processes: Processes) -> None:
    """What installing a package with the algorithm leaves: an entry point, a folder on the path."""
    site = processes.folder / "site"
    info = site / "dummy_algorithm-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy-algorithm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[smolcluster.algorithms]\ndummy = dummy_algorithm.spec:SPEC\n"
    )
    (site / "dummy_algorithm").symlink_to(TESTS / "dummy_algorithm")
    processes.environ["PYTHONPATH"] = str(site)


@pytest.mark.timeout(600)
def test_an_algorithm_of_another_package_is_launched_and_shown(processes: Processes) -> None:
    install(processes)
    overrides = (f"port={free_port()}", f"num_epochs={EPOCHS}", "metrics_port=null", "threads=1")
    flags = ("--local", "--no-tmux", "--workers", "2", "--override", *overrides)
    ended = partial(processes.ended, forked=False)  # Python finds the package by its metadata
    ended("launch", "dummy", *flags, "min_workers=2", "heartbeat_timeout_s=60")

    run = find_run(processes.runs)
    summary, status = read_summary(run.summary), read_status(run.status)
    assert run.run_id.startswith("dummy-")
    assert (summary.algorithm, status.algorithm, status.state) == ("dummy", "dummy", "ended")
    assert [each.node for each in summary.workers] == ["worker1", "worker2"]
    assert sum(each.samples for each in summary.workers) == EPOCHS * summary.train_samples
    records = [line.record for line in steps_in(run.metrics)]
    assert len(records) == summary.steps
    assert_applied_once(records, summary.train_samples, EPOCHS)
    assert [record.values["lr"] for record in records] == [0.1] * summary.steps
    assert status.step == summary.steps
    assert summary.final.val_accuracy is not None
    assert summary.final.val_accuracy > 0.5, "ten digits, two epochs"
    assert (run.checkpoints / f"step-{summary.steps:08d}").is_dir(), "`resume` goes on from there"

    shown = ended("status", run.run_id)
    assert run.run_id in shown
    assert "worker 1 " in shown
    assert "worker 2 " in shown
    ended("report", run.run_id)
    page = unescape(run.report.read_text())
    assert "dummy · " in page
    assert run.run_id in page
