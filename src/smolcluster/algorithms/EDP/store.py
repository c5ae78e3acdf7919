"""A store of EDP: a slice of the weights with its optimizer, on a machine that need not be the server's.

It takes an optimizer step with each push that the server says so of: see `server/store_host.py`. Which
machines have one: `servers` in the cluster file.
By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("edp", "store"))

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from smolcluster.errors import PeerLost
from smolcluster.server.hosted_stores import OptimizerSlice
from smolcluster.server.push import GradientBuffers, GradientReceiver
from smolcluster.server.store import store_of
from smolcluster.server.store_host import TICK_S, SliceHost

PUSHES_HELD = 2
"""Of a worker: one that is to be applied, and one that arrives meanwhile."""


class Held(SliceHost):
    """A slice that steps by the run's optimizer."""

    def __init__(self, *session: Any) -> None:
        super().__init__(*session)
        self._memory = GradientBuffers()

    def _new_slice(self, values: Mapping[str, Tensor]) -> OptimizerSlice:
        own = self._buckets[self._span.start : self._span.stop]
        store = store_of(self._given.rule, own, values)
        return OptimizerSlice(store, self._buckets, self._span, self._given.incarnation)

    def _receiver_for(self, session_id: int) -> "PushReceiver":
        return PushReceiver(
            session_id,
            self._given.codec,
            self._buckets,
            None,
            self._memory,
            closed=self._closed,
            has_loss_scale=self._given.has_loss_scale,
            span=self._span,
        )


class PushReceiver(GradientReceiver):
    """Takes a worker's pushes; one may arrive while another waits for the coordinator's word."""

    def __init__(self, *pushes: Any, closed: threading.Event, **options: Any) -> None:
        """See `GradientReceiver`; when `closed` is set nobody may wait any more, as the slice is lost."""
        super().__init__(*pushes, **options)
        self._places = threading.Semaphore(PUSHES_HELD)
        self._closed = closed

    def begin(self) -> None:
        """Its next push begins: the reader waits until the coordinator has decided on older ones."""
        while not self._places.acquire(timeout=TICK_S):
            if self._closed.is_set():
                raise PeerLost("the store has lost its slice")

    def _free(self, gradient: Tensor) -> None:
        super()._free(gradient)
        self._places.release()
