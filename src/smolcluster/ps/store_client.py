"""A worker's sessions with the stores of a run whose weights lie on several hosts."""

from collections.abc import Sequence
from contextlib import suppress

from smolcluster.cluster.link import Link
from smolcluster.errors import ConnectTimeout, PeerLost
from smolcluster.net.dialling import Address
from smolcluster.net.session import Session
from smolcluster.ps.weights import StateReceiver, WeightsArrived
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import SLICES, StoreList

DIAL_TIMEOUT_S = 5.0


def _dial_any(link: Link, addresses: Sequence[Address], receiver: StateReceiver) -> Session:
    """A session by the first of a store's addresses at which it answers this machine.

    Raises:
        ConnectTimeout: it answers at none; Rejected, AuthError: it does not let this worker in.
    """
    for address in addresses[:-1]:
        with suppress(ConnectTimeout):
            return link.dial(address, (SLICES,), receiver, DIAL_TIMEOUT_S)
    return link.dial(addresses[-1], (SLICES,), receiver, DIAL_TIMEOUT_S)


class StoreClient:
    """Where the buckets of a push go to, and the weights that come from there."""

    def __init__(self, link: Link, replica: Replica, stores: StoreList | None = None) -> None:
        """Reach all stores; None: the server holds all buckets itself.

        Raises:
            ConnectTimeout: a store did not answer; Rejected, AuthError: it does not let this worker in.
        """
        self._server = link
        self._sessions: list[Session] = [link] * len(replica.buckets)
        self._parts: dict[int, WeightsArrived] = {}
        for place in stores.stores if stores else ():
            span = range(place.first, place.stop)
            receiver = StateReceiver(replica.buckets, replica.params.dtype, span=span)
            addresses = [Address(each.host, each.port) for each in place.places]
            session = _dial_any(link, addresses, receiver)
            for number in span:
                self._sessions[number] = session

    def session_of(self, bucket: int) -> Session:
        return self._sessions[bucket]

    def push(self, buffers: Sequence[Frame], frames: Sequence[Frame]) -> None:
        """Send the frames of a push, one a bucket, to where these belong; of `buffers` to the server."""
        for frame in buffers:
            self._server.send_frame(frame)
        for session, frame in zip(self._sessions, frames, strict=True):
            session.send_frame(frame)

    def flush(self) -> None:
        """Wait until all that was sent has left, or the sessions have ended."""
        for session in dict.fromkeys(self._sessions):
            session.flush()

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
