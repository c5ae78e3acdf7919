"""A rank that keeps what it was given, and ends after some steps: `mesh_resumed.py FOLDER STEPS ARGUMENT...`.

The arguments are those of `smolcluster.distributed_training`. Rank 0 leaves in FOLDER what the ranks had once
they had taken over a checkpoint, whole, and the samples of each step; after STEPS steps it is asked to stop.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mesh_rank import Gathered
from smolcluster import distributed_training
from smolcluster.algorithms.Mesh import loop
from smolcluster.algorithms.Mesh.trainer import Computed, MeshTrainer
from smolcluster.training.loop import StepTaken

LOADED, SAMPLES = "loaded.safetensors", "samples.jsonl"


class Recorded(MeshTrainer):
    """What it trains is what `MeshTrainer` trains."""

    folder: Path
    num_steps_here: int
    num_taken = 0

    def keep_loaded(self) -> None:
        gathered = Gathered(self)
        gathered.begin()
        tensors = {
            f"{moment}/{name}": tensor.view(gathered.shapes[name]).clone()
            for moment in gathered.state
            for name, tensor in gathered.named(moment).items()
        }
        if self.groups.rank == 0:
            save_file(tensors, self.folder / LOADED)

    def compute(self, indices: Tensor, epoch: int, start: int, *more: Any) -> Computed:
        if self.groups.rank == 0:
            with (self.folder / SAMPLES).open("a") as file:
                file.write(json.dumps([epoch, start, indices.tolist()]) + "\n")
        return super().compute(indices, epoch, start, *more)

    def step(self, samples_applied: int, version: int, *more: Any) -> StepTaken:
        if self.num_taken == 0:
            self.keep_loaded()
        step = super().step(samples_applied, version, *more)
        self.num_taken += 1
        if self.num_taken == self.num_steps_here and self.groups.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step


if __name__ == "__main__":
    Recorded.folder, Recorded.num_steps_here = Path(sys.argv[1]), int(sys.argv[2])
    vars(loop)["MeshTrainer"] = Recorded
    sys.exit(distributed_training.main(sys.argv[3:]))
