"""Meshes of real processes take the steps that one process takes."""

import sys

import pytest

import mesh_rank
from harness import free_port
from processes import Processes
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary

WORLD_SIZE = 4


IN_CI = (
    *("dp2-fsdp2", "tp2-pp2-1f1b", "fsdp2-pp2-zbv", "dp2-tp2-bf16", "tp2-pp2-sequence-loss"),
    "dp2-tp2-llama",
)


@pytest.mark.parametrize(
    "names",
    [
        IN_CI,
        pytest.param(tuple(mesh_rank.CASES.keys() - set(IN_CI)), marks=pytest.mark.slow, id="all"),
    ],
)
def test_a_mesh_trains_as_one_process_does(processes: Processes, names: tuple[str, ...]) -> None:
    program = (sys.executable, mesh_rank.__file__)
    ranks = [
        processes.start(*program, str(rank), str(WORLD_SIZE), str(processes.folder), *names)
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        assert rank.wait() == 0, rank.output
    for name in names:
        mesh_rank.compare(name, mesh_rank.CASES[name], processes.folder)


def test_a_run_goes_on_with_another_mesh(processes: Processes) -> None:
    """It leaves what every run leaves, and its checkpoint is of no mesh."""
    program = (sys.executable, "-m", "smolcluster.distributed_training", "--config", "digits")
    flags = ("--batch-size", "128", "--run-id", "spread", "--epochs", "1", "--tp", "2")
    port = str(free_port())
    there = ("--world-size", "2", "--master-port", port)
    ranks = [processes.start(*program, *there, "--rank", str(r), *flags) for r in (0, 1)]
    for rank in ranks:
        assert rank.wait() == 0, rank.output
    paths = find_run(processes.runs)
    first = read_summary(paths.summary)
    alone = processes.start(
        *(*program, "--batch-size", "128", "--resume", "spread", "--epochs", "2"),
    )
    assert alone.wait() == 0, alone.output
    both = read_summary(paths.summary)
    assert both.steps == 2 * first.steps
    assert both.final.val_loss is not None and first.final.val_loss is not None
    assert both.final.val_loss < first.final.val_loss
