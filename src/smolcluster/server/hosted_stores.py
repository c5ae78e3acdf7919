"""A run's weights on one host or several, which step by the run's optimizer: see `store_links.py`."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from smolcluster.server.push import Pushed
from smolcluster.server.slices import place_of
from smolcluster.server.store import Store, state_of
from smolcluster.server.store_links import StoreLinks
from smolcluster.training.replica import Replica
from smolcluster.wire.messages import CountedPart, PartKey, SliceRule, TakeStep


class HostedStores(StoreLinks[Pushed]):
    """The stores of a run whose slices step by the run's optimizer, with one push at a time."""

    def __init__(self, replica: Replica, nodes: Sequence[str], **links: Any) -> None:
        """`links`: see `StoreLinks`.

        Raises:
            ConfigError: the replica's optimizer needs all weights in one place.
        """
        super().__init__(replica, nodes, **links)
        replica.optimizer.part(place_of(replica.buckets, self.own_span))  # refuses what it cannot

    @cached_property
    def own(self) -> Store:
        """The one in this process, once a checkpoint has been restored."""
        return Store.of(self._replica, self.own_span)

    def _contents(self, place: slice) -> dict[str, Tensor]:
        return {name: values[place] for name, values in state_of(self._replica).items()}

    def _rule(self, place: slice) -> SliceRule:
        return self._optimizer_rule(place)

    def is_partial(self, session_id: int) -> bool:
        """Whether of a push of this session its own part has arrived, and not all others."""
        owns = (pending.own for pending in self._pending.values())
        return any(own is not None and own.session_id == session_id for own in owns)

    def of(self, key: PartKey) -> "HostedPush":
        return HostedPush(self, key)

    def norms_elsewhere(self, key: PartKey) -> list[float]:
        """Norms of a push's buckets on other hosts, in their order."""
        return self._pending[key].others()

    def tell_to_step(
        self, key: PartKey, clip: float, learning_rate: float, bound: float | None
    ) -> None:
        """Let all other stores take a step with this push."""
        del self._pending[key]
        step = TakeStep(
            parts=(CountedPart(key=key, weight=1.0),),
            clip=clip,
            learning_rate=learning_rate,
            bound=bound,
        )
        self._tell_to_step(self._holders(0), step)


class HostedPush(Store):
    """The store in this process, and one push that all stores take in one step."""

    def __init__(self, stores: HostedStores, key: PartKey) -> None:
        own = stores.own
        super().__init__(own.buckets, own.weights, own.buffer, own.optimizer)
        self._stores, self._key = stores, key

    def norm(self) -> float:
        """L2 norm of the push: those of its buckets, in their order."""
        return math.hypot(*self.norms(), *self._stores.norms_elsewhere(self._key))

    def step(self, clip: float, learning_rate: float, bound: float | None = None) -> None:
        self._stores.tell_to_step(self._key, clip, learning_rate, bound)
        super().step(clip, learning_rate, bound)
