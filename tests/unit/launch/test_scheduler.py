"""What a scheduler is told of a run, and what its commands say of it."""

import os
import subprocess
from pathlib import Path

import pytest

from smolcluster.configs.schema import SlurmConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.jobs.scheduler import Job
from smolcluster.launch.jobs.slurm import sbatch_script
from smolcluster.launch.sessions import ask_to_end, exit_code
from smolcluster.runs.launched import LaunchedProcess, Scheduler

COMMANDS = {"slurm": "squeue", "kubernetes": "kubectl"}


def job(
    scheduler: Scheduler, folder: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> LaunchedProcess:
    """A run whose scheduler's command is this shell text."""
    command = folder / ".local" / "bin" / COMMANDS[scheduler]
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\n{said}\n")
    command.chmod(0o755)
    monkeypatch.setenv("HOME", str(folder))
    argv = ("kubectl", "--namespace", "default", "apply", "-f", "-")
    return LaunchedProcess(
        node="here",
        role="ranks",
        run_dir=str(folder),
        session="job/a",
        argv=argv,
        scheduler=scheduler,
    )


@pytest.mark.parametrize("scheduler", COMMANDS)
def test_a_scheduler_that_does_not_answer_does_not_say_that_a_run_is_over(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = job(scheduler, tmp_path, monkeypatch, "echo no contact >&2; exit 1")
    with pytest.raises(LaunchError, match="no contact"):
        exit_code(process)
    with pytest.raises(LaunchError, match="no contact"):
        ask_to_end(process, 0.2)


@pytest.mark.parametrize(
    ("conditions", "code"),
    [
        ("", None),
        ("Complete ", 0),
        ("Completed ", 0),
        ("StartupPolicyCompleted ", None),
        ("Failed ", 1),
    ],
)
def test_how_an_object_is_by_its_conditions(
    conditions: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = job("kubernetes", tmp_path, monkeypatch, f"printf 'found {conditions}'")
    assert exit_code(process) == code


def test_of_several_jobs_of_a_name_the_newest_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an order of ours Slurm lists those last that were cancelled."""
    said = (
        'case " $* " in *" --sort=i "*) printf "CANCELLED\\nRUNNING\\n";; *) echo CANCELLED;; esac'
    )
    assert exit_code(job("slurm", tmp_path, monkeypatch, said)) is None


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_of_slurm_ends_as_its_ranks_do(code: int, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, said in (("scontrol", "echo node1"), ("srun", f"exit {code}")):
        (commands / name).write_text(f"#!/bin/sh\n{said}\n")
        (commands / name).chmod(0o755)
    process = LaunchedProcess(node="slurm", role="ranks", run_dir=str(tmp_path))
    job = Job(process, ("-m", "x"), num_ranks=2, port=1, restarts=0)
    environ = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node1",
    }
    script = sbatch_script(job, SlurmConfig())
    ended = subprocess.run(["bash"], input=script, text=True, env=environ, check=False)
    assert ended.returncode == code
    assert (tmp_path / "exits" / process.stem).read_text() == f"{code}\n"
