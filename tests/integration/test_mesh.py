"""Meshes of real processes take the steps that one process takes."""

import json
import sys
from pathlib import Path

import pytest
import torch

import mesh_rank
from processes import Processes
from smolcluster.configs.schema import DatasetPlace
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
