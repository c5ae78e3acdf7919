"""A worker's sessions with the stores of a run whose weights lie on several hosts."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from smolcluster.errors import ConnectTimeout, PeerLost
from smolcluster.server.link import Link
from smolcluster.server.weights import WeightsArrived
from smolcluster.utils.retry import Deadline
from smolcluster.wire.dialling import Address
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import SLICES, Pull, StoreList
from smolcluster.wire.session import Receiver, Session

DIAL_TIMEOUT_S = 5.0
MAX_FAILED_DIALS = 6
"""In so many sessions in a row a store may not answer before the worker gives up."""


def _dial_any(link: Link, addresses: Sequence[Address], receiver: Receiver) -> Session:
    """A session by the first of a store's addresses at which it answers this machine.

    Raises:
        ConnectTimeout: it answers at none; Rejected, AuthError: it does not let this worker in.
    """
    for address in addresses[:-1]:
        with suppress(ConnectTimeout):
            return link.dial(address, (SLICES,), receiver, DIAL_TIMEOUT_S)
    return link.dial(addresses[-1], (SLICES,), receiver, DIAL_TIMEOUT_S)


class StoreClient:
    """Where the buckets of a worker's pushes go to: to the server, unless it names stores."""

    def __init__(self, num_buckets: int, receiver_for: Callable[[range], Receiver]) -> None:
        """`receiver_for`: takes what a store sends that holds these buckets."""
        self._num_buckets, self._receiver_for = num_buckets, receiver_for
        self._server: Link
        self._sessions: list[Session] = []
        self._parts: dict[int, WeightsArrived] = {}
        self._is_spread = False
        self._failed_dials = 0

    def begin(self, link: Link) -> None:
        """A session with the server has begun, who holds all buckets unless he names stores."""
        self._server, self._is_spread = link, False
        self._sessions = [link] * self._num_buckets
        self._parts.clear()

    def reach(self, stores: StoreList) -> None:
        """Some buckets lie on other hosts: dial them, and ask the server for weights.

        Raises:
            PeerLost: it pushed to others until now, or cannot reach them; it has to begin a new session.
            ConnectTimeout: it could not reach them in several sessions.
            Rejected, AuthError: a store does not let this worker in.
        """
        if self._is_spread:
            raise PeerLost("a store was lost")
        try:
            for place in stores.stores:
                span = range(place.first, place.stop)
                addresses = [Address(each.host, each.port, place.node) for each in place.places]
                session = _dial_any(self._server, addresses, self._receiver_for(span))
                self._sessions[span.start : span.stop] = [session] * len(span)
        except ConnectTimeout as error:
            self._failed_dials += 1
            if self._failed_dials == MAX_FAILED_DIALS:
                raise
            raise PeerLost(str(error)) from error
        self._is_spread, self._failed_dials = True, 0
        self._server.send(Pull())

    @property
    def sessions(self) -> Sequence[Session]:
        """With the server and all stores, each once."""
        return list(dict.fromkeys((self._server, *self._sessions)))

    def session_of(self, bucket: int) -> Session:
        return self._sessions[bucket]

    def push(self, buffers: Sequence[Frame], frames: Sequence[Frame]) -> None:
        """Send the frames of a push, one a bucket, to where these belong; of `buffers` to the server."""
        for frame in buffers:
            self._server.send_frame(frame)
        for session, frame in zip(self._sessions, frames, strict=True):
            session.send_frame(frame)

    def flush(self, timeout_s: float = math.inf) -> bool:
        """Wait until all that was sent has left, or the sessions have ended; returns whether it has."""
        deadline = Deadline(timeout_s)
        return all(session.flush(deadline.remaining()) for session in self.sessions)

    def weights(self, part: WeightsArrived) -> list[WeightsArrived]:
        """Take a part of the weights; returns all parts in order when they are there.

        Raises:
            PeerLost: they are of two versions.
        """
        self._parts[part.first] = part
        if sum(len(each.weights) for each in self._parts.values()) < len(self._sessions):
            return []
        parts, self._parts = self._parts, {}
        if len({each.version for each in parts.values()}) > 1:
            raise PeerLost("the stores have sent weights of two versions")
        return [parts[first] for first in sorted(parts)]
