"""A host's part of the run's weights θ: takes outer steps, and says what workers are sent of them.

It knows no leases and decides nothing: which changes count, and how much, is said by the server, which has
one of these in its own process; stores on other hosts have others (`store.py`).

A store applies what it encodes, as its receivers do, so that all who begin at one version come to the same
bits at another, and no copy of a receiver's weights is needed to know what it lacks.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from smolcluster.algorithms.DiLoCo.exchange import Encoder, Layout, outer_frames
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import lossless_for
from smolcluster.server.store import Counted, Store, mean_of
from smolcluster.training.optimizer import bucket_norms
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import TakeStep

T = TypeVar("T")
WHOLE = 0
"""The one fragment, where all weights are exchanged at once."""


@dataclass(frozen=True)
class Update(Generic[T]):
    """What leads from the weights of `base_version` to those of `version`: `nbytes`, in whatever form."""

    base_version: int
    version: int
    nbytes: int
    encoded: T


class UpdateHistory(Generic[T]):
    """Consecutive updates up to the newest version, of fewer than `whole_nbytes` bytes together.

    Whoever is a few versions behind applies them in order: with `int8` 3, with `int4` 7. Whoever is further
    behind gets the whole weights.
    """

    def __init__(self, whole_nbytes: int) -> None:
        self._whole_nbytes = whole_nbytes
        self._updates: deque[Update[T]] = deque()

    def add(self, update: Update[T]) -> None:
        """Keep the newest update.

        Raises:
            ValueError: it does not follow on the last one.
        """
        if self._updates and self._updates[-1].version != update.base_version:
            raise ValueError(
                f"an update from version {update.base_version} does not follow on version "
                f"{self._updates[-1].version}"
            )
        self._updates.append(update)
        while self._updates and self._nbytes() >= self._whole_nbytes:
            self._updates.popleft()

    def since(self, version: int) -> Sequence[Update[T]] | None:
        """The updates that lead from `version` to the newest, in order; None: send the whole weights."""
        updates = list(self._updates)
        for index, update in enumerate(updates):
            if update.base_version == version:
                return updates[index:]
        return None

    def _nbytes(self) -> int:
        return sum(update.nbytes for update in self._updates)


class OuterStore:
    """A part of θ in `weights`, which change in place, with the outer optimizer's state."""

    def __init__(
        self,
        weights: Tensor,
        layout: Layout,
        outer: OuterOptimizer,
        codec_down: str | None,
        *,
        is_async: bool = False,
        keeps_whole: bool = False,
    ) -> None:
        """Hold what `layout` says of the weights, as places in `weights` and in the optimizer's state.

        Args:
            codec_down: of the outer steps that workers are sent; None: they are sent weights.
            is_async: some time the workers' changes are applied one by one.
            keeps_whole: what the codec owes has room for whole fragments, of which these are the beginnings.
        """
        self._weights = weights
        self._layout = layout
        self._outer = outer
        self._is_async = is_async
        self._one_by_one = False
        """Whether changes are applied so, and each worker is sent steps of its own."""
        whole = layout.whole or layout
        self._lossless = Encoder(lossless_for(weights.dtype), layout)
        kept = whole.fragments if keeps_whole else None
        steps = Encoder(codec_down, layout, kept) if codec_down else None
        self._steps = steps if steps and not steps.codec.lossless else None
        self.versions = [0] * len(layout.fragments)
        """Of each fragment: that of the last outer step that has changed it."""
        self._history: list[UpdateHistory[list[Frame]]] = [
            UpdateHistory(weights.itemsize * fragment.numel) for fragment in whole.fragments
        ]
        """Of each fragment: its last outer steps, encoded; as many on each host."""
        self._nbytes = [self._step_nbytes(whole, number) for number in range(len(self.versions))]
        self._fragment: dict[int, tuple[int, list[Frame]]] = {}
        """Fragments as they are, by number: their version, and frames that all share."""
        self._norms: dict[int, tuple[int, list[float]]] = {}
        """Of fragments, by number: their version, and the L2 norms of its weights by bucket."""
        self._theirs: dict[str, Tensor] = {}
        """Where changes are applied one by one: the weights that each worker has, on the CPU."""

    def _step_nbytes(self, whole: Layout, number: int) -> int:
        """Of an outer step of a whole fragment, encoded."""
        if self._steps is None:
            return 0
        sizes = (bucket.stop - bucket.start for bucket in whole.buckets(number))
        return sum(self._steps.codec.encoded_nbytes(size) for size in sizes)

    @property
    def residuals(self) -> Sequence[ErrorFeedback]:
        """By fragment: what a lossy codec owes to its next outer step."""
        return self._steps.feedbacks if self._steps else []

    def resume(self, versions: Sequence[int]) -> None:
        """The weights, the optimizer's state and the residuals have been filled."""
        self.versions = list(versions)
        for number, feedback in enumerate(self.residuals):
            feedback.resume(self._layout.buckets(number))

    def step(self, number: int, changes: Sequence[Counted], version: int) -> None:
        """Step a fragment's weights along the mean of what workers have changed: Σ n_i Δ_i / Σ n_i.

        With a codec for the way back, θ takes the very step that workers decode.
        """
        fragment = self._layout.fragments[number]
        theta = self._layout.gather(number, self._weights)
        before = theta.clone() if self._steps else None
        self._outer.step(theta, mean_of(changes).to(theta.device), fragment)
        fragment.scatter(theta, self._weights)
        self._follow_step(number, before, version)

    def step_along(self, inner: Store, means: Mapping[int, Tensor], step: TakeStep) -> None:
        """Step all weights by the workers' optimizer along mean gradients (numel,), by fragment.

        `inner` has the same weights, and takes the step. A fragment without a gradient stays as it is.
        """
        before = {
            number: self._layout.gather(number, self._weights)
            for number in range(len(self.versions))
            if self._steps or number not in means
        }
        if step.learning_rate is not None:
            buffer = inner.buffer.zero_()
            for number, mean in means.items():
                self._layout.fragments[number].scatter(mean.to(buffer.device), buffer)
            inner.take(buffer, owned=True)
            inner.step(step.clip, step.learning_rate, step.bound)
        for number in range(len(self.versions)):
            if number not in means:
                self._layout.fragments[number].scatter(before[number], self._weights)
            self._follow_step(number, before.get(number), step.version + number)

    def _follow_step(self, number: int, before: Tensor | None, version: int) -> None:
        """A fragment's weights have taken a step from `before` (numel,): it can be sent from now on.

        Without a lossy codec `before` may be None, for the weights are sent as they are.
        """
        base_version, self.versions[number] = self.versions[number], version
        if self._steps is None or before is None:
            return
        theta = self._layout.gather(number, self._weights)
        taken = self._encode(self._steps, number, (before - theta).cpu(), base_version)
        self._layout.fragments[number].scatter(before - taken.to(theta.device), self._weights)

    def apply(
        self, worker: str, change: Tensor, share: float, moves_by: float | None, version: int
    ) -> None:
        """Change all weights by `worker`'s change (n,), of weight `share`; see `DelayedNesterov.apply`.

        Raises:
            TypeError: the outer optimizer cannot.
        """
        if not isinstance(self._outer, DelayedNesterov):
            raise TypeError(
                f"{type(self._outer).__name__} takes the changes of all workers at once"
            )
        place = slice(0, self._layout.fragments[WHOLE].numel)
        theta = self._weights[place]
        theirs = self._theirs.get(worker)  # None: it has gone since it sent its change
        self._outer.apply(
            theta,
            change.to(theta.device),
            share,
            moves_by,
            place,
            start=None if theirs is None else theirs.to(theta.device),
            blocks=self._layout.buckets(WHOLE),
        )
        self.versions[WHOLE] = version
        self._one_by_one = True

    def norms(self, number: int) -> list[float]:
        """L2 norms of a fragment's weights, by bucket."""
        version, norms = self._norms.get(number, (None, []))
        if version != self.versions[number]:
            values = self._layout.gather(number, self._weights)
            buckets = self._layout.buckets(number)
            norms = bucket_norms(values, buckets) if buckets else []
            self._norms[number] = self.versions[number], norms
        return norms

    def follow(self, worker: str) -> None:
        """`worker` has the weights as they are."""
        if self._is_async:
            self._theirs[worker] = self._layout.gather(WHOLE, self._weights).cpu()

    def leave(self, worker: str) -> None:
        self._theirs.pop(worker, None)

    def frames_for(self, worker: str, number: int, base_version: int) -> list[Frame]:
        """What leads `worker`, who has `base_version` of a fragment, to its weights of now."""
        if self._one_by_one and self._steps is not None:
            return self._own_frames(self._steps, worker, base_version)
        steps = self._history[number].since(base_version)
        self.follow(worker)
        if steps is None:
            return self._whole_fragment(number)
        return [frame for step in steps for frame in step.encoded]

    def _own_frames(self, encoder: Encoder, worker: str, base_version: int) -> list[Frame]:
        """The way from what `worker` has to the weights as they are.

        What the codec loses of it is a part of the next way, as it is that from what the worker has then.
        """
        theirs = self._theirs[worker]
        way = theirs - self._layout.gather(WHOLE, self._weights).cpu()
        encoded = encoder.encode(WHOLE, way, counts=False)
        for place, bucket in zip(self._layout.buckets(WHOLE), encoded, strict=True):
            encoder.codec.decode(bucket, way[place])
        theirs.sub_(way)
        return self._frames(encoder, WHOLE, encoded, base_version)

    def _whole_fragment(self, number: int) -> list[Frame]:
        version = self.versions[number]
        if self._fragment.get(number, (None,))[0] != version:
            values = self._layout.gather(number, self._weights).cpu()
            encoded = self._lossless.encode(number, values)
            self._fragment[number] = version, self._frames(self._lossless, number, encoded, None)
        return self._fragment[number][1]

    def _encode(self, encoder: Encoder, number: int, taken: Tensor, base_version: int) -> Tensor:
        """Encode an outer step for those who have the weights before it; returns it as it is decoded."""
        encoded = encoder.encode(number, taken)
        encoder.settle(number, is_applied=True)
        for place, bucket in zip(self._layout.buckets(number), encoded, strict=True):
            encoder.codec.decode(bucket, taken[place])
        frames = self._frames(encoder, number, encoded, base_version)
        update = Update(base_version, self.versions[number], self._nbytes[number], frames)
        self._history[number].add(update)
        return taken

    def _frames(
        self, encoder: Encoder, number: int, encoded: Sequence[Tensor], base_version: int | None
    ) -> list[Frame]:
        version, codec = self.versions[number], encoder.codec
        return outer_frames(
            self._layout, number, encoded, codec, base_version=base_version, version=version
        )
