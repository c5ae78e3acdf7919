"""The state that replicas share: how a joiner gets it, bucket by bucket, and how two copies are compared."""

from torch import Tensor
from xxhash import xxh3_64_digest

from smolcluster.cluster.tensors import bucket_spec, bytes_of
from smolcluster.codec.registry import get_codec, lossless_for
from smolcluster.training.replica import Replica
from smolcluster.transport.frames import Frame
from smolcluster.transport.messages import WEIGHTS, State, TensorSpec, frame_of

DIGEST_NBYTES = 8
STEP_COUNT = "step"
"""The one part of an optimizer's state that is no tensor of the parameters' size: the version says it."""


def contents_of(replica: Replica) -> dict[str, Tensor]:
    """What a joiner needs, by name: the weights, and the optimizer's tensors of the same shape."""
    state = replica.optimizer.state.items()
    return {WEIGHTS: replica.params} | {name: part for name, part in state if name != STEP_COUNT}


class StateStream:
    """Sends one joiner the state, bucket by bucket, of whatever version it then is.

    Between two buckets a step may be committed: the joiner takes it for what it has, like everybody else. So
    a bucket is sent as of the last commit, followed by what the open step has already reduced of it.
    """

    def __init__(self, replica: Replica, incarnation: str) -> None:
        self._replica = replica
        self._incarnation = incarnation
        self._next = 0

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""
        return self._next == len(self._replica.buckets)

    def covers(self, bucket: int) -> bool:
        """Whether the joiner has this bucket, so that it needs its further steps."""
        return bucket < self._next

    def next_frames(self, version: int) -> tuple[int, list[Frame]]:
        """The next bucket, and its frames as of `version`, of memory of their own."""
        number = self._next
        self._next += 1
        return number, [
            _state_frame(self._replica, self._incarnation, version, number, content)
            for content in contents_of(self._replica)
        ]


def weights_frame(replica: Replica, incarnation: str, version: int, number: int) -> Frame:
    """A bucket of the weights, copied."""
    return _state_frame(replica, incarnation, version, number, WEIGHTS)


def digests_of(replica: Replica) -> list[bytes]:
    """xxh3-64 of the bytes of each bucket of the weights, 8 bytes each."""
    weights = replica.params.to("cpu")
    return [xxh3_64_digest(bytes_of(weights[bucket])) for bucket in replica.buckets]


def digests_spec(num_buckets: int) -> TensorSpec:
    """Describe the digests of so many buckets."""
    nbytes = DIGEST_NBYTES * num_buckets
    return TensorSpec(codec="raw", dtype="xxh3-64", shape=(num_buckets,), nbytes=nbytes)


def _state_frame(
    replica: Replica, incarnation: str, version: int, number: int, content: str
) -> Frame:
    bucket = replica.buckets[number]
    state = State(
        incarnation=incarnation,
        version=version,
        content=content,
        bucket=number,
        num_buckets=len(replica.buckets),
        tensor=bucket_spec(get_codec(lossless_for(replica.params.dtype)), bucket),
    )
    return frame_of(state, bytes_of(contents_of(replica)[content][bucket].to("cpu", copy=True)))
