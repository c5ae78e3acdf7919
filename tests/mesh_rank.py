"""A rank of a mesh as a process of its own: `mesh_rank.py RANK WORLD_SIZE FOLDER CASE...`.

Trains each case and leaves what came of it in FOLDER/CASE.json; the test compares it with one process.
"""

import json
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from smolcluster.algorithms.Mesh.config import MeshConfig, config_of
from smolcluster.configs.schema import GPTConfig, TrainConfig
from smolcluster.models.gpt import GPT
from smolcluster.training.recipe import Training
from smolcluster.training.workload import Workload

SEED, NUM_STEPS, LENGTH, WORDS = 3, 3, 6, 24
CPU = torch.device("cpu")
TRAIN: dict[str, Any] = {
    "dataset": {"name": "digits"},
    "batch_size": 16,
    "num_epochs": 2,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "gradient_clipping": {"max_norm": 0.4},
    "weight_decay": 0.01,
}
ADAM = {"optimizer": "adam", "learning_rate": 0.01}


@dataclass(frozen=True)
class Case:
    """A mesh, and what is trained on it."""

    mesh: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    double: bool = False

    @property
    def config(self) -> MeshConfig:
        return config_of({"mesh": self.mesh, **self.keys})

    @property
    def training(self) -> TrainConfig:
        return TrainConfig.model_validate({**TRAIN, **self.train})


CASES = {
    "tp4": Case({"tp": 4}),
    "fsdp4": Case({"fsdp": 4}, {"microbatches": 2}, ADAM, double=True),
    "dp2-fsdp2": Case({"dp": 2, "fsdp": 2}, {"activation_checkpointing": "full"}),
    "tp2-pp2-1f1b": Case({"tp": 2, "pp": 2}, {"microbatches": 4}, ADAM, double=True),
    "pp4-gpipe": Case({"pp": 4}, {"microbatches": 4, "schedule": "gpipe"}),
    "dp2-pp2-zero-bubble": Case(
        {"dp": 2, "pp": 2}, {"microbatches": 2, "schedule": "zero-bubble"}, ADAM, double=True
    ),
    "fsdp2-pp2-zbv": Case(
        {"fsdp": 2, "pp": 2}, {"microbatches": 4, "schedule": "zbv"}, ADAM, double=True
    ),
    "dp2-pp2-dualpipev": Case(
        {"dp": 2, "pp": 2}, {"microbatches": 4, "schedule": "dualpipev"}, ADAM, double=True
    ),
    "fsdp2-pp2-dualpipev": Case(
        {"fsdp": 2, "pp": 2}, {"microbatches": 4, "schedule": "dualpipev"}, ADAM, double=True
    ),
    "tp2-fsdp2": Case({"tp": 2, "fsdp": 2}, {"activation_checkpointing": "selective"}),
    "tp2-pp2-interleaved": Case({"tp": 2, "pp": 2}, {"microbatches": 4, "schedule": "interleaved"}),
    "dp2-tp2-bf16": Case({"dp": 2, "tp": 2}, {}, {"precision": "bf16"}),
}


class Sentences:
    """Tokens by arithmetic, of which the last ones of every third sample are no loss terms."""

    def __len__(self) -> int:
        return 24  # the second step of an epoch has 8 samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH + 1) * (index % 7 + 1) + index) % WORDS
        targets = tokens[1:].clone()
        if index % 3 == 0:
            targets[-2:] = -100
        return {"inputs": tokens[:-1], "targets": targets}


def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, targets = model(batch["inputs"]), batch["targets"].flatten()
    total = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total, (targets != -100).sum()


def workload(case: Case) -> Workload:
    config = GPTConfig(
        model_dim=16, num_layers=4, num_heads=4, ff_dim=32, max_seq_len=LENGTH, dropout=0.0
    )
    dtype = torch.float64 if case.double else torch.float32
    return Workload(
        lambda: GPT(config, WORDS).to(dtype),
        loss,
        Sentences(),
        name="arithmetic",
        training=Training(),
    )


def train_case(name: str, case: Case, folder: Path) -> None:
    from smolcluster.algorithms.Mesh.groups import Groups
    from smolcluster.algorithms.Mesh.trainer import WEIGHTS, MeshTrainer

    groups = Groups(case.config.mesh, CPU)
    trainer = MeshTrainer(workload(case), case.training, case.config, groups, seed=SEED)
    applied, steps = 0, []
    for _ in range(NUM_STEPS):
        step = trainer.step(applied)
        applied += trainer.num_samples_at(applied)
        steps.append([step.loss, step.num_terms, step.grad_norm])
    weights = {each.name: each.tensor for each in trainer.gather() if each.moment == WEIGHTS}
    if groups.rank == 0:
        said = {name: each.flatten().tolist() for name, each in weights.items()}
        (folder / f"{name}.json").write_text(json.dumps({"steps": steps, "weights": said}))


def main() -> None:
    rank, world_size, folder, *names = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    for name in names:
        train_case(name, CASES[name], Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
