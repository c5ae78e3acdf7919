"""What a stage computes of a training step: forward and backward of single microbatches, in any order.

    output = compute.forward(microbatch, place, value)      # value: what the stage before has sent
    gradient = compute.backward(microbatch, gradient)       # of the output, to that of the value
    loss = compute.end_step()

Gradients are of the *sum* of the loss terms, and add up in `grad` of the stage's parameters: how many terms a
step has only the last stage knows, and it is known when the step ends. Before each layer PyTorch's generator
is seeded by the microbatch's place and the layer's number, so dropout masks do not depend on the cut or the
schedule, and are those of a single process with the same microbatches (`layer_seeds.py`).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smolcluster.data.dataset import Batch, Place
from smolcluster.data.pytree import map_tensors, tensors_in
from smolcluster.errors import ProtocolError
from smolcluster.training.batches import placed
from smolcluster.training.compute import autocast
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.modes import evaluating
from smolcluster.training.replica import Replica
from smolcluster.training.stages.build import model_input, output_loss
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.deferred import Deferred, add_gradients, backward_input
from smolcluster.training.user_code import user_code
from smolcluster.training.workload import Workload, count_terms, real_count

Gradients = list[Tensor | None]
"""Of the tensors of floats in a tree, in order; None: nothing depends on one."""


@dataclass
class _Held:
    """What is kept of a microbatch from its forward to its backward.

    Attributes:
        place, value, batch: what it was computed from, where it is computed again; else None.
        leaves: the value's tensors of floats, which collect gradients.
        edges: where gradients enter: the output's tensors that have any, and how many it has in all.
    """

    place: Place
    value: Batch
    batch: Batch
    leaves: list[Tensor] = field(default_factory=list)
    edges: list[GradientEdge | None] = field(default_factory=list)
    ones: list[Tensor] = field(default_factory=list)
    """The gradient of the loss itself, on the last stage."""


@dataclass(frozen=True)
class StageLoss:
    """The sum of a step's loss terms, and their number; of all stages but the last one 0."""

    total: float = 0.0
    num_terms: float = 0.0


class StageCompute:
    """The microbatches of one stage."""

    def __init__(
        self, replica: Replica, workload: Workload, seed: int, *, recompute: bool = False
    ) -> None:
        """Compute with the stage that `replica.model` is.

        Args:
            recompute: keep a microbatch's input alone, and compute the rest again for its backward.
        """
        assert isinstance(replica.model, Stage)  # noqa: S101 - `stage_replica` has made it
        self.stage = replica.model
        self._replica, self._workload = replica, workload
        self._recompute = recompute
        self._seeds = LayerSeeds(seed, replica.device)
        self._loss = output_loss(workload, self._model_returned)
        self._parameters: list[Tensor] = [
            each for each in self.stage.parameters() if each.requires_grad
        ]
        self._held: dict[int, _Held] = {}
        self._deferred: dict[int, Deferred] = {}
        self._totals: list[Tensor] = []
        self._counts: list[float | Tensor] = []
        self.stage.before_layer = self._seed_layer

    @property
    def needs_batch(self) -> bool:
        """Whether it takes samples: the model's input, or what the loss needs of them."""
        return self.stage.is_first or self.stage.is_last

    def forward(
        self, microbatch: int, place: Place, value: Batch, batch: Batch = None, num_samples: int = 1
    ) -> Batch:
        """Compute a microbatch.

        Args:
            place: of its first sample.
            value: what the stage before has returned; of the first stage nothing.
            batch: the samples, for the first and the last stage.
            num_samples: how many there are.

        Returns:
            What the next stage takes, without graphs; of the last stage None.

        Raises:
            UserCodeError: the model or the loss raised an exception.
        """
        self._seeds.begin(place)
        value, batch = self._given(value, batch)
        held = _Held(place, value, batch)
        with self._replica.meter("forward"):
            if self._recompute and not self.stage.is_last:
                with torch.no_grad():
                    output = self._run(held, value)
            else:
                output = self._with_graph(held, num_samples)
        self._held[microbatch] = held
        return None if self.stage.is_last else map_tensors(output, Tensor.detach)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """The gradients of a microbatch's value; those of the weights are added to theirs.

        `gradients`: of its output, what the next stage's `backward` returned; on the last stage empty.
        """
        with self._replica.meter("backward"):
            leaves, entering = self._entering(microbatch, gradients)
            add_gradients(entering, [*leaves, *self._parameters])
        return [each.grad for each in leaves]

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        """As `backward`, but the gradients of the weights are left for `backward_weight`."""
        with self._replica.meter("backward"):
            leaves, entering = self._entering(microbatch, gradients)
            found, self._deferred[microbatch] = backward_input(entering, leaves, self._parameters)
        return found

    def backward_weight(self, microbatch: int) -> None:
        with self._replica.meter("backward"):
            self._deferred.pop(microbatch).run()

    def end_step(self) -> StageLoss:
        """The loss of the microbatches since the last call; what a step that broke off has left goes."""
        totals, counts = self._totals, self._counts
        self._held, self._deferred, self._totals, self._counts = {}, {}, [], []
        self._seeds.forget()
        num_terms = sum(real_count(each, of=self._loss) for each in counts)
        return StageLoss(sum(each.item() for each in totals), num_terms)

    @torch.no_grad()
    def evaluate(self, value: Batch, batch: Batch = None) -> Batch:
        """The output of a batch that is not trained on; of the last stage what the model returns."""
        value, batch = self._given(value, batch)
        precision, device = self._replica.precision, self._replica.device
        with evaluating(self.stage), autocast(precision, device), user_code("model"):
            return self.stage(value)

    def _given(self, value: Batch, batch: Batch) -> tuple[Batch, Batch]:
        """The stage's input and its samples, on its device."""
        device = self._replica.device
        batch = placed(batch, device, self.stage.dtype)
        if self.stage.is_first:
            with user_code("loss"):
                return model_input(self._workload, batch), batch
        return map_tensors(value, lambda each: each.to(device)), batch

    def _with_graph(self, held: _Held, num_samples: int) -> Batch:
        """The output; what its backward needs is kept in `held`."""
        value = held.value if self.stage.is_first else leaves_of(held.value)
        output = self._run(held, value)
        held.leaves = [] if self.stage.is_first else floats_in(value)
        if not self._recompute or self.stage.is_last:
            held.value = None
        if not self.stage.is_last:
            held.edges = [_edge(each) for each in floats_in(output)]
            return output
        with user_code("loss"):
            self._seeds.begin(held.place)  # what it draws, it draws again: see `model_input`
            result = self._loss(output, held.batch)
        held.batch = None
        total, count = count_terms(result, num_samples, of=self._loss)
        self._totals.append(total.detach())
        self._counts.append(count)
        held.edges, held.ones = [_edge(total)], [torch.ones_like(total)]
        return None

    def _run(self, held: _Held, value: Batch) -> Any:
        self._seeds.at(held.place)
        with autocast(self._replica.precision, self._replica.device), user_code("model"):
            return self.stage(value)

    def _entering(
        self, microbatch: int, gradients: Gradients
    ) -> tuple[list[Tensor], list[tuple[GradientEdge, Tensor]]]:
        """The leaves of a microbatch, and where its gradients enter; it is held no more.

        Raises:
            ProtocolError: there are not as many gradients as tensors of floats were sent.
        """
        held = self._held.pop(microbatch)
        if self._recompute and not held.edges:
            with torch.enable_grad():
                self._with_graph(held, 1)
        given = held.ones if self.stage.is_last else gradients
        if len(given) != len(held.edges):
            raise ProtocolError(
                f"the next stage sends {len(given)} gradients of {len(held.edges)} tensors"
            )
        pairs = zip(held.edges, given, strict=True)
        entering = [
            (edge, each.to(self._replica.device))
            for edge, each in pairs
            if edge is not None and each is not None
        ]
        return held.leaves, entering

    def _seed_layer(self, number: int) -> None:
        if self.stage.training:
            self._seeds(number)

    def _model_returned(self) -> None:
        if self.stage.model_draws:
            self._seeds.model_returned()


def leaves_of(value: Batch) -> Batch:
    """The same values; those of floating point collect gradients."""
    return map_tensors(value, lambda each: each.detach().requires_grad_(each.is_floating_point()))


def floats_in(value: Batch) -> list[Tensor]:
    return [each for each in tensors_in(value) if each.is_floating_point()]


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None
