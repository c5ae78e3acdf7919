import signal
from pathlib import Path

import pytest

from processes import Processes
from smolcluster.cli import main
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status
from smolcluster.runs.summary import read_summary

pytestmark = pytest.mark.usefixtures("as_a_process")


def words_for(tmp_path: Path, *overrides: str) -> list[str]:
    """`train`, whose runs are in `tmp_path`."""
    return ["train", "--override", f"runs_dir={tmp_path}", "threads=1", *overrides]


@pytest.mark.usefixtures("with_curves")
def test_a_run_leaves_its_files_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words_for(tmp_path, "num_epochs=2", "model.hidden=8"))
    out, err = capsys.readouterr()
    assert code == 0, err
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


def test_num_steps_ends_it_within_an_epoch(tmp_path: Path) -> None:
    assert main([*words_for(tmp_path, "model.hidden=8"), "--num-steps", "3"]) == 0
    summary = read_summary(find_run(tmp_path).summary)
    assert (summary.steps, summary.epochs) == (3, 1)


def test_ctrl_c_ends_it_with_130_and_no_traceback(tmp_path: Path, processes: Processes) -> None:
    words = words_for(tmp_path, "num_epochs=100000")
    process = processes.smolcluster(*words)
    process.wait_for("training SimpleNN")
    process.kill(signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.output


def test_a_run_that_cannot_begin_leaves_its_log_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere"
    data = ("dataset.name=MNIST", f"dataset.root={nowhere}", "dataset.download=false")
    assert main(words_for(tmp_path, *data)) == 2
    paths = find_run(tmp_path)
    status = read_status(paths.status)
    assert (status.state, status.step) == ("failed", 0)
    assert str(nowhere) in (status.reason or "")
    assert "name: MNIST" in paths.config.read_text()
    [log] = paths.logs.iterdir()
    assert '"level":"ERROR"' in log.read_text()
    assert str(nowhere) in "".join(capsys.readouterr().err.splitlines())
