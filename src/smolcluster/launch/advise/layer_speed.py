"""What each layer of the model costs on this machine, as a process of its own.

`python -m smolcluster.launch.advise.layer_speed FOLDER` finds in the folder what `speed` finds there, and
prints one JSON object, a `LayerSpeeds`. Nothing is written.
"""

import sys
from math import ceil
from pathlib import Path

import psutil
import torch
from pydantic import BaseModel, ConfigDict

from smolcluster.configs.resolve import Settings
from smolcluster.data.dataset import Place
from smolcluster.errors import SmolclusterError
from smolcluster.launch.advise.speed import asked_in, settings_in
from smolcluster.runs.model_file import ModelFile
from smolcluster.training.builtin import load_workload
from smolcluster.training.compute import placed
from smolcluster.training.stages.build import model_input, output_loss
from smolcluster.training.stages.measure import (
    MeasuredLayer,
    layers_of_workload,
    measure_layers,
)
from smolcluster.training.workload import count_terms
from smolcluster.utils.device import describe, pick_device, use_threads


class LayerSpeeds(BaseModel):
    """A model's layers on one machine.

    Attributes:
        layers: for one microbatch each.
        memory_bytes: free on the device.
        device: in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    layers: tuple[MeasuredLayer, ...]
    memory_bytes: int
    device: str


LAYER_SPEEDS = ModelFile[LayerSpeeds](LayerSpeeds, "is damaged")


def measure(settings: Settings, num_microbatches: int) -> LayerSpeeds:
    """Measure all layers on a microbatch of the training data.

    Raises:
        SmolclusterError: the model cannot be cut, or not be computed here.
    """
    train, node, seed = settings.train, settings.node, settings.cluster.seed
    use_threads(node.threads)
    device = pick_device(node.device)
    memory_bytes = free_memory(device)
    workload = load_workload(train, seed, node.dataset)
    size = (workload.batch_size or train.batch_size) * train.gradient_accumulation
    indices = workload.train.order(0, seed)[: ceil(size / num_microbatches)]
    batch = workload.train.batch(indices, Place(seed, 0, 0))
    batch = placed(batch, device, torch.get_default_dtype())
    loss = output_loss(workload)

    def finish(output: object) -> torch.Tensor:
        return count_terms(loss(output, batch), len(indices), of=loss)[0]

    layers = layers_of_workload(workload, seed, device)
    found = measure_layers(layers, model_input(workload, batch), finish, device)
    return LayerSpeeds(layers=tuple(found), memory_bytes=memory_bytes, device=describe(device))


def free_memory(device: torch.device) -> int:
    """Bytes that a process may still take on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    if device.type == "mps":
        return min(available, int(torch.mps.recommended_max_memory()))
    return available


def main(folder: Path) -> None:
    """Measure what the folder asks for, and print it.

    Raises:
        SmolclusterError: it cannot be measured.
    """
    asked = asked_in(folder)
    speeds = measure(settings_in(folder, asked), asked.num_microbatches)
    sys.stdout.write(f"{speeds.model_dump_json()}\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except SmolclusterError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
