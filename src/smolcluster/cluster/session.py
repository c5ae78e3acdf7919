"""A session: one proved connection with a thread that reads and a thread that writes.

The reader hands every message to a receiver and puts what that returns into the inbox; it never sends. The
writer sends what is queued, and a heartbeat when there is nothing; nobody else touches the socket, so two
peers that both send a lot can never wait for each other. A full queue means that the peer does not keep up:
the session is cut, and the peer may come back.
"""

import queue
import threading
from contextlib import suppress
from typing import Protocol

import torch

from smolcluster.cluster.inbox import Event, Gone, Inbox
from smolcluster.errors import SmolclusterError
from smolcluster.transport.connection import Connection
from smolcluster.transport.frames import Buffer, Frame
from smolcluster.transport.messages import Heartbeat, Kinds, Message, frame_of


class Receiver(Protocol):
    """Takes a session's messages, in its reader's thread."""

    @property
    def in_progress(self) -> bool:
        """Whether a transfer of several frames has begun and not ended."""

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        """Take a message and its payload, which is valid during the call only; return what happened."""


HEARTBEATS_PER_TIMEOUT = 4


class Session:
    """Runs `connection` until either side ends it, then puts one `Gone` into the inbox."""

    def __init__(
        self,
        connection: Connection,
        *,
        seat: int,
        receiver: Receiver,
        inbox: Inbox,
        heartbeat_timeout_s: float,
        max_queued: int,
        kinds: Kinds,
    ) -> None:
        self.seat = seat
        self.connection = connection
        self.receiver = receiver
        self._kinds = kinds
        self._inbox = inbox
        self._heartbeat_every_s = heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        self._outbound: queue.Queue[Frame | None] = queue.Queue(maxsize=max_queued)
        self._reason: str | None = None
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"reader-{seat}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"writer-{seat}", daemon=True)

    def start(self) -> None:
        """Begin to read and write."""
        self._writer.start()
        self._reader.start()  # last, because it waits for the writer when it ends

    def send(self, message: Message, payload: Buffer = b"") -> None:
        """Queue a message. `payload` must not change until it has been sent. Never blocks."""
        self.send_frame(frame_of(message, payload))

    def send_frame(self, frame: Frame) -> None:
        """Queue a ready frame, which may be shared with other sessions. Never blocks."""
        try:
            self._outbound.put_nowait(frame)
        except queue.Full:
            self.cut(f"it does not keep up: {self._outbound.maxsize} frames are waiting for it")

    def end_with(self, last_words: Message) -> None:
        """Drop the tensors that are still queued, send a last message, then close this side."""
        kept = []
        with suppress(queue.Empty):
            while True:
                frame = self._outbound.get_nowait()
                if frame is not None and not frame.payload.nbytes:
                    kept.append(frame)
        for frame in (*kept, frame_of(last_words)):
            self.send_frame(frame)
        self.finish()

    def finish(self) -> None:
        """Send what is queued, then close this side; the peer's closing ends the session."""
        try:
            self._outbound.put_nowait(None)
        except queue.Full:
            self.cut("it did not keep up to the end")

    def cut(self, reason: str) -> None:
        """End the session at once. Whether queued messages arrived is unknown. The first reason counts."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
        self.connection.abort()

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the session has ended and its memory is free. Returns whether it has."""
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _read(self) -> None:
        torch.set_num_threads(1)
        try:
            while True:
                message, payload = self.connection.receive(self._kinds)
                if not isinstance(message, Heartbeat):
                    event = self.receiver(message, payload)
                    if event is not None:
                        self._inbox.put(event)
        except SmolclusterError as error:
            self.cut(str(error))
        finally:
            self.cut("an internal error in its reader, see the log file")
            self._wake_writer()
            self._writer.join()
            self.connection.close()
            self._inbox.put(Gone(self.seat, self._reason or ""))

    def _write(self) -> None:
        heartbeat = frame_of(Heartbeat())
        try:
            while (frame := self._next_frame(heartbeat)) is not None:
                self.connection.send_frame(frame)
            self.connection.end_sending()
        except SmolclusterError as error:
            self.cut(str(error))

    def _wake_writer(self) -> None:
        try:
            self._outbound.put_nowait(None)
        except queue.Full:  # then it is sending, and the cut has ended that
            return

    def _next_frame(self, heartbeat: Frame) -> Frame | None:
        try:
            return self._outbound.get(timeout=self._heartbeat_every_s)
        except queue.Empty:
            return heartbeat
