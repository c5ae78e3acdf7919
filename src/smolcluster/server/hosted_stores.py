"""A run's weights on one host or several, which step by the run's optimizer: both ends of their protocol."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from smolcluster.errors import ProtocolError
from smolcluster.server.push import Pushed
from smolcluster.server.store import Counted, HeldSlice, Store, state_of
from smolcluster.server.store_links import StoreLinks
from smolcluster.training.replica import Replica
from smolcluster.wire.messages import WEIGHTS, CountedPart, PartKey, SliceRule, TakeStep


class OptimizerSlice(HeldSlice):
    """Steps by the run's optimizer, along one push at a time; or, if it `mixes`, towards pushed weights."""

    def __init__(
        self,
        store: Store,
        all_buckets: Sequence[slice],
        span: range,
        incarnation: str,
        *,
        mixes: bool = False,
    ) -> None:
        super().__init__(all_buckets, span, incarnation)
        self._store, self._mixes = store, mixes
        self._taken: Tensor | None = None
        """What the store has taken, and not stepped along."""

    def contents(self) -> dict[str, Tensor]:
        return {WEIGHTS: self._store.weights, **self._store.optimizer.moments}

    def norms(self, _fragment: int, _bucket: int, values: Tensor) -> Sequence[Sequence[float]]:
        self._take(values)
        return (self._store.norms(),)

    def _step_parts(
        self, step: TakeStep, _fragment: int, _keys: Sequence[PartKey], parts: Sequence[Counted]
    ) -> None:
        if len(parts) != 1 or (step.learning_rate is None and not self._mixes):
            raise ProtocolError("it wanted another step than one with a push and a learning rate")
        [(share, values)] = parts
        if values is not self._taken:
            self._take(values)
        self._taken = None
        if step.learning_rate is None:
            self._store.mix(share)
        else:
            self._store.step(step.clip, step.learning_rate, step.bound)

    def _take(self, values: Tensor) -> None:
        self._taken = values
        if self._mixes:
            self._store.take_difference(values)
        else:
            self._store.take(values)


class HostedStores(StoreLinks[Pushed]):
    """The stores of a run whose slices step by the run's optimizer, with one push at a time."""

    def __init__(
        self, replica: Replica, nodes: Sequence[str], *, mixes: bool = False, **links: Any
    ) -> None:
        """`mixes`: pushes are weights, towards which a step goes; `links`: see `StoreLinks`.

        Raises:
            ConfigError: the replica's optimizer needs all weights in one place.
        """
        super().__init__(replica, nodes, **links)
        self.own = OptimizerSlice(
            Store.of(replica, self.own_span),
            replica.buckets,
            self.own_span,
            self._incarnation,
            mixes=mixes,
        )

    def _contents(self, place: slice) -> Mapping[str, Tensor]:
        return {name: values[place] for name, values in state_of(self._replica).items()}

    def _rule(self, place: slice) -> SliceRule:
        return self._optimizer_rule(place)

    def is_partial(self, session_id: int) -> bool:
        """Whether of a push of this session its own part has arrived, and not all others."""
        owns = (pending.own for pending in self._pending.values())
        return any(own is not None and own.session_id == session_id for own in owns)

    def norm(self, key: PartKey) -> float:
        """L2 norm of a push; of weights, that of the way to them."""
        return self._pending[key].norm()

    def step(
        self, key: PartKey, clip: float, learning_rate: float, bound: float | None = None
    ) -> None:
        """Let all hosts take a step with a push."""
        del self._pending[key]
        parts = (CountedPart(key=key, weight=1.0),)
        self._step(TakeStep(parts=parts, clip=clip, learning_rate=learning_rate, bound=bound))

    def mix(self, key: PartKey, share: float) -> None:
        """Go this share of the way to the weights of a push."""
        del self._pending[key]
        self._step(TakeStep(parts=(CountedPart(key=key, weight=share),)))
