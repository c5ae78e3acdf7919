"""What a worker knows of several hosts: in an order that none of their links alone says."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from peers import opened, small_replica
from smolcluster.algorithms.DiLoCo.exchange import (
    MOST_HELD,
    ChangeReceiver,
    DeltaArrived,
    Encoder,
    FragmentArrived,
    FragmentReceiver,
    Hosts,
    Layout,
    delta_frames,
)
from smolcluster.algorithms.DiLoCo.fragments import cut
from smolcluster.errors import PeerLost, ProtocolError
from smolcluster.server.link import Link
from smolcluster.server.weights import WeightsArrived
from smolcluster.wire.dialling import Address
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Collect,
    Delta,
    DeltaSent,
    HostPort,
    Message,
    Pull,
    Saved,
    StoreList,
    StorePlace,
)

PLACES = (HostPort(host="127.0.0.1", port=1),)
STORES = StoreList(
    stores=(
        StorePlace(node="win", places=PLACES, first=1, stop=2),
        StorePlace(node="pi5", places=PLACES, first=2, stop=3),
    )
)
SAVED = MessageReceived(0, Saved(step=7, keep_last=1))


@dataclass
class FakeLink:
    """A session: what was sent by it; those with stores are dialled in their order."""

    messages: list[Message] = field(default_factory=list)
    dialled: "list[FakeLink]" = field(default_factory=list)
    meant: list[str | None] = field(default_factory=list)

    def __hash__(self) -> int:
        return id(self)

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def send_frame(self, frame: Frame) -> None:
        self.messages.append(opened(frame)[0])

    def dial(self, address: Address, *_: Any) -> "FakeLink":
        self.meant.append(address.node)
        self.dialled.append(FakeLink())
        return self.dialled[-1]


def hosts_of(num_fragments: int) -> tuple[Hosts, FakeLink, Layout]:
    """A worker that has just reached both stores; the server and each of them hold a bucket."""
    replica = small_replica()
    layout = Layout.of(replica, cut(replica.layers, num_fragments))
    hosts, link = Hosts(layout, 3, lambda _: cast(FragmentReceiver, None)), FakeLink()
    hosts.begin(cast(Link, link))
    hosts.reach(STORES)
    assert link.messages == [Pull()]
    assert link.meant == ["win", "pi5"]
    link.messages.clear()
    return hosts, link, layout


def weights(first: int, version: int = 1) -> WeightsArrived:
    return WeightsArrived(version, [torch.full((2,), float(first))], first=first)


def fragment(first: int, version: int, number: int = 0, base: int | None = 1) -> FragmentArrived:
    return FragmentArrived(number, base, version, torch.full((2,), float(first)), {}, first)


def taken(hosts: Hosts, *events: Event) -> list[Event]:
    return [told for event in events for told in hosts.take(event)]


def test_a_fragment_is_taken_when_all_who_hold_it_have_sent_it() -> None:
    hosts, _, _ = hosts_of(1)
    assert taken(hosts, fragment(2, 2), fragment(2, 3, base=2), fragment(0, 2)) == []
    [arrived] = taken(hosts, fragment(1, 2))
    assert isinstance(arrived, FragmentArrived)
    assert (arrived.base_version, arrived.version) == (1, 2)
    assert arrived.values.tolist() == [0, 0, 1, 1, 2, 2]
    [arrived] = taken(hosts, fragment(0, 3, base=2), fragment(1, 3, base=2))
    assert isinstance(arrived, FragmentArrived)
    assert arrived.version == 3


def test_what_a_host_sends_behind_its_weights_waits_for_those_of_the_others() -> None:
    hosts, _, _ = hosts_of(1)
    assert taken(hosts, fragment(1, 1, base=0), weights(0, 5), SAVED, fragment(0, 6, base=5)) == []
    assert taken(hosts, weights(2, 5), fragment(2, 6, base=5), fragment(1, 2)) == []
    whole, saved = taken(hosts, weights(1, 5))
    assert isinstance(whole, WeightsArrived)
    assert [bucket.tolist() for bucket in whole.weights] == [[0, 0], [1, 1], [2, 2]]
    assert saved is SAVED
    [arrived] = taken(hosts, fragment(1, 6, base=5))  # what came before its weights is void
    assert isinstance(arrived, FragmentArrived)
    assert arrived.version == 6


def test_parts_of_two_versions_do_not_belong_together() -> None:
    hosts, _, _ = hosts_of(1)
    with pytest.raises(PeerLost, match="of two versions"):
        taken(hosts, fragment(0, 2), fragment(1, 3), fragment(2, 2))


def test_a_change_goes_to_where_its_buckets_are_and_the_server_hears_of_it() -> None:
    hosts, link, layout = hosts_of(3)
    homes = [layout.homes(number) for number in range(3)]
    assert homes == [[0, 1], [2], [2]], "the last fragments are no matter of the server's"
    encoder = Encoder("fp32", layout)
    for number in range(3):
        encoded = encoder.encode(number, torch.zeros(layout.fragments[number].numel))
        collect = Collect(request=number + 1, fragment=number, wait=False)
        hosts.send(collect, [], delta_frames(layout, collect, encoded, encoder.codec))
    own, *told = link.messages
    assert isinstance(own, Delta)
    assert (own.fragment, own.bucket, own.num_buckets) == (0, 0, 2)
    assert told == [DeltaSent(request=2, fragment=1), DeltaSent(request=3, fragment=2)]
    win, pi5 = ([cast(Delta, each) for each in store.messages] for store in link.dialled)
    assert [(each.fragment, each.bucket) for each in win] == [(0, 1)]
    assert [(each.fragment, each.bucket) for each in pi5] == [(1, 0), (2, 0)]


def test_a_worker_that_sends_ever_more_changes_is_refused_until_one_is_decided_on() -> None:
    """Of another fragment, and in the middle of a change, that counts for nothing."""
    replica = small_replica()
    layout = Layout.of(replica, cut(replica.layers, 3))
    receiver, encoder = ChangeReceiver(1, "fp32", layout), Encoder("fp32", layout)

    def sent(number: int, request: int) -> list[DeltaArrived]:
        encoded = encoder.encode(number, torch.ones(layout.fragments[number].numel))
        collect = Collect(request=request, fragment=number, wait=False)
        frames = delta_frames(layout, collect, encoded, encoder.codec)
        return [cast(DeltaArrived, receiver(*opened(frame))) for frame in frames]

    held = [sent(0, request) for request in range(MOST_HELD)]
    assert [[each.part is None for each in change] for change in held] == [[True, False]] * 2
    sent(1, 7)
    with pytest.raises(ProtocolError, match="sent fragment 0 again before it was answered"):
        sent(0, 8)
    held[0][-1].free()
    sent(0, 9)
    with pytest.raises(ProtocolError, match="sent fragment 0 again before it was answered"):
        sent(0, 10)
