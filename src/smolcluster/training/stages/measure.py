"""What each layer of a model costs on this machine: seconds a microbatch, and bytes.

Layers that are alike, such as the blocks of a transformer, are measured once. A layer is fed what the one
before it returns, so only those that are measured are ever in memory, one at a time.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import psutil
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from smolcluster.data.dataset import Batch, Place
from smolcluster.data.pytree import map_tensors, tensors_in
from smolcluster.training.batches import apart, placed
from smolcluster.training.stages.build import (
    build_stage,
    model_input,
    model_layers,
    outline,
    output_loss,
)
from smolcluster.training.stages.compute import leaves_of
from smolcluster.training.stages.deferred import backward_input
from smolcluster.training.workload import Workload, count_terms
from smolcluster.utils.device import describe
from smolcluster.utils.user_code import user_code
from smolcluster.wire.messages import MeasuredLayer

LEAST_REPEATS, MOST_REPEATS, MEASURE_S = 3, 50, 0.3
"""Of a layer, after one that is not counted: so often, or for so long."""

Finish = Callable[[Any], Batch]
"""The last layer's output to the loss, ()."""
LayerToMeasure = tuple[Hashable, Callable[[], nn.Module]]
"""What is equal of layers that cost the same for the same input; what makes one where it is measured."""


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


def measure_workload(
    workload: Workload,
    seed: int,
    num_samples: int,
    device: torch.device,
    *,
    is_timed: bool = True,
) -> LayerSpeeds:
    """Measure all layers of a model on a microbatch of so many training samples.

    Unless `is_timed` only bytes are measured: each kind of layer is computed once, and takes 0 s.

    Raises:
        SmolclusterError: the model cannot be cut, or not be computed here.
    """
    memory_bytes, own = free_memory(device), model_layers(outline(workload), workload)
    indices = workload.train.order(0, seed)[:num_samples]
    batch = workload.train.batch(indices, Place(seed, 0, 0))
    batch = placed(batch, device, _dtype_of(own))
    loss = output_loss(workload)

    def finish(output: object) -> Tensor:
        return count_terms(loss(output, batch), len(indices), of=loss)[0]

    layers = [
        (key_of(layer), partial(build_stage, workload, place, place + 1, seed, device))
        for place, layer in enumerate(own)
    ]
    value = model_input(workload, batch)
    found = measure_layers(layers, value, finish, device, is_timed=is_timed)
    return LayerSpeeds(layers=tuple(found), memory_bytes=memory_bytes, device=describe(device))


def _dtype_of(layers: Iterable[nn.Module]) -> torch.dtype:
    own = (each for layer in layers for each in layer.parameters() if each.is_floating_point())
    return next((each.dtype for each in own), torch.get_default_dtype())


def free_memory(device: torch.device) -> int:
    """Bytes that a process may still take on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    if device.type == "mps":
        return min(available, int(torch.mps.recommended_max_memory()))
    return available


def measure_layers(
    layers: Iterable[LayerToMeasure],
    value: Batch,
    finish: Finish,
    device: torch.device,
    *,
    is_timed: bool = True,
) -> list[MeasuredLayer]:
    """Measure all layers of a model, in order, on `value`, the model's input for a microbatch.

    Unless `is_timed` only bytes are measured.

    Raises:
        UserCodeError: a layer or the loss raised an exception.
    """
    pending, found = list(layers), list[MeasuredLayer]()
    known: dict[Hashable, tuple[MeasuredLayer, Batch]] = {}
    for place, (of_layer, build) in enumerate(pending):
        is_last = place + 1 == len(pending)
        shapes = tuple((tuple(each.shape), each.dtype) for each in tensors_in(value))
        key = (of_layer, is_last, place == 0, shapes)
        if key not in known:
            ending = finish if is_last else lambda output: output
            known[key] = _measured(build(), value, ending, device, is_timed=is_timed)
        measured, value = known[key]
        found.append(measured)
    found[-1:] = [each.model_copy(update={"output_bytes": 0}) for each in found[-1:]]
    return found


def _measured(
    layer: nn.Module, value: Batch, finish: Finish, device: torch.device, *, is_timed: bool
) -> tuple[MeasuredLayer, Batch]:
    """What a layer costs, and its output, detached."""
    trained: list[Tensor] = [each for each in layer.parameters() if each.requires_grad]
    own = [*layer.parameters(), *layer.buffers()]
    output, nbytes = _held(layer, value, own, finish)
    forward, gradient, weight = 0.0, 0.0, 0.0
    if is_timed:
        forward, gradient, weight = _median_times(layer, value, trained, finish, device)
    sizes = [each.nbytes for each in trained]
    measured = MeasuredLayer(
        forward_s=forward,
        input_s=gradient,
        weight_s=weight,
        trained_bytes=sum(sizes),
        frozen_bytes=sum(each.nbytes for each in own) - sum(sizes),
        activation_bytes=nbytes,
        output_bytes=sum(each.nbytes for each in tensors_in(output)),
        input_bytes=sum(each.nbytes for each in tensors_in(value)),
    )
    return measured, output


def _median_times(
    layer: nn.Module,
    value: Batch,
    trained: list[Tensor],
    finish: Finish,
    device: torch.device,
) -> tuple[float, float, float]:
    """Of several times what `_timed` returns."""
    times: list[tuple[float, float, float]] = []
    end = time.perf_counter()
    while len(times) <= LEAST_REPEATS or (time.perf_counter() < end and len(times) <= MOST_REPEATS):
        times.append(_timed(layer, value, trained, finish, device))
        if len(times) == 1:
            end = time.perf_counter() + MEASURE_S
    forward, gradient, weight = (median(each) for each in zip(*times[1:], strict=True))
    return forward, gradient, weight


def _held(layer: nn.Module, value: Batch, own: list[Tensor], finish: Finish) -> tuple[Batch, int]:
    """The output, detached, and how many bytes autograd and the stage keep for the backward."""
    weights = {each.untyped_storage().data_ptr() for each in own}
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    given = apart(leaves_of(value))  # which the layer may write into
    for tensor in tensors_in(given):
        note(tensor)
    with saved_tensors_hooks(note, lambda tensor: tensor), user_code("model"):
        output = layer(given)
        finish(output)
    return map_tensors(output, Tensor.detach), sum(held.values())


def _timed(
    layer: nn.Module,
    value: Batch,
    trained: list[Tensor],
    finish: Finish,
    device: torch.device,
) -> tuple[float, float, float]:
    """Seconds of forward, of the gradients of the input, and of those of the weights."""
    leaves = leaves_of(value)
    inputs = [each for each in tensors_in(leaves) if each.requires_grad]
    value = apart(leaves)
    marks = [_now(device)]
    with user_code("model"):
        output = layer(value)
    with user_code("loss"):
        output = finish(output)
    marks.append(_now(device))
    entering = [
        (get_gradient_edge(each), torch.ones_like(each))
        for each in tensors_in(output)
        if each.requires_grad
    ]
    with user_code("backward of the model"):
        _, deferred = backward_input(entering, inputs, trained)
        marks.append(_now(device))
        deferred.run()
    marks.append(_now(device))
    for parameter in trained:
        parameter.grad = None
    forward, gradient, weight = (b - a for a, b in pairwise(marks))
    return forward, gradient, weight


def _now(device: torch.device) -> float:
    """The clock when the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def key_of(layer: nn.Module) -> Hashable:
    """Equal of layers of the same kind and shapes; they may be on `meta`."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors
    )
    return type(layer).__qualname__, repr(layer), shapes
