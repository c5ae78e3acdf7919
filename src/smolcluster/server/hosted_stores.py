"""The coordinator's side of stores that hold weights: when they step, and with which clip factor.

The server decides: when all stores have their part of a push it combines their norms, in the order of the
buckets, and tells all to step or to forget it. All slices have the same version at any point of that order.
The replica holds all weights and moments; what lies elsewhere is in it as it was when it was gathered last.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from smolcluster.server.push import Pushed
from smolcluster.server.slices import PushKey, place_of, read_norms
from smolcluster.server.store import Store, Stores, state_of
from smolcluster.server.store_links import RemoteStore, StoreLinks
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer
from smolcluster.training.replica import Replica
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Apply,
    Arrived,
    Discard,
    Message,
    SendWeights,
    SliceRule,
)

StepsUndone = Callable[[str, int, float], None]
"""Called with a node, how many steps its store had taken, and the share of the weights in its slice."""


@dataclass(frozen=True)
class NormsArrived(Event):
    """A store has its part of a push whole; `norms` are the L2 norms of its buckets."""

    session_id: int
    key: PushKey
    norms: tuple[float, ...]


@dataclass
class PendingPush:
    """What has arrived of a push: the server's own part, and the norms of the others by node."""

    own: Pushed | None = None
    norms: dict[str, tuple[float, ...]] = field(default_factory=dict)


class HostedStores(StoreLinks):
    """All stores of a run's weights, on one host or several. Only the deciding thread calls it."""

    def __init__(
        self, replica: Replica, nodes: Sequence[str], *, num_own: int = 1, **links: Any
    ) -> None:
        """`num_own` stores hold the slice of this process; `links`: see `StoreLinks`.

        Raises:
            ConfigError: the replica's optimizer needs all weights in one place.
        """
        super().__init__(replica, nodes, **links)
        replica.optimizer.part(place_of(replica.buckets, self.own_span))  # refuses what it cannot
        self._pushes: dict[PushKey, PendingPush] = {}
        self._copied_steps = 0
        """How many steps the optimizer had taken when the slices were gathered last."""
        self._num_own = num_own
        self._own: Stores
        self._on_undone: StepsUndone

    def begin(self, version: int, on_undone: StepsUndone) -> None:
        """The replica is as the run begins, or goes on from a checkpoint of `version`.

        `on_undone` hears of steps that a lost store had taken and its slice has not.
        """
        self._on_undone = on_undone
        self._own = Stores(self._replica, self._num_own, self.own_span)
        self._remember_copy(version)

    @property
    def stores(self) -> Sequence[Store]:
        """Those in this process."""
        return self._own.stores

    # what slices hold

    def _contents(self, place: slice) -> dict[str, Tensor]:
        return {name: values[place] for name, values in state_of(self._replica).items()}

    def _rule(self, place: slice) -> SliceRule:
        return rule_of(self._replica, place, self._copied_steps)

    def _remember_copy(self, version: int) -> None:
        super()._remember_copy(version)
        for store in self._stores:
            store.num_steps = 0
        self._copied_steps = num_steps_of(self._replica)

    def _on_lost(self, store: RemoteStore) -> None:
        if store.num_steps:
            place = place_of(self._replica.buckets, store.span)
            share = (place.stop - place.start) / self._replica.num_params
            self._on_undone(store.node, store.num_steps, share)
            store.num_steps = 0
        for pending in self._pushes.values():
            pending.norms.pop(store.node, None)

    def _hear(
        self, store: RemoteStore, session_id: int, message: Message, payload: memoryview
    ) -> Event | None:
        if not isinstance(message, Arrived):
            return MessageReceived(session_id, message)
        norms = read_norms(message.tensor, payload, len(store.span))
        return NormsArrived(session_id, PushKey(message.instance, message.lease), norms)

    # pushes

    def whole(
        self, key: PushKey, event: Pushed | NormsArrived, *, is_awaited: bool
    ) -> Pushed | None:
        """Take a part of the push `key`; returns the server's own part when all others have arrived as well.

        `is_awaited`: whether its worker is still to be given an answer.
        """
        pending = self._pushes.setdefault(key, PendingPush())
        if isinstance(event, Pushed):
            pending.own = event
        elif (store := self._of_session(event.session_id)) is not None:
            pending.norms[store.node] = event.norms
            store.heard_at = time.monotonic()
        if not is_awaited and not isinstance(event, Pushed):
            self.forget(key)
            return None
        if is_awaited and len(pending.norms) < len(self._stores):
            return None
        return pending.own

    def is_partial(self, session_id: int) -> bool:
        """Whether of a push of this session its own part has arrived, and not all others."""
        return any(
            pending.own is not None and pending.own.session_id == session_id
            for pending in self._pushes.values()
        )

    def forget(self, key: PushKey) -> Pushed | None:
        """A push that has not been applied is not wanted any more; returns the server's part of it."""
        pending = self._pushes.pop(key, PendingPush())
        if pending.norms:
            self._tell(pending.norms, Discard(instance=key.instance, lease=key.lease))
        return pending.own

    def of(self, key: PushKey) -> "HostedPush":
        return HostedPush(self, self._own, key)

    def norm_of(self, key: PushKey) -> float:
        """L2 norm of a push: those of its buckets, in their order."""
        norms = self._pushes[key].norms
        others = (norm for store in self._stores for norm in norms[store.node])
        return math.hypot(*self._own.norms(), *others)

    def step(self, key: PushKey, clip: float, learning_rate: float, bound: float | None) -> None:
        """Take the step with this push here, and let all stores take it."""
        pending = self._pushes.pop(key)
        for store in self._stores:
            store.num_steps += store.listens is not None
        step = Apply(
            instance=key.instance,
            lease=key.lease,
            clip=clip,
            learning_rate=learning_rate,
            bound=bound,
        )
        self._tell(pending.norms, step)
        self._own.step(clip, learning_rate, bound)

    def send_weights(self, instance: str, version: int) -> None:
        """Let all stores send their weights of now to a worker."""
        every = [store.node for store in self._stores]
        self._tell(every, SendWeights(instance=instance, version=version))


def num_steps_of(replica: Replica) -> int:
    """How many steps the optimizer has taken; 0 where it does not mind."""
    state = replica.optimizer.state
    return int(state[STEP_COUNT]) if state else 0


def rule_of(replica: Replica, place: slice, num_steps: int) -> SliceRule:
    """How a slice steps elsewhere, of which the optimizer has taken so many steps.

    Raises:
        ConfigError: the replica's optimizer needs all weights in one place.
    """
    part = replica.optimizer.part(place)
    assert isinstance(part, FlatOptimizer)  # noqa: S101 - others have no parts
    rule = part.rule
    return SliceRule(
        optimizer=rule.name,
        optimizer_args=dict(rule.arguments),
        weight_decay=rule.weight_decay,
        num_decayed=rule.num_decayed,
        num_steps=num_steps,
    )


class HostedPush:
    """One push, to be taken by all stores in one step: see `Stores`."""

    def __init__(self, stores: HostedStores, own: Stores, key: PushKey) -> None:
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
