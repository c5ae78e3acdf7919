"""A worker and a server spoken by hand, and a hub in the test's own hands: every step is the test's."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from harness import SECRET, Lines, Recorder
from smolcluster.algorithms.context import ServerContext
from smolcluster.configs.schema import AlgorithmName, RunConfig, Settings
from smolcluster.data.permutation import Range
from smolcluster.errors import PeerLost
from smolcluster.observability.metrics import Metrics
from smolcluster.runs.events import Event as RunEvent
from smolcluster.runs.events import EventLog, read_events
from smolcluster.server.joining import Follower
from smolcluster.server.records import Records
from smolcluster.server.report import Report
from smolcluster.server.store_host import SliceHost, StoreSetup
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Joined, WorkerPool
from smolcluster.training.build import build
from smolcluster.training.loop import StepTaken
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.utils.retry import Deadline
from smolcluster.wire import acceptor
from smolcluster.wire.connection import Connection, accept_next, connect, listen
from smolcluster.wire.dialling import Address
from smolcluster.wire.frames import Frame, check_head
from smolcluster.wire.handshake import (
    Authenticated,
    Door,
    accept,
    client_handshake,
    introduce,
    server_authenticate,
)
from smolcluster.wire.inbox import Event, Inbox, MessageReceived
from smolcluster.wire.messages import (
    SESSION,
    STORE,
    Accepted,
    Heartbeat,
    Hello,
    LeaseKey,
    Message,
    Ready,
    Telemetry,
    Welcome,
    decode,
    payload_nbytes,
)
from smolcluster.wire.security import Secret
from smolcluster.wire.session import Receiver
from smolcluster.wire.tls import new_identity

DEADLINE_S = 60.0
IDENTITY = new_identity()
"""Making a key takes a while."""
THREADS = ("reader-", "writer-", "accept", "greet", "keeper-", "evaluator")

E = TypeVar("E", bound=Event)
M = TypeVar("M", bound=Message)


class Echo(Receiver):
    """A receiver that passes every message on, and keeps the payloads."""

    def __init__(self, session_id: int = 0) -> None:
        self.session_id = session_id
        self.payloads: list[bytes] = []

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        self.payloads.append(bytes(payload))
        return MessageReceived(self.session_id, message)


def next_event(inbox: Inbox, kind: type[E]) -> E:
    """The next event, which must be of that kind."""
    event = inbox.get(DEADLINE_S)
    assert isinstance(event, kind), f"{event} instead of {kind.__name__}"
    return event


class Hand:
    """One end of a session, spoken by hand."""

    def __init__(self, connection: Connection, welcome: Welcome | None = None) -> None:
        self.connection = connection
        self._welcome = welcome
        # Silence is the test's affair: a hand never loses patience, but it does not wait for ever.
        connection.stall_timeout_s = DEADLINE_S

    @property
    def welcome(self) -> Welcome:
        assert self._welcome is not None
        return self._welcome

    def say(self, message: Message, payload: bytes = b"") -> None:
        self.connection.send(message, payload)

    def ready(
        self,
        *,
        dataset: str,
        model: str | None = None,
        unacknowledged: LeaseKey | None = None,
        samples: tuple[tuple[str, ...], ...] = (),
        order: str | None = None,
        first_weights: str | None = None,
        first_losses: tuple[float | None, ...] = (),
    ) -> None:
        self.say(
            Ready(
                dataset_fingerprint=dataset,
                model_fingerprint=model or self.welcome.model_fingerprint,
                device="cpu",
                samples_per_s=0.0,
                unacknowledged=unacknowledged,
                samples=samples,
                order=order,
                first_weights=first_weights,
                first_losses=first_losses,
            )
        )

    def hear(self) -> tuple[Message, bytes]:
        """The next message but for heartbeats and reports, and its payload."""
        while True:
            message, payload = self.connection.receive(deadline=Deadline(DEADLINE_S))
            if not isinstance(message, Heartbeat | Telemetry):
                return message, bytes(payload)

    def hear_a(self, kind: type[M]) -> M:
        message, _ = self.hear()
        assert isinstance(message, kind), f"{message} instead of {kind.__name__}"
        return message

    def hear_the_end(self) -> None:
        """The other side closes, and says nothing more before that."""
        try:
            message, _ = self.hear()
        except PeerLost as error:
            assert "in time" not in str(error)
        else:
            raise AssertionError(f"{message} instead of the end")

    def leave(self) -> None:
        self.connection.close()


def hello(worker_id: int = 1, node: str = "macbook", instance: str | None = None) -> Hello:
    """How a worker introduces itself; each is a process of its own unless `instance` says otherwise."""
    greeting = introduce(node, worker_id)
    return greeting if instance is None else greeting.model_copy(update={"instance": instance})


def follower(
    address: Address,
    lines: list[str] | None = None,
    *,
    secret: Secret = SECRET,
    start_timeout_s: float = DEADLINE_S,
) -> Follower:
    """A process that follows whoever listens there; what it logs are the lines."""
    return Follower(
        hello=hello(),
        secret=secret,
        log=logger([] if lines is None else lines),
        address=address,
        start_timeout_s=start_timeout_s,
    )


def store_setup(held: type[SliceHost], addresses: tuple[str, ...] | None = None) -> StoreSetup:
    """A store's process `win`, whose coordinator is nowhere."""
    return StoreSetup(
        hello=introduce("win", sets=(SESSION, STORE)),
        address=Address("127.0.0.1", 1),
        secret=SECRET,
        start_timeout_s=1.0,
        log=logger([]),
        held=held,
        addresses=addresses,
    )


def knock(
    port: int,
    greeting: Hello,
    secret: Secret = SECRET,
    answer: type[Accepted] = Welcome,
) -> Hand:
    """Connect and prove oneself; returns when the server has let this process in, or refused it."""
    connection = connect("127.0.0.1", port, DEADLINE_S)
    try:
        told = client_handshake(connection, greeting, secret, Deadline(DEADLINE_S), answer=answer)
    except BaseException:
        connection.close()
        raise
    return Hand(connection, told if isinstance(told, Welcome) else None)


def welcome_of(run: RunConfig, **told: Any) -> Welcome:
    """A welcome to a run, which says these things."""
    given: dict[str, Any] = {
        "run_id": run.run_id,
        "incarnation": "0123abcd",
        "settings": run.model_dump(mode="json"),
        "model_fingerprint": "m",
        "bucket_bytes": 1 << 20,
        "codec": "fp32",
        "heartbeat_timeout_s": DEADLINE_S,
    }
    return Welcome(**given | told)


class HandledDoor:
    """A server's door by hand: accepts, authenticates and admits when the test says so."""

    def __init__(self) -> None:
        self.patience_s = DEADLINE_S
        self._listeners = listen(["127.0.0.1"], 0)
        self.port: int = self._listeners[0].getsockname()[1]
        self._hands: list[Hand] = []

    def open(self, secret: Secret = SECRET, node: str = "mini1") -> Authenticated:
        connection = self.accept()
        return server_authenticate(connection, Door(node, secret, IDENTITY), Deadline(DEADLINE_S))

    def accept(self) -> Connection:
        """The next connection; nothing has been said."""
        connection = accept_next(self._listeners, self.patience_s)
        assert connection is not None, "nobody came"
        self._hands.append(Hand(connection))
        return connection

    def admit(self, run: RunConfig, **told: Any) -> Hand:
        client = self.open()
        accept(client, welcome_of(run, **told))
        return Hand(client.talk.connection)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for hand in self._hands:
            hand.leave()


@pytest.fixture
def door() -> Iterator[HandledDoor]:
    """A server's door by hand."""
    door = HandledDoor()
    yield door
    door.close()


@pytest.fixture(autouse=True)
def nothing_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every thread of a session, acceptor or evaluator ends, soon, with the test that started it."""
    monkeypatch.setattr(acceptor, "ACCEPT_TICK_S", 0.02)
    yield
    wait_for_threads()


class HandledHub:
    """A hub whose events are asked for by the test's thread, and workers spoken by hand."""

    def __init__(self, pool: WorkerPool[Report], port: int, dataset: str) -> None:
        self.pool = pool
        self.events: list[Event] = []
        self._port = port
        self._dataset = dataset
        self._pool = ThreadPoolExecutor(8)
        self._hands: list[Hand] = []
        self.on_event: Callable[[Event], None] = self.events.append

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline(DEADLINE_S)
        while not condition():
            assert not deadline.expired, f"it did not come; events: {self.events}"
            for event in self.pool.next_events(0.01):
                self.on_event(event)

    def begin_to_enter(self, greeting: Hello, secret: Secret = SECRET) -> Future[Hand]:
        """A worker comes to the door; the hub must handle what comes for it to get in."""

        def enter() -> Hand:
            hand = knock(self._port, greeting, secret)
            self._hands.append(hand)
            return hand

        return self._pool.submit(enter)

    def enter(self, greeting: Hello, secret: Secret = SECRET) -> Hand:
        """A worker gets in, but is not ready yet.

        Raises:
            Rejected, AuthError: it does not.
        """
        future = self.begin_to_enter(greeting, secret)
        self.until(future.done)
        return future.result()

    def join(self, greeting: Hello, unacknowledged: LeaseKey | None = None) -> Hand:
        hand = self.enter(greeting)
        seen = len(self.pool.workers)
        joined = self.num_joined
        hand.ready(dataset=self._dataset, unacknowledged=unacknowledged)
        self.until(lambda: self.num_joined > joined or len(self.pool.workers) > seen)
        return hand

    @property
    def num_joined(self) -> int:
        return sum(isinstance(event, Joined) for event in self.events)

    def leave(self) -> None:
        """All workers close their connections."""
        for hand in self._hands:
            hand.leave()

    def close(self) -> None:
        self.leave()
        self._pool.shutdown()


@dataclass
class Parts:
    """What a server's context is made of, for a test to look at."""

    context: ServerContext
    metrics: Recorder
    log_lines: list[str]
    events_path: Path

    @property
    def port(self) -> int:
        return self.context.settings.cluster.port

    @property
    def dataset(self) -> str:
        return self.context.training.workload.fingerprint

    def happened(self, kind: type[RunEvent]) -> list[RunEvent]:
        self.context.records.events.flush()
        return [r.event for r in read_events(self.events_path) if isinstance(r.event, kind)]


@contextmanager
def server_parts(
    settings: Settings,
    folder: Path,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    algorithm: AlgorithmName = "edp",
) -> Iterator[Parts]:
    """A server's context that nobody serves yet."""
    lines: list[str] = []
    log = logger(lines)
    metrics = Recorder()
    path = folder / "events.jsonl"
    events = EventLog(path, "test", warn=log.warning)
    incarnation = secrets.token_hex(4)
    context = ServerContext(
        settings=settings,
        run=settings.run_config("test-run", algorithm),
        training=build(
            settings.train,
            settings.cluster.seed,
            settings.node.dataset,
            torch.device("cpu"),
            bucket_bytes=bucket_bytes,
        ),
        node=settings.cluster.server,
        secret=SECRET,
        incarnation=incarnation,
        records=Records(Metrics([metrics]), events, incarnation),
        log=log,
    )
    try:
        yield Parts(context, metrics, lines, path)
    finally:
        events.close()


def report_of(
    parts: Parts,
    incarnation: str = "here",
    moved: tuple[int, int] = (1000, 2000),
    run: RunConfig | None = None,
) -> Report:
    context = parts.context
    return Report(
        run=run or context.run,
        node="mini1",
        num_workers=3,
        codec="fp32",
        training=context.training,
        records=replace(context.records, incarnation=incarnation),
        log=context.log,
        bytes_moved=lambda: moved,
    )


def step_taken(
    version: int, samples: Range, worker: Worker | None = None, loss: float = 0.5, **more: Any
) -> StepTaken:
    """A step along what a worker has pushed, or all have."""
    given: dict[str, Any] = {"learning_rate": 1e-3, "grad_norm": 2.5, "layer_norms": {}}
    if worker is not None:
        given |= worker.who
    given |= {"num_terms": samples.num_samples, **more}
    return StepTaken(version, samples, loss, **given)


def opened(frame: Frame) -> tuple[Message, memoryview]:
    """What the other side makes of a frame; the payload is a copy, as from a socket."""
    message = decode(frame.kind, check_head(frame.head))
    assert payload_nbytes(message) == len(frame.payload)
    return message, memoryview(bytearray(frame.payload))


def deliver(frames: Sequence[Frame], receiver: Receiver) -> list[Event]:
    """What a receiver makes of frames whose payloads it has no place for."""
    events = [receiver(*opened(frame)) for frame in frames]
    return [event for event in events if event is not None]


def small_replica(
    optimizer: str = "sgd",
    dtype: torch.dtype = torch.float32,
    *,
    bucket_values: int = 256,
    **options: Any,
) -> Replica:
    """A model of 610 values: in three buckets or ten of 64 values, the last one shorter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(dtype)
    return Replica(model, optimizer, bucket_bytes=bucket_values * dtype.itemsize, **options)


def set_gradient(replica: Replica, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(replica.num_params, generator=generator, dtype=replica.params.dtype)
    replica.grads.copy_(gradient)
    return gradient


def logger(lines: list[str]) -> logging.Logger:
    log = logging.Logger("test", logging.DEBUG)
    log.addHandler(Lines(lines))
    return log


def session_threads() -> list[threading.Thread]:
    """Threads of sessions, receptions and evaluators that run now."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


def wait_for_threads() -> None:
    """Wait until all threads of the cluster room have ended, and their sockets are closed with them."""
    end = time.monotonic() + DEADLINE_S
    while threads := session_threads():  # one of them may have started another
        threads[0].join(max(0.0, end - time.monotonic()))
        assert not threads[0].is_alive(), f"thread {threads[0].name} goes on for ever"
