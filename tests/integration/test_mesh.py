"""Meshes of real processes take the steps that one process takes."""

import json
import sys
from pathlib import Path

import pytest
import torch

import mesh_rank
from harness import free_port
from processes import Processes
from smolcluster.configs.schema import DatasetPlace
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
from smolcluster.training.build import build
from smolcluster.training.loop import training_steps

WORLD_SIZE = 4


def alone(case: mesh_rank.Case) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Loss, loss terms and norm of each step of one process, and its weights."""
    workload, train = mesh_rank.workload(case), case.training
    training = build(train, mesh_rank.SEED, DatasetPlace(), mesh_rank.CPU, workload=workload)
    steps = []
    for step in training_steps(training, train):
        steps.append([step.loss, step.num_terms, step.grad_norm])
        if len(steps) == mesh_rank.NUM_STEPS:
            break
    weights = {name: each.detach().flatten() for name, each in training.replica.parameters.items()}
    return steps, weights


IN_CI = ("dp2-fsdp2", "tp2-pp2-1f1b", "fsdp2-pp2-zbv", "dp2-tp2-bf16")


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
        compare(name, mesh_rank.CASES[name], processes.folder)


def compare(name: str, case: mesh_rank.Case, folder: Path) -> None:
    found = json.loads((folder / f"{name}.json").read_text())
    steps, weights = alone(case)
    exact = 1e-9 if case.double else 1e-5
    tolerance = 2e-2 if case.train.get("precision") == "bf16" else exact
    for mesh, single in zip(found["steps"], steps, strict=True):
        assert mesh == pytest.approx(single, rel=tolerance, abs=tolerance), name
    assert found["weights"].keys() == weights.keys(), name
    for each, own in weights.items():
        values = torch.tensor(found["weights"][each], dtype=own.dtype)
        assert torch.allclose(values, own, rtol=tolerance, atol=tolerance), f"{name}: {each}"


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
