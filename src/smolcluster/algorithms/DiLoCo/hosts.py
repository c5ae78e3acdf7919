"""A worker's way to the hosts that hold the weights: what comes from several is put together here.

On each link all comes in the order in which the server has said it, but not so on two of them. A worker must
not see that: whole weights count when all hosts' parts are here, and what a host has sent behind its part
waits for these; a fragment is taken when all have sent theirs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from smolcluster.algorithms.DiLoCo.exchange import FragmentArrived, FragmentReceiver, Layout
from smolcluster.errors import PeerLost
from smolcluster.server.link import Link
from smolcluster.server.store_client import StoreClient
from smolcluster.server.weights import WeightsArrived
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import Collect, DeltaSent, StoreList
from smolcluster.wire.session import Session

SERVER = 0
"""The first bucket that is on the server's host, by which hosts are named here."""


class Hosts:
    """The server, and the stores on other hosts if it names any."""

    def __init__(
        self, layout: Layout, num_buckets: int, receiver_for: Callable[[range], FragmentReceiver]
    ) -> None:
        """`layout`: of the whole; `receiver_for`: takes what a store sends that holds these flat buckets."""
        self._layout, self._num_buckets = layout, num_buckets
        self._client = StoreClient(num_buckets, receiver_for)
        self._holders: list[list[int]] = []
        """By fragment: the hosts that hold something of it."""
        self._fragments: list[dict[int, deque[FragmentArrived]]] = []
        """By fragment and host: what has come, and not from all yet."""
        self._behind: dict[int, list[Event]] = {}
        """By host whose part of whole weights is here, and not yet all others': what has come behind it."""
        self.is_several = False

    def begin(self, link: Link) -> None:
        """A session with the server has begun, who holds all weights unless he names stores."""
        self._client.begin(link)
        self._link, self.is_several = link, False
        self._behind = {}
        self._hold({SERVER: range(self._num_buckets)})

    def reach(self, stores: StoreList) -> None:
        """Some weights lie on other hosts: see `StoreClient.reach`."""
        self._client.reach(stores)
        self.is_several = True
        own = range(min(store.first for store in stores.stores))
        others = {store.first: range(store.first, store.stop) for store in stores.stores}
        self._hold({SERVER: own} | others)

    def _hold(self, spans: dict[int, range]) -> None:
        parts = {first: self._layout.part(span) for first, span in spans.items()}
        self._holders = [
            [first for first, part in sorted(parts.items()) if part.numbers[number]]
            for number in range(len(self._layout.fragments))
        ]
        self._forget()

    def _forget(self) -> None:
        self._fragments = [{first: deque() for first in each} for each in self._holders]

    def send(self, collect: Collect, buffers: Sequence[Frame], frames: Sequence[Frame]) -> None:
        """Send a fragment's change, a frame for each of its buckets, to where these belong."""
        for frame in buffers:
            self._link.send_frame(frame)
        for home, frame in zip(self._layout.homes(collect.fragment), frames, strict=True):
            self.session_of(home).send_frame(frame)
        if SERVER not in self._holders[collect.fragment]:
            self._link.send(DeltaSent(request=collect.request, fragment=collect.fragment))

    def session_of(self, bucket: int) -> Session:
        """With who holds this flat bucket."""
        return self._client.session_of(bucket)

    def take(self, event: Event) -> Iterator[Event]:
        """What may be known of now that this has come, in order.

        Raises:
            PeerLost: what hosts have sent does not belong together.
        """
        host = event.first if isinstance(event, WeightsArrived | FragmentArrived) else SERVER
        if host in self._behind:
            self._behind[host].append(event)
        elif isinstance(event, WeightsArrived):
            yield from self._take_weights(event)
        elif isinstance(event, FragmentArrived):
            yield from self._take_fragment(event, host)
        else:
            yield event

    def _take_weights(self, part: WeightsArrived) -> Iterator[Event]:
        self._behind[part.first] = []
        parts = self._client.weights(part)
        if not parts:
            return
        self._forget()  # what has come of fragments was before
        behind, self._behind = self._behind, {}
        weights = [bucket for each in parts for bucket in each.weights]
        yield WeightsArrived(part.version, weights, parts[0].buffers)
        for events in behind.values():
            for event in events:
                yield from self.take(event)

    def _take_fragment(self, part: FragmentArrived, host: int) -> Iterator[Event]:
        arrived = self._fragments[part.fragment]
        arrived[host].append(part)
        if not all(arrived.values()):
            return
        parts = [each.popleft() for each in arrived.values()]
        place = part.fragment, part.base_version, part.version
        if any((each.fragment, each.base_version, each.version) != place for each in parts):
            raise PeerLost("the hosts have sent a fragment of two versions")
        buffers = {number: values for each in parts for number, values in each.buffers.items()}
        values = parts[0].values if len(parts) == 1 else torch.cat([each.values for each in parts])
        yield FragmentArrived(*place, values, buffers)
