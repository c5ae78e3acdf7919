"""The loss of a model that has just been built, by which two machines see that it is the same model.

Layout, frozen weights and data are compared on their own. What else makes a model, such as constants, a file
that it reads, or what is done to a sample on the way, shows in its loss alone. A copy computes it for each
sample that is compared, in evaluation mode and by itself, because other devices draw other masks; a loss that
is random even so is not compared. Weights that are trained come from the server: where they begin
differently, losses say nothing.
"""

import copy
import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import torch
from torch import nn

from smolcluster.data.dataset import Elsewhere, Place, Samples
from smolcluster.data.loading import MapSamples, StreamSamples
from smolcluster.data.marks import MOST_SKETCHED, chosen, mark_of_tensor, reader_of, value_differs
from smolcluster.errors import SmolclusterError
from smolcluster.training.batches import placed
from smolcluster.training.buffers import ModelBuffers, kept_attributes
from smolcluster.training.copying import copied, is_copied_soon, uncompiled
from smolcluster.training.criterion import holders_of, modules_of
from smolcluster.training.layer_seeds import seed_generators
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload, count_terms
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.utils.user_code import user_code
from smolcluster.wire.messages import MAX_LOSS

PATIENCE_S = 0.25
"""How long losses are computed; those that are then not there are not compared."""
TOLERANCE, LEAST = 1e-2, 1e-4
"""Of a loss, relative and absolute: devices round differently."""
OF_ITSELF = 1e-4
SEEDS = (1, 2)
_ASIDE = threading.Lock()
"""Held while the process's generators and PyTorch's compiler are set aside: two threads would bring back each
other's state, and leave the compiler off."""


class FirstLosses(NamedTuple):
    """What a model was built with, and made of samples."""

    weights: str | None = None
    """A sketch of the trained weights (`data/marks.py`); None: there are no losses."""
    samples: tuple[int, ...] = ()
    """The samples' numbers."""
    losses: tuple[float | None, ...] = ()
    """The mean loss of each sample; None: it is not compared."""


NO_LOSSES = FirstLosses()


def difference(
    ours: FirstLosses, weights: str | None, losses: tuple[float | None, ...]
) -> str | None:
    """What to say to a worker that has built another model, with these weights and losses; None: nothing."""
    if None in (ours.weights, weights) or value_differs(str(ours.weights), str(weights)):
        return None
    for number, own, theirs in zip(ours.samples, ours.losses, losses, strict=False):
        if (
            own is None
            or theirs is None
            or math.isclose(own, theirs, rel_tol=TOLERANCE, abs_tol=LEAST)
        ):
            continue
        return (
            f"this worker's model begins with the loss {theirs:.6g} on training sample {number}, the "
            f"server's with {own:.6g}, though the weights that are trained are the same: give both the "
            "same code, versions and settings, and the same files that model, loss or data read, and draw "
            "what is random in the model from PyTorch's generator, which is seeded"
        )
    return None


def first_losses(workload: Workload, replica: Replica) -> FirstLosses:
    """The losses of a model that has just been built; model, loss and generators are then as they were.

    There are none of an outline, of samples that only one process has, and where they take too long or fail.
    """
    is_elsewhere = isinstance(workload.train, StreamSamples | Elsewhere)
    if is_elsewhere or replica.device.type == "meta" or not is_copied_soon(replica.model):
        return NO_LOSSES
    with _aside(workload, replica.device), suppress(SmolclusterError, torch.OutOfMemoryError):
        with user_code("model"):
            model = copied(replica.model)
            model.eval()
        numbers = _numbers(workload.train)
        losses = tuple(_losses(model, workload, replica, numbers))
        flat = replica.params[:: -(-replica.num_params // MOST_SKETCHED) or 1]
        return FirstLosses(mark_of_tensor(flat), numbers, losses)
    return NO_LOSSES


@contextmanager
def _aside(workload: Workload, device: torch.device) -> Iterator[None]:
    """Compute nothing that lasts, and compile nothing, which would take longer than all else."""
    with _ASIDE, ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(isolated_rng(device, SEEDS[0]))
        stack.enter_context(kept_attributes(list(holders_of(workload.loss))))
        for _, module in modules_of(workload.loss):
            stack.enter_context(ModelBuffers(module).kept())
        stack.enter_context(uncompiled())
        yield


def _numbers(samples: Samples) -> tuple[int, ...]:
    if isinstance(samples, MapSamples):
        return tuple(chosen(len(samples.dataset)))
    return tuple(chosen(samples.num_samples))


def _losses(
    model: nn.Module, workload: Workload, replica: Replica, numbers: tuple[int, ...]
) -> Iterator[float | None]:
    samples = _reader(workload.train)

    def loss_of(number: int, seed: int) -> float | None:
        with user_code("data"):
            batch = samples.batch(torch.tensor([number]), Place(seed, 0, 0))
        for lowers in (False, True):
            seed_generators(seed, replica.device)
            with suppress(SmolclusterError):
                with user_code("data"):
                    given = placed(
                        batch, replica.device, replica.params.dtype, lowers_doubles=lowers
                    )
                with user_code("loss"):
                    total, count = count_terms(workload.loss(model, given), 1, of=workload.loss)
                    return float(total) / float(count) if float(count) else math.nan
        return None

    if replica.device.type != "cpu":  # its first computation loads what others need as well
        loss_of(numbers[0], SEEDS[0])
    until = time.monotonic() + PATIENCE_S
    for number in numbers:
        found = [loss_of(number, seed) for seed in SEEDS if time.monotonic() < until]
        yield _steady(found)


def _steady(found: list[float | None]) -> float | None:
    """The loss that was found under each of the seeds; None: it is not the same, or no number."""
    if len(found) < len(SEEDS):
        return None
    first, second = found
    if first is None or second is None or not abs(first) <= MAX_LOSS:
        return None
    return (
        first if math.isclose(first, second, rel_tol=OF_ITSELF, abs_tol=OF_ITSELF * LEAST) else None
    )


def _reader(samples: Samples) -> Samples:
    """The samples, from a copy of a user's dataset: see `reader_of`."""
    if not isinstance(samples, MapSamples):
        return samples
    own = copy.copy(samples)
    own.dataset = reader_of(samples.dataset)
    return own
