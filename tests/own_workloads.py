"""Runs of a user's own workload: in one process, and by a cluster in this process."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Cluster, local_settings
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.data.dataset import Batch
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.loop import training_steps
from smolcluster.training.workload import Terms, Workload

CPU = torch.device("cpu")
ALGORITHMS: list[AlgorithmName] = ["edp", "syncps"]
NODES = ("pi5", "win", "macbook", "mini1")
NUM_SAMPLES = 160
"""Of `normed`."""


class Rows:
    """A map-style dataset of inputs and targets."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.inputs[index], "target": self.targets[index]}


def settings_for(algorithm: AlgorithmName, num_workers: int, *overrides: str) -> Settings:
    own = ("num_epochs=2", f"min_workers={num_workers}", *overrides)
    if algorithm == "edp":
        own = ("worker_update_interval=1", "batch_size=32", *own)
    else:
        shares = [f"batch_share.{node}={1 / num_workers}" for node in NODES[:num_workers]]
        own = ("global_batch_size=32", *shares, *own)
    return local_settings(*own, workers=num_workers, algorithm=algorithm)


def alone(
    settings: Settings, workload: Workload, algorithm: AlgorithmName = "syncps"
) -> tuple[list[float], TrainingContext]:
    """The losses of every step of a single process with the same batches."""
    train, seed = settings.run_config("alone", algorithm).train, settings.cluster.seed
    training = build(train, seed, settings.node.dataset, CPU, workload=workload)
    return [step.loss for step in training_steps(training, train)], training


def run(settings: Settings, folder: Path, algorithm: AlgorithmName, workload: Workload) -> Cluster:
    folder.mkdir(exist_ok=True)
    cluster = Cluster(settings, folder, algorithm=algorithm, workload=workload)
    num_workers = settings.cluster.num_workers
    cluster.finish(*(cluster.worker(i + 1, node=NODES[i]) for i in range(num_workers)))
    return cluster


def losses_of(cluster: Cluster) -> Sequence[float]:
    return [record.values["loss"] for record in cluster.metrics.steps]


class Normed(nn.Module):
    """Two batch norms, one of which averages over all batches; a counter; and a table that never changes."""

    num_rows: Tensor
    largest: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.cumulative = nn.BatchNorm1d(12, momentum=None)
        self.outer = nn.Linear(12, 4)
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(8), persistent=False)
        self.register_buffer("table", torch.linspace(0, 1, 12))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 8) to logits (batch, 4)."""
        if self.training:
            self.num_rows += len(inputs)
            self.largest = torch.maximum(self.largest, inputs.detach().abs().amax(dim=0))
        hidden = self.norm(self.inner(inputs / (1 + self.largest))).relu() + self.table
        logits: Tensor = self.outer(self.cumulative(hidden))
        return logits


def loss(model: nn.Module, batch: Batch) -> Terms:
    logits = model(batch["input"])
    return functional.cross_entropy(logits, batch["target"], reduction="sum"), len(logits)


def double_normed() -> nn.Module:
    return Normed().double()


def normed(
    *, held_out: bool = False, double: bool = False, num_samples: int = NUM_SAMPLES
) -> Workload:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 8, generator=generator)
    rows = Rows(inputs, torch.randint(0, 4, (num_samples,), generator=generator))
    model = double_normed if double else Normed
    return Workload(model, loss, rows, rows if held_out else None, name="normed")


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
