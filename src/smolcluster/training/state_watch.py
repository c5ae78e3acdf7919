"""Sees to it that computing leaves a model's weights alone: only the optimizer changes them.

A plain loop forgives a forward that normalises a weight in place, sets one from its first batch, or puts
another parameter into its place. Where several machines share the weights, each would come to others, and a
weight that has left the flat memory is never stepped. So this is found, named and refused, in one process as
well. What of the model's state may change are its buffers (`buffers.py`).

Gradients that were dropped or replaced, as by `zero_grad()` in the loss, are gathered into the flat memory
again after each backward. The rest is looked at in the first batches, as an epoch begins and now and then,
and costs a pass over the weights: PyTorch's version counters tell of changes in place, but not of those
through `.data`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from smolcluster.errors import ModelChanged
from smolcluster.training.buffers import NUM_FIRST, ModelBuffers, plain_name
from smolcluster.training.fingerprint import content

EVERY = 1000
"""After so many batches it is looked again, however long an epoch is."""
_REMEDY = (
    "leave weights to the optimizer: compute with what is derived from them "
    "(torch.nn.utils.parametrizations, functional.normalize(weight)), set them when the model is made, or "
    "keep what follows the data in buffers (register_buffer)"
)
_FROZEN_REMEDY = "make it a buffer (register_buffer), whose values machines share as they change"
_MAX_NORM_REMEDY = "set max_norm=None, and normalise the rows that were looked up"
_IN_THE_LOSS = (
    "leave zero_grad(), backward() and optimizers out of the loss: return what is to be trained on"
)


class Trained(NamedTuple):
    """A trained parameter, and the views of the flat tensors that it and its gradient are."""

    name: str
    parameter: nn.Parameter
    data: Tensor
    gradient: Tensor


class Turns:
    """Decides at which batches a model's state is looked at."""

    def __init__(self) -> None:
        self._num_batches = 0
        self._epoch: int | None = None

    def come(self, epoch: int) -> bool:
        """Whether it is with this one: it is one of the first, an epoch's first, or it was long ago."""
        is_first = self._num_batches < NUM_FIRST or self._num_batches % EVERY == 0
        is_new, self._epoch = epoch != self._epoch, epoch
        self._num_batches += 1
        return is_first or is_new


class StateWatch:
    """Looks at one replica's model."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        trained: Sequence[Trained],
        grads: Tensor,
        buffers: ModelBuffers,
    ) -> None:
        """Remember the model of now.

        Args:
            parameters: all by name.
            trained: those that lie in the flat memory.
            grads: flat gradient (num_params,).
        """
        self._model, self._buffers, self._grads = model, buffers, grads
        self._trained = trained
        names = {each.name for each in trained}
        self._frozen = {name: each for name, each in parameters.items() if name not in names}
        self._places = self._look_at_places()
        self._turns = Turns()
        self._looks = False
        self._is_suspicious = False
        self._versions = [each.parameter._version for each in trained]
        self._before: list[object] = []
        self._marks: dict[str, object] = {}
        self._clears_in_place = False

    # The gradient

    @contextmanager
    def around_loss(self, *, is_first: bool) -> Iterator[None]:
        """Keep the gradient of a batch's parts so far through a loss that drops or clears it.

        Raises:
            ModelChanged: the loss does more to gradients than that.
        """
        aside = self._grads.clone() if self._clears_in_place and not is_first else None
        version = self._grads._version
        yield
        for each in self._trained:
            given = each.parameter.grad
            if given is not each.gradient:
                if given is not None:
                    raise ModelChanged(f"loss: it gives {each.name} a gradient; {_IN_THE_LOSS}")
                each.parameter.grad = each.gradient
        if self._grads._version == version:
            return
        if bool(self._grads.any()) or not (is_first or self._clears_in_place):
            raise ModelChanged(f"loss: it changes gradients; {_IN_THE_LOSS}")
        self._clears_in_place = True
        if aside is not None:
            self._grads.copy_(aside)

    def gather(self) -> None:
        """After a backward: what hooks have put in a gradient's place counts."""
        for each in self._trained:
            given = each.parameter.grad
            if given is not each.gradient:
                if given is None:
                    each.gradient.zero_()
                else:
                    each.gradient.copy_(given)
                each.parameter.grad = each.gradient

    # The weights

    def begin(self, epoch: int) -> None:
        """A batch will be computed."""
        self._looks = self._turns.come(epoch) or self._is_suspicious
        self._buffers.before_batch()
        if self._looks:
            self._look_at_frozen()
            self._before = [mark(each.data) for each in self._trained]

    def end(self) -> None:
        """It was computed, and nothing has been stepped since.

        Raises:
            ModelChanged: parameters have changed; one is named.
            ConfigError: buffers have, in a way that cannot be sent.
        """
        if not self._looks:
            return
        self._buffers.look()
        self._check_places()
        for each, before in zip(self._trained, self._before, strict=True):
            if mark(each.data) != before:
                raise self._changed(each.name)
        self._look_at_frozen()
        self._buffers.check_none_is_new()
        versions = [each.parameter._version for each in self._trained]
        self._is_suspicious, self._versions = versions != self._versions, versions

    def forget_batches(self) -> None:
        """Those so far were rehearsed: what follows the weights, such as a teacher, has not moved yet."""
        self._turns = Turns()
        self._buffers.forget_batches()

    def forget_frozen(self) -> None:
        """Frozen parameters may have changed for a reason, such as an evaluation that merges adapters."""
        self._marks.clear()

    def _look_at_places(self) -> dict[str, nn.Parameter]:
        """The parameters by name; tied ones more than once. The model's own methods may leave some out."""
        return {
            f"{path}.{name}".lstrip("."): parameter
            for path, module in nn.Module.named_modules(self._model, remove_duplicate=False)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def _check_places(self) -> None:
        places = self._look_at_places()
        for name, parameter in places.items():
            if name not in self._places:
                raise made_late(plain_name(name))
            if self._places[name] is not parameter:
                raise self._changed(plain_name(name), "is replaced by another one")
        for name in self._places.keys() - places.keys():
            raise self._changed(plain_name(name), "is removed")
        for each in self._trained:
            if each.parameter.data_ptr() != each.data.data_ptr():
                raise self._changed(each.name, "gets other memory (.data = …)")
            if not each.parameter.requires_grad:
                raise refrozen(each.name, is_frozen=True)
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise refrozen(name, is_frozen=False)

    def _look_at_frozen(self) -> None:
        changing = {self._buffers.names[number] for number in self._buffers.changing}
        for name, parameter in self._frozen.items():
            if name in changing:
                continue
            now = mark(parameter)
            if self._marks.setdefault(name, now) != now:
                raise self._changed(name, "is frozen, but changes")

    def _changed(self, name: str, what: str = "changes") -> ModelChanged:
        place = f"{name.rpartition('.')[0]}."
        modules = (
            each for path, each in self._model.named_modules() if plain_name(f"{path}.") == place
        )
        remedy = _FROZEN_REMEDY if name in self._frozen else _REMEDY
        return changed(name, next(modules, self._model), what, remedy)


def made_late(name: str) -> ModelChanged:
    """Computing has made a parameter."""
    return ModelChanged(
        f"model: parameter {name} is made only as the model computes, so that nobody trains it: make it when "
        "the model is made"
    )


def refrozen(name: str, *, is_frozen: bool) -> ModelChanged:
    """Computing has frozen a parameter, or begun to train it; `is_frozen`: that it is now."""
    what = "is frozen when training begins, and then to be trained"
    if is_frozen:
        what = "is to be trained when training begins, and then frozen"
    return ModelChanged(
        f"model: parameter {name} {what}, as the model computes; the optimizer has what is trained from "
        "the beginning: leave requires_grad as it is, or train in two runs, of which the second begins "
        "with the weights of the first"
    )


def changed(
    name: str, owner: nn.Module, what: str = "changes", remedy: str = _REMEDY
) -> ModelChanged:
    """Computing does `what` to a parameter of the module `owner`."""
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.max_norm is not None:
        remedy = _MAX_NORM_REMEDY
    return ModelChanged(
        f"model: parameter {name} ({kind_of(owner)}) {what} as the model computes, and machines "
        f"would come to different weights; {remedy}"
    )


def kind_of(module: nn.Module) -> str:
    """The name of its class, without what PyTorch puts before that of a module whose weights are sharded."""
    return type(module).__name__.removeprefix("FSDP")


def mark(tensor: Tensor) -> object:
    """What differs if a tensor's values do, by one pass and without a copy."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return tensor._version
    if tensor.device.type == "cpu":
        return content(tensor)
    real = tensor.detach()
    real = torch.view_as_real(real) if real.is_complex() else real
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    return real.view(bits).sum().item()
