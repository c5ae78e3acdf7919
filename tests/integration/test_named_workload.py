"""A cluster that trains what a function of a user's file returns."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Cluster, free_port, local_settings
from processes import Processes
from smolcluster.configs.schema import Settings
from smolcluster.errors import ConfigError, Rejected, SmolclusterError
from smolcluster.runs.events import RunStarted, WorkerRejected, read_events
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
from smolcluster.utils.stopping import Interrupted
from tiers import at_night

MODULE = "points_of_a_user"
FILE = """
import torch
from torch import nn
from smolcluster.training.workload import Workload

def loss(model, batch):
    return (model(batch[:, :4]) - batch[:, 4:]).square().mean()

def workload(width: int = 8):
    inputs = torch.randn(200, 4)
    rows = torch.cat((inputs, inputs.sum(1, keepdim=True)), 1).unbind()
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    return Workload(model, loss, rows, rows[:40], name="points")
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a function in a file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / f"{MODULE}.py"
    file.write_text(FILE)
    yield f"{file}:workload"
    sys.modules.pop(MODULE, None)


def settings_for(named: str, *overrides: str) -> Settings:
    own = (
        f"workload={named}",
        "workload_args.width=16",
        "num_epochs=4",
        "learning_rate=0.02",
        *overrides,
    )
    return local_settings(*own, workers=1, train="workload")


def test_server_and_worker_train_what_the_function_returns(tmp_path: Path, named: str) -> None:
    cluster = Cluster(settings_for(named), tmp_path)
    summary = cluster.finish(cluster.worker(1, workload=named))
    assert cluster.training.workload.name == "points"
    assert cluster.training.replica.num_params == 16 * 4 + 16 + 16 + 1, "workload_args.width is 16"
    assert summary.final.val_loss is not None
    assert sum(cluster.losses[-7:]) < sum(cluster.losses[:7])


def refused(cluster: Cluster, worker_s: str | None) -> SmolclusterError:
    """Why a worker is refused that names this function."""
    error = cluster.worker(1, workload=worker_s).failure()
    assert isinstance(error, SmolclusterError)
    cluster.stop.note(signal.SIGTERM)
    assert isinstance(cluster.server.failure(), Interrupted)
    return error


def test_a_worker_names_a_function_where_one_is_trained_and_no_other(
    tmp_path: Path, named: str
) -> None:
    """A welcome names no code."""
    settings = settings_for(named)
    said = settings.run_config("run", "edp").model_dump_json()
    assert str(tmp_path) not in said
    assert ":workload" not in said
    assert f'"workload":"{MODULE}.workload"' in said
    digits = local_settings("num_epochs=1", workers=1)
    for told, worker_s, words in (
        (settings, None, ("--workload FILE.py:FUNCTION", f"{MODULE}.workload")),
        (digits, named, ("digits", f"without --workload {named}")),
    ):
        error = refused(Cluster(told, tmp_path), worker_s)
        assert isinstance(error, ConfigError)
        assert [word for word in words if word not in str(error)] == []


def test_other_code_is_refused_with_both_hashes(tmp_path: Path, named: str) -> None:
    cluster = Cluster(settings_for(named), tmp_path)
    ours = cluster.training.workload.source or ""
    file = Path(named.rpartition(":")[0])
    file.write_text(FILE.replace("square()", "abs()"))
    del sys.modules[MODULE]  # as in a process of its own
    error = refused(cluster, named)
    assert isinstance(error, Rejected)
    assert error.code == "workload"
    assert f"server {ours[:12]}" in str(error)
    [event] = cluster.happened(WorkerRejected)
    assert event.code == "workload"
    assert event.reason == str(error)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["file", *at_night("module")])
def test_a_launch_and_what_goes_on_with_it_train_the_function(
    tmp_path: Path,
    processes: Processes,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # where the processes begin
    name = named if form == "file" else f"{MODULE}:workload"
    port = f"port={free_port()}"
    own = ("metrics_port=null", "workload_args.width=16", "batch_size=50")
    if form == "file":
        processes.ended("train", "--workload", name, "--override", *own)
        again: tuple[str, ...] = ("train", "--resume", "latest", "--override", "num_epochs=3")
    else:
        flags = ("--local", "--no-tmux", "--workers", "1", "--workload", name)
        processes.ended("launch", "edp", *flags, "--override", *own, port)
        again = ("resume", "--override", "num_epochs=3")
    first = find_run(processes.runs)
    assert read_summary(first.summary).steps == 2 * 200 / 50
    file = Path(named.rpartition(":")[0])
    file.write_text(FILE + "# a comment more")
    monkeypatch.chdir("/")
    said = processes.ended(*again)
    assert "the workload's code is not what it was" in said
    assert find_run(processes.runs).run_id == first.run_id
    assert read_summary(first.summary).steps == 3 * 200 / 50
    starts = [
        each.event for each in read_events(first.events) if isinstance(each.event, RunStarted)
    ]
    assert [each.num_params for each in starts] == [16 * 4 + 16 + 16 + 1] * 2
    assert starts[0].source != starts[1].source
