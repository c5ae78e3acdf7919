"""Where threads leave what happened, and the one thread that decides picks it up.

Readers, the acceptor and the evaluator only ever put; the server's loop only ever gets. So all state of an
algorithm belongs to one thread, and what it sees is in one order: a worker's push stands before its going.
"""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Semaphore
from typing import NoReturn

from smolcluster.wire.membership import Admitted, Refused
from smolcluster.wire.messages import Hello, Message


class Event:
    """Something that happened outside the deciding thread."""


@dataclass(frozen=True)
class Call(Event):
    """Something that the deciding thread shall do, such as to take what another one has made ready."""

    run: Callable[[], None]


def fail(error: Exception) -> NoReturn:
    """What the deciding thread shall do when another one has failed."""
    raise error


@dataclass(frozen=True)
class JoinRequest(Event):
    """A worker that knows the secret asks to come in; `answer` must be set."""

    session_id: int
    hello: Hello
    answer: "Future[Admitted | Refused]" = field(default_factory=Future)


@dataclass(frozen=True)
class MessageReceived(Event):
    """A message arrived; `payload` is a copy of its own, empty unless the receiver passes payloads on."""

    session_id: int
    message: Message
    payload: bytes | bytearray = b""


@dataclass(frozen=True)
class SessionClosed(Event):
    """A session has ended; nothing more will come from it."""

    session_id: int
    reason: str


class Inbox:
    """A queue of events. It stays short: every sender waits for an answer sooner or later."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Event, Semaphore | None]] = queue.SimpleQueue()

    def put(self, event: Event, room: Semaphore | None = None) -> bool:
        """Leave an event. Never blocks; any thread.

        `room`: of how many of its sender's events more may wait. Returns whether there was any.
        """
        if room and not room.acquire(blocking=False):
            return False
        self._events.put((event, room))
        return True

    def get(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s` seconds without one."""
        try:
            event, room = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if room:
            room.release()
        return event


class Handled(Inbox):
    """Hands each event to a function, in the thread that puts it, where nobody waits for them."""

    def __init__(self, handle: Callable[[Event], object]) -> None:
        super().__init__()
        self._handle = handle

    def put(self, event: Event, room: Semaphore | None = None) -> bool:  # noqa: ARG002 - none waits
        self._handle(event)
        return True
