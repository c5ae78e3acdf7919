"""Runs of a user's own workload: in one process, and by a cluster in this process."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from harness import Cluster, local_settings
from smolcluster.configs.resolve import Settings
from smolcluster.configs.schema import AlgorithmName
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.loop import training_steps
from smolcluster.training.workload import Workload

CPU = torch.device("cpu")
ALGORITHMS: list[AlgorithmName] = ["edp", "syncps"]
NODES = ("pi5", "win", "macbook")


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


def alone(settings: Settings, workload: Workload) -> tuple[list[float], TrainingContext]:
    """The losses of every step of a single process with the same batches."""
    train, seed = settings.run_config("alone", "syncps").train, settings.cluster.seed
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
