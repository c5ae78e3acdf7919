"""Where the weights lie and what changes them: stores of one slice each.

A slice is a contiguous range of the buckets that the flat parameters are cut into (Li et al. 2014, "Scaling
distributed machine learning with the parameter server"). A store changes its own slice, by a step of its
optimizer or towards a worker's weights, and knows no workers, leases, versions or files.

Stores need one thing of each other: a gradient is clipped by the norm of the whole. Each tells one norm a
bucket, and these are combined in the order of the buckets and in float64, so that the clip factor is the
same, bit for bit, for any number of stores.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

from smolcluster.codec.base import bytes_of
from smolcluster.errors import ProtocolError
from smolcluster.server.slices import place_of
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer, bucket_norms
from smolcluster.training.replica import Replica
from smolcluster.training.torch_optimizer import Optimizer
from smolcluster.wire.messages import WEIGHTS, OuterRule, SliceRule

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

    @classmethod
    def of(cls, replica: Replica, span: range | None = None) -> "Store":
        """The slice of a replica's weights that is in its own process: it works in the replica's own memory.

        It is made after a checkpoint has been restored, because it counts its own steps from there. `span`:
        the numbers of its buckets; None: all.
        """
        span = range(len(replica.buckets)) if span is None else span
        place = place_of(replica.buckets, span)
        return Store(
            replica.buckets[span.start : span.stop],
            replica.params[place],
            replica.grads[place],
            replica.optimizer.part(place),
        )

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

    def norm(self) -> float:
        """L2 norm of all that was taken."""
        return math.hypot(*self.norms())

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

    def digests(self) -> list[bytes]:
        """xxh3-64 of the bytes of each bucket of the weights, 8 bytes each."""
        weights = self.weights.to("cpu")
        return [xxh3_64_digest(bytes_of(weights[self._within(each)])) for each in self.buckets]

    def _within(self, bucket: slice) -> slice:
        return slice(bucket.start - self._start, bucket.stop - self._start)


def store_of(
    rule: SliceRule | OuterRule | None, buckets: Sequence[slice], values: Mapping[str, Tensor]
) -> Store:
    """The store of a slice of these buckets; `values` (n,) by name become its memory.

    Raises:
        ProtocolError: these are not what its rule needs.
    """
    weights = values.get(WEIGHTS)
    if not isinstance(rule, SliceRule) or weights is None:
        raise ProtocolError("it gave a slice without weights or rule to a store that takes steps")
    buffer = torch.empty_like(weights)
    optimizer = FlatOptimizer(
        rule.optimizer,
        weights,
        buffer,
        rule.weight_decay,
        rule.num_decayed,
        arguments=rule.optimizer_args,
    )
    if set(optimizer.moments) != set(values) - {WEIGHTS}:
        raise ProtocolError(f"{rule.optimizer} has other moments than were sent")
    for name in optimizer.moments:
        optimizer.state[name] = values[name]
    if STEP_COUNT in optimizer.state:
        optimizer.state[STEP_COUNT].fill_(rule.num_steps)
    return Store(buckets, weights, buffer, optimizer)
