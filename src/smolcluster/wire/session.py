"""A session: one proved connection with a thread that reads and a thread that writes.

The reader hands every message to a receiver and puts what that returns into the inbox; it never sends. The
writer sends what is queued, and a heartbeat now and then; nobody else touches the socket, so two peers that
both send a lot can never wait for each other. A full queue means that the peer does not keep up:
the session is cut, and the peer may come back.
"""

import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import torch

from smolcluster.errors import SmolclusterError
from smolcluster.utils.retry import Deadline
from smolcluster.wire.clocks import Clocks
from smolcluster.wire.connection import Connection
from smolcluster.wire.frames import Buffer, Frame
from smolcluster.wire.inbox import Event, Inbox, SessionClosed
from smolcluster.wire.messages import Heartbeat, Kinds, Message, frame_of


class Receiver(ABC):
    """Takes a session's messages, in its reader's thread."""

    @property
    def in_progress(self) -> bool:
        """Whether a transfer of several frames has begun and not ended."""
        return False

    def place_for(self, _message: Message) -> memoryview | None:
        """Where the payload of a message shall be written: memory of exactly its size, or None.

        What is written there is unverified, and of no meaning, until the message is handed over.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """The session has ended: nobody may wait any more. Any thread."""

    @abstractmethod
    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message and its payload, which is valid during the call only unless it has a place of
        its own; return what happened.
        """


Later = Callable[[float], Frame | None]
"""Returns a frame when it may be sent, after so many seconds at most; None: it is wanted no more."""

HEARTBEATS_PER_TIMEOUT = 4
LONGEST_PULSE_S = 1.0
"""Heartbeats also tell the round trip and what the worker does, and are followed by people."""
MOST_UNREAD = 65_536
"""Events of one session that may wait in the inbox: more than any step has, and little memory."""


class Session:
    """Runs `connection` until either side ends it, then puts one `SessionClosed` into the inbox."""

    def __init__(
        self,
        connection: Connection,
        *,
        session_id: int,
        receiver: Receiver,
        inbox: Inbox,
        heartbeat_timeout_s: float,
        max_queued: int,
        kinds: Kinds,
        report: Callable[[], Message | None] = lambda: None,
        trouble: Callable[[], str] = str,
    ) -> None:
        """`report`: what to send along with each heartbeat, `trouble`: what it says; the writer asks."""
        self.session_id = session_id
        self.clocks = Clocks()
        self._report, self._trouble = report, trouble
        self.connection = connection
        self.receiver = receiver
        """It may be replaced by another one, which takes the next message."""
        self._kinds = kinds
        self._inbox = inbox
        self._longest_hold_s = heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        self._heartbeat_every_s = min(self._longest_hold_s, LONGEST_PULSE_S)
        self._beat_at = time.monotonic() + self._heartbeat_every_s
        self._max_queued = max_queued
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Lets the writer look: a condition would wake it while its lock is still held."""
        self._changed = threading.Condition()
        """Held while what follows is changed; wakes whoever waits until something has gone."""
        self._queued: deque[Iterator[Frame]] = deque()
        """What waits to be sent: frames that belong together, of which each may have to be waited for."""
        self._begun: Iterator[Frame] | None = None
        """Those that the writer is at."""
        self._urgent: deque[Frame] = deque()
        self._is_finishing = self._is_over = False
        """Whether this side is closed when all of that has been sent, and whether it is."""
        self.num_queued = 0
        """What was ever queued; frames that belong together count as one."""
        self.num_gone = 0
        """Of these, what was sent or taken back: its memory is free."""
        self._reason: str | None = None
        self._room = threading.Semaphore(MOST_UNREAD)
        """For what has come and was not taken up yet."""
        self._started = threading.Event()
        """Others may know of the session just before it is started."""
        self._reader = threading.Thread(target=self._read, name=f"reader-{session_id}", daemon=True)
        self._writer = threading.Thread(
            target=self._write, name=f"writer-{session_id}", daemon=True
        )

    def start(self) -> None:
        self._writer.start()
        self._reader.start()  # last, because it waits for the writer when it ends
        self._started.set()

    def send(self, message: Message, payload: Buffer = b"") -> None:
        """Queue a message. `payload` must not change until it has been sent. Never blocks."""
        self.send_frame(frame_of(message, payload))

    def send_urgent(self, message: Message) -> None:
        """Send a small message after the frame that is being sent, before all others. Never blocks."""
        with self._changed:
            self._urgent.append(frame_of(message))
        self._wake()

    def send_frame(self, frame: Frame) -> None:
        """Queue a ready frame, which may be shared with other sessions. Never blocks."""
        self.send_frames((frame,))

    def send_later(self, later: Later) -> None:
        """Queue what the writer asks for a frame when its turn has come; all behind it wait for that."""

        def asked() -> Iterator[Frame]:
            if (frame := later(self._longest_hold_s)) is not None:
                yield frame

        self.send_frames(asked())

    def send_frames(self, frames: Iterable[Frame]) -> None:
        """Queue frames that belong together: between them come heartbeats and what is urgent. Never blocks.

        The writer asks for each when its turn has come.
        """
        with self._changed:
            if self._is_over:
                return
            is_full = self.backlog >= self._max_queued
            if not is_full:
                self.num_queued += 1
                self._queued.append(iter(frames))
        if is_full:
            self.cut(f"it does not keep up: {self._max_queued} frames are waiting for it")
        else:
            self._wake()

    @property
    def backlog(self) -> int:
        """Frames that wait, with the one that is being sent."""
        return self.num_queued - self.num_gone

    @property
    def is_crowded(self) -> bool:
        """Whether so many frames wait that another step's might be too many."""
        return self.backlog > self._max_queued // 2

    def flush(self, timeout_s: float = math.inf) -> bool:
        """Wait until what is queued has been sent, but for what is urgent.

        Returns whether it was, or the session has ended.
        """
        with self._changed:
            num = self.num_queued
            return self._changed.wait_for(
                lambda: self.num_gone >= num, min(timeout_s, threading.TIMEOUT_MAX)
            )

    def end_with(self, close_message: Message) -> None:
        """Drop what is still queued, send a last report and a last message, then close this side."""

        def last() -> Iterator[Frame]:
            if report := self._report():
                yield frame_of(report)
            yield frame_of(close_message)

        self.drop_queued()
        self.send_frames(last())
        self.finish()

    def send_at_once(self, message: Message) -> None:
        """Drop what is still queued, and send a message in its place."""
        self.drop_queued()
        self.send(message)

    def drop_queued(self) -> None:
        """Take back what has not begun to be sent. Only the thread that queues may, unless nobody does."""
        with self._changed:
            self.num_gone += len(self._queued)
            self._queued.clear()
            self._is_finishing = False
            self._begun = None  # the writer notes that it has gone
            self._changed.notify_all()

    def finish(self) -> None:
        """Send what is queued, then close this side; the peer's closing ends the session."""
        with self._changed:
            self._is_finishing = True
        self._wake()

    def cut(self, reason: str) -> None:
        """End the session at once. Whether queued messages arrived is unknown. The first reason counts."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
        self._wake()
        self.connection.abort()

    @property
    def is_cut(self) -> bool:
        return self._reason is not None

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the session has ended and its memory is free. Returns whether it has."""
        deadline = Deadline(threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        if not self._started.wait(deadline.remaining()):
            return False
        self._reader.join(deadline.remaining())
        return not self._reader.is_alive()

    def join_or_cut(self, timeout_s: float) -> None:
        """Wait until the session has ended; one that has not within so many seconds is cut."""
        if not self.join(timeout_s):
            self.cut("it did not close in time")
            self.join(None)

    def hear_trouble(self, trouble: str) -> None:
        """What the peer's newest heartbeat says that it cannot do; empty: nothing. The reader's thread."""

    def _place_for(self, message: Message) -> memoryview | None:
        """Where the receiver wants a payload: the one of now, not of when the message was waited for."""
        return self.receiver.place_for(message)

    def _read(self) -> None:
        torch.set_num_threads(1)
        try:
            while True:
                message, payload = self.connection.receive(self._kinds, place_for=self._place_for)
                if isinstance(message, Heartbeat):
                    self.clocks.hear(message)
                    self.hear_trouble(message.trouble)
                else:
                    event = self.receiver(message, payload)
                    if event is not None and not self._inbox.put(event, self._room):
                        self.cut(f"{MOST_UNREAD} of its messages are waiting to be taken")
        except SmolclusterError as error:
            self.cut(str(error))
        finally:
            self.cut("an internal error in its reader, see the log file")
            self.receiver.close()
            self._writer.join()
            self.connection.close()
            self._inbox.put(SessionClosed(self.session_id, self._reason or ""))

    def _write(self) -> None:
        try:
            while self._begin_next():
                self._send_begun()
                with self._changed:
                    self._begun = None
                    self.num_gone += 1
                    self._changed.notify_all()
            self.connection.end_sending()
        except SmolclusterError as error:
            self.cut(str(error))
        except BaseException:
            self.cut("an internal error in its writer, see the log file")
            raise
        finally:
            with self._changed:
                self.drop_queued()
                self._begun, self._is_over = None, True
                self.num_gone = self.num_queued

    def _begin_next(self) -> bool:
        """Wait for what is to be sent next, and send meanwhile what comes between; False: that was all."""
        while True:
            self._send_between()
            with self._changed:
                has_more = self._queued or self._urgent
                if self.is_cut or (self._is_finishing and not has_more):
                    return False
                if self._queued and not self._urgent:
                    self._begun = self._queued.popleft()
                    return True
            with suppress(queue.Empty):
                self._woken.get(timeout=max(0.0, self._beat_at - time.monotonic()))

    def _send_begun(self) -> None:
        """Send the frames that belong together, as far as they are not taken back; keep no hold of any."""
        begun = self._begun
        for frame in begun or ():
            self.connection.send_frame(frame)
            del frame  # while the next one is waited for
            self._send_between()
            if self._begun is not begun or self.is_cut:
                return

    def _send_between(self) -> None:
        """Send what is urgent, and a heartbeat if it is time, however much is queued."""
        while self._urgent:
            self.connection.send_frame(self._urgent.popleft())
        if time.monotonic() >= self._beat_at:
            self.connection.send_frame(frame_of(self.clocks.beat(self._trouble())))
            if report := self._report():
                self.connection.send_frame(frame_of(report))
            self._beat_at = time.monotonic() + self._heartbeat_every_s

    def _wake(self) -> None:
        """Let the writer look at what has changed. It is woken once for all that has until it does."""
        if self._woken.empty():
            self._woken.put(None)
