"""The key-value store by which ranks find each other and watch each other: rank 0's, behind our own door.

torch's `TCPStore` listens on every interface and lets anybody read and write. This one is a `Store` to torch
as well (Gloo and NCCL exchange their addresses through it), but a rank reaches it by a session of ours:
it proves that it knows the secret, and between machines what is said is encrypted, whatever the configuration
says of `encryption`.
"""

import itertools
import logging
import platform
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Literal

import torch.distributed as dist
from pydantic import Field, Strict, StringConstraints
from torch._C._distributed_c10d import Store

from smolcluster.utils.retry import Deadline
from smolcluster.wire.acceptor import Acceptor, SessionOpened
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.inbox import Event, Handled, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import SESSION, Accepted, Count, Message, MessageSet, TensorSpec
from smolcluster.wire.node import MAX_QUEUED, Node
from smolcluster.wire.security import Secret
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.streams import spec_of

MOST_NBYTES = 16 << 20
"""Of a value."""
MOST_NUMBER = 2**53
"""That is told or added up to."""
MOST_KEYS = 4096
"""That one question may name."""
SILENCE_S = 120.0
"""A rank that is silent for so long is cut off; who watches the ranks has named it before."""
POLL_S = 0.01
ANSWER_S = 60.0
"""How long an answer may take; who watches the ranks sees sooner that rank 0 does not answer."""
CLOSING_S = 5.0
"""How long a session that is to end may take, before it is cut."""

Operation = Literal["set", "get", "check", "compare_set", "add", "delete", "count"]
Key = Annotated[str, StringConstraints(max_length=1024)]
Number = Annotated[int, Field(ge=-MOST_NUMBER, le=MOST_NUMBER)]
Keys = Annotated[tuple[Key, ...], Strict(False), Field(max_length=MOST_KEYS)]


class Ask(Message, kind=65):
    """A rank: do this with these keys; the payload is a value, of `compare_set` both, one after the other."""

    operation: Operation
    keys: Keys
    number: Number = 0
    """Of `add` what is added, of `compare_set` how many bytes the expected value has."""
    question: Count = 0
    """Numbers what this rank asks in a session."""
    tensor: TensorSpec


class Answer(Message, kind=66):
    """Rank 0: what came of it; the payload is a value."""

    number: Number
    question: Count
    tensor: TensorSpec


GROUP_STORE = MessageSet(
    "group-store", from_dialler=frozenset({Ask}), from_listener=frozenset({Answer})
)
"""What ranks, which dial, and rank 0 say to each other."""
Ready = tuple[int, bytes]
"""A number and a value."""


class Shelf:
    """The values. Any thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __call__(self, ask: Ask, value: bytes) -> Ready:
        """Do what is asked; the number of `get` says whether there is a value, of `check` whether all are.

        Raises:
            ValueError: it cannot be done.
        """
        with self._lock:
            if ask.operation == "check":
                return int(all(key in self._values for key in ask.keys)), b""
            if ask.operation == "count":
                return len(self._values), b""
            [key] = ask.keys
            return self._do(ask, key, value)

    def _do(self, ask: Ask, key: str, value: bytes) -> Ready:
        before = self._values.get(key)
        match ask.operation:
            case "set":
                self._values[key] = value
            case "add":
                number = int(before or b"0") + ask.number
                if abs(number) > MOST_NUMBER:
                    raise ValueError(f"{key} would be larger than can be told")
                self._values[key] = str(number).encode()
                return number, b""
            case "compare_set":
                expected, wanted = value[: ask.number], value[ask.number :]
                if (before or b"") == expected:
                    self._values[key] = before = wanted
                return int(before is not None), expected if before is None else before
            case "delete":
                self._values.pop(key, None)
        return int(before is not None), before or b""


class GroupStore(Store):
    """What torch, and whoever watches the ranks, use of a store, each in threads of its own.

    Every operation raises `torch.distributed.DistStoreError`, a RuntimeError, when rank 0 is lost or a value
    does not come in time.
    """

    def __init__(self, end: "Host | Way", timeout_s: float) -> None:
        """`end`: rank 0 has the values, others have a way to them; it ends with this store."""
        super().__init__()
        self._end = end
        self.timeout_s = timeout_s

    @property
    def addresses(self) -> tuple[str, str]:
        """From which address of this machine rank 0's is reached, and the latter."""
        return self._end.addresses

    def close(self) -> None:
        self._end.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], _encoded(value))

    def get(self, key: str) -> bytes:
        """The key's value, once it has one."""
        self.wait([key])
        return self._ask("get", [key])[1]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys)[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        limit_s = self.timeout_s if timeout is None else timeout.total_seconds()
        end = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(
                    f"keys have not come in {limit_s:.0f} s: {', '.join(keys)}"
                )
            time.sleep(POLL_S)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the key if it has the expected value (none is an empty one); its value from then on."""
        first = _encoded(expected)
        return self._ask("compare_set", [key], first + _encoded(desired), len(first))[1]

    def add(self, key: str, amount: int) -> int:
        """Add to the number that the key has, at first 0; returns the sum."""
        return self._ask("add", [key], number=amount)[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key])[0])

    def num_keys(self) -> int:
        return self._ask("count", [])[0]

    def _ask(
        self, operation: Operation, keys: Sequence[str], value: bytes = b"", number: int = 0
    ) -> Ready:
        told = spec_of("none", "uint8", len(value), len(value))
        return self._end(
            Ask(operation=operation, keys=tuple(keys), number=number, tensor=told), value
        )


class Host:
    """Rank 0's side: has the values, and answers each of the other ranks in the thread that reads of it."""

    addresses = ("127.0.0.1", "127.0.0.1")

    def __init__(
        self, addresses: Sequence[str], port: int, secret: Secret, log: logging.Logger
    ) -> None:
        """Listen on these addresses of this machine, and on no other one.

        Raises:
            PortBusy, ConfigError: as `Node.listen`.
        """
        self._shelf = Shelf()
        self.sessions: dict[int, Session] = {}
        self._acceptors: list[Acceptor] = []
        self.port, node, ids = port, _node(secret, log), itertools.count(1)
        answer = Accepted(bucket_bytes=MOST_NBYTES, heartbeat_timeout_s=SILENCE_S)
        try:
            for address in addresses:
                acceptor = node.listen(
                    [address],
                    self.port,
                    sets=(SESSION, GROUP_STORE),
                    inbox=Handled(self._on_event),
                    admit=lambda number, _: (answer, _Answering(self, number)),
                    max_queued=MAX_QUEUED,
                    session_ids=ids,
                )
                acceptor.open()
                self._acceptors.append(acceptor)
                [self.port] = acceptor.ports
        except BaseException:
            self.close()
            raise

    def __call__(self, ask: Ask, value: bytes) -> Ready:
        return self._shelf(ask, value)

    def close(self) -> None:
        """Let nobody in any more, and end all sessions after what is queued for them."""
        sessions, deadline = list(self.sessions.values()), Deadline(CLOSING_S)
        for session in sessions:
            session.finish()
        for session in sessions:
            session.join(deadline.remaining())
        for acceptor in self._acceptors:
            acceptor.close()

    def _on_event(self, event: Event) -> None:
        match event:
            case SessionOpened(session_id=session_id, session=session):
                self.sessions[session_id] = session
            case SessionClosed(session_id=session_id):
                self.sessions.pop(session_id, None)


class _Answering(Receiver):
    """Does what a rank asks, and answers it."""

    def __init__(self, host: Host, session_id: int) -> None:
        self._host, self._session_id = host, session_id
        self._num_answered = 0

    def __call__(self, message: Message, payload: memoryview) -> None:
        session = self._host.sessions.get(self._session_id)
        if session is not None and isinstance(message, Ask):
            question = message.question
            if question != self._num_answered:
                session.cut(f"it asks question {question} where {self._num_answered} comes next")
                return
            try:
                number, found = self._host(message, bytes(payload))
            except ValueError as error:
                session.cut(f"it asks for what cannot be done: {error}")
            else:
                self._num_answered += 1
                told = spec_of("none", "uint8", len(found), len(found))
                answer = Answer(number=number, question=question, tensor=told)
                session.send(answer, found)


class _Hearing(Receiver):
    """Passes on what rank 0 answers."""

    def __call__(self, message: Message, payload: memoryview) -> Event:
        return MessageReceived(0, message, bytes(payload))


class Way:
    """Another rank's side: a session with rank 0, of which one thread at a time asks something.

    When a question breaks off, the session is lost for all threads.
    """

    def __init__(self, address: Address, secret: Secret, timeout_s: float, log: logging.Logger):
        """Try for `timeout_s` seconds to be let in.

        Raises:
            ConnectTimeout, AuthError, VersionDiffers: as `Node.dial`.
        """
        self._inbox, self._lock = Inbox(), threading.Lock()
        self._is_lost = False
        self._num_asked = 0
        self._session = _node(secret, log).dial_session(
            address,
            (GROUP_STORE,),
            session_id=0,
            receiver=_Hearing(),
            inbox=self._inbox,
            timeout_s=timeout_s,
            whom="the peer",
        )
        self._session.start()

    @property
    def addresses(self) -> tuple[str, str]:
        """From which address of this machine the store is reached, and at which one."""
        connection = self._session.connection
        return connection.own_address, connection.address

    def close(self) -> None:
        with self._lock:
            self._end()

    def __call__(self, ask: Ask, value: bytes) -> Ready:
        with self._lock:
            if not self._is_lost:
                question = self._num_asked
                self._num_asked += 1
                self._session.send(ask.model_copy(update={"question": question}), value)
                event = self._inbox.get(ANSWER_S)
                if isinstance(event, MessageReceived) and isinstance(event.message, Answer):
                    answer = event.message
                    if answer.question == question:
                        return answer.number, bytes(event.payload)
            self._end()  # an answer may be on its way still: nothing more is asked here
        raise dist.DistStoreError("rank 0, which has the store, is lost")

    def _end(self) -> None:
        self._is_lost = True
        self._session.finish()
        self._session.join_or_cut(CLOSING_S)


def _node(secret: Secret, log: logging.Logger) -> Node:
    hello = introduce(platform.node()[:64] or "rank", sets=(SESSION, GROUP_STORE))
    return Node(hello=hello, secret=secret, log=log)


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
