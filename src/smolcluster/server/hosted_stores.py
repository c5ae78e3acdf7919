"""The coordinator's side of hosts that hold weights: what has arrived there, and when they step along it.

A worker sends each host its part of what it has pushed. Each host tells the norms of what it gets; when the
server has its own part and all norms it knows the norm of the whole and decides: all hosts take one step
along it, or drop it. What is said to them is in one order for all. So any number of hosts makes the same of
the same parts, bit for bit. How a slice steps is its rule's matter; `stepping_slice.py` is the other side.
The replica holds all weights and state; what lies elsewhere is in it as it was when it was gathered last.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from smolcluster.server.buffers import buffer_frames
from smolcluster.server.push import Pushed
from smolcluster.server.slices import place_of, read_norms
from smolcluster.server.store import Store, Stores, state_of
from smolcluster.server.store_links import RemoteStore, StoreLinks
from smolcluster.server.weights import state_frames
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Arrived,
    CountedPart,
    Drop,
    Message,
    PartKey,
    SendWeights,
    SliceRule,
    TakeStep,
)

Own = TypeVar("Own")
StepsUndone = Callable[[str, int, float], None]
"""Called with a node, how many steps its store had taken, and the share of the weights in its slice."""


@dataclass(frozen=True)
class NormsArrived(Event):
    """A store has so many buckets of a fragment's part, from `first` on.

    `norms` are rows of one each: the L2 norms of the part, and perhaps of the weights. `key` None: of the
    mean that was wanted.
    """

    session_id: int
    key: PartKey | None
    fragment: int
    first: int
    norms: Sequence[Sequence[float]]

    @property
    def last(self) -> int:
        return self.first + len(self.norms[0]) - 1


@dataclass
class Pending(Generic[Own]):
    """What has arrived of a fragment: the server's own part, and by bucket the norms of the others."""

    fragment: int = 0
    own: Own | None = None
    norms: dict[int, Sequence[float]] = field(default_factory=dict)

    def take(self, told: NormsArrived) -> None:
        for number, norms in enumerate(zip(*told.norms, strict=True), told.first):
            self.norms[number] = norms

    def others(self, row: int = 0) -> list[float]:
        """Norms elsewhere, in the order of the buckets; row 1 are those of the weights."""
        return [self.norms[bucket][row] for bucket in sorted(self.norms)]


class HostLinks(StoreLinks, Generic[Own]):
    """The hosts of a run's weights, each of which steps its slice. Only the deciding thread calls it.

    `Own` is what comes to this process of a part. What is exchanged at once is a fragment, of which each host
    holds some buckets or none; the only one are all weights, unless a subclass says otherwise.
    """

    def __init__(self, replica: Replica, nodes: Sequence[str], **links: Any) -> None:
        """`links`: see `StoreLinks`."""
        super().__init__(replica, nodes, **links)
        self._pending: dict[PartKey, Pending[Own]] = {}
        self._copied_steps = 0
        """How many steps the optimizer had taken when the slices were gathered last."""
        self.snapshot: tuple[int, list[Frame]] | None = None
        """A version, and frames of the server's part of the weights then."""
        self._on_undone: StepsUndone

    def begin(self, version: int, on_undone: StepsUndone) -> None:
        """The replica is as the run begins, or goes on from a checkpoint of `version`.

        `on_undone` hears of steps that a lost store had taken and its slice has not.
        """
        self._on_undone = on_undone
        self._remember_copy(version)

    # what slices hold

    def _held(self, store: RemoteStore, _fragment: int) -> range:
        """The numbers of a fragment's buckets that a store holds."""
        return store.span

    def _holders(self, fragment: int) -> Collection[str]:
        """The other hosts that hold something of a fragment."""
        return [store.node for store in self._stores if self._held(store, fragment)]

    def _optimizer_rule(self, place: slice) -> SliceRule:
        """How the replica's optimizer steps a slice that is elsewhere.

        Raises:
            ConfigError: it needs all weights in one place.
        """
        part = self._replica.optimizer.part(place)
        assert isinstance(part, FlatOptimizer)  # noqa: S101 - others have no parts
        rule = part.rule
        return SliceRule(
            optimizer=rule.name,
            optimizer_args=dict(rule.arguments),
            weight_decay=rule.weight_decay,
            num_decayed=rule.num_decayed,
            num_steps=self._copied_steps,
        )

    def _remember_copy(self, version: int) -> None:
        super()._remember_copy(version)
        for store in self._stores:
            store.num_steps = 0
        state = self._replica.optimizer.state
        self._copied_steps = int(state[STEP_COUNT]) if state else 0

    def _on_lost(self, store: RemoteStore) -> None:
        if store.num_steps:
            place = place_of(self._replica.buckets, store.span)
            share = (place.stop - place.start) / self._replica.num_params
            self._on_undone(store.node, store.num_steps, share)
            store.num_steps = 0
        for pending in self._pending.values():
            for bucket in self._held(store, pending.fragment):
                pending.norms.pop(bucket, None)

    # parts

    def _hear(
        self, store: RemoteStore, session_id: int, message: Message, payload: memoryview
    ) -> Event | None:
        if not isinstance(message, Arrived):
            return MessageReceived(session_id, message)
        norms = read_norms(message, payload, self._held(store, message.fragment))
        return NormsArrived(session_id, message.key, message.fragment, message.bucket, norms)

    def hear(self, told: NormsArrived) -> bool:
        """A store has buckets; returns whether it has them still, and was not given its slice anew since."""
        if (store := self._of_session(told.session_id)) is None:
            return False
        store.heard_at = time.monotonic()
        return True

    def collect(
        self, key: PartKey, part: Own | NormsArrived, fragment: int = 0
    ) -> Pending[Own] | None:
        """Take what is known of a fragment's part; returns all when it has arrived everywhere."""
        pending = self._pending.setdefault(key, Pending(fragment))
        if isinstance(part, NormsArrived):
            pending.take(part)
        else:
            pending.own = part
        return pending if pending.own is not None and self._is_whole(pending) else None

    def _is_whole(self, pending: Pending[Any]) -> bool:
        num_elsewhere = sum(len(self._held(store, pending.fragment)) for store in self._stores)
        return len(pending.norms) == num_elsewhere

    def drop_part(self, told: NormsArrived) -> None:
        """Nobody waits for a part that a store has told of: it drops it when it has all of its own."""
        store = self._of_session(told.session_id)
        if store and told.key and told.last == self._held(store, told.fragment)[-1]:
            self._tell([store.node], Drop(key=told.key))

    def forget(self, key: PartKey) -> Own | None:
        """A part is not wanted any more; returns the server's own of it.

        What is still on its way to a store is dropped when it comes: see `drop_part`.
        """
        pending = self._pending.pop(key, Pending[Own]())
        for store in self._stores:
            held = self._held(store, pending.fragment)
            if held and held[-1] in pending.norms:
                self._tell([store.node], Drop(key=key))
        return pending.own

    # steps

    def _tell_to_step(self, nodes: Collection[str], step: TakeStep) -> None:
        for store in self._stores:
            if store.node in nodes and store.listens is not None:
                store.num_steps += 1
        self._tell(nodes, step)

    def send_whole(self, worker: str, version: int) -> list[Frame]:
        """Let stores send a worker all weights, which are of `version`; returns the server's part of them.

        Raises:
            NonFiniteLoss: they are ruined.
        """
        every = [store.node for store in self._stores]
        self._tell(every, SendWeights(instance=worker, version=version))
        if self.snapshot is None or self.snapshot[0] != version:  # all share one copy
            replica = self._replica
            replica.check_weights(f"after step {version}")
            with replica.meter("encode"):
                frames = state_frames(
                    self._incarnation, version, replica.snapshot(), replica.buckets, self.own_span
                )
                self.snapshot = version, [*self._buffer_frames(version), *frames]
        return self.snapshot[1]

    def _buffer_frames(self, version: int) -> list[Frame]:
        replica = self._replica
        return buffer_frames(replica.buffers.values(), replica.bucket_bytes, version=version)


class HostedStores(HostLinks[Pushed]):
    """The stores of a run whose slices step by the run's optimizer, with one push at a time."""

    def __init__(
        self, replica: Replica, nodes: Sequence[str], *, num_own: int = 1, **links: Any
    ) -> None:
        """`num_own` stores hold the slice of this process; `links`: see `StoreLinks`.

        Raises:
            ConfigError: the replica's optimizer needs all weights in one place.
        """
        super().__init__(replica, nodes, **links)
        replica.optimizer.part(place_of(replica.buckets, self.own_span))  # refuses what it cannot
        self._num_own = num_own
        self._own: Stores

    def begin(self, version: int, on_undone: StepsUndone) -> None:
        super().begin(version, on_undone)
        self._own = Stores(self._replica, self._num_own, self.own_span)

    @property
    def stores(self) -> Sequence[Store]:
        """Those in this process."""
        return self._own.stores

    def _contents(self, place: slice) -> dict[str, Tensor]:
        return {name: values[place] for name, values in state_of(self._replica).items()}

    def _rule(self, place: slice) -> SliceRule:
        return self._optimizer_rule(place)

    def is_partial(self, session_id: int) -> bool:
        """Whether of a push of this session its own part has arrived, and not all others."""
        owns = (pending.own for pending in self._pending.values())
        return any(own is not None and own.session_id == session_id for own in owns)

    def of(self, key: PartKey) -> "HostedPush":
        return HostedPush(self, self._own, key)

    def norm_of(self, key: PartKey) -> float:
        """L2 norm of a push: those of its buckets, in their order."""
        return math.hypot(*self._own.norms(), *self._pending[key].others())

    def step(self, key: PartKey, clip: float, learning_rate: float, bound: float | None) -> None:
        """Take the step with this push here, and let all stores take it."""
        del self._pending[key]
        step = TakeStep(
            parts=(CountedPart(key=key, weight=1.0),),
            clip=clip,
            learning_rate=learning_rate,
            bound=bound,
        )
        self._tell_to_step(self._holders(0), step)
        self._own.step(clip, learning_rate, bound)


class HostedPush:
    """One push, to be taken by all stores in one step: see `Stores`."""

    def __init__(self, stores: HostedStores, own: Stores, key: PartKey) -> None:
        self._stores, self._own, self._key = stores, own, key

    def take(self, gradient: Tensor) -> None:
        """Take the server's own part (n,); the others are where they have arrived."""
        self._own.take(gradient)

    def take_difference(self, weights: Tensor) -> None:
        """Take the way to a worker's weights (num_params,), all of which are here."""
        self._own.take_difference(weights)

    def mix(self, share: float) -> None:
        self._own.mix(share)

    def norm(self) -> float:
        return self._stores.norm_of(self._key)

    def step(self, clip: float, learning_rate: float, bound: float | None = None) -> None:
        self._stores.step(self._key, clip, learning_rate, bound)
