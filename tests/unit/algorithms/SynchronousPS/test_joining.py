"""Who joins in mid-run ends up with the server's weights and optimizer state, bit for bit, whenever it came.

The server is real, but for its sockets; one worker does all the work, and joiners come wherever
they can among the reduced buckets and commits of two steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from harness import local_settings
from peers import server_parts, welcome_of
from smolcluster.algorithms.SynchronousPS.members import StepMember
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.configs.schema import DatasetPlace
from smolcluster.server.buffers import DTYPE
from smolcluster.server.push import GradientSender
from smolcluster.server.worker import Worker as Peer
from smolcluster.server.worker_pool import Joined
from smolcluster.training.buffers import ModelBuffers
from smolcluster.training.build import build
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.wire.messages import Assignment, Buffers, Welcome
from unit.algorithms.SynchronousPS.actors import (
    deliver,
    post_of,
    random_gradient,
    worker_at,
)

BUCKET_BYTES = 16 * 1024
NUM_BUCKETS = 3


class Joiner:
    """A real worker that is fed with the frames that its session holds."""

    def __init__(self, server: Server, session_id: int) -> None:
        peer = worker_at(session_id, "win")
        server.handle(joined(peer))
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

    @property
    def num_buffer_frames(self) -> int:
        """Of what has been sent and not been taken."""
        return sum(isinstance(message, Buffers) for message in self._post.said)

    def follow(self) -> None:
        """Take what has been sent, as it is now."""
        frames, self._post.frames = self._post.frames, []
        self._post.num_gone = self._post.num_queued
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
    """Give the model a buffer that takes several frames."""
    replica.model.register_buffer("queue", torch.zeros(3 * BUCKET_BYTES // DTYPE.itemsize))
    replica.buffers = ModelBuffers(replica.model)


def everything(replica: Replica) -> dict[str, torch.Tensor]:
    return {"weights": replica.params, **replica.optimizer.state}


def joined(peer: Peer) -> Joined:
    assert peer.ready is not None
    return Joined(peer, peer.ready)


def welcome(server: Server) -> Welcome:
    told = {"incarnation": server.context.incarnation, "codec": server.context.codec}
    return welcome_of(server.context.run, bucket_bytes=BUCKET_BYTES, **told)


class Run:
    """A server and the one worker that has a share of the batches."""

    def __init__(self, server: Server) -> None:
        self.server = server
        peer = worker_at(1, "pi5")
        server.handle(joined(peer))
        self._post = post_of(peer)
        self._receiver = server.receiver_for(1)
        self._sender = GradientSender(server.context.codec, server.replica)
        self._post.num_gone = self._post.num_queued
        server.pool.started = True
        server.advance(0.0)

    def take_step(self) -> Iterator[None]:
        """The worker pushes; stops after each bucket."""
        replica, version = self.server.replica, self.server.version
        lease = next(each.lease for each in self._post.said if isinstance(each, Assignment))
        self._post.frames.clear()
        self._post.num_gone = self._post.num_queued
        replica.grads.copy_(random_gradient(replica.num_params, version))
        loss = BatchLoss(0.5, lease.stop - lease.start)
        for frame in self._sender.frames(lease, version, loss, 0.25):
            event = deliver(frame, self._receiver)
            assert event is not None
            self.server.handle(event)
            self.server.advance(0.0)
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
                list(run.take_step())
            yield run


@pytest.mark.parametrize(
    ("codec", "optimizer"),
    [
        ("fp32", "adam"),
        ("int8", "sgd"),
        ("fp32", "sgd optimizer_args.momentum=0.9"),
        ("fp32", "NAdam"),
        ("fp32", "Adafactor"),
    ],
)
def test_a_joiner_is_the_servers_equal_wherever_it_comes(
    tmp_path: Path, codec: str, optimizer: str
) -> None:
    with run_of(tmp_path, *f"optimizer={optimizer}".split(), f"codec={codec}") as run:
        server = run.server
        joiners = [Joiner(server, 10), Joiner(server, 11)]
        joiners[0].follow()
        for _ in range(2):
            for _ in run.take_step():
                joiners += [Joiner(server, 10 + len(joiners) + more) for more in range(2)]
                for joiner in joiners[::2]:  # the others hear of all at once
                    joiner.follow()
        assert server.version == 5
        for joiner in joiners:
            joiner.follow()
            assert (joiner.version, joiner.differs_in(server)) == (5, [])


def test_buffers_are_sent_to_a_joiner_before_the_state(tmp_path: Path) -> None:
    with run_of(tmp_path) as run:
        server = run.server
        register_queue(server.replica)
        numel = server.replica.buffers.numel(0)
        server.replica.buffers.put({0: torch.arange(numel, dtype=torch.float64)})
        joiner = Joiner(server, 10)
        assert joiner.num_buffer_frames == 3
        list(run.take_step())
        joiner.follow()
        assert joiner.differs_in(server) == []
        queue = joiner.replica.model.get_buffer("queue")
        assert torch.equal(queue, server.replica.model.get_buffer("queue"))
