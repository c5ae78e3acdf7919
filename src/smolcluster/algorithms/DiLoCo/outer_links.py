"""The server's side of the weights θ, on one host or several: when they step, and along which changes.

A change comes bucket by bucket to where each belongs. A store tells the norms of what it gets; when the
server has its own part and all norms, it knows the norm of the whole, and decides. An outer step names the
changes, with what they count, in one order for all hosts. So any number of hosts gives the same weights, bit
for bit.
The other side is `outer_slice.py`.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smolcluster.algorithms.DiLoCo.exchange import DeltaArrived, Layout
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.algorithms.DiLoCo.outer_store import WHOLE, OuterStore
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import ConfigError, ProtocolError
from smolcluster.server.buffers import buffer_frames
from smolcluster.server.hosted_stores import num_steps_of, rule_of
from smolcluster.server.slices import place_of, read_norms
from smolcluster.server.store import Stores
from smolcluster.server.store_links import RemoteStore, StoreLinks
from smolcluster.server.weights import state_frames
from smolcluster.training.buffers import BufferValues, mean_buffers
from smolcluster.training.optimizer import bucket_norms, clip_factor
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    MAX_LAYERS,
    WEIGHTS,
    BucketNorm,
    CountedChange,
    DropChange,
    GradientNorms,
    Message,
    OuterRule,
    SendWeights,
    TakeGradients,
    TakeInnerStep,
    TakeOuterStep,
)

RESIDUAL = "residual"
"""The content of a slice that `codec_down` owes to its next outer steps."""


class ChangeKey(NamedTuple):
    """Which change: of which worker's process, for which request."""

    instance: str
    request: int


@dataclass(frozen=True)
class NormArrived(Event):
    """A store has a bucket of a change: its L2 norm, and that of the weights; NaN: not finite."""

    session_id: int
    key: ChangeKey
    fragment: int
    bucket: int
    norm: float
    weights_norm: float


@dataclass
class PendingChange:
    """What has arrived of a change: the server's own part, and the norms of the other buckets by number."""

    fragment: int
    own: DeltaArrived | None = None
    norms: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeChange:
    """A change that has arrived, at all hosts.

    Attributes:
        values: the server's own part, (numel,) on the CPU.
        buffers: what was added to the model's.
        norm, weights_norm: of all of it, and of the weights that it is a change of.
    """

    key: ChangeKey
    fragment: int
    values: Tensor
    buffers: BufferValues
    norm: float
    weights_norm: float


@dataclass(frozen=True)
class Change:
    """A change that an outer step takes: it counts `weight` times, and is of `num_samples`."""

    arrived: WholeChange
    weight: float
    num_samples: int


@dataclass(frozen=True)
class Listeners:
    """Who hears of steps that a lost store has taken in vain (see `StepsUndone`), and of its loss."""

    on_undone: Callable[[str, int, float], None]
    on_lost: Callable[[], None]


class AwaitedNorms:
    """What a store is to tell of the mean gradient of a step: its norms, fragment by fragment."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """`numbers`: of the fragments, in order; there is one at least."""
        self._left = deque(numbers)
        self.norms: dict[int, Sequence[float]] = {}
        self.is_whole = threading.Event()

    def take(self, number: int, norms: Sequence[float]) -> None:
        """In the reader's thread.

        Raises:
            ProtocolError: these are not what comes next.
        """
        if self._left.popleft() != number:
            raise ProtocolError(f"it told the norms of fragment {number} out of turn")
        self.norms[number] = norms
        if not self._left:
            self.is_whole.set()


class OuterLinks(StoreLinks):
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
        self.versions = [0] * len(layout.fragments)
        """Of each fragment: that of the last outer step that has changed it."""
        self._pending: dict[ChangeKey, PendingChange] = {}
        self._awaited: dict[str, deque[AwaitedNorms]] = {}
        """By store: what it was asked for and has not told, also of steps that came to nothing."""
        self._keeps_inner = False
        """Whether slices hold the state of the inner optimizer, which takes the run's first steps."""
        self._copied_steps = 0
        """How many steps that had taken when the slices were gathered last."""
        self._snapshot: tuple[int, list[Frame]] | None = None
        self._listeners: Listeners

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
        self.versions = [version] * len(self.versions)
        self._own.resume(self.versions)

    def begin(self, version: int, listeners: Listeners, *, begins_together: bool = False) -> None:
        """The replica is as the run begins, or goes on after so many batches.

        `begins_together`: steps of the inner optimizer come before the outer ones.
        """
        self._listeners, self._keeps_inner = listeners, begins_together
        if self._residual is not None:
            for fragment, feedback in zip(self._whole.fragments, self._own.residuals, strict=True):
                fragment.scatter(feedback.committed, self._residual)
        super()._remember_copy(version)
        self._copied_steps = num_steps_of(self._replica)

    # what slices hold

    def _contents(self, place: slice) -> dict[str, Tensor]:
        residual = {} if self._residual is None else {RESIDUAL: self._residual[place]}
        state = {name: values[place] for name, values in self._outer.vectors.items()}
        if self._keeps_inner:
            moments = self._replica.optimizer.moments
            state |= {name: values[place] for name, values in moments.items()}
        return {WEIGHTS: self._replica.params[place], **state, **residual}

    def _rule(self, place: slice) -> OuterRule:
        inner = rule_of(self._replica, place, self._copied_steps) if self._keeps_inner else None
        return OuterRule(
            learning_rate=self._outer.learning_rate,
            momentum=self._outer.momentum,
            is_async=self._is_async,
            codec_down=self._codec_down,
            layers=tuple(place.stop - place.start for _, place in self._replica.layers),
            num_fragments=len(self._whole.fragments),
            inner=inner,
        )

    def _remember_copy(self, version: int) -> None:
        super()._remember_copy(version)
        self._copied_steps = num_steps_of(self._replica)
        for store in self._stores:
            store.num_steps = 0
        if self._residual is not None:
            for number, feedback in enumerate(self._own.residuals):
                start = self.layout.fragments[number].numel
                gathered = self._whole.gather(number, self._residual)
                feedback.committed[start:] = gathered[start:]

    def _on_lost(self, store: RemoteStore) -> None:
        if store.num_steps:
            place = place_of(self._replica.buckets, store.span)
            share = (place.stop - place.start) / self._replica.num_params
            self._listeners.on_undone(store.node, store.num_steps, share)
            store.num_steps = 0
        self._forget(self._pending)
        self._awaited.pop(store.node, None)
        self._listeners.on_lost()

    def _hear(
        self, store: RemoteStore, session_id: int, message: Message, payload: memoryview
    ) -> Event | None:
        part = self._parts[self._stores.index(store)]
        numbers = part.numbers
        if isinstance(message, GradientNorms):
            self._hear_norms(store, message, payload, part)
            return None
        if not isinstance(message, BucketNorm):
            return MessageReceived(session_id, message)
        if message.fragment >= len(numbers) or message.bucket not in numbers[message.fragment]:
            raise ProtocolError(
                f"it has told of bucket {message.bucket} of fragment {message.fragment}, which it has not"
            )
        norms = (message.norm, message.weights_norm)
        return NormArrived(
            session_id,
            ChangeKey(message.instance, message.request),
            message.fragment,
            message.bucket,
            *(math.nan if norm is None else norm for norm in norms),
        )

    def _hear_norms(
        self, store: RemoteStore, told: GradientNorms, payload: memoryview, part: Layout
    ) -> None:
        awaited = self._awaited.get(store.node)
        if not awaited or told.fragment >= len(part.numbers):
            raise ProtocolError("it told norms of a gradient unasked")
        norms = read_norms(told.tensor, payload, len(part.numbers[told.fragment]))
        awaited[0].take(told.fragment, norms)
        if awaited[0].is_whole.is_set():
            awaited.popleft()

    # changes

    def whole(self, key: ChangeKey, part: DeltaArrived | NormArrived) -> WholeChange | None:
        """Take a part of a change; returns all of it when that has arrived."""
        pending = self._pending.setdefault(key, PendingChange(part.fragment))
        if isinstance(part, DeltaArrived):
            pending.own = part
        else:
            pending.norms[part.bucket] = part.norm, part.weights_norm
        number, own = part.fragment, pending.own
        own_buckets = self.layout.buckets(number)
        num_others = self._whole.num_buckets(number) - len(own_buckets)
        if own is None or len(pending.norms) < num_others:
            return None
        del self._pending[key]
        others = [pending.norms[bucket] for bucket in sorted(pending.norms)]
        norms = bucket_norms(own.values, own_buckets) if own_buckets else []
        return WholeChange(
            key,
            number,
            own.values,
            own.buffers,
            math.hypot(*norms, *(norm for norm, _ in others)),
            math.hypot(*self._own.norms(number), *(norm for _, norm in others)),
        )

    def hear(self, part: NormArrived) -> bool:
        """A store has a bucket; returns whether it has it still, and was not given its slice anew since."""
        if (store := self._of_session(part.session_id)) is None:
            return False
        store.heard_at = time.monotonic()
        return True

    def drop(self, change: WholeChange) -> None:
        """A change that has arrived is not to be applied."""
        self._tell(self._holders(change.fragment), _dropped(change.key))

    def drop_part(self, part: NormArrived) -> None:
        """Nobody waits for a change of which a part has come: its store drops it when it has all of it."""
        for store, held in zip(self._stores, self._parts, strict=True):
            if part.bucket == _last(held.numbers[part.fragment]):
                self._tell([store.node], _dropped(part.key))

    def forget(self, instance: str) -> None:
        """Nobody waits any more for a worker's changes that have not arrived everywhere.

        What is still on its way to a store is dropped when it comes: see `drop_part`.
        """
        self._forget(each for each in self._pending if each.instance == instance)

    def _forget(self, keys: Iterable[ChangeKey]) -> None:
        for key in list(keys):
            pending = self._pending.pop(key)
            for store, held in zip(self._stores, self._parts, strict=True):
                if _last(held.numbers[pending.fragment]) in pending.norms:
                    self._tell([store.node], _dropped(key))

    def step(self, number: int, changes: Sequence[Change]) -> None:
        """Step a fragment's weights along the mean of these changes, here and on all other hosts."""
        base_version = self._count_step(number)
        self._tell_to_step(number, base_version, changes)
        with self._replica.meter("apply"):
            self._own.step(
                number,
                [(each.weight, each.arrived.values) for each in changes],
                base_version=base_version,
                version=self.version,
            )
            buffers = [(each.num_samples, each.arrived.buffers) for each in changes]
            self._replica.buffers.add(mean_buffers(buffers))

    def step_together(
        self,
        changes: Sequence[Sequence[Change]],
        learning_rate: float,
        clipping: GradientClipping,
        check_stop: Callable[[], None] = lambda: None,
    ) -> bool:
        """Step all weights by the inner optimizer along a mean gradient, here and on all other hosts.

        `changes`: by fragment, the workers' gradients. A fragment without any stays as it is, and all do
        where nothing counts, as all gradients have overflowed. Nothing else is decided until all hosts have
        told the norms of what they hold of the mean; False: one is missing, and nothing has stepped.
        `check_stop` may raise.
        """
        if not self.is_ready:
            return False
        replica, stepped = self._replica, [number for number, each in enumerate(changes) if each]
        awaited = {store.node: self._ask_norms(store, stepped) for store in self._stores}
        for number in stepped:
            taken = TakeGradients(fragment=number, changes=_counted(changes[number]))
            self._tell(self._holders(number), taken)
        self._own.gradients.clear()
        norms = []
        with replica.meter("apply"):
            for number in stepped:
                counted = [(each.weight, each.arrived.values) for each in changes[number]]
                norms.append(self._own.take_gradients(number, counted))
        for store in self._stores:
            told = awaited[store.node]
            if told and not self._wait_for(
                store, told.is_whole, check_stop, "its gradient's norms"
            ):
                return False
            for number, own in zip(stepped, norms, strict=True):
                own.extend(told.norms.get(number, ()) if told else ())
        norm = math.hypot(*(each for of_fragment in norms for each in of_fragment))
        does_count = any(each.weight for of_fragment in changes for each in of_fragment)
        step = TakeInnerStep(
            version=self.version + 1,
            base_versions=tuple(self.versions),
            clip=clip_factor(norm, clipping),
            learning_rate=learning_rate if does_count else None,
            bound=clipping.bound,
        )
        self._tell([store.node for store in self._stores], step)
        for store in self._stores:
            store.num_steps += 1
        for number in range(len(changes)):
            self._count_step(number)
        with replica.meter("apply"):
            [inner] = Stores(replica, span=self.own_span).stores
            self._own.step_together(inner, step)
            buffers = [(each.num_samples, each.arrived.buffers) for each in changes[0]]
            replica.buffers.add(mean_buffers(buffers))
        return True

    def _ask_norms(self, store: RemoteStore, stepped: Sequence[int]) -> AwaitedNorms | None:
        """What a store will tell of these fragments' mean gradients; None: it holds nothing of them."""
        held = self._parts[self._stores.index(store)].numbers
        numbers = [number for number in stepped if held[number]]
        if not numbers:
            return None
        awaited = AwaitedNorms(numbers)
        self._awaited.setdefault(store.node, deque()).append(awaited)
        return awaited

    def apply(self, change: Change, share: float) -> None:
        """Change all weights by one worker's change, of weight `share`, as soon as it has come.

        Raises:
            TypeError: the outer optimizer cannot.
        """
        outer = self._outer
        moves_by = outer.count(share) if isinstance(outer, DelayedNesterov) else None
        base_version = self._count_step(WHOLE)
        self._tell_to_step(WHOLE, base_version, [change], share, moves_by)
        with self._replica.meter("apply"):
            worker = change.arrived.key.instance
            self._own.apply(worker, change.arrived.values, share, moves_by, self.version)
            buffers = change.arrived.buffers
            self._replica.buffers.add({each: added * share for each, added in buffers.items()})

    def _count_step(self, number: int) -> int:
        """A fragment takes a step; returns its version before that."""
        base_version = self.versions[number]
        self.version += 1
        self.versions[number] = self.version
        return base_version

    def _tell_to_step(
        self,
        number: int,
        base_version: int,
        changes: Sequence[Change],
        share: float | None = None,
        moves_by: float | None = None,
    ) -> None:
        self._keeps_inner = False
        if not (holders := self._holders(number)):
            return
        for store in self._stores:
            if store.node in holders and store.listens is not None:
                store.num_steps += 1
        step = TakeOuterStep(
            fragment=number,
            base_version=base_version,
            version=self.version,
            changes=_counted(changes),
            share=share,
            moves_by=moves_by,
        )
        self._tell(holders, step)

    def _holders(self, number: int) -> Collection[str]:
        """The other hosts that hold something of a fragment."""
        pairs = zip(self._stores, self._parts, strict=True)
        return [store.node for store, part in pairs if part.numbers[number]]

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
        return [*(self._buffer_frames() if number == 0 else []), *frames]

    def send_whole(self, worker: str, incarnation: str) -> list[Frame]:
        """All weights as they are, for a worker that has none: returns the server's part of them."""
        every = [store.node for store in self._stores]
        self._tell(every, SendWeights(instance=worker, version=self.version))
        self.follow(worker)
        if self._snapshot is None or self._snapshot[0] != self.version:
            replica = self._replica
            with replica.meter("encode"):
                weights = replica.snapshot()
                frames = state_frames(
                    incarnation, self.version, weights, replica.buckets, self.own_span
                )
            self._snapshot = self.version, [*self._buffer_frames(), *frames]
        return self._snapshot[1]

    def follow(self, worker: str) -> None:
        """A worker has all weights as they are here."""
        self._own.follow(worker)

    def leave(self, worker: str) -> None:
        """A worker has gone."""
        self.forget(worker)
        self._own.leave(worker)
        self.worker_gone(worker)

    def _buffer_frames(self) -> list[Frame]:
        replica = self._replica
        values = replica.buffers.values()
        return buffer_frames(values, replica.bucket_bytes, version=self.version)


def _counted(changes: Sequence[Change]) -> tuple[CountedChange, ...]:
    return tuple(
        CountedChange(
            instance=each.arrived.key.instance,
            request=each.arrived.key.request,
            weight=each.weight,
        )
        for each in changes
    )


def _dropped(key: ChangeKey) -> DropChange:
    return DropChange(instance=key.instance, request=key.request)


def _last(numbers: range) -> int | None:
    return numbers[-1] if numbers else None
