"""Who joins in mid-run ends up with the server's weights and optimizer state, bit for bit, whenever it came.

The server is real, but for its sockets; one worker does all the work, and joiners are sent a bucket of the
state at every possible place among the reduced buckets and commits of two steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch

from harness import local_settings
from peers import DEADLINE_S, server_parts
from smolcluster.algorithms.SynchronousPS.members import FRAMES_AHEAD, StepMember
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.configs.schema import DatasetPlace
from smolcluster.server.buffers import VALUE_NBYTES
from smolcluster.server.push import GradientSender
from smolcluster.server.worker_pool import Joined
from smolcluster.training.buffers import ModelBuffers
from smolcluster.training.build import build
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.wire.messages import Assignment, Buffers, Ready, Welcome
from unit.algorithms.SynchronousPS.actors import (
    deliver,
    post_of,
    random_gradient,
    worker_at,
)

BUCKET_BYTES = 16 * 1024
NUM_BUCKETS = 3
ORDERS = ((0, 1, 2), (1, 2, 0))
"""In which order the server hears that a bucket is complete: readers may overtake each other."""
NUM_PLACES = len(ORDERS) * NUM_BUCKETS + 1
"""Before the first bucket that is reduced, and after each."""


class Joiner:
    """A real worker that is fed with the frames that its session holds."""

    def __init__(self, server: Server, session_id: int, places: tuple[int, ...]) -> None:
        self.places = places
        peer = worker_at(session_id, "win")
        server.handle(Joined(peer, ready()))
        found = server.members.get(session_id)
        assert found is not None
        self.member: StepMember = found
        self._post = post_of(peer)
        training = build(
            server.context.run.train,
            session_id,
            DatasetPlace(),
            torch.device("cpu"),
            bucket_bytes=BUCKET_BYTES,
            workload=server.context.training.workload,
        )
        self.replica = training.replica
        if server.replica.buffers.names:
            register_queue(self.replica)
        # It has no link: with digests that differ it would fail as it asks for weights.
        self._worker = Worker(welcome(server), training)
        self._receiver = self._worker.new_receiver()

    def come_to(self, place: int, server: Server) -> None:
        """Be sent as many buckets as are due here, one at a time."""
        for due in self.places:
            if due == place:
                self._post.num_sent = self._post.num_queued - FRAMES_AHEAD + 1
                what = server.version, server.reduced, server.reduction
                server.members.catch_up(self.member, *what)
                self.follow()

    def drain(self) -> None:
        """Take what has been sent; nothing waits in the session then."""
        self.follow()
        self._post.num_sent = self._post.num_queued

    @property
    def num_buffer_frames(self) -> int:
        """Of what has been sent and not been taken."""
        return sum(isinstance(message, Buffers) for message in self._post.said)

    def follow(self) -> None:
        """Take what has been sent, as it is now."""
        frames, self._post.frames = self._post.frames, []
        for frame in frames:
            event = deliver(frame, self._receiver)
            if event is not None:
                self._worker.handle(event)

    def differs_in(self, server: Server) -> list[str]:
        """What is not the server's, bit for bit."""
        mine, theirs = everything(self.replica), everything(server.replica)
        return [name for name in theirs if not torch.equal(mine[name], theirs[name])]

    @property
    def version(self) -> int:
        return self._worker.version


def register_queue(replica: Replica) -> None:
    """Give the model a buffer that takes more frames than may wait for a joiner."""
    length = (FRAMES_AHEAD + 1) * BUCKET_BYTES // VALUE_NBYTES
    replica.model.register_buffer("queue", torch.zeros(length))
    replica.buffers = ModelBuffers(replica.model)


def everything(replica: Replica) -> dict[str, torch.Tensor]:
    return {"weights": replica.params, **replica.optimizer.state}


def ready() -> Ready:
    return Ready(dataset_fingerprint="d", model_fingerprint="m", device="cpu", samples_per_s=0.0)


def welcome(server: Server) -> Welcome:
    return Welcome(
        node="mini1",
        run_id="run",
        incarnation=server.context.incarnation,
        settings=server.context.run.model_dump(mode="json"),
        model_fingerprint=server.replica.fingerprint,
        bucket_bytes=BUCKET_BYTES,
        codec=server.context.codec,
        heartbeat_timeout_s=DEADLINE_S,
    )


class Run:
    """A server and the one worker that has a share of the batches."""

    def __init__(self, server: Server) -> None:
        self.server = server
        peer = worker_at(1, "pi5")
        server.handle(Joined(peer, ready()))
        self._post = post_of(peer)
        self._receiver = server.receiver_for(1)
        self._sender = GradientSender(server.context.codec, server.replica)
        while server.members.joining:
            server.advance(0.0)
            self._post.num_sent = self._post.num_queued
        server.open_step(0.0)

    def take_step(self, order: tuple[int, ...]) -> Iterator[None]:
        """The worker pushes; the server hears of its buckets in this order. Stops after each."""
        replica, version = self.server.replica, self.server.version
        lease = next(each.lease for each in self._post.said if isinstance(each, Assignment))
        self._post.frames.clear()
        self._post.num_sent = self._post.num_queued
        replica.grads.copy_(random_gradient(replica.num_params, version))
        frames = self._sender.frames(lease, version, BatchLoss(0.5, lease.stop - lease.start), 0.25)
        events = [deliver(frame, self._receiver) for frame in frames]
        for number in order:
            event = events[number]
            assert event is not None
            self.server.handle(event)
            yield


@contextmanager
def run_of(tmp_path: Path, *overrides: str) -> Iterator[Run]:
    settings = local_settings(
        *("batch_share.pi5=1.0", "batch_share.win=0.0", "worker_update_interval=1"),
        *overrides,
        workers=2,
        algorithm="syncps",
    )
    with server_parts(settings, tmp_path, BUCKET_BYTES, "syncps") as parts:
        server = Server(parts.context)
        assert len(server.replica.buckets) == NUM_BUCKETS
        with server.pool, server.evaluator:
            run = Run(server)
            for _ in range(3):
                list(run.take_step(ORDERS[0]))
            yield run


ALL_PLACES = list(combinations_with_replacement(range(NUM_PLACES), NUM_BUCKETS))


@pytest.mark.parametrize(
    ("codec", "optimizer"),
    [
        ("fp32", "adam"),
        ("int8", "adam"),
        ("fp32", "sgd"),
        ("int8", "sgd"),
        ("fp32", "sgd optimizer_args.momentum=0.9"),
        ("fp32", "NAdam"),
        ("fp32", "Adafactor"),
    ],
)
def test_a_joiner_is_the_servers_equal_wherever_its_buckets_come(
    tmp_path: Path, codec: str, optimizer: str
) -> None:
    with run_of(tmp_path, *f"optimizer={optimizer}".split(), f"codec={codec}") as run:
        server = run.server
        joiners = [
            Joiner(server, 10 + session_id, places) for session_id, places in enumerate(ALL_PLACES)
        ]
        place = 0
        for joiner in joiners:
            joiner.come_to(place, server)
        for order in ORDERS:
            for _ in run.take_step(order):
                place += 1
                for joiner in joiners:
                    joiner.follow()
                    joiner.come_to(place, server)
        assert place == NUM_PLACES - 1
        assert server.version == 5
        for joiner in joiners:
            assert joiner.member.joined
            assert (joiner.version, joiner.differs_in(server)) == (5, []), joiner.places


def test_buffers_that_fill_the_session_are_sent_to_a_joiner_once_and_outlast_a_commit(
    tmp_path: Path,
) -> None:
    with run_of(tmp_path) as run:
        server = run.server
        register_queue(server.replica)
        numel = server.replica.buffers.numel(0)
        server.replica.buffers.put({0: torch.arange(numel, dtype=torch.float64)})
        joiner = Joiner(server, 10, ())
        for _ in range(3):
            server.advance(0.0)
        assert joiner.num_buffer_frames == FRAMES_AHEAD + 1
        assert joiner.member.num_sent == 0
        list(run.take_step(ORDERS[0]))
        while not joiner.member.joined:
            joiner.drain()
            server.advance(0.0)
        joiner.drain()
        assert joiner.differs_in(server) == []
        queue = joiner.replica.model.get_buffer("queue")
        assert torch.equal(queue, server.replica.model.get_buffer("queue"))
