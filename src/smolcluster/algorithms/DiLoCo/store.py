"""Where the run's weights θ lie: takes outer steps, and says what workers are sent of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.algorithms.DiLoCo.exchange import Encoder, Layout, outer_frames
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.codec.registry import lossless_for
from smolcluster.ps.buffers import buffer_frames
from smolcluster.ps.history import Update, UpdateHistory
from smolcluster.ps.weights import state_frames
from smolcluster.training.buffers import BufferValues, mean_buffers
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame

WHOLE = 0
"""The one fragment, where all weights are exchanged at once."""


@dataclass(frozen=True)
class Change:
    """What a worker has changed a fragment by with `num_samples`: `values` (numel,), on the CPU.

    They count `weight` times. `buffers`: what was added to the model's.
    """

    weight: float
    values: Tensor
    num_samples: int
    buffers: BufferValues


class OuterStore:
    """θ, in the replica's own memory, with the outer optimizer's state; `version` counts the outer steps."""

    def __init__(
        self, replica: Replica, layout: Layout, outer: OuterOptimizer, codec_down: str | None
    ) -> None:
        """`codec_down`: of the outer steps that workers are sent; None: they are sent weights."""
        self._replica = replica
        self._layout = layout
        self._outer = outer
        self._whole = Encoder(lossless_for(replica.params.dtype), layout)
        steps = Encoder(codec_down, layout) if codec_down else None
        self._steps = steps if steps and not steps.codec.lossless else None
        self.version = 0
        self.versions = [0] * len(layout.fragments)
        """Of each fragment: that of the last outer step that has changed it."""
        self._history: list[UpdateHistory[list[Frame]]] = [
            UpdateHistory(replica.params.itemsize * fragment.numel) for fragment in layout.fragments
        ]
        """Of each fragment: its last outer steps, encoded."""
        self._fragment: dict[int, tuple[int, list[Frame]]] = {}
        """Fragments as they are, by number: their version, and frames that all share."""
        self._snapshot: tuple[int, list[Frame]] | None = None
        """The same of the whole."""
        self._norms: dict[int, tuple[int, float]] = {}
        """Of fragments, by number: their version, and the L2 norm of its weights."""
        self._theirs: dict[int, Tensor] = {}
        """Of workers that are followed: the weights (num_params,) that they were sent, on the CPU."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What else a checkpoint holds: momentum, and what the codec owes to the next outer step."""
        feedbacks = self._steps.feedbacks if self._steps else []
        return {f"outer.{name}": each for name, each in self._outer.state.items()} | {
            f"residual.{number}": feedback.committed for number, feedback in enumerate(feedbacks)
        }

    def resume(self, version: int) -> None:
        """Go on from a checkpoint, which has filled the `tensors`."""
        self.version = version
        self.versions = [version] * len(self.versions)
        for number, feedback in enumerate(self._steps.feedbacks if self._steps else []):
            feedback.resume(self._layout.buckets(number), 1)

    def step(self, number: int, changes: Sequence[Change]) -> None:
        """Step a fragment's weights along the mean of what workers have changed: Σ n_i Δ_i / Σ n_i.

        With a codec for the way back, θ takes the very step that workers decode.
        """
        replica, layout = self._replica, self._layout
        with replica.meter("apply"):
            theta = layout.gather(number, replica.params)
            before = theta.clone()
            self._outer.step(theta, mean_change(changes).to(theta.device), self._place(number))
            base_version = self.versions[number]
            self.version += 1
            self.versions[number] = self.version
            if self._steps is not None:
                taken = self._encode(self._steps, number, (before - theta).cpu(), base_version)
                theta = before - taken.to(theta.device)
            layout.fragments[number].scatter(theta, replica.params)
            replica.buffers.add(
                mean_buffers([(each.num_samples, each.buffers) for each in changes])
            )

    def apply(self, change: Change, share: float) -> None:
        """Change all weights by one worker's change, of weight `share`, as soon as it has come.

        Raises:
            TypeError: the outer optimizer cannot.
        """
        replica = self._replica
        if not isinstance(self._outer, DelayedNesterov):
            raise TypeError(
                f"{type(self._outer).__name__} takes the changes of all workers at once"
            )
        with replica.meter("apply"):
            theta = self._layout.gather(WHOLE, replica.params)
            self._outer.apply(theta, change.values.to(theta.device), share)
            self._layout.fragments[WHOLE].scatter(theta, replica.params)
            replica.buffers.add({each: added * share for each, added in change.buffers.items()})
        self.version += 1
        self.versions[WHOLE] = self.version

    def norm(self, number: int) -> float:
        """L2 norm of a fragment's weights."""
        version, norm = self._norms.get(number, (None, 0.0))
        if version != self.versions[number]:
            norm = float(
                torch.linalg.vector_norm(self._layout.gather(number, self._replica.params))
            )
            self._norms[number] = self.versions[number], norm
        return norm

    def follow(self, worker: int) -> None:
        """`worker` has the weights as they are, and is sent by itself what becomes of them."""
        if self._steps is not None:
            self._theirs[worker] = self._layout.gather(WHOLE, self._replica.params).cpu()

    def leave(self, worker: int) -> None:
        self._theirs.pop(worker, None)

    def own_frames(self, worker: int, base_version: int) -> list[Frame]:
        """The way from what `worker` has, of `base_version`, to the weights as they are.

        What the codec loses of it is a part of the next way, as it is that from what the worker has then.
        """
        if self._steps is None:
            return [*self._buffer_frames(), *self._whole_fragment(WHOLE)]
        theirs, encoder = self._theirs[worker], self._steps
        way = theirs - self._layout.gather(WHOLE, self._replica.params).cpu()
        encoded = encoder.encode(WHOLE, way, 0)
        for place, bucket in zip(self._layout.buckets(WHOLE), encoded, strict=True):
            encoder.codec.decode(bucket, way[place])
        theirs.sub_(way)
        return [*self._buffer_frames(), *self._frames(encoder, WHOLE, encoded, base_version)]

    def fragment_frames(self, number: int, base_version: int) -> list[Frame]:
        """A fragment as it is, for a worker that has `base_version` of it; with the first one the buffers."""
        steps = self._history[number].since(base_version)
        if steps is None:
            frames = self._whole_fragment(number)
        else:
            frames = [frame for step in steps for frame in step.encoded]
        return [*(self._buffer_frames() if number == 0 else []), *frames]

    def whole_frames(self, incarnation: str) -> list[Frame]:
        """All weights as they are, for a worker that has none."""
        if self._snapshot is None or self._snapshot[0] != self.version:
            replica = self._replica
            with replica.meter("encode"):
                weights = replica.snapshot()
                frames = state_frames(incarnation, self.version, weights, replica.buckets)
            self._snapshot = self.version, [*self._buffer_frames(), *frames]
        return self._snapshot[1]

    def _whole_fragment(self, number: int) -> list[Frame]:
        version = self.versions[number]
        if self._fragment.get(number, (None,))[0] != version:
            with self._replica.meter("encode"):
                values = self._layout.gather(number, self._replica.params).cpu()
                encoded = self._whole.encode(number, values, 1)
                frames = self._frames(self._whole, number, encoded, None)
            self._fragment[number] = version, frames
        return self._fragment[number][1]

    def _encode(self, encoder: Encoder, number: int, taken: Tensor, base_version: int) -> Tensor:
        """Encode an outer step for those who have the weights before it; returns it as it is decoded."""
        encoded = encoder.encode(number, taken, 1)
        encoder.settle(number, is_applied=True)
        for place, bucket in zip(self._layout.buckets(number), encoded, strict=True):
            encoder.codec.decode(bucket, taken[place])
        frames = self._frames(encoder, number, encoded, base_version)
        nbytes = sum(len(each) for each in encoded)
        self._history[number].add(Update(base_version, self.versions[number], nbytes, frames))
        return taken

    def _frames(
        self, encoder: Encoder, number: int, encoded: Sequence[Tensor], base_version: int | None
    ) -> list[Frame]:
        version, codec = self.versions[number], encoder.codec
        return outer_frames(
            self._layout, number, encoded, codec, base_version=base_version, version=version
        )

    def _buffer_frames(self) -> list[Frame]:
        replica = self._replica
        values = replica.buffers.values()
        return buffer_frames(values, replica.bucket_bytes, version=self.version)

    def _place(self, number: int) -> slice:
        start = sum(fragment.numel for fragment in self._layout.fragments[:number])
        return slice(start, start + self._layout.fragments[number].numel)


def mean_change(changes: Sequence[Change]) -> Tensor:
    """Δ̄ = Σ n_i Δ_i / Σ n_i, (numel,), in the memory of the first; 0 where nothing counts."""
    total = sum(change.weight for change in changes) or 1.0
    mean = changes[0].values.mul_(changes[0].weight / total)
    for change in changes[1:]:
        mean.add_(change.values, alpha=change.weight / total)
    return mean
