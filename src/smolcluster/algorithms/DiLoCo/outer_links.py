"""The weights θ, on one host or several: what each has of them, and when they step, along which changes.

A change comes bucket by bucket to where each belongs: see `server/store_links.py`. Of each fragment a slice
has what lies in its buckets, which may be nothing. An outer step names the changes, with what they count. In
a synchronous beginning changes are gradients, whose mean takes one step of the inner optimizer with all
fragments.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor

from smolcluster.algorithms.context import ServerContext, check_codec
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.algorithms.DiLoCo.exchange import DeltaArrived, Encoder, Layout, outer_frames
from smolcluster.algorithms.DiLoCo.fragments import cut
from smolcluster.algorithms.DiLoCo.ledger import Request
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import lossless_for
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import ConfigError, ProtocolError
from smolcluster.server.slices import place_of
from smolcluster.server.store import Counted, HeldSlice, Store, mean_of
from smolcluster.server.store_links import (
    NormsArrived,
    Pending,
    RemoteStore,
    StepsUndone,
    StoreLinks,
)
from smolcluster.training.buffers import BufferValues, mean_buffers
from smolcluster.training.optimizer import bucket_norms, clip_factor
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import (
    MAX_CHANGES,
    MAX_LAYERS,
    WEIGHTS,
    CountedPart,
    Drop,
    OuterRule,
    PartKey,
    SendWeights,
    TakeMean,
    TakeStep,
)

RESIDUAL = "residual"
"""The content of a slice that `codec_down` owes to its next outer steps."""
WHOLE = 0
"""The one fragment, where all weights are exchanged at once."""


class OuterSlice(HeldSlice):
    """A host's part of the run's weights θ: takes outer steps, and says what workers are sent of them.

    The part is in `weights`, which change in place, with the outer optimizer's state.
    """

    def __init__(
        self,
        weights: Tensor,
        layout: Layout,
        outer: OuterOptimizer,
        codec_down: str | None,
        *,
        buckets: Sequence[slice],
        span: range,
        incarnation: str,
        inner: Store | None = None,
        residual: Tensor | None = None,
        is_async: bool = False,
        keeps_whole: bool = False,
    ) -> None:
        """Hold what `layout` says of the weights, as places in `weights` and in the optimizer's state.

        Args:
            codec_down: of the outer steps that workers are sent; None: they are sent weights.
            buckets, span, incarnation: see `HeldSlice`.
            inner: steps the same weights along gradients, before the first outer step; None: none is taken.
            residual: where what the codec owes lies as the weights do, whenever it is asked for.
            is_async: some time the workers' changes are applied one by one.
            keeps_whole: what the codec owes has room for whole fragments, of which these are the beginnings.
        """
        super().__init__(buckets, span, incarnation)
        self._weights = weights
        self.layout = layout
        self._outer = outer
        self.inner, self._residual = inner, residual
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
        self._newest: dict[int, tuple[int, list[Frame]]] = {}
        """Of each fragment: its last outer step, encoded, and the version that it leads on from."""
        self._fragment: dict[int, tuple[int, list[Frame]]] = {}
        """Fragments as they are, by number: their version, and frames that all share."""
        self._norms: dict[int, tuple[int, list[float]]] = {}
        """Of fragments, by number: their version, and the L2 norms of its weights by bucket."""
        self._theirs: dict[str, Tensor] = {}
        """Where changes are applied one by one: the weights that each worker has, on the CPU."""

    @property
    def residuals(self) -> Sequence[ErrorFeedback]:
        """By fragment: what a lossy codec owes to its next outer step."""
        return self._steps.feedbacks if self._steps else []

    def resume(self, versions: Sequence[int]) -> None:
        """The weights, the optimizer's state and what the codec owes have been filled."""
        self.versions = list(versions)
        for number, feedback in enumerate(self.residuals):
            if self._residual is not None:
                feedback.committed.copy_(self.layout.gather(number, self._residual))
            feedback.resume(self.layout.buckets(number))

    def contents(self) -> dict[str, Tensor]:
        moments = {} if self.inner is None else self.inner.optimizer.moments
        contents = {WEIGHTS: self._weights, **self._outer.vectors, **moments}
        if self._residual is not None:
            for fragment, feedback in zip(self.layout.fragments, self.residuals, strict=True):
                fragment.scatter(feedback.committed, self._residual)
            contents[RESIDUAL] = self._residual
        return contents

    @property
    def num_frames(self) -> int:
        """Fragments are sent one by one, in a frame for each of their buckets."""
        return max(len(self.span), sum(map(len, self.layout.numbers)))

    def held(self, fragment: int) -> range:
        return self.layout.numbers[fragment]

    def norms(self, fragment: int, bucket: int, values: Tensor) -> Sequence[Sequence[float]]:
        """See `HeldSlice`; the second row are those of the weights."""
        if not values.numel():
            return ()
        places, first = self.layout.buckets(fragment), bucket - self.held(fragment).start
        start = places[first].start
        stop = start + values.numel()
        come = takewhile(lambda place: place.stop <= stop, islice(places, first, None))
        norms = bucket_norms(
            values, [slice(each.start - start, each.stop - start) for each in come]
        )
        return norms, self._weights_norms(fragment)[first : first + len(norms)]

    def _step_parts(
        self, step: TakeStep, fragment: int, keys: Sequence[PartKey], parts: Sequence[Counted]
    ) -> None:
        """Step a fragment's weights along the mean of what workers have changed: Σ n_i Δ_i / Σ n_i.

        With a codec for the way back, θ takes the very step that workers decode.
        """
        self.inner = None
        if step.one_by_one:
            self._apply(step, keys, parts)
            return
        places = self.layout.fragments[fragment]
        theta = self.layout.gather(fragment, self._weights)
        before = theta.clone() if self._steps else None
        self._outer.step(theta, mean_of(parts).to(theta.device), places)
        places.scatter(theta, self._weights)
        self._follow_step(fragment, before, step.version)

    def _step_means(self, step: TakeStep, means: Mapping[int, Tensor]) -> None:
        """Step all weights by the workers' optimizer along mean gradients (numel,), by fragment.

        A fragment without a gradient stays as it is.
        """
        inner = self.inner
        if inner is None:
            raise ProtocolError("it took a step of an inner optimizer that is not here")
        before = {
            number: self.layout.gather(number, self._weights)
            for number in range(len(self.versions))
            if self._steps or number not in means
        }
        if step.learning_rate is not None:
            buffer = inner.buffer.zero_()
            for number, mean in means.items():
                self.layout.fragments[number].scatter(mean.to(buffer.device), buffer)
            inner.take(buffer, owned=True)
            inner.step(step.clip, step.learning_rate, step.bound)
        for number in range(len(self.versions)):
            if number not in means:
                self.layout.fragments[number].scatter(before[number], self._weights)
            self._follow_step(number, before.get(number), step.version + number)

    def _follow_step(self, number: int, before: Tensor | None, version: int) -> None:
        """A fragment's weights have taken a step from `before` (numel,): it can be sent from now on.

        Without a lossy codec `before` may be None, for the weights are sent as they are.
        """
        base_version, self.versions[number] = self.versions[number], version
        if self._steps is None or before is None:
            return
        taken = before - self.layout.gather(number, self._weights)
        encoded, decoded = self._steps.encode_and_decode(number, taken.cpu())
        self._steps.settle(number, is_applied=True)
        self.layout.fragments[number].scatter(before - decoded.to(before.device), self._weights)
        self._newest[number] = (
            base_version,
            self._frames(self._steps, number, encoded, base_version),
        )

    def _apply(self, step: TakeStep, keys: Sequence[PartKey], parts: Sequence[Counted]) -> None:
        """Change all weights by one worker's change (n,); see `DelayedNesterov.apply`."""
        if len(parts) != 1 or not isinstance(self._outer, DelayedNesterov):
            raise ProtocolError("it applied changes one by one that are taken together")
        [(share, change)] = parts
        place = slice(0, self.layout.fragments[WHOLE].numel)
        theta = self._weights[place]
        theirs = self._theirs.get(keys[0].worker)  # None: it has gone since it sent its change
        self._outer.apply(
            theta,
            change.to(theta.device),
            share,
            step.moves_by,
            place,
            start=None if theirs is None else theirs.to(theta.device),
            blocks=self.layout.buckets(WHOLE),
        )
        self.versions[WHOLE] = step.version
        self._one_by_one = True

    def _weights_norms(self, number: int) -> list[float]:
        """L2 norms of a fragment's weights, by bucket."""
        version, norms = self._norms.get(number, (None, []))
        if version != self.versions[number]:
            values = self.layout.gather(number, self._weights)
            norms = self.layout.norms(number, values)
            self._norms[number] = self.versions[number], norms
        return norms

    def follow(self, worker: str) -> None:
        """`worker` has the weights as they are."""
        if self._is_async:
            self._theirs[worker] = self.layout.gather(WHOLE, self._weights).cpu()

    def leave(self, worker: str) -> None:
        self._theirs.pop(worker, None)

    def frames_for(self, wanted: SendWeights) -> Sequence[Frame]:
        if wanted.fragment is None:
            self.follow(wanted.instance)
        return super().frames_for(wanted)

    def _fragment_frames(self, wanted: SendWeights, number: int) -> Sequence[Frame]:
        if number >= len(self.versions):
            raise ProtocolError(f"it spoke of fragment {number}, which does not exist")
        worker, base_version = wanted.instance, wanted.base_version
        if self._one_by_one and self._steps is not None:
            return self._own_frames(self._steps, worker, base_version)
        self.follow(worker)
        followed, frames = self._newest.get(number, (None, []))
        return frames if followed == base_version else self._whole_fragment(number)

    def _own_frames(self, encoder: Encoder, worker: str, base_version: int) -> list[Frame]:
        """The way from what `worker` has to the weights as they are.

        What the codec loses of it is a part of the next way, as it is that from what the worker has then.
        """
        theirs = self._theirs[worker]
        way = theirs - self.layout.gather(WHOLE, self._weights).cpu()
        encoded, decoded = encoder.encode_and_decode(WHOLE, way, counts=False)
        theirs.sub_(decoded)
        return self._frames(encoder, WHOLE, encoded, base_version)

    def _whole_fragment(self, number: int) -> list[Frame]:
        version = self.versions[number]
        if self._fragment.get(number, (None,))[0] != version:
            values = self.layout.gather(number, self._weights).cpu()
            encoded = self._lossless.encode(number, values)
            self._fragment[number] = version, self._frames(self._lossless, number, encoded, None)
        return self._fragment[number][1]

    def _frames(
        self, encoder: Encoder, number: int, encoded: Sequence[Tensor], base_version: int | None
    ) -> list[Frame]:
        version, codec = self.versions[number], encoder.codec
        return outer_frames(
            self.layout, number, encoded, codec, base_version=base_version, version=version
        )


@dataclass
class Change:
    """What a worker was asked for, as it has arrived at all hosts; it waits for the others'.

    Attributes:
        buffers: what was added to the model's.
        norm, weights_norm: of all of it, and of the weights that it is a change of.
        weight: how many times it counts in an outer step: its loss terms.
        num_samples: that it is of.
        share: its worker's part of what all workers bring, where it is applied by itself.
    """

    request: Request
    key: PartKey
    buffers: BufferValues
    norm: float
    weights_norm: float
    weight: float = 0.0
    num_samples: int = 0
    share: float = 0.0


class OuterLinks(StoreLinks[DeltaArrived]):
    """θ on all hosts, with the outer optimizer's state. Only the deciding thread calls it.

    The replica holds all weights, and `outer` all state; what lies elsewhere is in them as it was gathered
    last.
    """

    own: OuterSlice

    def __init__(
        self,
        replica: Replica,
        nodes: Sequence[str],
        *,
        outer: OuterOptimizer,
        layout: Layout,
        codec_down: str | None,
        **links: Any,
    ) -> None:
        """`layout`: of the whole model; `codec_down`: of outer steps; `links`: see `StoreLinks`.

        Raises:
            ConfigError: the model has more tensors than a store can be told of.
        """
        super().__init__(replica, nodes, **links)
        if self._stores and len(replica.layers) > MAX_LAYERS:
            raise ConfigError(
                f"servers lists several, but the model has {len(replica.layers):,} trainable tensors, more "
                f"than the {MAX_LAYERS:,} that stores are told of; set servers to null"
            )
        self._outer, self._codec_down = outer, codec_down
        self._is_async = isinstance(outer, DelayedNesterov)
        self._parts = [layout.part(store.span) for store in self._stores]
        """What each of the other hosts holds."""
        self._layout = layout
        self.own = OuterSlice(
            replica.params[place_of(replica.buckets, self.own_span)],
            layout.part(self.own_span),
            outer,
            codec_down,
            buckets=replica.buckets,
            span=self.own_span,
            incarnation=self._incarnation,
            is_async=self._is_async,
            keeps_whole=True,
        )
        is_lossy = bool(self.own.residuals) and bool(self._stores)
        self._residual = torch.zeros(replica.num_params) if is_lossy else None
        """What all hosts owe, laid as the weights are; of this one as the run began."""
        self.version = 0
        """Outer steps that were taken."""
        self._means: dict[int, Pending[DeltaArrived]] = {}
        """By fragment: norms of the mean gradient that the next step takes, as far as they are told."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What else a checkpoint holds: momentum, and what the codec owes to the next outer steps."""
        return {f"outer.{name}": each for name, each in self._outer.state.items()} | {
            f"{RESIDUAL}.{number}": feedback.committed
            for number, feedback in enumerate(self.own.residuals)
        }

    def resume(self, version: int) -> None:
        """Go on from a checkpoint, which has filled the `tensors`."""
        self.version = version
        self.own.resume([version] * len(self.own.versions))

    def begin(
        self,
        version: int,
        on_undone: StepsUndone,
        on_store_lost: Callable[[], None] = lambda: None,
        *,
        begins_together: bool = False,
    ) -> None:
        """The replica is as the run begins, or goes on after so many batches.

        `begins_together`: steps of the inner optimizer come before the outer ones.
        """
        self.own.inner = Store.of(self._replica, self.own_span) if begins_together else None
        if self._residual is not None:
            for fragment, feedback in zip(self._layout.fragments, self.own.residuals, strict=True):
                fragment.scatter(feedback.committed, self._residual)
        super().begin(version, on_undone, on_store_lost)

    # what slices hold

    def _held(self, store: RemoteStore, fragment: int) -> range:
        numbers = self._parts[self._stores.index(store)].numbers
        return numbers[fragment] if fragment < len(numbers) else range(0)

    def _contents(self, place: slice) -> dict[str, Tensor]:
        residual = {} if self._residual is None else {RESIDUAL: self._residual[place]}
        state = {name: values[place] for name, values in self._outer.vectors.items()}
        if self.own.inner is not None:
            moments = self._replica.optimizer.moments
            state |= {name: values[place] for name, values in moments.items()}
        return {WEIGHTS: self._replica.params[place], **state, **residual}

    def _rule(self, place: slice) -> OuterRule:
        return OuterRule(
            learning_rate=self._outer.learning_rate,
            momentum=self._outer.momentum,
            is_async=self._is_async,
            codec_down=self._codec_down,
            layers=tuple(place.stop - place.start for _, place in self._replica.layers),
            versions=tuple(self.own.versions),
            inner=None if self.own.inner is None else self._optimizer_rule(place),
        )

    def _remember_copy(self, version: int) -> None:
        super()._remember_copy(version)
        if self._residual is not None:
            for number, feedback in enumerate(self.own.residuals):
                start = self.own.layout.fragments[number].numel
                gathered = self._layout.gather(number, self._residual)
                feedback.committed[start:] = gathered[start:]

    def _on_lost(self, store: RemoteStore) -> None:
        self._forget(self._pending)
        self._means.clear()
        super()._on_lost(store)

    # changes

    def hear(self, told: NormsArrived) -> bool:
        """See `StoreLinks.hear`; also whether it concerns a change, and no mean."""
        is_there = super().hear(told)
        if told.key is None and is_there and told.fragment in self._means:
            self._means[told.fragment].take(told.first, told.norms)
        return is_there and told.key is not None

    def whole(
        self, request: Request, key: PartKey, part: DeltaArrived | NormsArrived
    ) -> Change | None:
        """Take a part of what was requested; returns all of it when that has arrived."""
        own = self.take(key, part) if isinstance(part, DeltaArrived) else self.collect(key, part)
        if own is None:
            return None
        pending = self._pending.pop(key)
        return Change(request, key, own.buffers, pending.norm(), pending.norm(row=1))

    def drop(self, change: Change) -> None:
        """A change that has arrived is not to be applied."""
        self._tell(Drop(key=change.key), change.request.fragment)
        self.own.drop(change.key)

    def forget_worker(self, instance: str) -> None:
        """Nobody waits any more for a worker's changes that have not arrived everywhere."""
        self._forget(each for each in self._pending if each.instance == instance)

    def _forget(self, keys: Iterable[PartKey]) -> None:
        for key in list(keys):
            self.forget(key)

    def step(self, number: int, changes: Sequence[Change]) -> None:
        """Step a fragment's weights along the mean of these changes, on all hosts."""
        self._outer_step(number, changes)
        self._add_buffers(changes)

    def step_together(
        self,
        changes: Sequence[Sequence[Change]],
        learning_rate: float,
        clipping: GradientClipping,
    ) -> bool:
        """Step all weights by the inner optimizer along a mean gradient, here and on all other hosts.

        `changes`: by fragment, the workers' gradients. A fragment without any stays as it is, and all do
        where nothing counts, as all gradients have overflowed. False: hosts have still to tell the norms of
        what they hold of the mean, or one is missing; call it again with the same gradients.
        """
        if not self._means:
            if not self.is_ready:
                return False
            self._prepare_means(changes)
        if not all(map(self._has_all_norms, self._means.values())):
            return False
        norms = (norm for each in self._means.values() for norm in each.row(0))
        self._means = {}
        does_count = any(each.weight for of_fragment in changes for each in of_fragment)
        step = TakeStep(
            version=self.version + 1,
            parts=(),
            clip=clip_factor(math.hypot(*norms), clipping),
            learning_rate=learning_rate if does_count else None,
            bound=clipping.bound,
        )
        self.version += len(changes)
        self._step(step)
        self._add_buffers(changes[0])
        return True

    def _add_buffers(self, changes: Sequence[Change]) -> None:
        added = mean_buffers([(each.num_samples, each.buffers) for each in changes])
        self._replica.buffers.add(added)

    def _prepare_means(self, changes: Sequence[Sequence[Change]]) -> None:
        """Have all hosts take the mean of each fragment's gradients."""
        for number, of_fragment in enumerate(changes):
            if not of_fragment:
                continue
            wanted = TakeMean(parts=_counted(of_fragment))
            mean = self._means[number] = Pending(number)
            self._tell(wanted, number)
            with self._replica.meter("apply"):
                mean.take(self.own.held(number).start, self.own.prepare_mean(wanted))

    def apply(self, change: Change) -> None:
        """Change all weights by one worker's change, of weight `share`, as soon as it has come."""
        outer, share = self._outer, change.share
        moves_by = outer.count(share) if isinstance(outer, DelayedNesterov) else None
        self._outer_step(WHOLE, [replace(change, weight=share)], one_by_one=True, moves_by=moves_by)
        buffers = change.buffers
        self._replica.buffers.add({each: added * share for each, added in buffers.items()})

    def _outer_step(self, number: int, changes: Sequence[Change], **how: Any) -> None:
        """A fragment takes an outer step along these changes, on all hosts that hold something of it."""
        self.version += 1
        self._step(TakeStep(version=self.version, parts=_counted(changes), **how), number)

    # weights

    def send_fragment(self, worker: str, number: int, base_version: int) -> list[Frame]:
        """What leads `worker` from its weights of a fragment to those of now; with the first one the buffers.

        Returns the server's own part; stores send theirs.
        """
        wanted = SendWeights(
            instance=worker,
            version=self.own.versions[number],
            fragment=number,
            base_version=base_version,
        )
        self._tell(wanted, number)
        with self._replica.meter("encode"):
            frames = self.own.frames_for(wanted)
        return [*(self._buffer_frames(self.version) if number == 0 else []), *frames]


def _counted(changes: Sequence[Change]) -> tuple[CountedPart, ...]:
    return tuple(CountedPart(key=each.key, weight=each.weight) for each in changes)


def new_stores(context: ServerContext, outer: OuterOptimizer, num_fragments: int) -> OuterLinks:
    """Where the weights lie: here, and on the other hosts of `servers`.

    Raises:
        ConfigError: there are several, and this run needs all weights in one place, or has more workers
            than stores can be told of; or `codec_down` cannot hold the weights.
    """
    cluster, replica = context.settings.cluster, context.training.replica
    cluster.check_average(replica.ema_decay)
    if len(cluster.store_nodes) > 1 and cluster.num_workers > MAX_CHANGES:
        raise ConfigError(
            f"servers lists several, but num_workers is {cluster.num_workers}, more than the "
            f"{MAX_CHANGES} whose changes stores add up; set servers to null"
        )
    layout = Layout.of(replica, cut(replica.layers, num_fragments))
    codec_down = context.run.of(DiLoCoConfig).codec_down
    if codec_down is not None:
        check_codec("codec_down", codec_down, replica.params.dtype)
    return context.store_links(
        partial(OuterLinks, outer=outer, layout=layout, codec_down=codec_down)
    )
