"""Ranks of a group, each a process of its own: `mesh_group.py RANK WORLD_SIZE FOLDER CASE...`.

Each case goes through what a worker of DiLoCo asks of its copy of the weights, and rank 0 leaves in
FOLDER/CASE.pt what it was told and what the mesh had then. Also a workload that goes no faster than a test
wants it to.
"""

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import mesh_rank
from mesh_rank import Case
from own_workloads import Rows
from smolcluster.configs.schema import DatasetPlace
from smolcluster.data.dataset import Batch
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.workload import Terms, Workload

WORLD_SIZE, BUCKET_BYTES, NUM_FRAGMENTS = 4, 400, 3
NUM_SAMPLES = 360
"""Of `paced`."""
CASES = {
    "tp2-fsdp2": Case({"tp": 2, "fsdp": 2}),
    "dp2-fsdp2": Case({"dp": 2, "fsdp": 2}),
    "tp2-pp2": Case({"tp": 2, "pp": 2}, {"microbatches": 2}),
    "pp4": Case({"pp": 4}, {"microbatches": 4, "schedule": "gpipe"}),
}


def alone(case: Case) -> TrainingContext:
    """The whole model in one process."""
    workload = mesh_rank.workload(case)
    return build(case.training, mesh_rank.SEED, DatasetPlace(), mesh_rank.CPU, workload=workload)


def go_through(name: str, case: Case, folder: Path) -> None:
    from smolcluster.algorithms.DiLoCo.fragments import cut
    from smolcluster.algorithms.Mesh.group_rank import GroupRank
    from smolcluster.algorithms.Mesh.groups import Groups
    from smolcluster.algorithms.Mesh.trainer import MeshTrainer

    groups = Groups(case.config.mesh, mesh_rank.CPU, Mock())
    trainer = MeshTrainer(
        mesh_rank.workload(case), case.training, case.config, groups, seed=mesh_rank.SEED
    )
    outline = alone(case).replica
    own = GroupRank(trainer, outline.layers, BUCKET_BYTES, logging.getLogger("test"))
    fragments = [each.places for each in cut(outline.layers, NUM_FRAGMENTS)]
    said: dict[str, Any] = {}
    is_first = groups.rank == 0

    gathered = mesh_rank.Gathered(trainer)

    def weights() -> Tensor:
        flat, places = torch.zeros(outline.num_params), dict(outline.layers)
        gathered.begin()
        for each, values in gathered.named().items():
            flat[places[each]] = values
        return flat

    def step(number: int, *held: int) -> None:
        own.compute(list(range(16)), 0, 16 * number, 1.0)
        told = {"held": held, "clip": 1.0, "bound": None}
        own.obey("step", {"learning_rate": 0.1, **told})

    def read(places: list[tuple[int, int]], *, is_gradient: bool = False) -> Tensor:
        told = {"fragment": 1, "is_gradient": is_gradient}
        return torch.cat([own.obey("read", {"places": [place], **told}) for place in places])

    def take(places: list[tuple[int, int]], values: Tensor, **told: Any) -> None:
        sizes = [stop - start for start, stop in places]
        parts = zip(places, torch.split(values, sizes), strict=True)
        given = [(slice(*place), part) for place, part in parts]
        own.obey("take", {"places": places, **told}, *([given] if is_first else []))

    own.begin([[(place.start, place.stop) for place in places] for places in fragments])
    torch.manual_seed(5)
    given = torch.randn(outline.num_params) / 4

    def load() -> None:
        take([(0, 100), (100, len(given))], given, fragment=None, is_difference=False)

    load()
    said["loaded"] = given, weights()
    step(0)
    said["stepped"] = weights()
    places = [(place.start, place.stop) for place in fragments[1]]
    said["change"] = read(places)
    own.obey("mark_sent", {"fragment": 1})
    step(1)
    said["before"] = weights()
    new = torch.randn(len(said["change"]))
    take(places, new, fragment=1, is_difference=False)
    said["followed"] = new, weights()
    taken = torch.randn(len(said["change"]))
    take(places, taken, fragment=1, is_difference=True)
    said["taken"] = taken, weights()
    step(0, 1)
    said["held"] = weights()
    load()
    own.compute(list(range(16)), 0, 0, 1.0)
    own.obey("add_gradient", {"weight": 2.0, "held": [0]})
    said["gradient"] = read(places, is_gradient=True), read(places)
    own.save(str(folder / name), 7, 2)
    moments = own.moments if is_first else None
    assert own.take_up(moments, folder=str(folder / name), step=7)
    assert not own.take_up({} if is_first else None, folder=str(folder / name), step=8)
    said["places"] = fragments[1]
    if is_first:
        torch.save(said, folder / f"{name}.pt")


class Paced(nn.Module):
    """Takes a quarter of a second a batch, until the file `hurry` is there."""

    def __init__(self, hurry: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.hurry = hurry

    def stages(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)


def paced(hurry: str = "") -> Workload:
    """A learnable task; with `hurry`, the file that lets it go fast."""

    def loss(model: nn.Module, batch: Batch) -> Terms:
        if hurry and not Path(hurry).exists():
            time.sleep(0.25)
        logits = model(batch["input"])
        return functional.cross_entropy(logits, batch["target"], reduction="sum"), len(logits)

    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    rows = Rows(inputs, inputs[:, :4].argmax(dim=1))
    return Workload(lambda: Paced(hurry), loss, rows, rows, name="paced")


def slow_to_load(folder: str, ranks: str) -> Workload:
    """`paced`, which those of the ranks load for ten minutes; each leaves a file in the folder."""
    rank = os.environ["RANK"]
    if rank in ranks:
        Path(folder, rank).touch()
        time.sleep(600)
    return paced()


def main() -> None:
    rank, world_size, folder, *names = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(hours=1),
    )
    torch.set_num_threads(1)
    for name in names:
        go_through(name, CASES[name], Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
