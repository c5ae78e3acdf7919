"""Forward and backward of a stage's microbatches on this rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from smolcluster.algorithms.Mesh.compiling import compile_layers, compiler_named
from smolcluster.algorithms.Mesh.config import Recompute
from smolcluster.data.dataset import Batch, Place
from smolcluster.errors import ConfigError
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.deferred import Deferred, backward_input
from smolcluster.training.user_code import user_code
from smolcluster.training.workload import LossFunction, Terms, count_terms, real_count

OutputLoss = Callable[[Any, Batch], Terms | Tensor]
Autocast = Callable[[], AbstractContextManager[object]]


@dataclass
class Part:
    """A microbatch: what the model takes of it, and what the loss does.

    Attributes:
        place: of its first sample in the run.
        num_samples: 0: it only keeps others company, and counts nothing.
        model_input: for the first stage.
        batch: for the last stage.
    """

    place: Place
    num_samples: int
    model_input: Any = None
    batch: Batch = None

    @property
    def size(self) -> int:
        """Samples that are computed."""
        return max(1, self.num_samples)


class StageCompute:
    """One stage, and what it keeps of each microbatch between forward and backward.

    Gradients of the sum of the loss's terms are added up in the parameters.

    Attributes:
        loss: sum of the loss's terms since `begin`, float64, and their number.
    """

    def __init__(
        self,
        stage: Stage,
        output_loss: OutputLoss,
        loss_name: LossFunction,
        *,
        seeds: LayerSeeds,
        autocast: Autocast,
        recompute: Recompute,
        is_loss_parallel: bool = False,
        is_compiled: bool = False,
    ) -> None:
        """`is_loss_parallel`: each rank has the logits of its part of the vocabulary.

        Raises:
            ConfigError: its layers shall be compiled, but PyTorch's compiler does not work here.
        """
        self.stage = stage
        self._loss_kernels = loss_parallel if is_loss_parallel and stage.is_last else nullcontext
        self.loss = (0.0, 0.0)
        self._output_loss, self._loss_name = output_loss, loss_name
        self._autocast = autocast
        self._seeds = seeds
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._deferred: dict[int, Deferred] = {}
        self._scale = 1.0
        stage.before_layer = seeds
        self._compiling = compiler_named if is_compiled else nullcontext
        if is_compiled:
            compile_layers(stage)
        if recompute != "none":
            _recompute(stage, every=1 if recompute == "full" else 2)

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.stage, FSDPModule)

    def begin(self, scale: float) -> None:
        """A step begins; its loss is multiplied by `scale`."""
        self._scale, self.loss = scale, (0.0, 0.0)
        self._seeds.forget()
        for parameter in self.stage.parameters():
            parameter.grad = None
        if isinstance(self.stage, FSDPModule):
            self.stage.set_requires_gradient_sync(False)
            self.stage.set_reshard_after_backward(False)
            self.stage.set_manual_backward_finalization(True)

    def forward(self, number: int, part: Part, given: Any) -> Tensor | None:
        """Compute microbatch `number`; the last stage keeps the loss, the others return their output.

        Raises:
            ConfigError: the stage returns no tensor, so that it cannot be sent.
        """
        self._seeds.at(part.place)
        if self.stage.is_first:
            given = part.model_input
        else:
            given = given.detach().requires_grad_()
            self._inputs[number] = given
        with self._autocast(), user_code("model"), self._compiling():
            output = self.stage(given)
        if self.stage.is_last:
            with self._autocast(), self._loss_kernels(), user_code("loss"):
                self._seeds.begin(part.place)  # what it draws, it draws again: see `model_input`
                result = self._output_loss(output, part.batch)
            total, count = count_terms(result, part.size, of=self._loss_name)
            if isinstance(total, DTensor):
                total = total.full_tensor()
            if part.num_samples:
                sum_, terms = self.loss
                counted = real_count(count, of=self._loss_name)
                self.loss = (sum_ + float(total.detach()), terms + counted)
            self._outputs[number] = total.float() if total.dtype.itemsize < 4 else total
            if not part.num_samples:
                self._outputs[number] = self._outputs[number] * 0.0
            return None
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"layer {self.stage.end - 1} returns a {type(output).__name__}, but stages of a "
                "mesh send one tensor: cut the model so that layers return one, or set mesh.pp to "
                "1"
            )
        self._outputs[number] = output
        return output.detach()

    def backward(self, number: int, gradient: Tensor | None) -> Tensor | None:
        """All gradients; returns that of the input, for the stage before."""
        output = self._outputs.pop(number)
        given = self._inputs.pop(number, None)
        if not output.requires_grad:  # a first stage without weights
            return None
        with self._loss_kernels(), user_code("backward of the model"), self._compiling():
            torch.autograd.backward([output], [self._entering(output, gradient)])
        return None if given is None else given.grad

    def backward_input(self, number: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input alone; `backward_weight` makes the others."""
        output = self._outputs.pop(number)
        given = self._inputs.pop(number, None)
        if not output.requires_grad:
            self._deferred[number] = Deferred([], [], [])
            return None
        trained = [each for each in self.stage.parameters() if each.requires_grad]
        entering = [(get_gradient_edge(output), self._entering(output, gradient))]
        with self._loss_kernels(), user_code("backward of the model"):
            inputs = [] if given is None else [given]
            found, self._deferred[number] = backward_input(entering, inputs, trained)
        return found[0] if found else None

    def backward_weight(self, number: int) -> None:
        with self._loss_kernels(), user_code("backward of the model"):
            self._deferred.pop(number).run()

    def finish(self) -> None:
        """All microbatches are done: sum gradients over the ranks that share the weights."""
        if isinstance(self.stage, FSDPModule):
            self.stage.set_requires_gradient_sync(True)
            self.stage.set_reshard_after_backward(True)
            self.stage.finalize_backward()
            self.stage.set_manual_backward_finalization(False)

    def _entering(self, output: Tensor, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return torch.full_like(output, self._scale)
        return gradient


def _recompute(stage: Stage, every: int) -> None:
    """Let every n-th layer compute its activations again in the backward, drawing the same numbers."""
    for layer in stage.own_layers()[::every]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
