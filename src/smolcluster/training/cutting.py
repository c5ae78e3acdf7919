"""Whether a loss depends on how a batch is cut, and how much a part of a batch weighs.

SyncPS cuts batches, as it gives each worker a part of a step, and so does `microbatch`. The mean of the
whole is that of the parts, weighted by their loss terms. A loss that couples samples (contrastive losses) is
another one for parts, and so is a mean over terms of which samples have unequally many. That is said once.
It is looked at batches that are cut, the first, second, fourth, eighth and so on: the first samples need not
hold what makes the difference, such as a rare class of more weight.
"""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import torch

from smolcluster.data.dataset import Batch
from smolcluster.errors import SmolclusterError
from smolcluster.training.buffers import kept_attributes
from smolcluster.training.criterion import holders_of
from smolcluster.training.replica import Replica
from smolcluster.training.workload import LossFunction, OutputLoss
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.utils.user_code import user_code

NUM_SAMPLES = 16
"""Of a batch, which are computed whole and in two parts."""
TOLERANCE = 1e-3
"""Of what rounding may change."""
REMEDY = (
    "return (sum, number) of the loss's terms if samples have unequally many, or set batch: whole if the "
    "loss couples samples, so that one worker computes a step's batch at once"
)


class CutCheck:
    """Says once if the loss of a few samples is another one when they are computed in two parts."""

    def __init__(self, log: logging.Logger) -> None:
        self.is_done = False
        self._num_cut = 0
        self._log = log

    def is_due(self) -> bool:
        """Whether to look at the batch that has been cut now."""
        self._num_cut += 1
        return not self.is_done and self._num_cut.bit_count() == 1

    def look(
        self,
        replica: Replica,
        loss: LossFunction,
        num_samples: int,
        gather: Callable[[slice, int], Batch],
    ) -> None:
        """Compute so many samples; `gather` makes a batch of some, what is random in it by a number.

        Nothing else changes by it, and what goes wrong is left to the training, which meets it too.
        """
        numbers = count()  # a batch that is made at random differs each time, and nothing is said

        def loss_of(places: slice) -> tuple[float, float]:
            batch = gather(places, next(numbers))
            with replica.labels.watching():
                result = loss(model, replica.placed(batch))
            total, number = replica.labels.count(result, places.stop - places.start, of=loss)
            return float(total), float(number)

        said = None
        with (
            isolated_rng(replica.device),
            replica.evaluating() as model,
            kept_attributes([*model.modules(), *holders_of(loss)]),
            torch.no_grad(),
            suppress(SmolclusterError, RuntimeError, MemoryError),  # the latter: out of memory
            user_code("loss"),
        ):
            model.eval()
            said = said_of_cutting(loss_of, num_samples)
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
        with (
            isolated_rng(device),
            kept_attributes(holders_of(loss)),
            torch.no_grad(),
            suppress(SmolclusterError, RuntimeError, MemoryError),
            user_code("loss"),
        ):
            said = said_of_cutting(loss_of, num_samples)
        self._say(said)

    def _say(self, said: str | None) -> None:
        if said is not None:
            self.is_done = True
            self._log.warning("%s", said)


def said_of_cutting(
    loss_of: Callable[[slice], tuple[float, float]], num_samples: int
) -> str | None:
    """What to say where the loss of samples depends on how they are cut; None: it does not, or who knows.

    `loss_of` gives the sum of the terms of samples of a batch, and their number. It is called for all of them
    twice: a loss that is random differs from itself.
    """
    if num_samples < 2:
        return None
    cut = max(1, num_samples // 3)  # parts of unequal size show means of means as well
    whole, again = (_mean([loss_of(slice(0, num_samples))]) for _ in range(2))
    if not (math.isfinite(whole) and whole == again):
        return None
    parts = [loss_of(slice(0, cut)), loss_of(slice(cut, num_samples))]
    mean = _mean([each for each in parts if each[1]])
    if abs(mean - whole) <= TOLERANCE * max(abs(whole), TOLERANCE):
        return None
    return (
        f"the loss of {num_samples} samples at once is {whole:.4g}, of {cut} and {num_samples - cut} "
        f"{mean:.4g}: results depend on how a batch is cut; {REMEDY}"
    )


def _mean(parts: list[tuple[float, float]]) -> float:
    number = sum(count for _, count in parts)
    return sum(total for total, _ in parts) / number if number else math.nan
