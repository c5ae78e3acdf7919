import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary


@pytest.fixture
def start(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def train(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    """`smolcluster train` as a process of its own, whose runs are in `tmp_path`."""
    program = "import sys; from smolcluster.cli import main; sys.exit(main())"
    arguments = ["train", "--override", f"runs_dir={tmp_path}", "threads=1", *overrides]
    environ = {name: value for name, value in os.environ.items() if "SMOLCLUSTER" not in name}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ | {"WANDB_MODE": "disabled"},
    )


def test_a_run_leaves_its_files_and_a_table(tmp_path: Path) -> None:
    with train(tmp_path, "num_epochs=2", "model.hidden=8") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    paths = find_run(tmp_path)
    summary = read_summary(paths.summary)
    assert (summary.algorithm, summary.epochs) == ("single", 2)
    assert summary.samples_applied == 2 * summary.train_samples
    assert summary.run_id in out
    assert "hidden: 8" in paths.config.read_text()
    assert paths.metrics.is_file()
    assert paths.curves.is_file()
    assert not paths.sample.exists()
    [log] = paths.logs.iterdir()
    assert "training SimpleNN on digits" in log.read_text()
    assert "training SimpleNN on digits" in err


def test_ctrl_c_ends_it_with_130_and_no_traceback(
    tmp_path: Path, start: list[subprocess.Popen[str]]
) -> None:
    process = train(tmp_path, "num_epochs=100000")
    start.append(process)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("training SimpleNN" in line for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_run_that_cannot_begin_leaves_its_log_and_the_reason(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    data = ("dataset.name=MNIST", f"dataset.root={nowhere}", "dataset.download=false")
    with train(tmp_path, *data) as process:
        _, err = process.communicate()
    assert process.returncode == 2
    paths = find_run(tmp_path)
    status = read_status(paths.status)
    assert (status.state, status.step) == ("failed", 0)
    assert str(nowhere) in (status.reason or "")
    assert "name: MNIST" in paths.config.read_text()
    [log] = paths.logs.iterdir()
    assert '"level":"ERROR"' in log.read_text()
    assert str(nowhere) in err


def test_a_model_that_does_not_fit_the_data_is_one_line(tmp_path: Path) -> None:
    with train(tmp_path, "model.input_dim=7") as process:
        out, err = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert "Traceback" not in err
    [line] = [line for line in err.splitlines() if "ERROR" in line]
    assert re.search(r"model\.input_dim is 7, .* has 64", line)
