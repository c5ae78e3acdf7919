"""What the tests of SyncPS share: workers without a connection, and frames delivered by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peers import opened, small_replica
from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.algorithms.SynchronousPS.step import PartAssignment, Step
from smolcluster.algorithms.SynchronousPS.step_receiver import Committed, StepReceiver
from smolcluster.codec.base import absmax
from smolcluster.codec.registry import CODECS, get_codec, lossless_for
from smolcluster.data.permutation import Range
from smolcluster.server.worker import Worker
from smolcluster.training.replica import Replica
from smolcluster.wire import membership
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    Commit,
    LeaseKey,
    Message,
    Push,
    Ready,
    TensorSpec,
    frame_of,
)
from smolcluster.wire.session import Receiver, Session

LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]
DENSE = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254, "int4": 1 / 14}
"""Lossy codecs that send every value at once, and the most that they lose of the largest one."""
DTYPES = {name: codec.dtype for name, codec in CODECS.items()}


class Post(Session):
    """A session that goes nowhere: what is queued stays here."""

    def __init__(self, session_id: int = 1) -> None:
        self.session_id = session_id
        self.num_queued = 0
        self.num_gone = 0
        self.is_full = False
        self.frames: list[Frame] = []
        self.cut_because = ""

    def send_frame(self, frame: Frame) -> None:
        """Keep a frame."""
        self.num_queued += 1
        self.frames.append(frame)

    def send_urgent(self, message: Message) -> None:
        """Keep it as well."""
        self.frames.append(frame_of(message))

    def drop_queued(self) -> None:
        """All but a frame that is being sent."""
        waiting = max(0, self.backlog - 1)
        self.num_gone += waiting
        del self.frames[len(self.frames) - waiting :]

    @property
    def is_crowded(self) -> bool:
        """Whether the test says so."""
        return self.is_full

    def cut(self, reason: str) -> None:
        """Keep the reason."""
        self.cut_because = self.cut_because or reason

    @property
    def is_cut(self) -> bool:
        """Whether it was cut."""
        return bool(self.cut_because)

    @property
    def said(self) -> list[Message]:
        """The messages that were queued."""
        return [opened(frame)[0] for frame in self.frames]


def worker_at(
    session_id: int,
    node: str = "macbook",
    instance: str | None = None,
    samples_per_s: float = 0.0,
    unacknowledged: LeaseKey | None = None,
) -> Worker:
    """A worker with a session that goes nowhere."""
    member = membership.Member(session_id, session_id, node, instance or f"{session_id:016x}")
    ready = Ready(
        dataset_fingerprint="d",
        model_fingerprint="m",
        device="cpu",
        samples_per_s=samples_per_s,
        unacknowledged=unacknowledged,
    )
    return Worker(member, Post(session_id), ready)


def post_of(worker: Worker) -> Post:
    """Its session."""
    assert isinstance(worker.session, Post)
    return worker.session


def push_of(key: LeaseKey, bucket: int, num_buckets: int = 3, loss: float = 0.5) -> Push:
    """The message of one bucket of a push; what it says of its payload is of no matter here."""
    return Push(
        lease=key,
        base_version=0,
        bucket=bucket,
        num_buckets=num_buckets,
        num_samples=key.stop - key.start,
        num_terms=key.stop - key.start,
        loss=loss,
        compute_s=0.25,
        tensor=TensorSpec(codec="fp32", dtype="float32", shape=(1,), nbytes=4),
    )


def deliver(frame: Frame, receiver: Receiver) -> Event | None:
    """Hand a frame to a receiver as a connection does: the payload goes where the receiver wants it."""
    message, payload = opened(frame)
    place = receiver.place_for(message)
    if place is not None:
        place[:] = payload
        payload = place
    return receiver(message, payload)


def reduction_of(replica: Replica, codec_name: str) -> Reduction:
    """The sums of a server that has this replica."""
    every = range(len(replica.buckets))
    return Reduction(
        replica.buckets,
        codec_name,
        replica.grads,
        replica.parameter_at,
        span=every,
        kept=every,
        incarnation="here",
    )


def opened_step(version: int, sizes: Sequence[int], num_buckets: int = 3) -> Step:
    """A step of the first samples of an epoch; seat i + 1 holds part i."""
    step = Step(version, Range(0, 0, sum(sizes)), sizes, num_buckets, "here")
    for number, part in enumerate(step.parts):
        step.grant(part, worker_at(number + 1), 100 * version + number, 0.0)
    return step


def random_gradient(num_params: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_params, generator=generator, dtype=dtype)


def gradients_of(replica: Replica, count: int, seed: int = 0) -> list[Tensor]:
    """Some gradients of a replica."""
    dtype = replica.params.dtype
    return [random_gradient(replica.num_params, 100 * seed + each, dtype) for each in range(count)]


def replica_for(codec: str, optimizer: str = "sgd") -> Replica:
    """One with the type that the codec keeps."""
    return small_replica(optimizer, DTYPES[codec])


def add_part(
    reduction: Reduction, replica: Replica, assignment: PartAssignment, gradient: Tensor
) -> list[bool]:
    """Bring every bucket of a part; returns which of them were complete then."""
    return [
        reduction.add(
            *(assignment.session_id, push_of(assignment.key, number)),
            *(gradient[bucket], absmax(gradient[bucket])),
        )
        for number, bucket in enumerate(replica.buckets)
    ]


def reduce_step(
    reduction: Reduction, replica: Replica, version: int, gradients: Sequence[Tensor]
) -> list[Frame]:
    """Open a step of as many equal parts, bring them all, and return the frames of their mean."""
    step = opened_step(version, [8] * len(gradients))
    reduction.open(step)
    for assignment, gradient in zip(step.assignments, gradients, strict=True):
        add_part(reduction, replica, assignment, gradient)
    return [reduction.frame(version, number) for number in range(len(replica.buckets))]


def commit_of(version: int, **changes: object) -> Commit:
    """A commit without digests."""
    commit = Commit(version=version, num_samples=32, clip=1.0, learning_rate=0.1)
    return commit.model_copy(update=changes)


def committed(receiver: StepReceiver, version: int) -> Tensor:
    """Commit the step that a worker's receiver has put together, and take its mean."""
    event = receiver(commit_of(version), memoryview(b""))
    assert isinstance(event, Committed)
    return receiver.means.take(version)


def decoded(frame: Frame, codec_name: str, dtype: torch.dtype) -> Tensor:
    """The values in a frame."""
    codec = get_codec(codec_name)
    if codec_name == lossless_for(dtype):
        return torch.frombuffer(bytearray(frame.payload), dtype=dtype)
    message, payload = opened(frame)
    spec = getattr(message, "tensor", None)
    assert isinstance(spec, TensorSpec)
    values = torch.empty(spec.shape, dtype=codec.dtype)
    codec.decode(torch.frombuffer(payload, dtype=torch.uint8), values)
    return values
