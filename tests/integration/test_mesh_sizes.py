"""A run that goes on with other numbers of ranks."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import mesh_resumed
from harness import free_port
from processes import Processes
from smolcluster.configs.resolve import load_settings
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.training.build import build
from smolcluster.training.checkpoint import MODEL_FILE, OPTIMIZER_FILE
from texts import TINY, write_text

pytestmark = pytest.mark.nightly

BATCH_SIZE, STEPS = 8, 3
"""STEPS: of each part of the run but the last."""
MESHES = {"fsdp": 2, "tp": 2, "pp": 2}, {"tp": 2, "pp": 2}, {"dp": 1}, {"tp": 2, "pp": 4}
SHARED = {1: ("--sequence-parallel", "--loss-parallel")}
"""Further flags, by part: the 257 tokens of the vocabulary are not divided equally."""
SHARDING = """
pp_stage{stage}:
  shard: {{axis: 0, workers: {workers}}}
pp_stage{stage}_colpar:
  shard: {{axis: 1, workers: {workers}}}
pp_stage{stage}_rowpar:
  shard: {{axis: 0, workers: {workers}}}
"""
"""Of the last part: each of four stages on two ranks."""
MOMENTS = "exp_avg", "exp_avg_sq"


def train_part(processes: Processes, number: int, overrides: Sequence[str]) -> Path:
    """Go on with the run `spread` on a mesh, all parts but the last until it is stopped."""
    folder, is_last = processes.folder / f"part-{number}", number == len(MESHES) - 1
    folder.mkdir()
    world_size = math.prod(MESHES[number].values())
    sharding = processes.folder / "sharding.yaml"
    stages = [{"stage": each, "workers": [2 * each, 2 * each + 1]} for each in range(4)]
    sharding.write_text("".join(SHARDING.format(**stage) for stage in stages))
    told = [f"sharding={sharding}"] if is_last else []
    arguments = (
        *(str(folder), "0" if is_last else str(STEPS)),
        *("--world-size", str(world_size), "--master-port", str(free_port())),
        *(f"--{name}={size}" for name, size in MESHES[number].items()),
        *("--microbatches", "4" if is_last else "2", *SHARED.get(number, ())),
        *("--config=stdlib", "--run-id=spread", "--resume=auto"),
        *("--override", *overrides, *told),
    )
    program = sys.executable, mesh_resumed.__file__
    ranks = [
        processes.start(*program, *arguments, "--rank", str(rank)) for rank in range(world_size)
    ]
    for rank, child in enumerate(ranks):
        assert child.wait() == (143 if rank == 0 and not is_last else 0), child.output
    return folder


def kept_at(paths: RunPaths, step: int, layers: Sequence[tuple[str, slice]]) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint, flat, by the names that `mesh_resumed` gives them."""
    folder = paths.checkpoints / f"step-{step:08d}"
    state = load_file(folder / OPTIMIZER_FILE)
    weights = {f"/{name}": each.flatten() for name, each in load_file(folder / MODEL_FILE).items()}
    moments = {
        f"{moment}/{name}": state[moment][place] for moment in MOMENTS for name, place in layers
    }
    return weights | moments


def losses_of(paths: RunPaths) -> list[float]:
    records = [line.record for line in follow_metrics(paths.metrics).poll()]
    return [each.values["loss"] for each in records if each.kind == "step"]


@pytest.mark.timeout(900)
def test_a_run_on_8_then_4_then_1_then_8_ranks_is_that_of_one_process(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(processes.folder / "cache")
    processes.environ["XDG_CACHE_HOME"] = cache
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    text = write_text(processes.folder / "text.txt", 250)
    overrides = (
        *(*TINY, "model.num_layers=4", f"training.batch_size={BATCH_SIZE}", "training.epochs=2"),
        *("training.eval_steps=1000", "keep_last=10", f"data.root={text}"),
    )
    folders = [train_part(processes, number, overrides) for number in range(len(MESHES))]
    processes.ended("train", "--config=stdlib", "--run-id=alone", "--override", *overrides)

    settings = load_settings("edp", "stdlib", None, overrides, environ={}, local=True)
    seed = settings.cluster.seed
    training = build(settings.train, seed, settings.node.dataset, torch.device("cpu"))
    spread, single = find_run(processes.runs, "spread"), find_run(processes.runs, "alone")
    for number, folder in list(enumerate(folders))[1:]:
        loaded = load_file(folder / mesh_resumed.LOADED)
        kept = kept_at(spread, number * STEPS, training.replica.layers)
        assert loaded.keys() == kept.keys()
        for name, tensor in kept.items():
            assert torch.equal(loaded[name].flatten(), tensor), f"part {number}: {name}"

    order = [training.workload.train.order(epoch, seed).tolist() for epoch in range(2)]
    expected = [
        [epoch, start, order[epoch][start : start + BATCH_SIZE]]
        for epoch in range(2)
        for start in range(0, training.workload.train.num_samples, BATCH_SIZE)
    ]
    texts = [(each / mesh_resumed.SAMPLES).read_text() for each in folders]
    lines = [line for each in texts for line in each.splitlines()]
    assert [json.loads(line) for line in lines] == expected
    assert len(expected) > 3 * STEPS
    losses = losses_of(spread)
    assert len(losses) == len(expected)
    assert losses == pytest.approx(losses_of(single), rel=1e-6)

    model = processes.folder / "model"
    processes.ended("export", "spread", "--to", str(model))
    assert [each.name for each in model.glob("*.safetensors")] == [MODEL_FILE]
    exported, newest = load_file(model / MODEL_FILE), kept_at(spread, len(losses), ())
    assert all(torch.equal(exported[name[1:]].flatten(), each) for name, each in newest.items())
    written = processes.ended("generate", "spread", "--prompt=the cat", "--max-tokens=8")
    assert written.startswith("the cat")
