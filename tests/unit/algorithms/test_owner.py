"""What a process that owns a run decides before it builds what is trained, and what it leaves at the end."""

import signal
from pathlib import Path
from typing import Any

import pytest

from smolcluster.algorithms import owner
from smolcluster.algorithms.owner import LOCAL_BUCKET_BYTES, bucket_bytes_for
from smolcluster.configs.resolve import load_settings
from smolcluster.launch.saved import train
from smolcluster.runs.paths import find_run
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES


def test_buckets_are_large_where_all_processes_are_on_one_machine() -> None:
    local = load_settings("syncps", "digits", None, [], {}, local=True, local_workers=2)
    assert bucket_bytes_for(local.cluster) == LOCAL_BUCKET_BYTES
    shared = load_settings("syncps", "digits", None, [], {})
    assert bucket_bytes_for(shared.cluster) == DEFAULT_BUCKET_BYTES
    named = load_settings("syncps", "digits", None, ["bind=[mini1.local]"], {})
    assert bucket_bytes_for(named.cluster) == DEFAULT_BUCKET_BYTES


@pytest.mark.usefixtures("as_a_process")
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_after_the_last_step_costs_a_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_signals: int
) -> None:
    """A second one ends what is still written."""
    write = owner.write_artifacts

    def interrupted(*args: Any) -> None:
        for _ in range(num_signals):
            signal.raise_signal(signal.SIGINT)
        write(*args)

    monkeypatch.setattr(owner, "write_artifacts", interrupted)
    overrides = ["num_epochs=1", "eval_steps=1000", f"runs_dir={tmp_path}"]
    assert train("digits", overrides, run_id="r") == (0 if num_signals == 1 else 130)
    paths = find_run(tmp_path, "r")
    assert paths.summary.is_file()
    assert paths.report.is_file() == (num_signals == 1)
