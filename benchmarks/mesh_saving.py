"""What saving a mesh costs: how long training is held, and when all is on the disk.

Ranks are processes on Gloo, over which FSDP spreads a GPT of so many parameters with both moments of AdamW.
They take a step, and save twice; times are those of the second, since the first needs new memory.

* `ours`: each rank copies its part, while training is held; a thread brings the copies to rank 0, whose
  replica is copied and written as any run's checkpoint. All of it is timed, and the file is synced.
* `DCP`: `torch.distributed.checkpoint`, each rank a file of its own, which is synced as well. What holds
  training is `async_save`; how long `save` takes is timed by itself.
* `raw`: one process writes as many bytes to one file, and syncs it.
"""

import argparse
import logging
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.nn import functional

from common import free_port, report, say, seconds
from exchange import Children
from mesh import PRELOAD, TIMEOUT
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.gathering import StateGathering
from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.algorithms.Mesh.shards import Shards
from smolcluster.algorithms.Mesh.trainer import WEIGHTS, MeshTrainer
from smolcluster.configs.schema import DatasetConfig, DatasetPlace, GPTConfig, TrainConfig
from smolcluster.models.gpt import GPT
from smolcluster.training.build import build
from smolcluster.training.checkpoint import CheckpointStore, Snapshot, TrainingState
from smolcluster.training.workload import Workload

CPU, SEED, LENGTH = torch.device("cpu"), 1, 8
WIDTH, VOCABULARY, PARAMS_A_LAYER = 768, 20_000, 12 * 768**2
BYTES_A_PARAM = 12
"""In float32, with both moments."""


@dataclass(frozen=True)
class Case:
    """A mesh, and the size of what it trains."""

    num_ranks: int
    num_params: float
    port: int
    folder: Path

    @property
    def train(self) -> TrainConfig:
        return TrainConfig(
            model=GPTConfig(),
            dataset=DatasetConfig(name="text"),
            optimizer="adamw",
            batch_size=self.num_ranks,
        )

    @property
    def config(self) -> MeshConfig:
        return MeshConfig.model_validate({"mesh": {"fsdp": self.num_ranks}, "microbatches": 1})

    def workload(self) -> Workload:
        num_layers = max(1, round((self.num_params - WIDTH * VOCABULARY) / PARAMS_A_LAYER))
        config = GPTConfig(
            model_dim=WIDTH,
            num_layers=num_layers,
            num_heads=12,
            ff_dim=4 * WIDTH,
            max_seq_len=LENGTH,
            dropout=0.0,
        )
        tokens = torch.randint(0, VOCABULARY, (64, LENGTH))
        rows = [(each, each) for each in tokens]
        return Workload(lambda: GPT(config, VOCABULARY), loss, rows)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def be_rank(pipe: Pipe, case: Case, rank: int) -> None:
    """Take a step, and save in each way whenever the pipe says so; tells seconds by name."""
    url = f"tcp://127.0.0.1:{case.port}"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=case.num_ranks, timeout=TIMEOUT
    )
    torch.set_num_threads(1)
    groups = Groups(case.config.mesh, CPU, Mock())
    trainer = MeshTrainer(case.workload(), case.train, case.config, groups, seed=SEED)
    ours = Ours(trainer, case) if rank == 0 else None
    shards = Shards(trainer, ours.layers if ours else ())
    gathering = StateGathering(trainer, shards)
    trainer.step(0, 1)
    while pipe.recv() >= 0:
        dist.barrier()
        began = time.perf_counter()
        gathering.begin(ours.state if ours else None)
        held = time.perf_counter() - began
        gathering.wait()
        gathered = time.perf_counter() - began
        if ours is not None:
            ours.write()
        whole = time.perf_counter() - began
        tensors = tensors_of(trainer)
        dist.barrier()
        dcp_whole = seconds(partial(save, tensors, checkpoint_id=case.folder / "dcp"))
        dist.barrier()
        began = time.perf_counter()
        saving: Any = async_save(tensors, checkpoint_id=case.folder / "later")
        dcp_held = time.perf_counter() - began
        saving.result()
        pipe.send((held, gathered, whole, dcp_held, dcp_whole))


class Ours:
    """Rank 0's replica, and where it is saved."""

    def __init__(self, trainer: MeshTrainer, case: Case) -> None:
        training = build(case.train, SEED, DatasetPlace(), CPU, workload=trainer.workload)
        self.replica = training.replica
        self.layers = self.replica.layers
        self.state = {WEIGHTS: self.replica.params, **self.replica.optimizer.state}
        self._store = CheckpointStore(case.folder / "ours", 1, logging.getLogger("benchmark"))
        self._spare: Snapshot | None = None
        self._step = 0

    def write(self) -> None:
        self._step += 1
        state = TrainingState(
            run_id="benchmark",
            algorithm="mesh",
            incarnation="1",
            step=self._step,
            samples_applied=0,
            epoch=0,
            dataset_fingerprint="none",
            seed=SEED,
            codec="none",
        )
        self._spare = Snapshot.of(self.replica, state, spare=self._spare)
        self._store.save(self._spare)


def tensors_of(trainer: MeshTrainer) -> dict[str, Any]:
    """Weights and moments as DCP takes them."""
    found: dict[str, Any] = {}
    for place, slot in enumerate(trainer.slots):
        found[slot.name] = parameter = slot.parameter
        for name, moment in trainer.optimizer.moments(place).items():
            found[f"{slot.name}.{name}"] = (
                DTensor.from_local(
                    moment,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                if isinstance(parameter, DTensor)
                else moment
            )
    return found


def write_raw(folder: Path, num_bytes: int) -> None:
    piece = bytes(1 << 24)
    with (folder / "raw").open("wb") as file:
        for _ in range(num_bytes // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description="What saving a mesh costs.")
    parser.add_argument("--ranks", type=int, default=2, help="processes that FSDP spreads it over")
    parser.add_argument("--params", type=float, default=100, help="of the model, in millions")
    parser.add_argument("--saves", type=int, default=3, help="timed ones")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        Children([*PRELOAD, "torch.distributed.checkpoint"]) as children,
    ):
        case = Case(options.ranks, 1e6 * options.params, free_port(), Path(name))
        pipes = [children.start(be_rank, case, rank) for rank in range(options.ranks)]
        found, raw = [], []
        for number in range(options.saves + 1):
            for pipe in pipes:
                pipe.send(number)
            told = [children.hear(pipe) for pipe in pipes]
            slowest = [max(each) for each in zip(*told, strict=True)]
            wrote = seconds(partial(write_raw, case.folder, int(BYTES_A_PARAM * case.num_params)))
            if number:
                found.append(slowest)
                raw.append(wrote)
            say(f"save {number}: {slowest}, raw {wrote:.2f} s")
    held, gathered, whole, dcp_held, dcp_whole = map(statistics.median, zip(*found, strict=True))
    beside = statistics.median(raw)
    rows = [
        ["", "training held, s (aim 0.2)", "gathered, s", "saved, s", "of a raw write (aim 1.3)"],
        ["ours", f"{held:.2f}", f"{gathered:.2f}", f"{whole:.2f}", f"{whole / beside:.2f}"],
        ["DCP", f"{dcp_held:.2f}", "", f"{dcp_whole:.2f}", f"{dcp_whole / beside:.2f}"],
        ["raw", "", "", f"{beside:.2f}", ""],
    ]
    report(f"{options.params:g} M parameters with moments, FSDP over {options.ranks} ranks", rows)


if __name__ == "__main__":
    main()
