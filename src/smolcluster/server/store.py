"""Where the weights lie and what changes them: stores of one slice each, and all stores of a model.

A slice is a contiguous range of the buckets that the flat parameters are cut into (Li et al. 2014, "Scaling
distributed machine learning with the parameter server"). A store changes its own slice, by a step of its
optimizer or towards a worker's weights, and knows no workers, leases, versions or files.

Stores need one thing of each other: a gradient is clipped by the norm of the whole. Each tells one norm a
bucket, and these are combined in the order of the buckets and in float64, so that the clip factor is the
same, bit for bit, for any number of stores.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

from smolcluster.codec.base import bytes_of
from smolcluster.server.slices import place_of, spans
from smolcluster.training.optimizer import bucket_norms
from smolcluster.training.replica import Replica
from smolcluster.training.torch_optimizer import Optimizer
from smolcluster.wire.messages import WEIGHTS

Counted = tuple[float, Tensor]
"""What a worker has sent, (n,), and how many times it counts."""


def mean_of(parts: Sequence[Counted]) -> Tensor:
    """Σ n_i x_i / Σ n_i, (n,), in the memory of the first; 0 where nothing counts."""
    total = sum(weight for weight, _ in parts) or 1.0
    (weight, first), *others = parts
    mean = first.mul_(weight / total)
    for weight, values in others:
        mean.add_(values, alpha=weight / total)
    return mean


def state_of(replica: Replica) -> dict[str, Tensor]:
    """What a copy of a replica needs, by name: its weights, and the moments of its optimizer. Views."""
    return {WEIGHTS: replica.params, **replica.optimizer.moments}


class TakesSteps(Protocol):
    """Weights, wherever they lie, that take one step with one gradient."""

    def take(self, gradient: Tensor) -> None: ...

    def take_difference(self, weights: Tensor) -> None: ...

    def mix(self, share: float) -> None: ...

    def norm(self) -> float: ...

    def step(self, clip: float, learning_rate: float, bound: float | None = None) -> None: ...


class Store:
    """One slice of the flat parameters, with its optimizer's state.

    `buckets` are places in the flat parameters, in order and without gaps; `weights` (n,) change in place.
    """

    def __init__(
        self, buckets: Sequence[slice], weights: Tensor, buffer: Tensor, optimizer: Optimizer
    ) -> None:
        """`buffer` (n,), on the weights' device, takes gradients from elsewhere, and what is clipped."""
        self.buckets = buckets
        self.weights = weights
        self.optimizer = optimizer
        self.buffer = buffer
        self._taken = self._scaled = buffer
        self._start = buckets[0].start

    @property
    def place(self) -> slice:
        return slice(self._start, self.buckets[-1].stop)

    def take(self, gradient: Tensor, *, owned: bool = False) -> None:
        """Take the gradient of the next step, (n,).

        On the weights' device it is not copied, and must not change before the step. `owned`: the step may
        change it, and leaves the buffer alone.
        """
        self._taken = gradient
        self._scaled = gradient if owned else self.buffer
        if gradient.device != self.weights.device:
            self._taken = self._scaled = self.buffer.copy_(gradient)

    def take_difference(self, weights: Tensor) -> None:
        """Take the way from these weights to a worker's, (n,), instead of a gradient."""
        self._taken = self.buffer.copy_(weights).sub_(self.weights)

    def norms(self) -> list[float]:
        """The L2 norm of each bucket of what was taken."""
        return bucket_norms(self._taken, [self._within(bucket) for bucket in self.buckets])

    def step(self, clip: float, learning_rate: float, bound: float | None = None) -> None:
        """Take one optimizer step with `clip` times the gradient; no element is above `bound`."""
        gradient = self._taken
        if clip != 1.0:
            gradient = torch.mul(gradient, clip, out=self._scaled)
        if bound is not None:
            gradient = torch.clamp(gradient, -bound, bound, out=self._scaled)
        self.optimizer.step_with(gradient, learning_rate, owned=gradient is self._scaled)

    def mix(self, share: float) -> None:
        self.weights.add_(self._taken, alpha=share)

    def _within(self, bucket: slice) -> slice:
        return slice(bucket.start - self._start, bucket.stop - self._start)


class Stores:
    """The stores of a replica's weights that are in this process: they work in the replica's own memory.

    What reads or restores the replica as a whole (evaluation, checkpoints) need not know how many there are.
    They are made after a checkpoint has been restored, because each counts its own steps from there.
    """

    def __init__(self, replica: Replica, num_stores: int = 1, span: range | None = None) -> None:
        """Cut the replica into so many slices, at least a bucket each and of about as many.

        `span`: the numbers of the first buckets, which are cut; None: all.
        """
        self.replica = replica
        self.buckets = replica.buckets
        self.stores: list[Store] = []
        for each in spans(len(replica.buckets if span is None else span), [1] * num_stores):
            place = place_of(replica.buckets, each)
            store = Store(
                replica.buckets[each.start : each.stop],
                replica.params[place],
                replica.grads[place],
                replica.optimizer.part(place),
            )
            self.stores.append(store)

    def take(self, gradient: Tensor, *, owned: bool = False) -> None:
        """Take the gradient of the next step, (n,). See `Store.take`."""
        for store in self.stores:
            store.take(gradient[store.place], owned=owned)

    def take_difference(self, weights: Tensor) -> None:
        """Take the way to a worker's weights (num_params,); it stands in the replica's `grads`."""
        for store in self.stores:
            store.take_difference(weights[store.place])

    def norm(self) -> float:
        """L2 norm of all that was taken: the stores tell each other theirs."""
        return math.hypot(*self.norms())

    def norms(self) -> list[float]:
        """The L2 norm of each bucket of what was taken."""
        with self.replica.meter("apply"):
            return [norm for store in self.stores for norm in store.norms()]

    def step(self, clip: float, learning_rate: float, bound: float | None = None) -> None:
        with self.replica.meter("apply"):
            for store in self.stores:
                store.step(clip, learning_rate, bound)

    def mix(self, share: float) -> None:
        with self.replica.meter("apply"):
            for store in self.stores:
                store.mix(share)

    @property
    def num_skipped(self) -> int:
        """Steps of the run that no optimizer has taken."""
        scaler = self.replica.scaler
        return 0 if scaler is None else scaler.num_overflows

    def digests(self) -> list[bytes]:
        """xxh3-64 of the bytes of each bucket of the weights, 8 bytes each."""
        weights = self.replica.params.to("cpu")
        return [xxh3_64_digest(bytes_of(weights[bucket])) for bucket in self.replica.buckets]
