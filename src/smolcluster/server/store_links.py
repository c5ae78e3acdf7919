"""The coordinator's side of the slices of a run's weights: who holds them, and when they step.

A run's buckets are cut into as many slices as there are hosts. The first is in the server's own process (with
one host that is all of them), each other one in that of a store (`store_host.py`), which has dialled this
server. A worker sends each host its part of what it has pushed. Each slice tells the norms of what it gets;
with all of them the coordinator knows the norm of the whole and decides: all take one step along it, or drop
it. What is said to a store is in one order, and obeyed in that order; the server's own slice obeys at once,
while others do elsewhere. So any number of hosts makes the same of the same parts, bit for bit.

What lies elsewhere is here as it was when it was gathered last, for an evaluation or a checkpoint. From that
copy a store that was lost gets its slice back, while the others keep theirs (partial recovery: Maeng et al.,
2011.02999).
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from smolcluster.configs.schema import ClusterConfig, RunConfig
from smolcluster.errors import ClusterEmpty, NonFiniteLoss, ProtocolError
from smolcluster.server.buffers import buffer_frames
from smolcluster.server.slices import (
    by_name,
    place_of,
    read_norms,
    slice_frames,
    slice_pieces,
    spans,
)
from smolcluster.server.store import HeldSlice, PartArrived
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer
from smolcluster.training.replica import Replica
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_duration
from smolcluster.wire.acceptor import LetIn, SessionOpened
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived, SessionClosed
from smolcluster.wire.membership import BUSY_RETRY_AFTER_S, Refused, longest_wait
from smolcluster.wire.messages import (
    Accepted,
    Arrived,
    Drop,
    Gather,
    Goodbye,
    Hello,
    Listening,
    Message,
    OuterRule,
    PartKey,
    Reject,
    SendWeights,
    Slice,
    SliceRule,
    State,
    StoreList,
    StorePlace,
    TakeStep,
    WorkerGone,
)
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.streams import Assembler, Piece

GATHER_TICK_S = 0.1
COPY_EVERY_S, COPY_RATIO = 60.0, 50.0
"""Slices are gathered every so many seconds, and not before so many times as long as it took last."""
GATHER_SLOWER = 20.0
"""Times as slow as the way to a store may the way back be."""


Own = TypeVar("Own", bound=PartArrived)
StepsUndone = Callable[[str, int, float], None]
"""Called with a node, how many steps its store had taken, and the share of the weights in its slice."""


@dataclass(frozen=True)
class NormsArrived(Event):
    """A store has so many buckets of a fragment's part, from `first` on.

    `norms` are rows of one each: the L2 norms of the part, and perhaps of the weights. `key` None: of the
    mean that was wanted.
    """

    session_id: int
    key: PartKey | None
    fragment: int
    first: int
    norms: Sequence[Sequence[float]]


@dataclass
class Pending(Generic[Own]):
    """What has arrived of a part: norms by bucket, and the last that has come of the server's own."""

    fragment: int = 0
    own: Own | None = None
    norms: dict[int, Sequence[float]] = field(default_factory=dict)

    def take(self, first: int, norms: Sequence[Sequence[float]]) -> None:
        """A slice has told norms, from a bucket on: rows of one each."""
        self.norms.update(enumerate(zip(*norms, strict=True), first))

    def row(self, row: int) -> list[float]:
        """Norms in the order of the buckets; row 1 are those of the weights."""
        return [self.norms[bucket][row] for bucket in sorted(self.norms)]

    def norm(self, row: int = 0) -> float:
        """That of the whole."""
        return math.hypot(*self.row(row))


class StoreReceiver(Receiver):
    """Takes what a store says, in its session's reader: the slices that were asked for, and all else."""

    def __init__(self, hear: Callable[[Message, memoryview], Event | None]) -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._asked: deque[tuple[Assembler[State], Tensor, threading.Event]] = deque()
        """What was asked for and is not whole yet: the store sends one after the other."""
        self.num_frames = 0
        """Of slices, that have arrived."""

    def expect(self, pieces: Sequence[Piece], dtype: torch.dtype) -> tuple[Tensor, threading.Event]:
        """The store is about to be asked for its slice; returns its memory, and what is set when it is whole.

        Where one that was asked for before still arrives, this one is written over it.
        """
        whole = threading.Event()
        with self._lock:
            old = self._asked[-1][1] if self._asked else None
            values = torch.empty(pieces[-1].place.stop, dtype=dtype) if old is None else old
            self._asked.append(
                (Assembler("slice", lambda _: pieces, lambda *_, **__: values), values, whole)
            )
        return values, whole

    def _take(self, state: State, payload: memoryview) -> None:
        with self._lock:
            if not self._asked:
                raise ProtocolError("it sent its slice unasked")
            incoming, _, whole = self._asked[0]
        self.num_frames += 1
        if incoming.take(state, payload)[1] is not None:
            with self._lock:
                self._asked.popleft()
            whole.set()

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, State):
            self._take(message, payload)
            return None
        return self._hear(message, payload)


@dataclass
class RemoteStore:
    """A store on another machine: its name, its buckets, and the session with it if there is one."""

    node: str
    span: range
    session: Session | None = None
    instance: str = ""
    listens: Listening | None = None
    """Where workers are let in; None: it has not got its slice yet."""
    waiting_since: float = field(default_factory=time.monotonic)
    """Of one without its slice: when it was lost, or when the last frame of the slice left for it."""
    num_gone: int = 0
    """The most frames that have left for it in one session since it was lost."""
    opened_at: float = 0.0
    """When its session began."""
    took_s: float = 0.0
    """How long it took from then until it had its slice."""
    num_steps: int = 0
    """Steps that it has taken since its slice was last gathered, or given to it."""
    heard_at: float = 0.0
    """When it last said anything."""

    @property
    def live_session(self) -> Session:
        """The session of one that has its slice."""
        assert self.session is not None  # noqa: S101 - without a session it has none
        return self.session

    @property
    def receiver(self) -> StoreReceiver:
        """What takes what it says."""
        receiver = self.live_session.receiver
        assert isinstance(receiver, StoreReceiver)  # noqa: S101 - as it was admitted
        return receiver

    def send(self, message: Message) -> None:
        """Say something to it, if it is there."""
        if self.session is not None:
            self.session.send(message)


class StoreLinks(ABC, Generic[Own]):
    """All slices of a run: `own`, which is in this process, and those of stores on other hosts.

    Only the deciding thread calls it. What a slice holds, and how it changes, is a subclass's matter. `Own`
    is what tells of parts that have come to this process.
    """

    own: HeldSlice

    def __init__(
        self,
        replica: Replica,
        nodes: Sequence[str],
        *,
        run: RunConfig,
        codec: str,
        incarnation: str,
        cluster: ClusterConfig,
        log: logging.Logger,
        shares: Sequence[float] | None = None,
    ) -> None:
        """Cut the replica's buckets among `nodes`, in these `shares`; the first is this process."""
        self._replica = replica
        self._run, self._codec, self._incarnation = run, codec, incarnation
        self._cluster, self._log = cluster, log
        self.own_span, *others = spans(len(replica.buckets), shares or [1] * len(nodes))
        self._stores = [
            RemoteStore(node, span) for node, span in zip(nodes[1:], others, strict=False)
        ]
        for node in nodes[1 + len(others) :]:
            log.warning("the model has %d buckets: %s holds none", len(replica.buckets), node)
        self._copied_version = 0
        self._copied_at = time.monotonic()
        self._copying_took_s = 0.0
        self._has_been_ready = False
        self._pending: dict[PartKey, Pending[Own]] = {}
        self._copied_steps = 0
        """How many steps the optimizer had taken when the slices were gathered last."""
        self._buffers: tuple[int, list[Frame]] | None = None
        """A version of whole weights that were sent, and frames of the model's buffers then."""
        self._on_undone: StepsUndone
        self._on_store_lost: Callable[[], None]

    def begin(
        self,
        version: int,
        on_undone: StepsUndone,
        on_store_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """The replica is as the run begins, or goes on from a checkpoint of `version`.

        `on_undone` hears of steps that a lost store had taken and its slice has not.
        """
        self._on_undone, self._on_store_lost = on_undone, on_store_lost
        self._remember_copy(version)

    # what slices hold

    @abstractmethod
    def _contents(self, place: slice) -> Mapping[str, Tensor]:
        """What a slice of the flat weights holds, by name: views of what was gathered last."""

    def _rule(self, _place: slice) -> SliceRule | OuterRule | None:
        """How a slice steps; None: it takes no steps."""
        return None

    def _owes_residual(self) -> bool:
        """Whether the residual among a slice's contents is still owed."""
        return False

    def _held(self, store: RemoteStore, _fragment: int) -> range:
        """The numbers of a fragment's buckets that a store holds."""
        return store.span

    def _holders(self, fragment: int | None = None) -> list[RemoteStore]:
        """The other hosts, or those that hold something of a fragment."""
        return [store for store in self._stores if fragment is None or self._held(store, fragment)]

    def _optimizer_rule(self, place: slice) -> SliceRule:
        """How the replica's optimizer steps a slice that is elsewhere.

        Raises:
            ConfigError: it needs all weights in one place.
        """
        part = self._replica.optimizer.part(place)
        assert isinstance(part, FlatOptimizer)  # noqa: S101 - others have no parts
        rule = part.rule
        return SliceRule(
            optimizer=rule.name,
            optimizer_args=dict(rule.arguments),
            weight_decay=rule.weight_decay,
            num_decayed=rule.num_decayed,
            num_steps=self._copied_steps,
        )

    def _remember_copy(self, version: int) -> None:
        """The slices are now here as they are at `version`."""
        self._copied_at = time.monotonic()
        self._copied_version = version
        for store in self._stores:
            store.num_steps = 0
        state = self._replica.optimizer.state
        self._copied_steps = int(state[STEP_COUNT]) if state else 0

    def _on_lost(self, store: RemoteStore) -> None:
        if store.num_steps:
            place = place_of(self._replica.buckets, store.span)
            share = (place.stop - place.start) / self._replica.num_params
            self._on_undone(store.node, store.num_steps, share)
            store.num_steps = 0
        for pending in self._pending.values():
            for bucket in self._held(store, pending.fragment):
                pending.norms.pop(bucket, None)
        self._on_store_lost()

    # who is there

    def admit(self, session_id: int, hello: Hello) -> LetIn | Refused:
        """Decide on a store that has proved itself. Any thread."""
        known = {store.node: store for store in self._stores}
        if hello.node not in known:
            names = ", ".join(known) or "none"
            return Refused(
                "node",
                f"{hello.node!r} is no store of this run (servers has {names}); mend servers in the server's "
                "cluster file",
            )
        answer = Accepted(
            bucket_bytes=self._replica.bucket_bytes,
            heartbeat_timeout_s=self._run.heartbeat_timeout_s,
        )
        return answer, StoreReceiver(partial(self._hear, known[hello.node], session_id))

    @property
    def is_ready(self) -> bool:
        """Whether all stores have their slices."""
        return all(store.listens for store in self._stores)

    def check_patience(self, now: float) -> None:
        """Give up when a store has been missing for too long, or has its slice sent and gets no further.

        Raises:
            ClusterEmpty: it has.
        """
        limit_s, key = longest_wait(self._cluster, started=self._has_been_ready)
        for store in self._stores:
            if store.listens is not None:
                continue
            session = store.session
            if session is not None and session.num_gone > store.num_gone:
                store.num_gone, store.waiting_since = session.num_gone, now
            if now - store.waiting_since > limit_s:
                missing, remedy = "did not come within", "start it"
                if session is not None:
                    missing, remedy = (
                        "has not got on with its slice for",
                        "look at its log file, start it",
                    )
                raise ClusterEmpty(
                    f"the store {store.node} {missing} {format_duration(limit_s)} ({key}); {remedy}, then "
                    "the server again"
                )

    def are_silent(self, now: float) -> bool:
        """Whether a store that has its slice has said nothing for as long as a lost one is waited for.

        It may have nothing to say. Whoever wants to know gathers: that cuts a store that does not answer.
        """
        limit_s = self._cluster.empty_cluster_timeout_s
        return any(store.listens and now - store.heard_at > limit_s for store in self._stores)

    def is_copy_due(self, now: float) -> bool:
        """Whether what would be lost with a store is older than gathering it costs."""
        has_changed = any(store.num_steps for store in self._stores)
        wait_s = max(COPY_EVERY_S, COPY_RATIO * self._copying_took_s)
        return self.is_ready and has_changed and now - self._copied_at > wait_s

    def introduce(self, session: Session) -> bool:
        """Tell a worker of the stores on other hosts, when all are ready; returns whether there are none.

        It asks for weights when it has reached them.
        """
        if self._stores and self.is_ready:
            places = (
                StorePlace(
                    node=store.node,
                    places=store.listens.places,
                    first=store.span.start,
                    stop=store.span.stop,
                )
                for store in self._stores
                if store.listens
            )
            session.send(StoreList(stores=tuple(places)))
        return not self._stores

    def handle(self, event: Event) -> bool:
        """Take what concerns stores; returns whether they are ready now, and were not before."""
        match event:
            case SessionOpened():
                self._opened(event)
            case SessionClosed(session_id=session_id, reason=reason):
                self._closed(session_id, reason)
            case MessageReceived(session_id=session_id, message=Listening() as listens):
                return self._listens(session_id, listens)
            case MessageReceived(session_id=session_id, message=Goodbye() as goodbye):
                # of one that was lost nothing counts
                if goodbye.fault == "non-finite" and self._of_session(session_id):
                    raise NonFiniteLoss(goodbye.reason)
                self._closed(session_id, goodbye.reason)
        return False

    def _of_session(self, session_id: int) -> RemoteStore | None:
        sessions = ((store, store.session) for store in self._stores)
        return next((s for s, own in sessions if own and own.session_id == session_id), None)

    def _opened(self, opened: SessionOpened) -> None:
        """Give a store its slice, as it was gathered last."""
        hello, session = opened.client.hello, opened.session
        store = next(each for each in self._stores if each.node == hello.node)
        if store.session is not None:
            if store.instance != hello.instance:
                sentence = f"the store {store.node} is another live process; stop that one"
                reject = Reject(code="busy", sentence=sentence, retry_after_s=BUSY_RETRY_AFTER_S)
                session.end_with(reject)
                return
            store.session.cut("the same process has connected again")
            self._lost(store, "the same process has connected again")
        store.session, store.instance = session, hello.instance
        store.opened_at = time.monotonic()
        session.send(self._slice_of(store))
        place = place_of(self._replica.buckets, store.span)
        for frame in slice_frames(
            self._contents(place),
            self._replica.buckets,
            store.span,
            incarnation=self._incarnation,
            version=self._copied_version,
        ):
            session.send_frame(frame)

    def _slice_of(self, store: RemoteStore) -> Slice:
        replica = self._replica
        place = place_of(replica.buckets, store.span)
        return Slice(
            run_id=self._run.run_id,
            reconnect_timeout_s=self._run.reconnect_timeout_s,
            incarnation=self._incarnation,
            num_params=replica.num_params,
            bucket_length=replica.buckets[0].stop,
            first=store.span.start,
            stop=store.span.stop,
            contents=tuple(self._contents(place)),
            codec=self._codec,
            has_loss_scale=replica.scaler is not None,
            rule=self._rule(place),
            owes_residual=self._owes_residual(),
        )

    def _listens(self, session_id: int, listens: Listening) -> bool:
        store = self._of_session(session_id)
        if store is None or store.listens is not None:
            return False
        store.listens, store.heard_at = listens, time.monotonic()
        store.took_s = store.heard_at - store.opened_at
        first, stop, total = store.span.start + 1, store.span.stop, len(self._replica.buckets)
        self._log.info(
            "the store %s holds buckets %d to %d of %d, as they were at step %d",
            store.node,
            first,
            stop,
            total,
            self._copied_version,
        )
        if self.is_ready:
            self._has_been_ready = True
        return self.is_ready

    def _closed(self, session_id: int, reason: str) -> None:
        if (store := self._of_session(session_id)) is not None:
            self._lost(store, reason)

    def _lost(self, store: RemoteStore, reason: str) -> None:
        if store.listens is not None:  # else it is waited for already
            store.waiting_since, store.num_gone = time.monotonic(), 0
        store.session, store.listens = None, None
        self._on_lost(store)
        self._log.warning(
            "the store %s is lost: %s; training pauses, for up to %s, until it is back",
            store.node,
            reason,
            format_duration(self._cluster.empty_cluster_timeout_s),
        )

    def _tell(self, message: Message, fragment: int | None = None) -> None:
        """Say something to the other hosts, or to those that hold something of a fragment."""
        for store in self._holders(fragment):
            store.send(message)

    # parts

    def _hear(
        self, store: RemoteStore, session_id: int, message: Message, payload: memoryview
    ) -> Event | None:
        if not isinstance(message, Arrived):
            return MessageReceived(session_id, message)
        norms = read_norms(message, payload, self._held(store, message.fragment))
        return NormsArrived(session_id, message.key, message.fragment, message.bucket, norms)

    def hear(self, told: NormsArrived) -> bool:
        """A store has buckets; returns whether it has them still, and was not given its slice anew since."""
        if (store := self._of_session(told.session_id)) is None:
            return False
        store.heard_at = time.monotonic()
        return True

    def take(self, key: PartKey, came: Own) -> Own | None:
        """Buckets of a part have come to this process; returns the last of these once all are everywhere.

        Of one that is sent again nothing is taken.
        """
        with self._replica.meter("apply"):
            norms = self.own.take(key, came)
        if norms is None:
            return None
        pending = self._pending.setdefault(key, Pending(came.fragment))
        pending.take(came.bucket, norms)
        if came.part is not None:
            pending.own = came
        return pending.own if self._has_all_norms(pending) else None

    def collect(self, key: PartKey, told: NormsArrived) -> Own | None:
        """A store has buckets of a part; returns as `take`."""
        pending = self._pending.setdefault(key, Pending(told.fragment))
        pending.take(told.first, told.norms)
        return pending.own if self._has_all_norms(pending) else None

    def _has_all_norms(self, pending: Pending[Any]) -> bool:
        held = (self._held(store, pending.fragment) for store in self._stores)
        return len(pending.norms) == sum(map(len, (self.own.held(pending.fragment), *held)))

    def drop_part(self, told: NormsArrived) -> None:
        """Nobody waits for a part that a store has told of: it drops it when it has all of its own."""
        store = self._of_session(told.session_id)
        stop = told.first + len(told.norms[0])
        if store and told.key and stop == self._held(store, told.fragment).stop:
            store.send(Drop(key=told.key))

    def forget(self, key: PartKey) -> None:
        """A part is not wanted any more, if it has not been decided on.

        What is still on its way to a store is dropped when it comes: see `drop_part`.
        """
        pending = self._pending.pop(key, Pending[Own]())
        for store in self._stores:
            held = self._held(store, pending.fragment)
            if held and held[-1] in pending.norms:
                store.send(Drop(key=key))
        if pending.own is not None:
            self.own.drop(key)

    # steps

    def _step(self, step: TakeStep, fragment: int | None = None) -> None:
        """Let all hosts take a step that hold something of a fragment; None: of any."""
        for store in self._holders(fragment):
            store.num_steps += store.listens is not None
        self._tell(step, fragment)
        with self._replica.meter("apply"):
            self.own.take_step(step)

    def send_whole(self, worker: str, version: int) -> list[Frame]:
        """Let stores send a worker all weights, which are of `version`; returns the server's part of them.

        Raises:
            NonFiniteLoss: they are ruined.
        """
        wanted = SendWeights(instance=worker, version=version)
        self._tell(wanted)
        if self._buffers is None or self._buffers[0] != version:
            self._replica.check_weights(f"after step {version}")
            self._buffers = version, self._buffer_frames(version)
        with self._replica.meter("encode"):
            return [*self._buffers[1], *self.own.frames_for(wanted)]

    def _buffer_frames(self, version: int) -> list[Frame]:
        replica = self._replica
        return buffer_frames(replica.buffers.values(), replica.bucket_bytes, version=version)

    # weights

    def worker_gone(self, instance: str) -> None:
        """Let no store keep anything for a worker that may not come."""
        self._tell(WorkerGone(instance=instance))
        self.own.leave(instance)

    def gather(self, version: int, check_stop: Callable[[], None] = lambda: None) -> bool:
        """Bring all slices into the replica, as they are now; returns False if a store is missing.

        Nothing else is decided meanwhile. A store of which nothing comes for as long as a lost one is waited
        for is cut, and so is one that takes `GATHER_SLOWER` times as long as for getting its slice, and so
        long besides. The weights must not be read by others until this returns. `check_stop` may raise.
        """
        if not self._contents(slice(0, 0)):
            return True
        if not self.is_ready:
            return False
        began = time.monotonic()
        asked = [(store, *self._ask(store, version)) for store in self._stores]
        for store, _, whole in asked:
            if not self._wait_for(store, whole, check_stop):
                return False
        for store, gathered, _ in asked:
            contents = self._contents(place_of(self._replica.buckets, store.span))
            for name, values in by_name(tuple(contents), gathered).items():
                contents[name].copy_(values)
        self._remember_copy(version)
        self._copying_took_s = self._copied_at - began
        return True

    def _ask(self, store: RemoteStore, version: int) -> tuple[Tensor, threading.Event]:
        replica = self._replica
        dtype = replica.params.dtype
        contents = tuple(self._contents(place_of(replica.buckets, store.span)))
        pieces = slice_pieces(replica.buckets, store.span, contents, dtype)
        asked = store.receiver.expect(pieces, dtype)
        store.send(Gather(version=version, contents=contents))
        return asked

    def _wait_for(
        self,
        store: RemoteStore,
        whole: threading.Event,
        check_stop: Callable[[], None],
    ) -> bool:
        """Wait for the slice that a store was asked for; if it does not come, cut it and return False."""
        session, receiver, progress = store.live_session, store.receiver, -1
        patience_s = self._cluster.empty_cluster_timeout_s
        deadline = Deadline(patience_s)
        total_s = patience_s + GATHER_SLOWER * store.took_s
        total = Deadline(total_s)
        while not whole.wait(GATHER_TICK_S):
            check_stop()
            if receiver.num_frames != progress:
                progress, deadline = receiver.num_frames, Deadline(patience_s)
            if deadline.expired:
                session.cut("it does not send its slice")
            if total.expired:
                session.cut(f"it has not sent its slice within {format_duration(total_s)}")
            if session.is_cut:
                return False
        store.heard_at = time.monotonic()
        return True
