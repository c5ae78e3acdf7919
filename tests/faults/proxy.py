"""A TCP proxy between one worker and the server that understands frames, and strikes once, at a named point.

It takes frames whole, of our own wire or of Gloo's, and passes them on, so a point is hit by what has passed,
never by a clock. One event loop in a thread of its own runs it; the loop's sockets have TCP_NODELAY set.
"""

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from smolcluster.algorithms.Mesh.store import Ask
from smolcluster.wire.frames import HEADER_SUM_NBYTES, PAYLOAD_SUM_NBYTES, PREFIX_NBYTES
from smolcluster.wire.messages import (
    Ack,
    Assignment,
    Challenge,
    Collect,
    Commit,
    Delta,
    End,
    Hello,
    Message,
    OuterStep,
    Proof,
    Push,
    Reduced,
    StageDone,
    StageState,
    State,
    Welcome,
)

LENGTHS = struct.Struct("!4sBBHIQ")
DELAY_S = 0.3
THROTTLE_PIECE_NBYTES = 512
THROTTLE_BYTES_PER_S = 64_000
GLOO = struct.Struct("<6Q")
"""Before each buffer: the length of all that comes, what it is, and where it belongs."""
GLOO_HELLO_NBYTES = 8
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
READ_NBYTES = 65536


class Fault(StrEnum):
    """What happens to a connection."""

    TRUNCATE = "truncate"
    """Part of a frame passes, then both sides see an orderly end."""
    STALL = "stall"
    """Part of a frame passes, then no byte any more; the sockets stay open."""
    RESET = "reset"
    """Part of a frame passes, then both sides are reset."""
    HALF_OPEN = "half_open"
    """The worker's side ends, the server's stays open and silent."""
    DUPLICATE = "duplicate"
    """The frame comes twice."""
    DELAY = "delay"
    """The frame and what is behind it come `DELAY_S` later."""
    CORRUPT = "corrupt"
    """A bit of the frame is flipped."""
    THROTTLE = "throttle"
    """The frame comes in small pieces, slowly."""


HARMLESS = frozenset({Fault.DELAY, Fault.THROTTLE})
SILENT = frozenset({Fault.STALL, Fault.HALF_OPEN})
"""What at least one side learns by silence only."""


class Gloo:
    """A buffer that Gloo sends, or a note without one."""

    KIND = 257


class GlooHello(Gloo):
    """Names the pair, to whoever listens."""

    KIND = 256


ENDING = frozenset({Fault.TRUNCATE, Fault.STALL, Fault.RESET, Fault.HALF_OPEN})
"""After which nothing passes any more."""


@dataclass(frozen=True)
class RawFrame:
    """A frame as it came."""

    kind: int
    header_nbytes: int
    payload_nbytes: int
    data: bytes

    @property
    def header(self) -> dict[str, Any]:
        fields = json.loads(self.data[PREFIX_NBYTES : PREFIX_NBYTES + self.header_nbytes])
        assert isinstance(fields, dict)
        return fields

    @property
    def payload_start(self) -> int:
        return PREFIX_NBYTES + self.header_nbytes + HEADER_SUM_NBYTES


class GlooFrame(RawFrame):
    """One of Gloo's."""

    @property
    def header(self) -> dict[str, Any]:
        return {"nbytes": self.payload_nbytes}

    @property
    def payload_start(self) -> int:
        return self.header_nbytes


Cut = Callable[[RawFrame], int]
Matches = Callable[[Mapping[str, Any]], bool]


def nothing(_frame: RawFrame) -> int:
    return 0


def mid_header(frame: RawFrame) -> int:
    return PREFIX_NBYTES + frame.header_nbytes // 2


def mid_payload(frame: RawFrame) -> int:
    """In the middle of the payload, before the highest byte of a number."""
    return frame.payload_start + frame.payload_nbytes // 2 // 4 * 4 + 3


def whole(frame: RawFrame) -> int:
    """After the last byte."""
    return len(frame.data)


def always(_header: Mapping[str, Any]) -> bool:
    return True


def of_bucket(number: int) -> Matches:
    """Frames that carry this bucket; -1 is the last one. What is not cut has one."""
    return lambda header: header.get("bucket", 0) == number % header.get("num_buckets", 1)


def of_key(key: str) -> Matches:
    """Questions to a mesh's store about this key."""
    return lambda header: header["keys"] == [key]


def larger_than(nbytes: int) -> Matches:
    """Gloo's frames with such a payload."""
    return lambda header: header["nbytes"] > nbytes


@dataclass(frozen=True)
class Point:
    """A moment of the protocol: the `nth` matching frame of a kind, and how much of it has passed.

    With `alone`, nothing comes down from the moment at which the first bucket of that push goes up, until the
    fault has struck: the server's answer cannot be faster than the fault.
    """

    name: str
    kind: type[Message] | type[Gloo]
    cut: Cut
    nth: int = 1
    matches: Matches = always
    alone: bool = False
    comes_down: bool = False
    """Of a kind that goes both ways, those from the server."""
    group: int = 0
    """Which of Gloo's connections leads through the proxy, in the order in which they are made; 0: none."""

    @property
    def upward(self) -> bool:
        """Whether it lies on the way to the server."""
        kinds = (Hello, Proof, Push, Delta, StageDone, StageState, Ask, Gloo, GlooHello)
        return self.kind in kinds and not self.comes_down


def _by_name(*points: Point) -> Mapping[str, Point]:
    return MappingProxyType({point.name: point for point in points})


def _common(push: type[Message]) -> tuple[Point, ...]:
    """Of all algorithms; `push` is how a worker sends what it has learnt."""
    return (
        Point("before_hello", Hello, nothing),
        Point("challenge", Challenge, mid_header),
        Point("proof", Proof, mid_header),
        Point("welcome", Welcome, mid_header),
        Point("header", push, mid_header, nth=2, matches=of_bucket(1)),
        Point("payload", push, mid_payload, nth=2, matches=of_bucket(2)),
        Point("push_to_ack", push, whole, nth=2, matches=of_bucket(-1), alone=True),
        Point("state_transfer", State, mid_payload, matches=of_bucket(2)),
        Point("end", End, nothing),
    )


POINTS: Mapping[str, Mapping[str, Point]] = MappingProxyType(
    {
        "edp": _by_name(
            *_common(Push),
            Point("broadcast", State, mid_payload, nth=2, matches=of_bucket(2)),
            Point("before_commit", Ack, nothing, nth=2),
        ),
        "syncps": _by_name(
            *_common(Push),
            Point("broadcast", Reduced, mid_payload, nth=3, matches=of_bucket(2)),
            Point("before_commit", Commit, nothing, nth=3),
        ),
        "diloco": _by_name(
            *_common(Delta),
            Point("broadcast", OuterStep, mid_payload, nth=2, matches=of_bucket(2)),
            Point("before_commit", Collect, nothing, nth=2),
        ),
        "pipeline": _by_name(
            *_common(StageDone),
            Point("payload", StageState, mid_payload, nth=2),
            Point("state_transfer", StageState, mid_payload, nth=2, comes_down=True),
            Point("broadcast", Assignment, mid_payload, nth=3),
            Point("before_commit", Commit, nothing, nth=3),
        ),
        "mesh": _by_name(
            Point("challenge", Challenge, mid_header),
            Point("meeting", Ask, mid_payload, matches=of_key("here/1")),
            Point("beat", Ask, mid_payload, nth=3, matches=of_key("beat/1")),
            Point("end", Ask, nothing, matches=of_key("gone/1")),
            Point("gloo_hello", GlooHello, nothing, group=1),
            Point("gloo_payload", Gloo, mid_payload, 11, larger_than(5000), group=1),
            Point("gloo_gathering", Gloo, mid_payload, 2, larger_than(5000), group=2),
        ),
    }
)
"""By algorithm and name. EDP's `broadcast` is the answer to a worker's first pull. In DiLoCo
`before_commit` is when a change is asked for. Of a mesh rank 1 is the worker, and rank 0 the server."""
HANDSHAKE = frozenset({"before_hello", "challenge", "proof", "welcome"})


@dataclass(eq=False)
class Side:
    """One end of a connection through the proxy."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def end(self) -> None:
        """Say in an orderly way that no more comes."""
        with suppress(OSError):
            self.writer.write_eof()

    def reset(self) -> None:
        """Break it off with an RST."""
        sock = self.writer.get_extra_info("socket")
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.writer.transport.abort()

    async def swallow(self) -> None:
        """Read and forget until this end has ended."""
        while await self.reader.read(READ_NBYTES):
            pass


@dataclass(eq=False)
class Pair:
    """A worker's connection and the server's."""

    worker: Side
    server: Side
    pumps: list[asyncio.Task[None]] = field(default_factory=list)
    may_come_down: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_come_down.set()

    def stop_other_pump(self) -> None:
        """From now on the calling direction is the only one that moves."""
        for pump in self.pumps:
            if pump is not asyncio.current_task():
                pump.cancel()


class FaultProxy:
    """Passes frames on between whoever connects and a port; `fault` strikes at `point`, once.

    The port is `target`, or what that says when somebody connects.
    """

    def __init__(
        self,
        target: int | Callable[[], int],
        point: Point | None = None,
        fault: Fault | None = None,
    ) -> None:
        self.connections = 0
        self.struck = threading.Event()
        self.struck_at = 0.0
        """When it struck, on the monotonic clock."""
        self._target = target
        self._next_frame = _next_gloo_frame if point is not None and point.group else _next_frame
        self._point = point
        self._fault = fault
        self._num_matched = 0
        self._num_pushes = 0
        self._pairs: list[Pair] = []
        self._greeters: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._stop: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="fault proxy", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        loop, stop = self._stop.result(10)
        loop.call_soon_threadsafe(stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        stop = asyncio.Event()
        self._stop.set_result((asyncio.get_running_loop(), stop))
        server = await asyncio.start_server(self._on_worker, sock=self._listener)
        await stop.wait()
        server.close()
        tasks = [*self._greeters, *(pump for pair in self._pairs for pump in pair.pumps)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pair in self._pairs:
            for side in (pair.worker, pair.server):
                side.writer.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets now

    async def _on_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._greeters.add(task)
        try:
            port = self._target if isinstance(self._target, int) else self._target()
            server = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        finally:
            self._greeters.discard(task)
        self.connections += 1
        pair = Pair(Side(reader, writer), Side(*server))
        self._pairs.append(pair)
        for source, sink, upward in (
            (pair.worker, pair.server, True),
            (pair.server, pair.worker, False),
        ):
            pair.pumps.append(asyncio.create_task(self._pump(pair, source, sink, upward=upward)))

    async def _pump(self, pair: Pair, source: Side, sink: Side, *, upward: bool) -> None:
        is_first = upward
        try:
            while True:
                frame = await self._next_frame(source.reader, is_first=is_first)
                is_first = False
                if self._is_point(pair, frame, upward=upward):
                    ends = await self._strike(pair, frame, sink)
                    pair.may_come_down.set()
                    if ends:
                        return
                    continue
                if not upward:
                    await pair.may_come_down.wait()
                await sink.send(frame.data)
        except asyncio.IncompleteReadError as error:
            with suppress(OSError):
                await sink.send(error.partial)
            sink.end()
        except OSError:
            sink.reset()

    def _is_point(self, pair: Pair, frame: RawFrame, *, upward: bool) -> bool:
        point = self._point
        if point is None or self.struck.is_set() or point.upward != upward:
            return False
        if frame.kind != point.kind.KIND:
            return False
        header = frame.header
        if point.alone and of_bucket(0)(header):
            self._num_pushes += 1
            if self._num_pushes == point.nth:
                pair.may_come_down.clear()
        if not point.matches(header):
            return False
        self._num_matched += 1
        return self._num_matched == point.nth

    async def _strike(self, pair: Pair, frame: RawFrame, sink: Side) -> bool:
        """Let the fault happen; returns whether this pair has ended with it."""
        assert self._point is not None
        cut = self._point.cut(frame)
        if self._fault in ENDING:
            pair.stop_other_pump()
            await sink.send(frame.data[:cut])
            self._note_strike()
            await self._end(pair)
            return True
        self._note_strike()
        match self._fault:
            case Fault.DUPLICATE:
                await sink.send(frame.data + frame.data)
            case Fault.CORRUPT:
                await sink.send(
                    _flipped(frame.data, min(cut or len(frame.data) // 2, whole(frame) - 1))
                )
            case Fault.DELAY:
                await asyncio.sleep(DELAY_S)
                await sink.send(frame.data)
            case Fault.THROTTLE:
                for start in range(0, len(frame.data), THROTTLE_PIECE_NBYTES):
                    await sink.send(frame.data[start : start + THROTTLE_PIECE_NBYTES])
                    await asyncio.sleep(THROTTLE_PIECE_NBYTES / THROTTLE_BYTES_PER_S)
        return False

    async def _end(self, pair: Pair) -> None:
        match self._fault:
            case Fault.RESET:
                pair.worker.reset()
                pair.server.reset()
            case Fault.TRUNCATE:
                pair.worker.end()
                pair.server.end()
                with suppress(OSError):
                    await asyncio.gather(pair.worker.swallow(), pair.server.swallow())
            case Fault.HALF_OPEN:
                pair.worker.end()
                with suppress(OSError):
                    await pair.worker.swallow()

    def _note_strike(self) -> None:
        self.struck_at = time.monotonic()
        self.struck.set()


async def _next_frame(reader: asyncio.StreamReader, *, is_first: bool) -> RawFrame:
    prefix = await reader.readexactly(PREFIX_NBYTES)
    _, _, kind, _, header_nbytes, payload_nbytes = LENGTHS.unpack(prefix)
    rest = header_nbytes + HEADER_SUM_NBYTES + payload_nbytes + PAYLOAD_SUM_NBYTES
    try:
        return RawFrame(
            kind, header_nbytes, payload_nbytes, prefix + await reader.readexactly(rest)
        )
    except asyncio.IncompleteReadError as error:
        raise asyncio.IncompleteReadError(prefix + error.partial, None) from None


async def _next_gloo_frame(reader: asyncio.StreamReader, *, is_first: bool) -> RawFrame:
    """As above; `is_first`: it is the first one of who has dialled."""
    if is_first:
        hello = await reader.readexactly(GLOO_HELLO_NBYTES)
        return GlooFrame(GlooHello.KIND, len(hello), 0, hello)
    prefix = await reader.readexactly(GLOO.size)
    nbytes = GLOO.unpack(prefix)[0] - GLOO.size
    return GlooFrame(Gloo.KIND, GLOO.size, nbytes, prefix + await reader.readexactly(nbytes))


def _flipped(data: bytes, position: int) -> bytes:
    """The bit is one that changes a float32 a lot."""
    spoilt = bytearray(data)
    spoilt[position] ^= 0x40
    return bytes(spoilt)
