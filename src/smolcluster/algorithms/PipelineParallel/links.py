"""A stage's sessions with its neighbours: activations go up, their gradients down, without the server.

    links = Links(node, server, bucket_bytes=1 << 20, heartbeat_timeout_s=10.0)
    places = links.listen(addresses)              # told to the coordinator, which tells the neighbours
    links.connect(route, timeout_s)               # after every plan
    links.begin_step(step)
    tree = links.receive(instruction)             # what it takes of another stage
    links.send(instruction, tree)                 # its result, to the stage that takes that

Of two neighbours the one of the higher rank dials; the handshake is that of all sessions, with the cluster's
secret. Where it reaches the other at none of its addresses the server relays. What is sent is encoded and
leaves in a session's writer, what comes is decoded in its reader, so both overlap computing. One thread
computes: it alone connects, sends and receives, and copies between the accelerator and the CPU.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import psutil
import torch
from torch import Tensor

from smolcluster.algorithms.PipelineParallel.transfers import (
    Direction,
    Key,
    Mailbox,
    encode,
    key_of,
    on_cpu,
)
from smolcluster.codec.base import bytes_of
from smolcluster.data.dataset import Batch
from smolcluster.data.pytree import decode, map_tensors, tensors_in
from smolcluster.errors import (
    AuthError,
    ConnectTimeout,
    DataError,
    PeerLost,
    ProtocolError,
    Rejected,
    SmolclusterError,
)
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.training.stages.execution import Transport
from smolcluster.utils.retry import Deadline
from smolcluster.wire.acceptor import Acceptor, LetIn, SessionOpened
from smolcluster.wire.dialling import Address
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, Handled, SessionClosed
from smolcluster.wire.membership import Refused
from smolcluster.wire.messages import (
    LINKS,
    SESSION,
    Accepted,
    Hello,
    HostPort,
    Message,
    Relayed,
    StageNeighbour,
    TensorSpec,
    Transfer,
    TransferPiece,
    host_ports,
)
from smolcluster.wire.node import MAX_QUEUED, Node
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.streams import Assembler, Piece, byte_frames, bytes_piece

DIAL_TIMEOUT_S = 5.0
"""How long each address of a neighbour is tried."""
PLAN_RETRY_S = 0.1
"""How soon a neighbour asks again that came before the plan which names it."""
MAX_QUEUED_NBYTES = 64 * 1024 * 1024
"""Tensors that wait for one neighbour; whoever computes waits before there are more."""
CLOSING_TIMEOUT_S = 3.0
PATIENCE_S = 3600.0
"""A neighbour that is lost is known at once; who is slow, or hangs, is the server's to tell apart."""


@dataclass(frozen=True)
class Route:
    """What a plan says of one stage's links.

    Attributes:
        rank: of this process.
        attempt: larger than that of any route before.
        step: the first one that is computed.
        ranks: whose each virtual stage is.
        neighbours: the processes that this one exchanges anything with.
        codec: of activations and their gradients (`codec/rows.py`).
        patience_s: silence after which a neighbour is lost that is waited for, seconds.
    """

    rank: int
    attempt: int
    step: int
    ranks: tuple[int, ...]
    neighbours: tuple[StageNeighbour, ...]
    codec: str
    patience_s: float = PATIENCE_S


class Links(Transport):
    """The sessions of one stage's process, over all plans of its session with the server."""

    def __init__(
        self, node: Node, server: Session | None, *, bucket_bytes: int, heartbeat_timeout_s: float
    ) -> None:
        """Connects to nobody yet.

        Args:
            node: this process, which its neighbours know by the `instance` of its hello.
            server: who relays where a direct link is blocked; None: nobody does.
            bucket_bytes: largest payload of a frame.
            heartbeat_timeout_s: silence after which a neighbour is lost, seconds.
        """
        self._node, self._server = node, server
        self._answer = Accepted(
            bucket_bytes=bucket_bytes,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self._mailbox = Mailbox(psutil.virtual_memory().available // 2)
        self._events = Handled(self._on_event)
        self._ids = count(1)
        self._lock = threading.Lock()
        """Guards what follows, which belongs to the thread that computes and to those of sessions."""
        self._outboxes: dict[str, _Outbox] = {}
        """The ways to neighbours, by instance: direct ones, and where there is none through the server."""
        self._relayed: dict[str, _Incoming] = {}
        """Of those that are reached through the server, by instance."""
        self._acceptor: Acceptor | None = None
        self._route = Route(0, 0, 0, (0,), (), "fp32")
        self._known: dict[int, StageNeighbour] = {}
        """Neighbours, and this process, by rank."""
        self._is_counted = False
        """Whether what is queued counts for `take_sent`."""
        self._stop = threading.Event()
        """Set when nobody shall be dialled any more."""

    def listen(self, addresses: Sequence[str]) -> tuple[HostPort, ...]:
        """Let neighbours in at these addresses of this machine; returns them with their ports.

        Raises:
            ConfigError: an address is not this machine's.
        """
        addresses = tuple(dict.fromkeys(addresses))
        self._acceptor = self._node.listen(
            addresses,
            0,
            sets=(SESSION, LINKS),
            inbox=self._events,
            admit=self._admit,
            max_queued=MAX_QUEUED,
            session_ids=self._ids,
        )
        self._acceptor.open()
        return host_ports(addresses, self._acceptor.ports)

    def connect(self, route: Route, timeout_s: float) -> None:
        """Reach all neighbours, of which those with a session that still holds are not dialled again.

        Args:
            route: who they are.
            timeout_s: how long they may take to come, seconds.

        Raises:
            ConnectTimeout: one was not reached, and nobody relays.
            PeerLost: one did not come in time, or is lost again.
            AuthError, Rejected: one does not let this process in.
            SmolclusterError: what `interrupt` was given.
        """
        self._stop.clear()
        self._is_counted = False
        self._mailbox.begin(route.attempt, route.step)
        if self._mailbox.is_interrupted():
            self._stop.set()
        self._adopt(route)
        deadline = Deadline(timeout_s)
        for neighbour in route.neighbours:
            if neighbour.rank < route.rank:
                self._reach(neighbour, deadline)
        for neighbour in route.neighbours:
            self._await(neighbour, deadline.remaining())

    def interrupt(self, error: SmolclusterError, through: int) -> None:
        """Have the thread that computes raise `error` in all attempts up to `through`. Any thread."""
        self._mailbox.interrupt(error, through)
        if self._mailbox.is_interrupted():
            self._stop.set()

    def check(self, attempt: int) -> None:
        """See to it that no neighbour of this attempt was lost after it had been reached.

        Raises:
            PeerLost: one was, and may wait for this stage, which it has lost before.
        """
        if attempt == self._route.attempt:
            self._mailbox.check(self._route.neighbours)

    def begin_step(self, step: int, *, is_counted: bool = False) -> None:
        """The steps before it are over: what still comes of them is dropped.

        `is_counted`: whether what is queued from now on counts for `take_sent`.
        """
        self._is_counted = is_counted
        self._mailbox.begin_step(step)

    def send(self, instruction: Instruction, result: Batch) -> None:
        """Queue a tree of tensors for the instruction's target; they must not change any more.

        Waits where more than `MAX_QUEUED_NBYTES` would be queued.

        Raises:
            PeerLost: that stage is lost. What was queued for it before may not have arrived.
            SmolclusterError: what `interrupt` was given.
        """
        key = self._key(instruction, instruction.target)
        self._send(key, self._route.ranks[instruction.target], result, self._route.codec)

    def receive(self, instruction: Instruction) -> Any:
        """Wait for the tree that an instruction takes, which is on the CPU.

        Raises:
            PeerLost: its sender is lost, or has sent nothing for the route's `patience_s`.
            SmolclusterError: what `interrupt` was given.
        """
        key = self._key(instruction, instruction.stage)
        return self._receive(key, self._route.ranks[instruction.source])

    def exchange(self, rank: int, tree: Batch) -> Batch:
        """Send a tree to the stage of that rank, without loss, and wait for its tree of the same step.

        Raises:
            PeerLost, SmolclusterError: as `receive`.
        """
        own = self._route.rank
        self._send(self._mailbox.key("exchange", rank, own), rank, tree, "fp32")
        return self._receive(self._mailbox.key("exchange", own, rank), rank)

    def take_sent(self) -> tuple[int, ...]:
        """The bytes, as encoded, that have begun to leave for each rank since this was asked last.

        Of steps alone that count (`begin_step`): not of links that are measured, nor of evaluations.
        """
        sent = [0] * (1 + max(self._route.ranks))
        for neighbour in self._route.neighbours:
            if (outbox := self._outbox(neighbour)) is not None:
                sent[neighbour.rank] = outbox.take_sent()
        return tuple(sent)

    def relayed(self, instance: str) -> "_Incoming":
        """What takes what the server relays of a neighbour, in the reader of its session. Any thread."""
        with self._lock:
            incoming = self._relayed.setdefault(instance, _Incoming(instance, self._mailbox))
            if instance not in self._outboxes and self._server is not None:
                self._outboxes[instance] = _Outbox(self._server, self._mailbox, relayed=instance)
        self._mailbox.notify()
        return incoming

    def close(self) -> None:
        """End all sessions and free the port; idempotent."""
        self._stop.set()
        with self._lock:
            sessions = [each.session for each in self._outboxes.values() if each.is_direct]
        for session in sessions:
            session.finish()
        deadline = Deadline(CLOSING_TIMEOUT_S)
        for session in sessions:
            session.join_or_cut(deadline.remaining())
        if self._acceptor is not None:
            self._acceptor.close()

    # the thread that computes

    def _adopt(self, route: Route) -> None:
        """Expect a route's neighbours, and cut the sessions with others."""
        hello, wanted = self._node.hello, {each.instance for each in route.neighbours}
        own = StageNeighbour.model_construct(
            rank=route.rank, node=hello.node, instance=hello.instance, places=()
        )
        with self._lock:
            self._route = route
            self._known = {each.rank: each for each in (own, *route.neighbours)}
            gone = [self._outboxes.pop(each) for each in set(self._outboxes) - wanted]
            for instance in set(self._relayed) - wanted:
                self._relayed.pop(instance).close()
        for outbox in gone:
            outbox.cut("it is no neighbour any more")

    def _outbox(self, neighbour: StageNeighbour) -> "_Outbox | None":
        """The way to a neighbour; None: there is none now."""
        with self._lock:
            return self._outboxes.get(neighbour.instance)

    def _await(self, neighbour: StageNeighbour, timeout_s: float) -> None:
        self._mailbox.wait_for(
            lambda: self._outbox(neighbour),
            peer=neighbour,
            timeout_s=timeout_s,
            progress=lambda: 0,
            what="it did not connect to this stage",
        )

    def _reach(self, neighbour: StageNeighbour, deadline: Deadline) -> None:
        """Dial a neighbour at each of its addresses, or ask the server to relay."""
        if (outbox := self._outbox(neighbour)) is not None:
            if not outbox.is_direct:  # the neighbour may have had a route without this stage since
                outbox.session.send(Relayed(instance=neighbour.instance))
            return
        try:
            self._dial(neighbour, deadline)
        except ConnectTimeout as error:
            if self._server is None:
                raise
            self._node.log.warning(
                "%s cannot be reached from here (%s): the server relays what the two say to each other; open "
                "its ports to this machine to take that load off the server",
                neighbour,
                error,
            )
            self.relayed(neighbour.instance)
            self._server.send(Relayed(instance=neighbour.instance))
        except AuthError as error:
            raise AuthError(f"link to {neighbour}: {error}") from None
        except PeerLost:
            if not self._mailbox.is_interrupted():
                raise

    def _dial(self, neighbour: StageNeighbour, deadline: Deadline) -> None:
        """Begin a session at the first address at which the neighbour answers.

        Raises:
            ConnectTimeout: it answers at none; Rejected, AuthError: it does not let this process in.
            PeerLost: nobody shall be dialled any more.
        """
        while True:
            refusal: Rejected | None = None
            for place in neighbour.places:
                try:
                    address = Address(place.host, place.port, neighbour.node)
                    session = self._node.dial_session(
                        address,
                        (LINKS,),
                        session_id=next(self._ids),
                        receiver=_Incoming(neighbour.instance, self._mailbox),
                        inbox=self._events,
                        timeout_s=min(DIAL_TIMEOUT_S, deadline.remaining()),
                        whom=str(neighbour),
                        stop=self._stop,
                    )
                except ConnectTimeout as error:
                    last = error
                    refusal = error.__cause__ if isinstance(error.__cause__, Rejected) else refusal
                else:
                    self._register(session, neighbour.instance)
                    session.start()
                    return
            if refusal is None or deadline.expired:  # else it answers, and has no plan yet
                raise last

    def _send(self, key: Key, rank: int, tree: Batch, codec: str) -> None:
        if rank == self._route.rank:
            self._mailbox.put(key, map_tensors(tree, Tensor.detach), 0)
            return
        neighbour, tree = self._known[rank], on_cpu(tree)
        outbox = self._outbox(neighbour)
        nbytes = sum(each.nbytes for each in tensors_in(tree))
        self._mailbox.wait_for(
            lambda: outbox is not None and outbox.has_room(nbytes),
            peer=neighbour,
            timeout_s=self._answer.heartbeat_timeout_s,
            progress=lambda: outbox.session.connection.bytes_sent if outbox else 0,
            what=f"{key} did not leave",
        )
        assert outbox is not None  # noqa: S101 - it has been waited for
        outbox.queue(key, tree, nbytes, codec, is_counted=self._is_counted)

    def _key(self, instruction: Instruction, taker: int) -> Key:
        """Names what stage `taker` takes of another one."""
        way: Direction = "forward" if instruction.op is Op.FORWARD else "backward"
        return self._mailbox.key(way, taker, instruction.microbatch)

    def _receive(self, key: Key, rank: int) -> Batch:
        return self._mailbox.take(key, self._known[rank], self._route.patience_s)

    # any thread

    def _admit(self, _session_id: int, hello: Hello) -> LetIn | Refused:
        with self._lock:
            if all(hello.instance != each.instance for each in self._route.neighbours):
                own = self._node.hello.node
                sentence = f"{own} has no plan yet in which {hello.node} is its neighbour"
                return Refused("neighbour", sentence, PLAN_RETRY_S)
        return self._answer, _Incoming(hello.instance, self._mailbox)

    def _register(self, session: Session, instance: str) -> None:
        with self._lock:
            old = self._outboxes.get(instance)
            self._outboxes[instance] = _Outbox(session, self._mailbox)
        self._mailbox.found(instance)
        if old is not None:
            old.cut("the same process has connected again")

    def _on_event(self, event: Event) -> None:
        """What an acceptor and the readers of sessions tell, in their threads."""
        match event:
            case SessionOpened(session=session, client=client):
                self._register(session, client.hello.instance)
            case SessionClosed(session_id=session_id, reason=reason):
                with self._lock:
                    lost = [
                        instance
                        for instance, outbox in self._outboxes.items()
                        if outbox.session.session_id == session_id
                    ]
                    for instance in lost:
                        del self._outboxes[instance]
                for instance in lost:
                    self._mailbox.lose(instance, reason)


class _Outbox:
    """What waits to be sent to one neighbour: directly, or through the server."""

    def __init__(self, session: Session, mailbox: Mailbox, relayed: str | None = None) -> None:
        """`relayed`: the neighbour's instance, where the session is the one with the server."""
        self.session = session
        self._mailbox = mailbox
        self._relayed = relayed
        self._queued_nbytes = self._sent_nbytes = 0
        self._is_awaited = False
        """Whether somebody waits for room: to wake who only waits for input would cost it the interpreter."""
        self._lock = threading.Lock()

    @property
    def is_direct(self) -> bool:
        return self._relayed is None

    def cut(self, reason: str) -> None:
        """End the session with the neighbour, if there is one."""
        if self.is_direct:
            self.session.cut(reason)

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may be queued now; anything may be where nothing else is."""
        with self._lock:
            queued = self._queued_nbytes
            has_room = queued == 0 or queued + nbytes <= MAX_QUEUED_NBYTES
            self._is_awaited = not has_room
        return has_room

    def take_sent(self) -> int:
        """Bytes, as encoded, that have begun to leave and count, since this was asked last."""
        with self._lock:
            sent, self._sent_nbytes = self._sent_nbytes, 0
        return sent

    def queue(self, key: Key, tree: Batch, nbytes: int, codec: str, *, is_counted: bool) -> None:
        """Have the session's writer encode a tree on the CPU, of so many bytes, and send it."""
        with self._lock:
            self._queued_nbytes += nbytes
        frames = self._frames(key, tree, nbytes, codec, is_counted=is_counted)
        self.session.send_frames(frames)

    def _frames(
        self, key: Key, tree: Batch, nbytes: int, codec: str, *, is_counted: bool
    ) -> Iterator[Frame]:
        """The frames of a tree, none larger than the session allows; in the writer's thread."""
        try:
            encoded = encode(tree, codec)
        except DataError as error:
            what = DataError(f"{key} cannot be sent to another stage: {error}")
            self._mailbox.interrupt(what, through=key.attempt)
            return
        finally:
            with self._lock:
                self._queued_nbytes -= nbytes
                is_awaited = self._is_awaited
            if is_awaited:
                self._mailbox.notify()
        if is_counted:
            with self._lock:
                self._sent_nbytes += encoded.nbytes
        message = partial(self._message, key=key, nbytes=encoded.nbytes)
        yield from byte_frames(message, encoded.slices(self.session.connection.max_payload))

    def _message(self, *, key: Key, offset: int, nbytes: int, tensor: TensorSpec) -> Message:
        piece = TransferPiece(**key._asdict(), offset=offset, nbytes=nbytes)
        if self._relayed is None:
            return Transfer(piece=piece, tensor=tensor)
        return Relayed(instance=self._relayed, piece=piece, tensor=tensor)


class _Incoming(Receiver):
    """Puts the pieces that one neighbour sends into the memory of what they are pieces of."""

    def __init__(self, instance: str, mailbox: Mailbox) -> None:
        self._instance, self._mailbox = instance, mailbox
        self._trees = Assembler[Message]("tree of tensors", self._bytes_of, self._memory_for)
        self._is_wanted = False
        """Whether what is arriving is not too late to be of use."""

    @property
    def in_progress(self) -> bool:
        return self._trees.first is not None

    def place_for(self, message: Message) -> memoryview | None:
        """Where a piece belongs; None: nowhere.

        What its sender has begun before the server lost it, and relayed no more of, is given up for a new
        tree, and so is the rest of a tree whose beginning was given up.

        Raises:
            ProtocolError: it is not the piece that must come, or there is no memory for the whole.
        """
        if not isinstance(message, Transfer | Relayed) or message.piece is None:
            return None
        if not message.piece.offset:
            self.close()
        elif not self.in_progress:
            return None
        return self._trees.place_for(message)

    def __call__(self, message: Message, _payload: memoryview) -> None:
        """A piece lies in its place; what it completes is decoded and left for the thread that computes.

        Raises:
            ProtocolError: that is no tree, or is here already.
        """
        if not isinstance(message, Transfer | Relayed) or message.piece is None:
            return
        self._mailbox.count_piece(self._instance)
        if (memory := self._trees.whole()) is not None:
            try:
                tree = decode(bytes_of(memory))
                self._mailbox.put(key_of(message.piece), tree, message.piece.nbytes)
            except ProtocolError:
                self._mailbox.release(message.piece.nbytes)
                raise

    def _bytes_of(self, first: Message) -> list[Piece]:
        piece: TransferPiece = getattr(first, "piece")  # noqa: B009 - `place_for` has looked
        self._is_wanted = self._mailbox.is_wanted(piece)
        return bytes_piece(
            piece.nbytes, lambda start: {"piece": piece.model_copy(update={"offset": start})}
        )

    def _memory_for(self, nbytes: int, *, dtype: torch.dtype) -> Tensor | None:
        if not self._is_wanted:
            return None
        self._mailbox.reserve(nbytes)
        return torch.empty(nbytes, dtype=dtype)

    def close(self) -> None:
        """Give back what was taken for something that did not come whole."""
        self._trees.first = None
        if (memory := self._trees.take_back()) is not None:
            self._mailbox.release(memory.numel())
