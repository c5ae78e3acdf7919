"""What a stage computes of a training step: forward and backward of single microbatches, in any order.

    output = compute.forward(microbatch, place, value)      # value: what the stage before has sent
    gradient = compute.backward(microbatch, gradient)       # of the output, to that of the value
    loss = compute.end_step()

Gradients are of the *sum* of the loss terms, and add up in `grad` of the stage's parameters: how many terms a
step has only the last stage knows, and it is known when the step ends. Before each layer PyTorch's generator
is seeded by the microbatch's place and the layer's number, so dropout masks do not depend on the cut or the
schedule, and are those of a single process with the same microbatches (`layer_seeds.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smolcluster.configs.schema import Precision
from smolcluster.data.dataset import Batch, Place
from smolcluster.data.pytree import has_a_row_a_sample, map_tensors, rows, tensors_in
from smolcluster.errors import ProtocolError, UserCodeError
from smolcluster.training.batches import Doubles, apart, placed
from smolcluster.training.compute import autocast
from smolcluster.training.cutting import CutCheck
from smolcluster.training.labels import lacks_labels
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.modes import evaluating
from smolcluster.training.stages.build import model_input, output_loss
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.deferred import Deferred, backward_input
from smolcluster.training.workload import Workload, count_terms, real_count
from smolcluster.utils.user_code import user_code

Gradients = list[Tensor | None]
"""Of the tensors of floats in a tree, in order; None: nothing depends on one."""
WRITES_INPUT = "a leaf Variable that requires grad"
"""In PyTorch's error where such a tensor is computed in place."""
Around = Callable[[str], AbstractContextManager[object]]
"""Entered around the user's code: "model", "loss" or "backward of the model"."""


@dataclass
class _Held:
    """What is kept of a microbatch from its forward to its backward.

    Attributes:
        place, value, batch: what it was computed from, where it is computed again; else None.
        num_samples: 0: it counts nothing, and has no gradient.
        leaves: the value's tensors of floats, which collect gradients.
        edges: where gradients enter: the output's tensors that have any, and how many it has in all.
        scales: the gradient of the loss itself, on the last stage.
        is_unlabelled: whether the batch says of all its places that no loss term belongs to them.
    """

    place: Place
    value: Batch
    batch: Batch
    num_samples: int
    leaves: list[Tensor] = field(default_factory=list)
    edges: list[GradientEdge | None] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    is_unlabelled: bool = False


@dataclass(frozen=True)
class StageLoss:
    """The sum of a step's loss terms, and their number; of all stages but the last one 0."""

    total: float = 0.0
    num_terms: float = 0.0


class StageCompute:
    """The microbatches of one stage.

    Attributes:
        stage: its layers.
        loss_scale: what the loss is multiplied by for the backward; `end_step` tells it unscaled.
        cut_check: of what the loss makes of batches that are cut; None: nobody looks.
        doubles: says that samples in float64 are cast: what refuses them may be another stage.
    """

    def __init__(
        self,
        stage: Stage,
        workload: Workload,
        seeds: LayerSeeds,
        *,
        precision: Precision = "fp32",
        recompute: bool = False,
        around: Around = user_code,
    ) -> None:
        """Compute on the device of `seeds`, which seed what the layers draw.

        Args:
            recompute: keep a microbatch's input alone, and compute the rest again for its backward.
            around: what the user's code runs in; it must name that code's exceptions, as `user_code` does.
        """
        self.stage, self.loss_scale = stage, 1.0
        self.cut_check: CutCheck | None = None
        self.doubles = Doubles()
        self._workload, self._seeds = workload, seeds
        self._precision, self._recompute, self._around = precision, recompute, around
        self._loss = output_loss(workload, self._model_returned)
        self._users_loss = workload.output_loss or workload.loss
        self._held: dict[int, _Held] = {}
        self._single: tuple[Any, Batch] | None = None
        """Output and batch of a microbatch of one sample, for `cut_check`."""
        self._deferred: dict[int, Deferred] = {}
        self._writes_input = False
        """Whether its first layer computes in place."""
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
            num_samples: how many there are; 0: there is one, which counts nothing and has no gradient.

        Returns:
            What the next stage takes, without graphs; of the last stage None.

        Raises:
            UserCodeError: the model or the loss raised an exception.
        """
        self._seeds.begin(place)
        held = _Held(place, *self._given(value, batch), num_samples)
        held.is_unlabelled = self.stage.is_last and lacks_labels(batch)
        self._held[microbatch] = held
        if self.stage.is_last:
            self._with_graph(held)
            return None
        if self._recompute:
            with torch.no_grad():
                output = self._run(held, apart(held.value))  # layers may write into it
        else:
            output = self._with_graph(held)
        return map_tensors(output, Tensor.detach)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """The gradients of a microbatch's value; those of the weights are added to theirs.

        `gradients`: of its output, what the next stage's `backward` returned; on the last stage empty.
        """
        leaves, entering = self._entering(microbatch, gradients)
        if entering:
            edges, values = zip(*entering, strict=True)
            with self._around("backward of the model"):
                torch.autograd.backward(edges, values)
        return [each.grad for each in leaves]

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        """As `backward`, but the gradients of the weights are left for `backward_weight`."""
        leaves, entering = self._entering(microbatch, gradients)
        # now, since those that FSDP has gathered are others than those that it keeps
        trained = [each for each in self.stage.parameters() if each.requires_grad]
        with self._around("backward of the model"):
            found, self._deferred[microbatch] = backward_input(entering, leaves, trained)
        return found

    def backward_weight(self, microbatch: int) -> None:
        with self._around("backward of the model"):
            self._deferred.pop(microbatch).run()

    def end_step(self) -> StageLoss:
        """The loss of the microbatches since the last call; what a step that broke off has left goes."""
        totals, counts = self._totals, self._counts
        self._held, self._deferred, self._totals, self._counts = {}, {}, [], []
        self._seeds.forget()
        num_terms = sum(real_count(each, of=self._users_loss) for each in counts)
        return StageLoss(sum(each.item() for each in totals), num_terms)

    @torch.no_grad()
    def evaluate(self, value: Batch, batch: Batch = None) -> Batch:
        """The output of a batch that is not trained on; of the last stage what the model returns."""
        value, batch = self._given(value, batch)
        with evaluating(self.stage), self._calling("model"):
            return self.stage(value)

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        with autocast(self._precision, self._seeds.device), self._around(what):
            yield

    def _given(self, value: Batch, batch: Batch) -> tuple[Batch, Batch]:
        """The stage's input and its samples, on its device."""
        device = self._seeds.device
        if self.stage.dtype is torch.float32:
            self.doubles.lower([batch])
        batch = placed(batch, device, self.stage.dtype)
        if self.stage.is_first:
            with user_code("loss"):  # which takes it once more where the last stage is
                return model_input(self._workload, apart(batch)), batch
        return map_tensors(value, lambda each: each.to(device)), batch

    def _with_graph(self, held: _Held) -> Batch:
        """The output, of the last stage the loss; what its backward needs is kept in `held`."""
        if self.stage.is_first:
            output = self._run(held, held.value)
        else:
            leaves = leaves_of(held.value)
            output, held.leaves = self._run_from(held, leaves), floats_in(leaves)
        if not self._recompute or self.stage.is_last:
            held.value = None
        if self.stage.is_last:
            output = self._loss_of(held, output)
            held.batch = None
            scale = self.loss_scale if held.num_samples else 0.0
            held.scales = [torch.full_like(output, scale)]
        held.edges = [_edge(each) for each in floats_in(output)]
        return output

    def _loss_of(self, held: _Held, output: Any) -> Tensor:
        """The sum of the loss's terms, (), which is counted unless its samples only keep others company."""
        if held.num_samples:
            self._look_at_cutting(held, output)  # first: the loss may write into both
        with self._calling("loss"):
            self._seeds.begin(held.place)  # what it draws, it draws again: see `model_input`
            result = self._loss(output, held.batch)
        total, count = count_terms(result, max(1, held.num_samples), of=self._users_loss)
        floats = floats_in(output) if held.is_unlabelled and not total.isfinite() else []
        if floats:  # a mean over no terms
            total, count = total.new_zeros(()), 0
            total = total + sum(each.sum() for each in floats) * 0.0
        whole = getattr(total, "full_tensor", None)  # of a DTensor, whose module takes long to load
        total = total if whole is None else whole()
        if held.num_samples:
            self._totals.append(total.detach())
            self._counts.append(count)
        return total.float() if total.dtype.itemsize < torch.float32.itemsize else total

    def _look_at_cutting(self, held: _Held, output: Any) -> None:
        """Say once if the loss of a microbatch's output is another one when it is computed in two parts.

        One of a single sample is looked at together with the next one.
        """
        check, both, num_samples = self.cut_check, (output, held.batch), held.num_samples
        if check is None or not all(has_a_row_a_sample(each, num_samples) for each in both):
            return
        if not all(each.ndim for each in tensors_in(output)):
            return  # who knows of how many samples it is
        if self._single is None and not check.is_due():
            return
        if num_samples == 1 and self._single is None:
            self._single = apart(map_tensors(both, Tensor.detach))
            return
        if num_samples == 1:
            before, following, self._single = self._single, iter(tensors_in(both)), None
            try:
                both = map_tensors(before, lambda each: torch.cat([each, next(following)]))
            except (RuntimeError, StopIteration):  # such as of sequences of another length
                return
            num_samples = 2

        def loss_of(places: slice) -> tuple[float, float]:
            some = [apart(rows(each, num_samples, places)) for each in both]
            with self._calling("loss"):
                self._seeds.begin(held.place)
                result = self._loss(*some)
            total, number = count_terms(result, places.stop - places.start, of=self._users_loss)
            return float(total), float(number)

        check.look_at_output(self._seeds.device, self._users_loss, num_samples, loss_of)

    def _run_from(self, held: _Held, leaves: Batch) -> Any:
        """The same; layers that write into what they are given get a copy, which takes memory."""
        if not self._writes_input:
            try:
                return self._run(held, leaves)
            except UserCodeError as error:
                if WRITES_INPUT not in str(error.__cause__):
                    raise
                self._writes_input = True
        return self._run(held, apart(leaves))

    def _run(self, held: _Held, value: Batch) -> Any:
        self._seeds.at(held.place)
        with self._calling("model"):
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
            self._with_graph(held)
        given = held.scales if self.stage.is_last else gradients
        if len(given) != len(held.edges):
            raise ProtocolError(
                f"the next stage sends {len(given)} gradients of {len(held.edges)} tensors"
            )
        pairs = zip(held.edges, given, strict=True)
        entering = [
            (edge, each.to(self._seeds.device))
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
