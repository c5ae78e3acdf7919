"""A store on a machine of its own: a slice of the buckets, in a process of its own.

    coordinator -> Slice, State …   the slice, its rule, and what it begins with
    worker      -> its part         Arrived goes on, with the norms of its buckets
    coordinator -> TakeStep         a step along the parts that it names, or along a mean
    coordinator -> TakeMean         the mean of parts is wanted for a step: Arrived goes back
    coordinator -> Drop             a part is not wanted any more
    coordinator -> SendWeights      weights to a worker
    coordinator -> Gather           everything to the coordinator

It dials the coordinator, tells where it listens, and lets workers in with the same secret. What a step does
is the matter of a subclass of `HeldSlice`, its rule: `algorithms/EDP/store.py` takes a step of an optimizer,
`algorithms/DiLoCo/store.py` an outer one, `algorithms/SynchronousPS/store.py` adds up a mean. It decides
nothing: what the coordinator (`store_links.py`) says comes in one order, so that the slices of all stores
stand at one version whenever anybody sees them. It has no model, no data and no code of a user's. When it
loses the coordinator it forgets its slice, and is given one when it comes back.

Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server".
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil
from torch import Tensor

from smolcluster.codec.registry import get_codec
from smolcluster.errors import PeerLost, ProtocolError, RunFailed
from smolcluster.server.joining import Follower, RunOver, check_goes_on
from smolcluster.server.slices import arrived, by_name, slice_frames, slice_pieces
from smolcluster.server.store import Counted, mean_of
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
    WEIGHTS,
    Accepted,
    CountedPart,
    Drop,
    Gather,
    Goodbye,
    HostPort,
    LeaseKey,
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

    held: "type[HeldSlice]"
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
        self._held: HeldSlice | None = None
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


@dataclass(frozen=True)
class Part:
    """What a worker has sent of a fragment, `values` (n,), as far as it belongs here."""

    fragment: int
    values: Tensor
    free: Callable[[], None]
    """The coordinator has decided on it: its worker may send more."""


@dataclass(frozen=True)
class PartArrived(Event):
    """Buckets of a fragment's part have come, from `bucket` on: `values` (m,); with the last one `part`."""

    session_id: int
    of: LeaseKey | int
    fragment: int
    bucket: int
    values: Tensor
    part: Part | None


class HeldSlice(ABC):
    """A slice and the workers' sessions: what a store is from the moment at which it has been given one.

    It keeps what workers have sent until the coordinator decides on it, and takes the steps that that says. A
    rule says how; one that keeps no parts has an `_on_event` and a `_take_mean` of its own.
    """

    def __init__(
        self,
        setup: StoreSetup,
        answer: Accepted,
        inbox: Inbox,
        given: Slice,
        values: Mapping[str, Tensor],
    ) -> None:
        """`values` (n,) by name become the store's own memory."""
        self._setup, self._answer, self._inbox, self._given = setup, answer, inbox, given
        self._buckets = buckets_of(given, answer.bucket_bytes)
        self._span = range(given.first, given.stop)
        self._contents = values
        self._workers: dict[str, Session] = {}
        self._owed: dict[str, list[Frame]] = {}
        """Frames for workers whose sessions this thread has not heard of yet."""
        self._acceptor: Acceptor | None = None
        self._closed = threading.Event()
        self._parts: dict[PartKey, Part] = {}
        """Those that wait for the coordinator's word."""
        self._means: dict[int, tuple[Tensor, Sequence[PartKey]]] = {}
        """By fragment: the mean that the next step takes, and whose it is."""
        self._snapshot: tuple[int, list[Frame]] | None = None
        """A version, and frames of the weights then."""

    # its rule

    @property
    def _num_frames(self) -> int:
        """In which all that workers are sent of the slice is sent once."""
        return len(self._span)

    @abstractmethod
    def _receiver_for(self, session_id: int) -> Receiver:
        """What takes the messages of a worker's session."""

    def _first_bucket(self, _fragment: int) -> int:
        """The number of the first of a fragment's buckets that is held here."""
        return self._span.start

    def _norms(self, _fragment: int, _bucket: int, _values: Tensor) -> Sequence[Sequence[float]]:
        """L2 norms by bucket of a fragment's values from a bucket on; a second row may be of the weights."""
        raise ProtocolError("it was sent parts of a slice that keeps none")

    def _step(
        self,
        _step: TakeStep,
        _fragment: int,
        _keys: Sequence[PartKey],
        _parts: Sequence[Counted],
    ) -> None:
        """Take a step along parts of a fragment."""
        raise ProtocolError("it wanted a step along parts of a slice that keeps none")

    def _step_along(self, _step: TakeStep, _means: Mapping[int, Tensor]) -> None:
        """Take a step along means, by fragment, (n,) each."""
        raise ProtocolError("it wanted a step along means of a slice that takes none")

    def _send_fragment(self, _wanted: SendWeights, _fragment: int) -> None:
        """Send a worker what leads to a fragment's weights."""
        raise ProtocolError("it wanted a fragment of a slice that has none")

    def _now(self) -> Mapping[str, Tensor]:
        """What the coordinator may gather, each (n,)."""
        return self._contents

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
            max_queued=COPIES_QUEUED * self._num_frames + EXTRA_QUEUED,
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
            case MessageReceived(session_id, message=WorkerGone(instance=instance)) if (
                session_id == COORDINATOR
            ):
                self._on_gone(instance)
            case MessageReceived(session_id, message=Gather() as wanted) if (
                session_id == COORDINATOR
            ):
                self._gather(wanted, coordinator)
            case MessageReceived(session_id, message) if session_id == COORDINATOR:
                self._obey(message, coordinator)
            case _:
                self._on_event(event, coordinator)

    def _gather(self, wanted: Gather, coordinator: Session) -> None:
        now = self._now()
        if not set(wanted.contents) <= now.keys():
            raise ProtocolError("it wants contents that its slice has not")
        contents = {name: now[name] for name in wanted.contents}
        for frame in self._frames(contents, wanted.version):
            coordinator.send_frame(frame)

    def _on_worker(self, opened: SessionOpened) -> None:
        instance = opened.client.hello.instance
        if (old := self._workers.get(instance)) is not None:
            old.cut("the same process has connected again")
        self._workers[instance] = opened.session
        for frame in self._owed.pop(instance, ()):
            opened.session.send_frame(frame)

    def _on_gone(self, instance: str) -> None:
        """A worker has gone: keep nothing for it."""
        self._owed.pop(instance, None)

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

    def _frames(self, contents: Mapping[str, Tensor], version: int) -> list[Frame]:
        return slice_frames(
            contents,
            self._buckets,
            self._span,
            incarnation=self._given.incarnation,
            version=version,
        )

    # parts and steps

    def _on_event(self, event: Event, coordinator: Session) -> None:
        """Tell the norms of what has come; keep what is whole until the coordinator decides on it."""
        if not isinstance(event, PartArrived):
            return
        part, instance = event.part, self._instance_of(event.session_id)
        key = None if instance is None else PartKey(instance=instance, of=event.of)
        if part is not None and (key is None or key in self._parts):
            # void, for its process has connected again; or sent twice: the first may count already
            part.free()
            return
        if key is None:
            return
        if part is not None:
            self._parts[key] = part
        self._tell_norms(key, event.fragment, event.bucket, event.values, coordinator)

    def _take_mean(self, wanted: TakeMean, coordinator: Session) -> None:
        fragment, keys, counted = self._named(wanted.parts)
        mean = mean_of(counted)
        self._means[fragment] = mean, keys
        self._tell_norms(None, fragment, self._first_bucket(fragment), mean, coordinator)

    def _drop(self, key: PartKey) -> None:
        self._means.pop(self._held(key).fragment, None)
        self._free([key])

    def _tell_norms(
        self,
        key: PartKey | None,
        fragment: int,
        bucket: int,
        values: Tensor,
        coordinator: Session,
    ) -> None:
        norms = self._norms(fragment, bucket, values)
        coordinator.send(*arrived(key, fragment, bucket, norms))

    def _obey(self, message: Message, coordinator: Session) -> None:
        match message:
            case TakeStep(parts=()):
                means, self._means = self._means, {}
                self._step_along(message, {number: mean for number, (mean, _) in means.items()})
                self._free(key for _, keys in means.values() for key in keys)
            case TakeStep(parts=named):
                fragment, keys, counted = self._named(named)
                self._step(message, fragment, keys, counted)
                self._free(keys)
            case TakeMean():
                self._take_mean(message, coordinator)
            case Drop(key=key):
                self._drop(key)
            case SendWeights(instance=instance, fragment=None, version=version):
                self._send_whole(instance, version)
            case SendWeights(fragment=int(fragment)):
                self._send_fragment(message, fragment)

    def _send_whole(self, instance: str, version: int) -> None:
        if self._snapshot is None or self._snapshot[0] != version:  # all share one copy
            weights = {WEIGHTS: self._contents[WEIGHTS]}
            self._snapshot = version, self._frames(weights, version)
        self._send(instance, self._snapshot[1])

    def _named(
        self, named: Sequence[CountedPart]
    ) -> tuple[int, Sequence[PartKey], Sequence[Counted]]:
        """The parts of a fragment that the coordinator has named, which stay here."""
        keys = [each.key for each in named]
        held = [self._held(key) for key in keys]
        if any(each.fragment != held[0].fragment for each in held):
            raise ProtocolError("it named parts of several fragments for one step")
        weights = [each.weight for each in named]
        counted = list(zip(weights, (each.values for each in held), strict=True))
        return held[0].fragment, keys, counted

    def _held(self, key: PartKey) -> Part:
        if (part := self._parts.get(key)) is None:
            raise ProtocolError("it decided on a part that has not arrived")
        return part

    def _free(self, keys: Iterable[PartKey]) -> None:
        for key in keys:
            self._parts.pop(key).free()
