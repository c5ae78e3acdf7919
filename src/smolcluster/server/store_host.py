"""A store on a machine of its own: a slice of the buckets, in a process of its own.

    coordinator -> Slice, State …   the slice, its rule, and what it begins with
    worker      -> its part         Arrived goes on, with the norms of its buckets
    coordinator -> TakeStep         a step along the parts that it names, or along a mean
    coordinator -> TakeMean         the mean of parts is wanted for a step: Arrived goes back
    coordinator -> Drop             a part is not wanted any more
    coordinator -> SendWeights      weights to a worker
    coordinator -> Gather           everything to the coordinator

It dials the coordinator, tells where it listens, and lets workers in with the same secret. What a step does
is the rule of its slice (`HeldSlice` in `store.py`), of which the coordinator has one too. It decides
nothing: what the coordinator (`store_links.py`) says comes in one order, so that the slices of all hosts
stand at one version whenever anybody sees them. It has no model, no data and no code of a user's. When it
loses the coordinator it forgets its slice, and is given one when it comes back.

Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server".
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil
from torch import Tensor

from smolcluster.codec.registry import get_codec
from smolcluster.errors import PeerLost, ProtocolError, RunFailed
from smolcluster.server.joining import Follower, RunOver, check_goes_on
from smolcluster.server.slices import arrived, by_name, slice_pieces
from smolcluster.server.store import HeldSlice, PartArrived
from smolcluster.training.replica import cut
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_bytes
from smolcluster.wire.acceptor import Acceptor, SessionOpened
from smolcluster.wire.connection import Connection
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    SESSION,
    SLICES,
    STORE,
    Accepted,
    Drop,
    Gather,
    Goodbye,
    HostPort,
    Listening,
    Message,
    PartKey,
    SendWeights,
    Slice,
    State,
    TakeMean,
    TakeStep,
    WorkerGone,
    from_listener,
    host_ports,
)
from smolcluster.wire.node import MAX_QUEUED
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.streams import Assembler

COORDINATOR = 0
"""Its session's number; those of workers count from 1."""
TICK_S = 0.5
EXTRA_QUEUED = 64
COPIES_QUEUED = 4
MAX_BUCKETS = 2**20
SHUTDOWN_TIMEOUT_S = 3.0
PRESENT_S = 5.0
"""How long workers may take to hear that the run is over."""


@dataclass(frozen=True, kw_only=True)
class StoreSetup(Follower):
    """A store's process: who it is, and the way to the coordinator.

    `addresses`: of this machine, at which workers are let in; None: the one from which it has reached the
    coordinator.
    """

    held: "type[SliceHost]"
    """What becomes of the slice that it is given."""
    addresses: tuple[str, ...] | None = None
    on_run_known: Callable[[str], None] = lambda _: None


def hold(setup: StoreSetup) -> None:
    """Hold a slice of the coordinator's run, and come back after every lost connection, until it is over.

    Raises:
        ConnectTimeout: no coordinator in time, at the start or after a loss.
        RunFailed: the run ended badly.
        Rejected, AuthError, ConfigError: this store is not wanted, or cannot listen.
    """
    patience_s: float | None = None

    def spend_session(connection: Connection, answer: Accepted) -> None:
        nonlocal patience_s
        with StoreSession(setup, connection, answer) as session:
            try:
                session.run()
            except ProtocolError as error:
                raise PeerLost(str(error)) from error
            finally:
                patience_s = session.reconnect_timeout_s

    try:
        setup.come_back(Accepted, spend_session, lambda: patience_s)
    except RunOver as news:
        setup.log.info("the run is over: %s", news)


@dataclass(frozen=True)
class SliceArrived(Event):
    """The coordinator has given a slice: its weights and moments by name, each (n,)."""

    slice: Slice
    values: Mapping[str, Tensor]


class StoreSession(Receiver):
    """One session with the coordinator, those of the workers, and the slice in between."""

    def __init__(self, setup: StoreSetup, connection: Connection, answer: Accepted) -> None:
        self._setup = setup
        self._answer = answer
        self._addresses = setup.addresses or (connection.own_address,)
        self._inbox = Inbox()
        self._given: Slice | None = None
        """What the reader has been told to collect, or has collected."""
        self._incoming: Assembler[State] | None = None
        """Puts it together until it is whole."""
        self._held: SliceHost | None = None
        self._coordinator = Session(
            connection,
            session_id=COORDINATOR,
            receiver=self,
            inbox=self._inbox,
            heartbeat_timeout_s=answer.heartbeat_timeout_s,
            max_queued=MAX_QUEUED,
            kinds=from_listener((SESSION, STORE)),
        )

    @property
    def reconnect_timeout_s(self) -> float | None:
        """How long the coordinator is looked for when it is lost, in seconds; None: it has given no slice."""
        return (
            None if self._held is None or self._given is None else self._given.reconnect_timeout_s
        )

    def __enter__(self) -> "StoreSession":
        self._coordinator.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._coordinator.end_with(Goodbye(reason="it was stopped"))
        self._coordinator.join_or_cut(SHUTDOWN_TIMEOUT_S)
        if self._held is not None:
            is_over = isinstance(error, RunOver | RunFailed)
            self._held.close(PRESENT_S if is_over else 0.0)

    def run(self) -> None:
        """Serve until the session with the coordinator ends, which is an exception.

        Raises:
            RunOver, RunFailed: the run has ended.
            Rejected: the coordinator does not want this store.
            PeerLost, ProtocolError: the coordinator is lost, or does not keep to the protocol.
            ConfigError: this machine cannot listen where it should.
        """
        while True:
            event = self._inbox.get(TICK_S)
            check_goes_on(event, "the server")
            if event is not None:
                self._handle(event)

    # the reader's thread

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take what the coordinator says; its slice is passed on when it is whole."""
        if isinstance(message, Slice):
            if self._given is not None:
                raise ProtocolError("it gave a second slice")
            self._given, buckets = message, buckets_of(message, self._answer.bucket_bytes)
            check_fits(message, psutil.virtual_memory().available)
            span = range(message.first, message.stop)
            dtype = get_codec(message.codec).dtype
            pieces = slice_pieces(buckets, span, message.contents, dtype)
            self._incoming = Assembler("slice", lambda _: pieces) if pieces else None
            return None if pieces else SliceArrived(message, {})
        if not isinstance(message, State):
            return MessageReceived(COORDINATOR, message)
        if self._given is None or self._incoming is None:
            raise ProtocolError("it sent weights of no slice that is still to come")
        _, values = self._incoming.take(message, payload)
        if values is None:
            return None
        self._incoming = None
        return SliceArrived(self._given, by_name(self._given.contents, values))

    # the main thread

    def _handle(self, event: Event) -> None:
        match event:
            case SliceArrived(given, values):
                self._setup.on_run_known(given.run_id)
                self._held = self._setup.held(self._setup, self._answer, self._inbox, given, values)
                listening = self._held.listen(self._addresses)
                self._coordinator.send(Listening(places=listening))
                told = given.run_id, *_told(given)
                self._setup.log.info("run %s: holds buckets %d to %d of %d", *told)
            case _ if self._held is not None:
                self._held.handle(event, self._coordinator)
            case MessageReceived(message=message):
                raise ProtocolError(f"{type(message).__name__} came before a slice")


def buckets_of(given: Slice, bucket_bytes: int) -> list[slice]:
    """The buckets of all weights, each of `bucket_bytes` but the last.

    Raises:
        ProtocolError: they are not so large, there are too many, or the slice is none of them.
    """
    agreed = bucket_bytes // get_codec(given.codec).dtype.itemsize
    num_buckets = -(-given.num_params // given.bucket_length)
    if given.bucket_length != min(agreed, given.num_params):
        raise ProtocolError(
            f"it gave buckets of {given.bucket_length} weights, {agreed} were agreed on"
        )
    if num_buckets > MAX_BUCKETS:
        raise ProtocolError(f"it has {num_buckets} buckets, at most {MAX_BUCKETS} may be")
    if not given.first < given.stop <= num_buckets:
        raise ProtocolError(
            f"it gave buckets {given.first} to {given.stop - 1} of {num_buckets} as a slice"
        )
    return cut(given.num_params, given.bucket_length)


def check_fits(given: Slice, free_nbytes: int) -> None:
    """Before any memory is taken: its contents, a gradient, and a push need as much each.

    Raises:
        ProtocolError: this machine has not so much.
    """
    itemsize = get_codec(given.codec).dtype.itemsize
    numel = (given.stop - given.first) * given.bucket_length
    nbytes = numel * itemsize * (len(given.contents) + 2)
    if nbytes > free_nbytes:
        raise ProtocolError(
            f"the slice takes {format_bytes(nbytes)} of memory, and this machine has "
            f"{format_bytes(free_nbytes)} free: give servers more hosts, or another one"
        )


def _told(given: Slice) -> tuple[int, int, int]:
    """First and last bucket for people, who count from 1, and how many there are."""
    return given.first + 1, given.stop, -(-given.num_params // given.bucket_length)


class SliceHost(ABC):
    """A slice and the workers' sessions: what a store is from the moment at which it has been given one.

    A subclass makes the slice, and says what takes a worker's messages.
    """

    _slice: HeldSlice

    def __init__(
        self,
        setup: StoreSetup,
        answer: Accepted,
        inbox: Inbox,
        given: Slice,
        values: Mapping[str, Tensor],
    ) -> None:
        """`values` (n,) by name become the slice's own memory.

        Raises:
            ProtocolError: they do not fit the rule that was given.
        """
        self._setup, self._answer, self._inbox, self._given = setup, answer, inbox, given
        self._buckets = buckets_of(given, answer.bucket_bytes)
        self._span = range(given.first, given.stop)
        self._workers: dict[str, Session] = {}
        self._owed: dict[str, list[Frame]] = {}
        """Frames for workers whose sessions this thread has not heard of yet."""
        self._acceptor: Acceptor | None = None
        self._closed = threading.Event()
        self._slice = self._new_slice(values)

    @abstractmethod
    def _new_slice(self, values: Mapping[str, Tensor]) -> HeldSlice:
        """The slice of `_given`, in the memory of these values."""

    @abstractmethod
    def _receiver_for(self, session_id: int) -> Receiver:
        """What takes the messages of a worker's session."""

    # workers

    def listen(self, addresses: Sequence[str]) -> tuple[HostPort, ...]:
        """Let workers in at these addresses; returns them with their ports."""
        addresses = tuple(dict.fromkeys(addresses))
        answer = Accepted(
            bucket_bytes=self._answer.bucket_bytes,
            heartbeat_timeout_s=self._answer.heartbeat_timeout_s,
        )
        self._acceptor = self._setup.listen(
            addresses,
            0,
            sets=(SESSION, SLICES),
            inbox=self._inbox,
            admit=lambda session_id, _: (answer, self._receiver_for(session_id)),
            max_queued=COPIES_QUEUED * self._slice.num_frames + EXTRA_QUEUED,
        )
        self._acceptor.open()
        return host_ports(addresses, self._acceptor.ports)

    def close(self, patience_s: float) -> None:
        """Forget the slice, and cut the workers' sessions, if they do not close them in so many seconds.

        When a run is over they do, as soon as they have heard of it from the server.
        """
        deadline = Deadline(patience_s)
        for session in self._workers.values():
            session.join(deadline.remaining())
        self._closed.set()
        if self._acceptor is not None:
            self._acceptor.close()

    def handle(self, event: Event, coordinator: Session) -> None:
        match event:
            case SessionOpened():
                self._on_worker(event)
            case SessionClosed(session_id=session_id):
                self._forget(session_id)
            case MessageReceived(session_id, message) if session_id == COORDINATOR:
                self._obey(message, coordinator)
            case _:
                self._on_event(event, coordinator)

    def _on_worker(self, opened: SessionOpened) -> None:
        instance = opened.client.hello.instance
        if (old := self._workers.get(instance)) is not None:
            old.cut("the same process has connected again")
        self._workers[instance] = opened.session
        for frame in self._owed.pop(instance, ()):
            opened.session.send_frame(frame)

    def _forget(self, session_id: int) -> None:
        if (instance := self._instance_of(session_id)) is not None:
            del self._workers[instance]

    def _instance_of(self, session_id: int) -> str | None:
        own = (name for name, each in self._workers.items() if each.session_id == session_id)
        return next(own, None)

    def _send(self, instance: str, frames: Sequence[Frame]) -> None:
        """Send a worker frames, if need be as soon as it is here."""
        session = self._workers.get(instance)
        if session is None:
            self._owed.setdefault(instance, []).extend(frames)
            return
        for frame in frames:
            session.send_frame(frame)

    def _on_event(self, event: Event, coordinator: Session) -> None:
        """Tell the norms of what has come; keep what is whole until the coordinator decides on it."""
        if not isinstance(event, PartArrived):
            return
        instance = self._instance_of(event.session_id)
        if instance is None:  # void, for its process has connected again
            event.free()
            return
        key = PartKey(instance=instance, of=event.of)
        if (norms := self._slice.take(key, event)) is not None:
            coordinator.send(*arrived(key, event.fragment, event.bucket, norms))

    def _obey(self, message: Message, coordinator: Session) -> None:
        match message:
            case TakeStep():
                self._slice.take_step(message)
            case TakeMean():
                if norms := self._slice.prepare_mean(message):
                    fragment = self._slice.fragment_of(message.parts[0].key)
                    first = self._slice.held(fragment).start
                    coordinator.send(*arrived(None, fragment, first, norms))
            case Drop(key=key):
                self._slice.drop(key)
            case SendWeights(instance=instance):
                self._send(instance, self._slice.frames_for(message))
            case WorkerGone(instance=instance):
                self._owed.pop(instance, None)
                self._slice.leave(instance)
            case Gather(version=version, contents=contents):
                for frame in self._slice.frames(contents, version):
                    coordinator.send_frame(frame)
