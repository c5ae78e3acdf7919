"""A mesh as a job of Slurm, on real Slurm with two nodes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_lab import SlurmLab, obstacle
from smolcluster.runs.status import STOPPED
from waiting import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900), pytest.mark.xdist_group("slurm")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    if reason := obstacle():
        pytest.skip(reason)
    with SlurmLab(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Runs:
    """The command `smolcluster` where Slurm has its own."""

    def __init__(self, lab: SlurmLab, folder: Path) -> None:
        self.lab, self.folder = lab, folder

    def smolcluster(self, *words: str, code: int = 0) -> str:
        env = {"SMOLCLUSTER_RUNS_DIR": str(self.folder), "WANDB_MODE": "disabled"}
        done = self.lab.run(sys.executable, "-m", "smolcluster.cli", *words, env=env, timeout_s=600)
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{said}\n{self.console()}\n{self.lab.logs()}"
        return said

    def launch(self, *overrides: str, options: tuple[str, ...] = ()) -> str:
        words = ("launch", "mesh", "--on", "slurm", "--train-config", "digits", *options)
        keys = (
            "slurm.nodes=2",
            "mesh.pp=1",
            "microbatches=1",
            "batch_size=64",
            "encryption=off",
            *overrides,
        )
        return self.smolcluster(*words, "--override", *keys)

    @property
    def run(self) -> Path:
        [found] = self.folder.glob("mesh-*")
        return found

    @property
    def step(self) -> int:
        file = self.run / "status.json"
        return int(json.loads(file.read_text())["step"]) if file.is_file() else 0

    def console(self) -> str:
        files = self.folder.glob("*/logs/*.txt")
        return "\n".join(file.read_text() for file in files)

    def wait_until(self, condition: Callable[[], object]) -> None:
        eventually(condition, lambda: f"{self.console()}\n{self.lab.logs()}")

    def state(self) -> str:
        query = ("squeue", "--noheader", "--states=all", f"--name={self.run.name}", "--format=%T")
        return self.lab.output(*query).strip()


@pytest.fixture
def runs(lab: SlurmLab, tmp_path: Path) -> Iterator[Runs]:
    yield Runs(lab, tmp_path)
    lab.run("scancel", "--user=root", "--signal=KILL", "--full")
    lab.run("scancel", "--user=root")


def test_two_ranks_are_started_on_each_of_two_nodes(runs: Runs) -> None:
    said = runs.launch("mesh.dp=2", "mesh.tp=2", "num_epochs=1")
    assert "files of the run" in said
    summary = json.loads((runs.run / "summary.json").read_text())
    assert summary["samples_applied"] == 1438
    assert runs.state() == "COMPLETED"
    assert "ended with code 0" in runs.smolcluster("status", runs.run.name)
    assert "on 4 ranks, dp 2" in runs.smolcluster("logs", runs.run.name)


def test_a_job_is_requeued_stopped_and_goes_on(runs: Runs) -> None:
    keys = ("mesh.dp=2", "mesh.tp=1", "checkpoint_steps=20", "eval_steps=100000")
    runs.launch(*keys, "num_epochs=100000", options=("--detach",))
    runs.wait_until(lambda: runs.step > 40)
    assert "running" in runs.smolcluster("status", runs.run.name)
    job = runs.lab.output("squeue", "--noheader", f"--name={runs.run.name}", "--format=%i").strip()
    runs.lab.output("scontrol", "requeue", job)
    runs.wait_until(lambda: "resuming run" in runs.console())
    before = runs.step
    runs.wait_until(lambda: runs.step > before + 20)
    runs.smolcluster("stop", runs.run.name)
    assert runs.state() == "CANCELLED"
    status = json.loads((runs.run / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("ended", STOPPED)
    checkpoints = runs.smolcluster("checkpoints", runs.run.name)
    assert f"{status['step']:,}" in checkpoints
    epochs = 2 + status["epoch"]
    runs.smolcluster("resume", runs.run.name, "--override", f"num_epochs={epochs}")
    summary = json.loads((runs.run / "summary.json").read_text())
    assert summary["samples_applied"] == epochs * 1438
