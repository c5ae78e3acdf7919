"""All hosts of DiLoCo's weights in one thread: what one says is heard by the other at once."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from harness import local_settings
from peers import opened, small_replica, store_setup
from smolcluster.algorithms.DiLoCo.exchange import (
    ChangeReceiver,
    DeltaArrived,
    Encoder,
    Layout,
    delta_frames,
)
from smolcluster.algorithms.DiLoCo.fragments import cut
from smolcluster.algorithms.DiLoCo.ledger import Request
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.algorithms.DiLoCo.outer_links import (
    Change,
    OuterLinks,
)
from smolcluster.algorithms.DiLoCo.store import Held
from smolcluster.configs.schema import GradientClipping
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.slices import by_name, slice_pieces
from smolcluster.server.store_host import COORDINATOR, buckets_of
from smolcluster.server.store_links import NormsArrived
from smolcluster.training.optimizer import FlatOptimizer
from smolcluster.wire.acceptor import SessionOpened
from smolcluster.wire.frames import Buffer, Frame
from smolcluster.wire.handshake import Authenticated, introduce
from smolcluster.wire.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.membership import Refused
from smolcluster.wire.messages import (
    SESSION,
    STORE,
    Accepted,
    Collect,
    Delta,
    DeltaSent,
    HostPort,
    Listening,
    Message,
    PartKey,
    Slice,
    State,
)
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.streams import Assembler
from unit.server.test_store_links import Client, patient

RUN = local_settings(algorithm="diloco").run_config("test-run", "diloco")
NODES = ("mini1", "win", "pi5")
WORKER_SESSION = 1
"""Each store numbers its workers' sessions from here, in their order."""
LISTENING = Listening(places=(HostPort(host="127.0.0.1", port=1),))
Hears = Callable[[Message, memoryview], None]


@dataclass
class Line:
    """One direction of a session: what is sent is heard at once."""

    session_id: int
    hears: Hears
    receiver: Receiver | None = None
    num_gone: int = 0
    is_cut: bool = False

    def send(self, message: Message, payload: Buffer = b"") -> None:
        self.hears(message, memoryview(bytearray(payload)))

    def send_frame(self, frame: Frame) -> None:
        self.hears(*opened(frame))

    def cut(self, _reason: str) -> None:
        self.is_cut = True


@dataclass
class StoreHost:
    """A store's process: its slice, if it has one, and the workers' receivers."""

    hosting: "Hosting"
    session_id: int
    receiver: Receiver
    """What takes at the server what it says."""
    held: Held | None = None
    incoming: Assembler[State] | None = None
    given: Slice | None = None
    receivers: dict[str, Callable[[Message, memoryview], Event | None]] = field(
        default_factory=dict
    )
    sent: dict[str, list[tuple[Message, memoryview]]] = field(default_factory=dict)
    """What workers have been sent."""

    def hear(self, message: Message, payload: memoryview) -> None:
        """The coordinator has said something."""
        bucket_bytes = self.hosting.replica.bucket_bytes
        if isinstance(message, Slice):
            self.given, span = message, range(message.first, message.stop)
            buckets = buckets_of(message, bucket_bytes)
            pieces = slice_pieces(buckets, span, message.contents, torch.float32)
            self.incoming = Assembler("slice", lambda _: pieces)
        elif isinstance(message, State):
            assert self.incoming is not None
            assert self.given is not None
            if (values := self.incoming.take(message, payload)[1]) is not None:
                self._begin(by_name(self.given.contents, values))
        else:
            assert self.held is not None
            self.held.handle(MessageReceived(COORDINATOR, message), self.to_coordinator)

    def _begin(self, values: Mapping[str, Tensor]) -> None:
        hosting = self.hosting
        setup = store_setup(Held)
        bucket_bytes = hosting.replica.bucket_bytes
        answer = Accepted(bucket_bytes=bucket_bytes, heartbeat_timeout_s=1.0)
        assert self.given is not None
        self.held = held = Held(setup, answer, Inbox(), self.given, values)
        for number, worker in enumerate(hosting.workers):
            session_id = WORKER_SESSION + number
            self.receivers[worker] = held._receiver_for(session_id)
            inbox = self.sent.setdefault(worker, [])
            line = Line(session_id, lambda *said, inbox=inbox: inbox.append(said))
            held._workers[worker] = cast(Session, line)
        hosting.links.handle(MessageReceived(self.session_id, LISTENING))

    @property
    def to_coordinator(self) -> Session:
        return cast(Session, Line(COORDINATOR, self._told))

    def _told(self, message: Message, payload: memoryview) -> None:
        event = self.receiver(message, payload)
        if event is not None:
            self.hosting.events.append(event)

    def deliver(self, worker: str, message: Message, payload: memoryview) -> None:
        """A worker has sent something."""
        assert self.held is not None
        event = self.receivers[worker](message, payload)
        if event is not None:
            self.held.handle(event, self.to_coordinator)


class Hosting:
    """The server's links to `num_hosts` - 1 stores, with workers that only bring changes."""

    def __init__(
        self,
        num_hosts: int,
        workers: Sequence[str],
        *,
        num_fragments: int = 1,
        codec_up: str = "fp32",
        codec_down: str | None = None,
        is_async: bool = False,
        optimizer: str | None = None,
    ) -> None:
        """`optimizer`: takes the run's first steps; None: they are outer steps."""
        self.workers, self.events = workers, list[Event]()
        self.replica = replica = small_replica()
        if optimizer is not None:
            replica.optimizer = FlatOptimizer(optimizer, replica.params, replica.grads, 0.0)
        self.layout = Layout.of(self.replica, cut(self.replica.layers, num_fragments))
        self.outer: OuterOptimizer = OuterOptimizer(self.replica.num_params, 0.7, 0.5)
        if is_async:
            self.outer = DelayedNesterov(self.replica.num_params, 0.7, 0.5, momentum_delay=3)
        self.codec_up = codec_up
        self.encoders = {worker: Encoder(codec_up, self.layout) for worker in workers}
        self.undone: list[tuple[str, int, float]] = []
        self.num_lost = 0
        self.links = OuterLinks(
            self.replica,
            NODES[:num_hosts],
            outer=self.outer,
            layout=self.layout,
            codec_down=codec_down,
            run=RUN,
            codec=codec_up,
            incarnation="here",
            cluster=patient(10.0, 60.0),
            log=logging.getLogger("test"),
        )
        self.links.begin(
            0,
            lambda *what: self.undone.append(what),
            self._lost,
            begins_together=optimizer is not None,
        )
        collector = BufferCollector(self.replica.buffers, self.replica.bucket_bytes)
        self.receivers = {
            worker: ChangeReceiver(number, codec_up, self.links.own.layout, collector)
            for number, worker in enumerate(workers)
        }
        self.stores: list[StoreHost] = []
        for number, node in enumerate(NODES[1:num_hosts]):
            self.open(node, 1 + number)
        self.num_requests = 0

    def _lost(self) -> None:
        self.num_lost += 1

    def open(self, node: str, session_id: int) -> None:
        """A store's process comes, and is given its slice."""
        hello = introduce(node, sets=(SESSION, STORE))
        answer = self.links.admit(session_id, hello)
        assert not isinstance(answer, Refused)
        store = StoreHost(self, session_id, answer[1])
        self.stores.append(store)
        client = cast("Authenticated", Client(hello))
        session = cast(Session, Line(session_id, store.hear, answer[1]))
        self.links.handle(SessionOpened(session, client))

    def lose(self, store: StoreHost) -> None:
        self.stores.remove(store)
        self.links.handle(SessionClosed(store.session_id, "its power is gone"))

    def host_of(self, home: int) -> StoreHost | None:
        """Who holds a flat bucket; None: the server."""
        for store in self.stores:
            assert store.given is not None
            if home in range(store.given.first, store.given.stop):
                return store
        return None

    def bring(self, worker: str, fragment: int, values: Tensor, weight: float = 1.0) -> Change:
        """A worker sends what a fragment has changed by; returns what the server makes of all parts."""
        encoder, self.num_requests = self.encoders[worker], self.num_requests + 1
        encoded = encoder.encode(fragment, values)
        encoder.settle(fragment, is_applied=True)
        request = Request(self.num_requests, 0, fragment, ())
        collect = Collect(request=self.num_requests, fragment=fragment, wait=False)
        key, whole = PartKey(instance=worker, of=self.num_requests), None
        own = list[Event]()
        homes = self.layout.homes(fragment)
        for home, frame in zip(
            homes, delta_frames(self.layout, collect, encoded, encoder.codec), strict=True
        ):
            message, payload = opened(frame)
            assert isinstance(message, Delta)
            if (store := self.host_of(home)) is not None:
                store.deliver(worker, message, payload)
            else:
                own += filter(None, [self.receivers[worker](message, payload)])
        if not own:
            sent = DeltaSent(request=self.num_requests, fragment=fragment)
            own += filter(None, [self.receivers[worker](sent, memoryview(b""))])
        for part in (*self.events, *own):
            assert isinstance(part, DeltaArrived | NormsArrived)
            whole = self.links.whole(request, key, part) or whole
        self.events.clear()
        assert whole is not None
        whole.weight, whole.num_samples = weight, 8
        return whole

    def step(self, fragment: int, *changes: tuple[str, Tensor, float]) -> None:
        """Workers bring these changes with these weights, and a fragment steps along them."""
        brought = [
            self.bring(worker, fragment, values, weight) for worker, values, weight in changes
        ]
        self.links.step(fragment, brought)

    def step_together(self, changes: Sequence[Sequence[tuple[str, Tensor, float]]]) -> bool:
        """Workers bring these gradients, by fragment, and all weights step along them."""
        brought = [
            [self.bring(worker, number, values, weight) for worker, values, weight in each]
            for number, each in enumerate(changes)
        ]
        return self.take_step(brought)

    def take_step(
        self, changes: Sequence[Sequence[Change]], clipping: GradientClipping | None = None
    ) -> bool:
        """All weights step along these gradients, if all stores tell the norms of their mean."""
        clipping = clipping or GradientClipping(max_norm=0.05)
        has_stepped = self.links.step_together(changes, 0.01, clipping)
        assert has_stepped == (not self.stores), "others have to tell norms first"
        for event in self.events:
            assert isinstance(event, NormsArrived)
            assert not self.links.hear(event), "it concerns no change"
        self.events.clear()
        return has_stepped or self.links.step_together(changes, 0.01, clipping)
