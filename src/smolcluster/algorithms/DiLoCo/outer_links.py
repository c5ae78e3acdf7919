"""The server's side of the weights θ, on one host or several: when they step, and along which changes.

A change comes bucket by bucket to where each belongs: see `server/store_links.py`. An outer step names the
changes, with what they count. In a synchronous beginning changes are gradients, whose mean takes one step of
the inner optimizer with all fragments. The other side is `store.py`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smolcluster.algorithms.context import ServerContext, check_codec
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.algorithms.DiLoCo.exchange import DeltaArrived, Layout
from smolcluster.algorithms.DiLoCo.fragments import cut
from smolcluster.algorithms.DiLoCo.ledger import Request
from smolcluster.algorithms.DiLoCo.outer import WHOLE, DelayedNesterov, OuterOptimizer, OuterStore
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import ConfigError
from smolcluster.server.store import Store, mean_of
from smolcluster.server.store_links import (
    NormsArrived,
    Pending,
    RemoteStore,
    StepsUndone,
    StoreLinks,
)
from smolcluster.training.buffers import BufferValues, mean_buffers
from smolcluster.training.optimizer import clip_factor
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


@dataclass
class Change:
    """What a worker was asked for, as it has arrived at all hosts; it waits for the others'.

    Attributes:
        values: the server's own part, (numel,) on the CPU.
        buffers: what was added to the model's.
        norm, weights_norm: of all of it, and of the weights that it is a change of.
        weight: how many times it counts in an outer step: its loss terms.
        num_samples: that it is of.
        share: its worker's part of what all workers bring, where it is applied by itself.
    """

    request: Request
    key: PartKey
    values: Tensor
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
        self._whole, self.layout = layout, layout.part(self.own_span)
        self._own = OuterStore(
            replica.params,
            self.layout,
            outer,
            codec_down,
            is_async=self._is_async,
            keeps_whole=True,
        )
        is_lossy = bool(self._own.residuals) and bool(self._stores)
        self._residual = torch.zeros(replica.num_params) if is_lossy else None
        """What all hosts owe, laid as the weights are; of this one as the run began."""
        self.version = 0
        """Outer steps that were taken."""
        self._means: dict[int, Pending[Tensor]] = {}
        """By fragment: the mean gradient that the next step of all takes, as far as hosts have it ready."""
        self._keeps_inner = False
        """Whether slices hold the state of the inner optimizer, which takes the run's first steps."""

    @property
    def versions(self) -> Sequence[int]:
        """Of each fragment: that of the last outer step that has changed it."""
        return self._own.versions

    @property
    def num_frames(self) -> int:
        """In which all fragments are sent from here."""
        return sum(map(len, self.layout.numbers))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What else a checkpoint holds: momentum, and what the codec owes to the next outer steps."""
        return {f"outer.{name}": each for name, each in self._outer.state.items()} | {
            f"{RESIDUAL}.{number}": feedback.committed
            for number, feedback in enumerate(self._own.residuals)
        }

    def resume(self, version: int) -> None:
        """Go on from a checkpoint, which has filled the `tensors`."""
        self.version = version
        self._own.resume([version] * len(self.versions))

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
        self._keeps_inner = begins_together
        if self._residual is not None:
            for fragment, feedback in zip(self._whole.fragments, self._own.residuals, strict=True):
                fragment.scatter(feedback.committed, self._residual)
        super().begin(version, on_undone, on_store_lost)

    # what slices hold

    def _held(self, store: RemoteStore, fragment: int) -> range:
        numbers = self._parts[self._stores.index(store)].numbers
        return numbers[fragment] if fragment < len(numbers) else range(0)

    def _contents(self, place: slice) -> dict[str, Tensor]:
        residual = {} if self._residual is None else {RESIDUAL: self._residual[place]}
        state = {name: values[place] for name, values in self._outer.vectors.items()}
        if self._keeps_inner:
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
            versions=tuple(self.versions),
            inner=self._optimizer_rule(place) if self._keeps_inner else None,
        )

    def _remember_copy(self, version: int) -> None:
        super()._remember_copy(version)
        if self._residual is not None:
            for number, feedback in enumerate(self._own.residuals):
                start = self.layout.fragments[number].numel
                gathered = self._whole.gather(number, self._residual)
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
            self._means[told.fragment].take(told)
        return is_there and told.key is not None

    def whole(
        self, request: Request, key: PartKey, part: DeltaArrived | NormsArrived
    ) -> Change | None:
        """Take a part of what was requested; returns all of it when that has arrived."""
        pending = self.collect(key, part, part.fragment)
        if pending is None or pending.own is None:
            return None
        del self._pending[key]
        number, own = part.fragment, pending.own
        return Change(
            request,
            key,
            own.values,
            own.buffers,
            math.hypot(*self.layout.norms(number, own.values), *pending.others()),
            math.hypot(*self._own.norms(number), *pending.others(1)),
        )

    def drop(self, change: Change) -> None:
        """A change that has arrived is not to be applied."""
        self._tell(self._holders(change.request.fragment), Drop(key=change.key))

    def forget_worker(self, instance: str) -> None:
        """Nobody waits any more for a worker's changes that have not arrived everywhere."""
        self._forget(each for each in self._pending if each.instance == instance)

    def _forget(self, keys: Iterable[PartKey]) -> None:
        for key in list(keys):
            self.forget(key)

    def step(self, number: int, changes: Sequence[Change]) -> None:
        """Step a fragment's weights along the mean of these changes, here and on all other hosts."""
        self._tell_outer_step(number, changes)
        with self._replica.meter("apply"):
            counted = [(each.weight, each.values) for each in changes]
            self._own.step(number, counted, self.version)
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
            self._take_means(changes)
        means = self._means
        if not all(map(self._is_whole, means.values())):
            return False
        self._means = {}
        own = {number: mean.own for number, mean in means.items() if mean.own is not None}
        norms = (
            norm
            for number, values in own.items()
            for norm in (*self.layout.norms(number, values), *means[number].others())
        )
        does_count = any(each.weight for of_fragment in changes for each in of_fragment)
        step = TakeStep(
            version=self.version + 1,
            parts=(),
            clip=clip_factor(math.hypot(*norms), clipping),
            learning_rate=learning_rate if does_count else None,
            bound=clipping.bound,
        )
        self._tell_to_step([store.node for store in self._stores], step)
        self.version += len(changes)
        with self._replica.meter("apply"):
            self._own.step_along(Store.of(self._replica, self.own_span), own, step)
            self._add_buffers(changes[0])
        return True

    def _add_buffers(self, changes: Sequence[Change]) -> None:
        self._replica.buffers.add(
            mean_buffers([(each.num_samples, each.buffers) for each in changes])
        )

    def _take_means(self, changes: Sequence[Sequence[Change]]) -> None:
        """Have all hosts take the mean of each fragment's gradients."""
        for number, of_fragment in enumerate(changes):
            if not of_fragment:
                continue
            if holders := self._holders(number):
                self._tell(holders, TakeMean(parts=_counted(of_fragment)))
            with self._replica.meter("apply"):
                mean = mean_of([(each.weight, each.values) for each in of_fragment])
            self._means[number] = Pending(number, mean)

    def apply(self, change: Change) -> None:
        """Change all weights by one worker's change, of weight `share`, as soon as it has come.

        Raises:
            TypeError: the outer optimizer cannot.
        """
        outer, share = self._outer, change.share
        moves_by = outer.count(share) if isinstance(outer, DelayedNesterov) else None
        self._tell_outer_step(
            WHOLE, [replace(change, weight=share)], one_by_one=True, moves_by=moves_by
        )
        with self._replica.meter("apply"):
            self._own.apply(change.key.worker, change.values, share, moves_by, self.version)
            buffers = change.buffers
            self._replica.buffers.add({each: added * share for each, added in buffers.items()})

    def _tell_outer_step(self, number: int, changes: Sequence[Change], **how: Any) -> None:
        """A fragment takes an outer step along these changes, on all hosts that hold something of it."""
        self._keeps_inner = False
        self.version += 1
        if holders := self._holders(number):
            step = TakeStep(version=self.version, parts=_counted(changes), **how)
            self._tell_to_step(holders, step)

    # weights

    def send_fragment(self, worker: str, number: int, base_version: int) -> list[Frame]:
        """What leads `worker` from its weights of a fragment to those of now; with the first one the buffers.

        Returns the server's own part; stores send theirs.
        """
        fragment = SendWeights(
            instance=worker,
            version=self.versions[number],
            fragment=number,
            base_version=base_version,
        )
        self._tell(self._holders(number), fragment)
        with self._replica.meter("encode"):
            frames = self._own.frames_for(worker, number, base_version)
        return [*(self._buffer_frames(self.version) if number == 0 else []), *frames]

    def send_whole(self, worker: str, version: int) -> list[Frame]:
        self.follow(worker)
        return super().send_whole(worker, version)

    def follow(self, worker: str) -> None:
        """A worker has all weights as they are here."""
        self._own.follow(worker)

    def leave(self, worker: str) -> None:
        """A worker has gone."""
        self.forget_worker(worker)
        self._own.leave(worker)
        self.worker_gone(worker)


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
