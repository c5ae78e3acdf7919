"""Whether a loss, or what a model keeps in buffers, depends on how a batch is cut.

SyncPS cuts batches, as it gives each worker a part of a step, and so does `microbatch`. The mean of the
whole is that of the parts, weighted by their loss terms. A loss that couples samples (contrastive losses) is
another one for parts, and so is a mean over terms of which samples have unequally many. Of buffers it is the
mean of what parts add that counts, which is wrong of a queue of past samples or of sums over a batch. That is
said once. It is looked at batches that are cut, the first, second, fourth, eighth and so on: the first
samples need not hold what makes the difference, such as a rare class of more weight.

Some couple samples in training alone, such as by a loss that balances experts. So what comes of a loss in
evaluation mode is compared, and then what comes of it in training mode, but for batch norm, of which that is
known, and dropout.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from smolcluster.data.dataset import Batch
from smolcluster.errors import SmolclusterError
from smolcluster.training.batches import apart
from smolcluster.training.buffers import ModelBuffers, kept_attributes
from smolcluster.training.copying import copied, is_copied_soon, uncompiled
from smolcluster.training.criterion import holders_of
from smolcluster.training.labels import LabelsSeen
from smolcluster.training.replica import Replica
from smolcluster.training.workload import LossFunction, OutputLoss
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.utils.user_code import user_code
from smolcluster.utils.words import a_few

NUM_SAMPLES = 16
"""Of a batch, which are computed whole and in two parts."""
TOLERANCE = 1e-3
"""Of what rounding may change."""
ROUNDING = 10
"""Times what a buffer's type rounds, beside that."""
REMEDY = (
    "return (sum, number) of the loss's terms if samples have unequally many, or set batch: whole if the "
    "loss couples samples, so that one worker computes a step's batch at once"
)
BUFFERS_REMEDY = (
    "keep means over samples in buffers, or train with SyncPS and batch: whole, so that one worker computes "
    "a step's batch at once"
)


class Few(NamedTuple):
    """Samples to look at: how many, and what makes a batch of some, what is random in it by a number."""

    num_samples: int
    gather: Callable[[slice, int], Batch]


class Outcome(NamedTuple):
    """What comes of some samples: the sum of their loss terms, their number, and what buffers gain.

    Of each buffer, by name: what is added to it, and how much of that may be rounding.
    """

    total: float
    number: float
    gained: Mapping[str, tuple[Tensor, float]] = MappingProxyType({})

    @property
    def mean(self) -> float:
        return self.total / self.number if self.number else math.nan


class CutCheck:
    """Says once if of a few samples another thing comes when they are computed in two parts."""

    def __init__(self, log: logging.Logger) -> None:
        self.is_done = False
        self._num_cut = 0
        self._log = log

    def is_due(self) -> bool:
        """Whether to look at the batch that has been cut now."""
        self._num_cut += 1
        return not self.is_done and self._num_cut.bit_count() == 1

    def look(self, replica: Replica, loss: LossFunction, few: Few, *, of_loss: bool = True) -> None:
        """Compute the samples; without `of_loss` only what comes of the buffers counts.

        Nothing else changes by it, and what goes wrong is left to the training, which meets it too.
        """
        numbers = count()  # a batch that is made at random differs each time, and nothing is said

        def outcome(model: nn.Module, places: slice) -> Outcome:
            batch = few.gather(places, next(numbers))
            seen, buffers = LabelsSeen(model), ModelBuffers(model)
            with kept_attributes(holders_of(loss)), seen.watching():
                result = loss(model, apart(replica.placed(batch)))
            total, number = seen.count(result, places.stop - places.start, of=loss)
            if not model.training:
                return Outcome(float(total), float(number))
            gained, now = buffers.difference(), buffers.values()
            named = {}
            for each, added in gained.items():
                precision = buffers.precision(each)
                if of_loss or precision:  # of whole numbers EDP adds up all
                    rounding = ROUNDING * precision * float(now[each].abs().max())
                    named[buffers.names[each]] = added, rounding
            return Outcome(float(total), float(number), named)

        said = None
        with isolated_rng(replica.device), torch.no_grad(), uncompiled():
            if of_loss:
                with _forgiving():
                    said = _in_evaluation(replica, outcome, few.num_samples)
            if said is None and is_copied_soon(replica.model):
                with _forgiving():
                    said = _in_training(replica, outcome, few.num_samples, of_loss=of_loss)
        self._say(said)

    def look_at_output(
        self,
        device: torch.device,
        loss: LossFunction | OutputLoss,
        num_samples: int,
        loss_of: Callable[[slice], tuple[float, float]],
    ) -> None:
        """The same of a model's output for so many samples, of which `loss_of` takes some."""
        said = None
        with isolated_rng(device), kept_attributes(holders_of(loss)), torch.no_grad(), _forgiving():
            said = said_of_cutting(lambda places: Outcome(*loss_of(places)), num_samples)
        self._say(said)

    def _say(self, said: str | None) -> None:
        if said is not None:
            self.is_done = True
            self._log.warning("%s", said)


def _in_evaluation(
    replica: Replica, outcome: Callable[[nn.Module, slice], Outcome], num_samples: int
) -> str | None:
    with replica.evaluating() as model, kept_attributes(model.modules()):
        model.eval()
        return said_of_cutting(lambda places: outcome(model, places), num_samples)


def _in_training(
    replica: Replica,
    outcome: Callable[[nn.Module, slice], Outcome],
    num_samples: int,
    *,
    of_loss: bool,
) -> str | None:
    """With copies, because a model may keep anything of what it has computed.

    One copy computes all samples twice, so that what it draws from generators of its own goes on.
    """
    copies: dict[int, nn.Module] = {}

    def of_a_copy(places: slice) -> Outcome:
        if places.start not in copies or places.stop < num_samples:
            copies[places.start] = model = copied(replica.model)
            for each in model.modules():
                if isinstance(each, _BatchNorm | _DropoutNd):
                    each.eval()
        with _kept(copies[places.start]) as model:
            return outcome(model, places)

    return said_of_cutting(of_a_copy, num_samples, of_loss=of_loss)


@contextmanager
def _kept(model: nn.Module) -> Iterator[nn.Module]:
    """Undo what the block does to a model's weights, buffers and attributes."""
    weights = [(each, each.detach().clone()) for each in model.parameters()]
    with ModelBuffers(model).kept(), kept_attributes(model.modules()):
        yield model
    for each, before in weights:
        each.detach().copy_(before)


@contextmanager
def _forgiving() -> Iterator[None]:
    # MemoryError, and RuntimeError of PyTorch: out of memory
    with suppress(SmolclusterError, RuntimeError, MemoryError), user_code("loss"):
        yield


def said_of_cutting(
    outcome: Callable[[slice], Outcome], num_samples: int, *, of_loss: bool = True
) -> str | None:
    """What to say where what comes of samples depends on how they are cut; None: it does not, or who knows.

    `outcome` is called for all of them twice: a loss that is random differs from itself.
    """
    if num_samples < 2:
        return None
    cut = max(1, num_samples // 3)  # parts of unequal size show means of means as well
    whole, again = (outcome(slice(0, num_samples)) for _ in range(2))
    parts = [outcome(slice(0, cut)), outcome(slice(cut, num_samples))]
    if of_loss and math.isfinite(whole.mean) and whole.mean == again.mean:
        counted = [each for each in parts if each.number]
        number = sum(each.number for each in counted)
        mean = sum(each.total for each in counted) / number if number else math.nan
        if not abs(mean - whole.mean) <= TOLERANCE * max(abs(whole.mean), TOLERANCE):
            return (
                f"the loss of {num_samples} samples at once is {whole.mean:.4g}, of {cut} and "
                f"{num_samples - cut} {mean:.4g}: results depend on how a batch is cut; {REMEDY}"
            )
    share = cut / num_samples
    names = [name for name in whole.gained if _is_no_mean(name, whole, again, parts, share)]
    if not names:
        return None
    return (
        f"model: what {num_samples} samples add to buffers ({a_few(names)}) is not the mean of what {cut} "
        f"and {num_samples - cut} of them add, and of what several workers add it is the mean that counts: "
        f"results depend on how many there are; {BUFFERS_REMEDY}"
    )


def _is_no_mean(
    name: str, whole: Outcome, again: Outcome, parts: list[Outcome], share: float
) -> bool:
    """Whether what a buffer gains by all samples is not the mean of what it gains by parts of them."""
    gained, rounding = whole.gained[name]
    first, second = (each.gained.get(name, (torch.zeros_like(gained), 0.0))[0] for each in parts)
    if name not in again.gained or not torch.equal(gained, again.gained[name][0]):
        return False
    difference = gained - torch.lerp(second, first, share)
    bound = TOLERANCE * float(gained.abs().max()) + rounding
    return float(difference.abs().max()) > bound
