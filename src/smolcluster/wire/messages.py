"""The messages of protocol version 2: one frozen model a kind, JSON in a frame's header.

They come in sets, one a protocol: `SESSION`, which every two peers speak, `PS`, what a worker and its server
say, `ROUNDS`, what they say besides where workers take steps of their own, `STORE` and `SLICES`, what a
store on another machine says to the server and to workers, and `LINKS`, what neighbouring stages of a
pipeline say. Two peers say to each other what is in the sets that their handshake agreed on, nothing else.

What arrives is validated strictly: unknown kinds and fields, wrong types, duplicate keys, NaN,
infinities, numbers and texts out of bounds, and deeply nested JSON are refused. A message with a
`tensor` field announces a payload of exactly `tensor.nbytes` bytes; all others have none.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
)

from smolcluster.configs.schema import HeartbeatTimeout, RunConfig
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ProtocolError, VersionDiffers
from smolcluster.utils.gpu import GpuQuantity
from smolcluster.utils.meter import MAX_SPANS, PHASES
from smolcluster.version import __version__
from smolcluster.wire.frames import Buffer, Frame, build_frame

MAX_SENTENCE_CHARS = 1000
MAX_LABEL_CHARS = 64
MAX_BUCKET_BYTES = 64 * 1024 * 1024
MAX_BATCH_NBYTES = 4 * 1024 * 1024 * 1024
MAX_SETS = 16
MOST_MARKED_VALUES = 64
UNSUMMED = "payloads without checksums over TLS and Unix sockets"


def one_line(text: object) -> object:
    """Make a text fit for a sentence field: printable, on one line, cut to `MAX_SENTENCE_CHARS`."""
    if not isinstance(text, str):
        return text
    printable = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())
    return line if len(line) <= MAX_SENTENCE_CHARS else line[: MAX_SENTENCE_CHARS - 1] + "…"


def as_label(text: object) -> object:
    """Make a text fit for a name that only people read: printable, on one line, and cut."""
    line = one_line(text)
    return line[:MAX_LABEL_CHARS] or "?" if isinstance(line, str) else line


T = TypeVar("T")
MAX_ENTRIES = 8192
"""Of a list. A header has room for no more."""
Many = Annotated[tuple[T, ...], Strict(False), Field(max_length=MAX_ENTRIES)]
Some = Annotated[tuple[T, ...], Strict(False), Field(min_length=1, max_length=MAX_ENTRIES)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Terms = Annotated[float, Field(ge=0, le=2**53)]
"""Loss terms: a weighted mean has the sum of its weights, which is no whole number."""
Positive = Annotated[int, Field(ge=1, le=2**53)]
Byte32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Instance = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,64}$")]
Label = Annotated[Name, BeforeValidator(as_label)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
"""As a module's user has named it."""
Sentence = Annotated[
    str, BeforeValidator(one_line), StringConstraints(max_length=MAX_SENTENCE_CHARS)
]
Outcome = Literal["applied", "stale", "late", "duplicate", "non_finite"]
Shape = Annotated[tuple[Count, ...], Strict(False), Field(max_length=8)]
MAX_PULLED_BUCKETS = 4096
MAX_FRAGMENTS = 4096
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Speed = Annotated[float, Field(ge=0, le=1e15)]
MAX_LOSS = 1e30
Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]
Amount = Annotated[float, Field(ge=0, le=2**53)]
Scale = Annotated[float, Field(gt=0, le=1e30)]
Moment = Annotated[float, Field(ge=0, le=1e11)]
"""Seconds since 1970 on the sender's clock."""
NUM_PHASES = len(PHASES)
SpanEntry = Annotated[
    tuple[
        Annotated[int, Field(ge=0, le=NUM_PHASES)],
        Annotated[int, Field(ge=-(2**53), le=2**53)],
        Annotated[int, Field(ge=0, le=2**53)],
    ],
    Strict(False),
]
"""A phase, its start and its length, in microseconds."""
Host = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.:%_-]{1,253}$")]
MAX_CONTENTS = 16
MAX_LAYERS, MAX_CHANGES, MAX_STAGES, MAX_WANTED, MAX_LAYER_KINDS = 4096, 512, 4096, 16, 200
"""So many of what a list holds have room in a header."""
FlatPlace = Annotated[tuple[Count, Count], Strict(False)]
"""Start and stop in flat weights."""
FlatPlaces = Many[FlatPlace]
Total = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], Terms], Strict(False)]
"""A sum over loss terms, or over those of a metric, and their number."""
OptimizerArgument = bool | int | float | Annotated[tuple[float, ...], Strict(False)]
WEIGHTS = "weights"
"""The content of a State that holds weights."""


class HeaderModel(BaseModel):
    """Base of everything in a header: immutable, strictly typed, finite, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LeaseKey(HeaderModel):
    """Names a lease: positions `start` to `stop` - 1 of an epoch's permutation, granted once."""

    incarnation: Identifier
    epoch: Count
    start: Count
    stop: Positive
    grant: Count


class TensorSpec(HeaderModel):
    """Describes a payload: its codec, the decoded type and shape, and its size on the wire."""

    codec: Identifier
    dtype: Identifier
    shape: Shape
    nbytes: Count


class Message(HeaderModel):
    """Base of all messages; `KIND` is the number in a frame's prefix."""

    KIND: ClassVar[int]

    def __init_subclass__(cls, *, kind: int | None = None) -> None:
        super().__init_subclass__()
        if kind is not None:
            cls.KIND = kind


class TensorMessage(Message):
    """Announces a payload, which is all of a tensor or a piece."""

    tensor: TensorSpec


class BucketMessage(TensorMessage):
    """One bucket of a stream, of `num_buckets` in all, which come in order."""

    bucket: Count
    num_buckets: Positive


class LeaseMessage(Message):
    """About the samples of a lease."""

    lease: LeaseKey


class LossMessage(LeaseMessage):
    """What samples have come to: their mean `loss` over `num_terms` loss terms, in `compute_s` seconds.

    `loss` is null where nobody has told it. `learning_rate` is what the worker's own schedule has come to;
    null: the run's. `overflow` is the loss scale with which the gradient overflowed; the step is skipped.
    """

    loss: Loss | None
    num_terms: Terms
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    overflow: Scale | None = None
    """Refused but in float16, and at 2⁻¹⁰ or less."""
    compute_s: Seconds

    @property
    def mean_loss(self) -> float:
        """`loss`; NaN where nobody has told it."""
        return math.nan if self.loss is None else self.loss


class Hello(Message, kind=1):
    """Who dials: who it is, and which sets of messages it knows. The first message of a connection."""

    version: Name
    sets: Annotated[dict[Identifier, Byte32], Field(max_length=MAX_SETS)]
    """The digest of each set, by name."""
    node: Name
    """In `host_ip`, unless the run is `elastic`."""
    worker_id: Annotated[int, Field(ge=0, le=2**31)]
    """0: it has none; of a server it asks what the run is and which number is free, and gets no session."""
    instance: Instance
    wanted: Name | None = None
    """The name of the process that is meant: another one refuses; None: it is not known."""


class Challenge(Message, kind=2):
    """Either side: 32 random bytes that the other one's proof must cover."""

    nonce: Byte32


class Proof(Message, kind=3):
    """Either side: proves that it knows the secret, and what was said before."""

    mac: Byte32


class DataSizes(HeaderModel):
    """What a model of ours is made for: features a sample and classes; of text tokens, and the vocabulary."""

    input_dim: Positive
    num_classes: Positive
    measure: Literal["accuracy", "perplexity"]


class ServedData(HeaderModel):
    """Training data that the server sends along with the work, so that no worker needs to have them.

    `sizes` are there where no worker has a workload of its own.
    """

    name: Label
    fingerprint: Identifier
    num_samples: Positive
    sizes: DataSizes | None = None


class Accepted(Message, kind=22):
    """Who was dialled: the other side is let in; which `sets` both know, the session's limits."""

    sets: Many[Identifier] = ()
    bucket_bytes: Annotated[int, Field(ge=4, le=MAX_BUCKET_BYTES)]
    heartbeat_timeout_s: HeartbeatTimeout


class Welcome(Accepted, kind=4):
    """Server: a worker is let in; says what is trained."""

    run_id: Identifier
    incarnation: Identifier
    settings: dict[str, Any]
    """A `RunConfig` as JSON: who hears it validates it against the schema of its own version."""
    model_fingerprint: Identifier
    codec: Identifier
    data: ServedData | None = None
    worker_id: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """To who asked for one: a number that is free."""
    plan: str | None = None
    """To processes that attach: the parameters and samples of the run (`server/offering.py`)."""

    @cached_property
    def run(self) -> RunConfig:
        """What is trained, and how.

        Raises:
            VersionDiffers: this version does not understand a setting.
        """
        try:
            return RunConfig.model_validate_json(json.dumps(self.settings))
        except ValidationError as error:
            raise VersionDiffers(
                f"this smolcluster {__version__} does not understand the run's settings: "
                f"{first_problem(error)}: install the server's version (git pull, then uv sync)"
            ) from None


MAX_SAMPLE_MARKS = 3
SampleMark = Annotated[
    tuple[Identifier, ...], Strict(False), Field(min_length=1, max_length=1 + MOST_MARKED_VALUES)
]


class Ready(Message, kind=5):
    """Client: has built model and data, and these are their fingerprints."""

    dataset_fingerprint: Identifier
    model_fingerprint: Identifier
    source: Identifier | None = None
    """SHA-256 of the code of a workload that was named."""
    device: Label
    samples_per_s: Speed
    unacknowledged: LeaseKey | None = None
    samples: Annotated[
        tuple[SampleMark, ...], Strict(False), Field(max_length=MAX_SAMPLE_MARKS)
    ] = ()
    """What its first, middle and last training sample are known by (`data/marks.py`); empty: it has none.

    The XXH3-64 of the structure, then of each value; of numbers of floating point `RMS:PROJECTION`, and `?`
    of what is not compared.
    """
    order: Identifier | None = None
    """XXH3-64 of how its own sampler begins the first epoch; null: it has none."""
    first_weights: Identifier | None = None
    """A sketch of the trained weights that its model was built with (`data/marks.py`); null: no losses."""
    first_losses: Annotated[
        tuple[Loss | None, ...], Strict(False), Field(max_length=MAX_SAMPLE_MARKS)
    ] = ()
    """What that model made of its first, middle and last training sample; null: it is not compared."""
    weights: Identifier | None = None
    """XXH3-128 of the weights and buffers that it has; null: it gets them in any case."""
    steps_alone: bool = False
    """Whether its steps are its own: its loop's optimizer is not the run's."""


class Reject(Message, kind=6):
    """Server: the client may not take part, why, and when to ask again (seconds; null: never)."""

    code: Identifier
    sentence: Sentence
    retry_after_s: Annotated[float, Field(ge=0)] | None = None


class Assignment(TensorMessage, LeaseMessage, kind=7):
    """Server: compute the gradient of these samples (payload: their indices).

    With `batch_nbytes` the samples themselves came just before, in `Served` messages of so many bytes in all.
    `version` is the server's. SyncPS: they are of a batch of `batch_samples`; only the buckets from
    `first_bucket` on are wanted; a `backup` of somebody else's part is pushed lossless. DiLoCo: only these
    `fragments` take a step; null: all. In its synchronous beginning what is collected next `is_gradient`.
    """

    version: Count
    learning_rate: Annotated[float, Field(ge=0)]
    """EDP: for the worker's own steps."""
    loss_scale: Scale = 1.0
    """The loss is multiplied by it before backward, and the gradient divided by it after."""
    batch_samples: Count = 0
    first_bucket: Count = 0
    backup: bool = False
    batch_nbytes: Annotated[int, Field(ge=1, le=MAX_BATCH_NBYTES)] | None = None
    fragments: Some[Count] | None = None
    is_gradient: bool = False


class Served(TensorMessage, LeaseMessage, kind=25):
    """Server: a piece of the batch that a worker will be assigned: from byte `offset` on of `nbytes` in all.

    The pieces come in order; what the batch's bytes mean is said in `data/pytree.py`.
    """

    offset: Count
    nbytes: Annotated[int, Field(ge=1, le=MAX_BATCH_NBYTES)]


class Push(LossMessage, BucketMessage, kind=8):
    """Client: one bucket of a gradient, computed on the weights of `base_version`.

    The gradient is the mean over the loss terms of `num_samples` samples; where it overflowed it is 0. For
    `held_s` seconds in all the push has waited for others' up to this bucket.
    """

    base_version: Count
    num_samples: Positive
    held_s: Seconds = 0.0


class Ack(LeaseMessage, kind=9):
    """Server: what became of a push, and the version of the weights after it."""

    outcome: Outcome
    version: Count


class Pull(Message, kind=10):
    """Client: asks for the weights, or for some buckets of them only.

    SyncPS: without buckets it has fallen behind, or has been parked, and asks for the whole state.
    """

    buckets: Some[Count] | None = None


class State(BucketMessage, kind=11):
    """Server: one bucket of the weights, or of a tensor of the optimizer that `content` names.

    Of `version` steps `num_skipped` were skipped: the optimizer has taken all others.
    """

    incarnation: Identifier
    version: Count
    content: Identifier = WEIGHTS
    num_skipped: Count = 0


class Buffers(BucketMessage, kind=23):
    """Either side: one bucket of the model's buffers of these `numbers`, which change as it computes.

    Client: what computing `lease` has added to them, before its push. Server: their values at `version`,
    before its State or the Commit that makes that version.
    """

    lease: LeaseKey | None = None
    version: Count
    numbers: Some[Count]


class Heartbeat(Message, kind=12):
    """Either side: still alive, at `sent_at`; and when the peer's last heartbeat was sent and came.

    The four moments of a pair of heartbeats give the round trip and the difference of the clocks (NTP,
    RFC 5905). Server: `trouble` is what it cannot save at the moment, and why.
    """

    sent_at: Moment
    heard_sent_at: Moment | None = None
    heard_at: Moment | None = None
    trouble: Sentence = ""


class Goodbye(Message, kind=13):
    """Leaves on purpose; or, with a `fault`, because it cannot go on. The server: it was stopped.

    `non-finite`: what it computes is not finite; `user-code`: the user's code raised an exception. If nobody
    else takes part, the run has failed; also if the exception came after a Ready. `own`: anything else.
    """

    reason: Sentence
    fault: Literal["own", "non-finite", "user-code"] | None = None


class End(Message, kind=15):
    """Server: the run is over, well or badly."""

    ok: bool
    sentence: Sentence


class Reduced(BucketMessage, kind=16):
    """Server, store: one bucket of the mean gradient of the step that makes `version`.

    `attempt` is that of a store's TakeMean.
    """

    attempt: Count = 0
    version: Count


class Commit(Message, kind=17):
    """Server: every bucket of the step that makes `version` has been sent; take it.

    If it `is_skipped`, because a gradient has overflowed, the weights and the optimizer stay as they are.
    The gradient, a mean over `num_terms` loss terms of `num_samples` samples, counts `clip` times. Now
    and then the payload holds a digest of each bucket of the weights before the step: xxh3-64 of their bytes.
    """

    version: Count
    num_samples: Positive
    num_terms: Terms = 0.0
    clip: Annotated[float, Field(ge=0)]
    is_skipped: bool = False
    learning_rate: Annotated[float, Field(ge=0)]
    tensor: TensorSpec | None = None


class Cancel(LeaseMessage, kind=18):
    """Server: a push is wanted no more; its first `num_buckets` buckets have counted.

    Null: with several hosts it is not known which buckets have.
    """

    num_buckets: Count | None


class Skip(LeaseMessage, kind=19):
    """Client: will not push what it was assigned, or no more of it, after having computed for `compute_s` s.

    For `held_s` seconds what it did push has waited for others'.
    EDP: because of a loss, gradient or weights that are NaN or infinite, which `reason` describes.
    """

    compute_s: Seconds
    held_s: Seconds = 0.0
    reason: Sentence = ""


class Telemetry(Message, kind=20):
    """Client: what its process has counted since it started, in sums that only grow (`utils/meter.py`).

    `phase_s` are the seconds by phase, `queued` the frames that wait to be sent now, `spans` those of its
    newest steps, counted from `spans_at`; `gpu` is what its GPU does now; `peak_bytes` is the most memory by
    phase, nothing where that is not measured.
    """

    uptime_s: Seconds
    steps: Count
    samples: Count
    phase_s: Annotated[
        tuple[Seconds, ...], Strict(False), Field(min_length=NUM_PHASES, max_length=NUM_PHASES)
    ]
    """data, forward, backward, encode, send, wait, apply."""
    raw_bytes: Count
    encoded_bytes: Count
    cpu_s: Seconds
    memory_bytes: Count
    sent_bytes: Count
    received_bytes: Count
    queued: Count
    peak_bytes: Annotated[tuple[Count, ...], Strict(False), Field(max_length=NUM_PHASES)] = ()
    gpu: dict[GpuQuantity, Amount] = {}
    spans_at: Moment = 0.0
    spans: Annotated[tuple[SpanEntry, ...], Strict(False), Field(max_length=MAX_SPANS)] = ()


class Park(Message, kind=21):
    """Server: the client does not keep up, and hears of no further step until it is sent the state anew.

    What was queued for it is dropped: the open step, and its parts. Of the push `lease` the first
    `num_buckets` buckets have counted (null: as of Cancel), of a later one nothing. It answers with a Pull.
    """

    lease: LeaseKey | None
    num_buckets: Count | None


class Logged(Message, kind=24):
    """Client: values that its user's loop has measured, by name, such as `val_loss`."""

    values: Annotated[
        dict[Identifier, Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]],
        Field(min_length=1, max_length=64),
    ]


class Stepped(LossMessage, kind=32):
    """Client: has taken a local step with these samples; `grad_norm` is before clipping."""

    grad_norm: Annotated[float, Field(ge=0)]


class ChangeMessage(Message):
    """About what a fragment has changed by, which a Collect has asked for as `request`."""

    request: Count
    fragment: Count


class Collect(ChangeMessage, kind=33):
    """Server: send what a fragment has changed by since its last weights; `wait`: until the next ones come.

    It is about all Assignments before it: where these say so, send their mean gradient. `request` names it in
    the Delta.
    """

    wait: bool


class Delta(BucketMessage, ChangeMessage, kind=34):
    """Client: one bucket of what a fragment has changed by: the weights it began with, less those of now."""


class DeltaSent(ChangeMessage, kind=39):
    """Client: it has sent what a fragment has changed by to stores; the server holds no bucket of it."""


class OuterStep(BucketMessage, kind=35):
    """Server, store: one bucket of a fragment's weights of `version`.

    With `base_version` it is what is to be taken from those of that version; null: the weights themselves.
    """

    fragment: Count
    base_version: Count | None
    version: Count


class Saved(Message, kind=36):
    """Server: saves the run as `step`; the worker shall keep its part of the last `keep_last` such steps."""

    step: Count
    keep_last: Positive


class SameWeights(Message, kind=64):
    """Server: the weights are those that the worker has, of which it told the digest."""


class Resumed(Message, kind=37):
    """Server: the weights before it are those that were saved as `step`, from which the run goes on."""

    step: Count


class HostPort(HeaderModel):
    """An address at which a process listens."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]


HostPorts = Annotated[Some[HostPort], Field(max_length=8)]


def host_ports(addresses: Iterable[str], ports: Iterable[int]) -> tuple[HostPort, ...]:
    """Addresses with their ports."""
    return tuple(HostPort(host=h, port=p) for h, p in zip(addresses, ports, strict=True))


class StorePlace(HeaderModel):
    """Where a store lets workers in, and which buckets of the weights it holds: `first` to `stop` - 1."""

    node: Name
    places: HostPorts
    first: Count
    stop: Positive


class StoreList(Message, kind=40):
    """Server: these stores hold the buckets that it does not hold itself.

    Of a push each store gets its own buckets, and so does the server. A worker asks for weights when it has
    reached all; from each comes its own slice, of one version. One who is told of them once more has to come
    back: a store was lost, and with it what was on its way.
    """

    stores: Some[StorePlace]


class SliceRule(HeaderModel):
    """An optimizer of a slice, of which the first `num_decayed` elements decay; `num_steps` were taken."""

    optimizer: Identifier
    optimizer_args: Annotated[dict[Identifier, OptimizerArgument], Field(max_length=MAX_CONTENTS)]
    weight_decay: Annotated[float, Field(ge=0)]
    num_decayed: Count
    num_steps: Count


class OuterRule(HeaderModel):
    """Nesterov's momentum over what workers have changed in a slice.

    The flat weights are those of tensors with as many elements as `layers` says. They are cut into fragments,
    of which these are the `versions`. Outer steps are sent encoded with `codec_down`; null: weights are.
    `is_async`: after some steps changes are applied one by one. `inner`: takes steps along gradients, before
    the first outer step.
    """

    learning_rate: Annotated[float, Field(gt=0)]
    momentum: Annotated[float, Field(ge=0, lt=1)]
    is_async: bool
    codec_down: Identifier | None
    layers: Some[Count]
    versions: Some[Count]
    inner: SliceRule | None = None


class Slice(Message, kind=41):
    """Server: what a store holds, and how it steps; followed by the State of its buckets.

    The flat weights of `num_params` elements are cut into buckets of `bucket_length`, of which it holds
    `first` to `stop` - 1, and of each of the `contents` as much. Gradients come encoded with `codec`.
    Without a `rule` it has no weights, and sends the mean of what is pushed; a residual among its contents is
    still owed if it `owes_residual`.
    """

    run_id: Identifier
    incarnation: Identifier
    reconnect_timeout_s: Seconds
    num_params: Positive
    bucket_length: Positive
    first: Count
    stop: Positive
    contents: Annotated[Many[Identifier], Field(max_length=MAX_CONTENTS)]
    codec: Identifier
    has_loss_scale: bool
    rule: SliceRule | OuterRule | None
    owes_residual: bool = False


class Listening(Message, kind=42):
    """Store or stage: workers are let in at each of these addresses; a store's slice is in its place."""

    places: HostPorts


class PartKey(HeaderModel):
    """Names what the worker `instance` has sent: for a lease, or as its answer to a request.

    Each host that holds weights gets a part of it. Nobody can send one in another's name. `instance` null:
    the gradient of an epoch's samples from `of` on, from whichever worker sends it first.
    """

    instance: Instance | None
    of: LeaseKey | Count

    @property
    def worker(self) -> str:
        """`instance`.

        Raises:
            ProtocolError: it is null.
        """
        if self.instance is None:
            raise ProtocolError("it named no worker's own part")
        return self.instance


class CountedPart(HeaderModel):
    """A part that a step takes, `weight` times."""

    key: PartKey
    weight: Annotated[float, Field(ge=0)]


class Arrived(TensorMessage, kind=43):
    """Store: of a fragment's part the buckets from `bucket` on have come; with the last one it is whole.

    `key` null: the mean that was to be ready is. The payload are their L2 norms, (1, n), or (2, n) with those
    of the weights that lie there. Where parts are added up as they come it has no norms, (0, n): a worker has
    sent all that it will of a part, n buckets of that have counted, and the part `is_whole` if all of its
    buckets have, whichever workers sent them.
    """

    key: PartKey | None
    fragment: Count
    bucket: Count
    is_whole: bool = False


class TakeMean(Message, kind=38):
    """Server: have the mean of these parts of a fragment ready for a step, and tell its norms.

    Parts of no one worker, of `weight` samples of `epoch` each, are added up as they come. The mean for the
    step that makes `version` is sent to all who were to be sent weights. A mean that was begun before, and
    not stepped along, is void; `attempt` is never used again.
    """

    parts: Some[CountedPart]
    epoch: Count = 0
    version: Count = 0
    attempt: Count = 0


class TakeStep(Message, kind=44):
    """Server: take one step along these parts of a fragment, which is at `version` then.

    Without parts: along `clip` times the means that are ready, of which no element may be above `bound`; the
    fragments are at `version` and the next ones then, in order. A fragment without a mean stays as it is, and
    all do where nothing counts. An optimizer of gradients steps with `learning_rate`, an outer one without.
    `one_by_one`: the part is applied by its weight, and momentum moves if `moves_by`, the sum of the weights
    since it has moved last, is not null.
    """

    version: Count = 0
    parts: Many[CountedPart]
    clip: Annotated[float, Field(ge=0, le=1)] = 1.0
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    bound: Annotated[float, Field(gt=0)] | None = None
    one_by_one: bool = False
    moves_by: Annotated[float, Field(ge=0)] | None = None


class Drop(Message, kind=45):
    """Server: a part is not to be applied; nor is a mean with it, which is sent to nobody any more."""

    key: PartKey


class SendWeights(Message, kind=46):
    """Server: send the weights of now, which are those of `version`, to the worker `instance`.

    Where a slice has no weights: what the open step has of its mean, and all means that come after it.
    With a `fragment` only what is held of that, which the worker has in `base_version`.
    """

    instance: Instance
    version: Count
    fragment: Count | None = None
    base_version: Count = 0


class WorkerGone(Message, kind=48):
    """Server: the worker `instance` has gone; what it has not fetched is not wanted any more."""

    instance: Instance


class Gather(Message, kind=47):
    """Server: send it these contents of the slice as they are now, which is at `version`."""

    version: Count
    contents: Annotated[Some[Identifier], Field(max_length=MAX_CONTENTS)]


class TransferPiece(HeaderModel):
    """Where a piece of tensors of a pipeline belongs: from byte `offset` on of `nbytes` in all.

    The bytes are those of `data/pytree.py`, in which tensors of floats are written as the run's codec does.
    `forward`: the input of virtual stage `stage`; `backward`: the gradient of its output; `exchange`: what
    two ranks add up, `stage` is the receiver's rank and `microbatch` the sender's. An `attempt` is the time
    from a plan, or from a step that is done again, until the next one.
    """

    attempt: Count
    step: Count
    direction: Literal["forward", "backward", "exchange"]
    stage: Count
    microbatch: Count
    offset: Count
    nbytes: Annotated[int, Field(ge=1, le=MAX_BATCH_NBYTES)]


class Transfer(TensorMessage, kind=60):
    """Stage: a piece of what its neighbour computes with."""

    piece: TransferPiece


class Relayed(Message, kind=61):
    """Stage: a Transfer for the process `instance`, which it cannot reach. Server: one that this has sent.

    Without a `piece`: from now on what the two say to each other goes through the server.
    """

    instance: Instance
    piece: TransferPiece | None = None
    tensor: TensorSpec | None = None


class StageNeighbour(HeaderModel):
    """A process of the pipeline that another one talks to: its rank, and where it lets others in."""

    rank: Count
    node: Name
    instance: Instance
    places: HostPorts

    def __str__(self) -> str:
        return f"stage {self.rank} ({self.node})"


class StageMessage(Message):
    """About the stages of a plan; an `attempt` is the time from a plan until the next one."""

    attempt: Count


class Planned(StageMessage, kind=52):
    """Server: which layers are whose from now on; what was begun before is void.

    Stage s has layers `cuts[s]` to `cuts[s + 1]` - 1 and is on rank `ranks[s]`; the receiver's is `rank`. Its
    weights are the initial ones, or with a `step` those of that step, which come then.
    """

    rank: Count
    cuts: Annotated[
        tuple[Count, ...], Strict(False), Field(min_length=2, max_length=MAX_STAGES + 1)
    ]
    ranks: Some[Count]
    neighbours: Many[StageNeighbour]
    turn: Count
    """Steps and evaluations that the stages take together count on from here."""
    step: Count | None = None


class MeasuredLayer(HeaderModel):
    """One layer on one machine, for one microbatch; the first has the embedding, the last head and loss.

    Attributes:
        forward_s, input_s, weight_s: seconds of forward, and of the gradients of input and weights.
        trained_bytes: weights that have gradients.
        frozen_bytes: other weights, and buffers.
        activation_bytes: held from forward to backward, `input_bytes` of them what the layer takes.
        output_bytes: sent to the next layer; of the last one 0.
    """

    forward_s: Seconds
    input_s: Seconds
    weight_s: Seconds
    trained_bytes: Count
    frozen_bytes: Count
    activation_bytes: Count
    output_bytes: Count
    input_bytes: Count = 0


class LayersMeasured(Message, kind=57):
    """Stage: what each layer of the model would cost here; layer i is one of `kinds[layers[i]]`.

    `memory_bytes` are free on the device.
    """

    kinds: Some[MeasuredLayer]
    layers: Some[Count]
    memory_bytes: Count
    device: Label


class MeasureLink(StageMessage, kind=62):
    """Server: measure what you send this process, which does the same; you are `rank` 0 or 1 of the two."""

    rank: Count
    neighbour: StageNeighbour


class LinkMeasured(StageMessage, kind=63):
    """Stage: what it sends the other one that a MeasureLink named; or the `reason` why it cannot."""

    bytes_s: Speed = 0.0
    latency_s: Seconds = 0.0
    reason: Sentence = ""


class StageReady(StageMessage, kind=53):
    """Stage: it has its layers and reaches its neighbours. Or, with a `reason`: it does not, or no more.

    `out_of_memory`: they are too much for its device. `places`: what of the whole model's flat weights, those
    that are trained, is here: from an element to before another one, in order.
    """

    reason: Sentence = ""
    out_of_memory: bool = False
    places: FlatPlaces = ()


class StageDone(LeaseMessage, StageMessage, kind=54):
    """Stage: what it has come to in a step: its gradients wait for the Commit.

    `loss` is the sum of `num_terms` loss terms, on the last stage; `squared_norm` that of the gradient of
    the sum, null: not finite. `sent_bytes`: to each rank, for this step.
    """

    loss: Annotated[float, Field(allow_inf_nan=False)] | None
    num_terms: Terms
    squared_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    """What is tied counts on the first stage."""
    seconds: Annotated[dict[Identifier, Seconds], Field(max_length=8)]
    peak_bytes: Count = 0
    sent_bytes: Many[Count] = ()


class KeepStages(StageMessage, kind=28):
    """Server: send all that you have of the state after this step."""

    step: Count


class WantState(StageMessage, kind=29):
    """Stage: send these tensors, as they were after the step of the plan."""

    content: Identifier
    names: Annotated[Some[TensorName], Field(max_length=MAX_WANTED)]


class StageState(TensorMessage, StageMessage, kind=30):
    """Either side: a piece of a tensor, from byte `offset` on.

    `content`: of the model itself, or of what the optimizer keeps of its parameter `name`.
    """

    step: Count
    content: Identifier
    name: TensorName
    offset: Count


class StageKept(StageMessage, kind=31):
    """Stage: it has sent all. Or it has done what a CopyOrder has told it, whose `turn` is `step`.

    `found`: the step of the moments that it goes on with, as it was told to; null: it has none.
    """

    step: Count
    found: Count | None = None


class CopyOrder(StageMessage, kind=58):
    """Server: what to do with the copy of the weights that the stages' own steps change, θ, all together.

    `begin`: follow these `fragments`, each some places in the whole model's flat weights, with θ of now as
    θ_start and fresh moments. `add_gradient`: add the gradient, times `weight`, to the sums of all fragments
    but those `held`. `step`: step along the gradient, which counts `clip` times and within ±`bound`; the
    fragments `held` stay as they are. `change`: send these `places` of a fragment's θ_start - θ, or where it
    `is_gradient` of its sum of gradients. `mark_sent`: a fragment's change is on its way. `follow`: new
    values of a fragment come, or what is to be taken from θ_start where it `is_difference`. `load`: whole
    weights come. `reset`: forget the moments. `save`: keep the moments under `step`. `take_up`: go on with
    those that were kept under `step`.
    """

    turn: Count
    order: Literal[
        "begin",
        "add_gradient",
        "step",
        "change",
        "mark_sent",
        "follow",
        "load",
        "reset",
        "save",
        "take_up",
    ]
    fragments: Many[FlatPlaces] = ()
    fragment: Count = 0
    weight: Terms = 0.0
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    learning_rate: Annotated[float, Field(ge=0)] = 0.0
    held: Many[Count] = ()
    places: FlatPlaces = ()
    is_gradient: bool = False
    is_difference: bool = False
    step: Count = 0
    keep_last: Count = 1


class CopyPiece(TensorMessage, StageMessage, kind=59):
    """Either side: from byte `offset` on what a CopyOrder wants that is here, or that belongs to this stage.

    The values stand in the order of the wanted places in the whole model's flat weights.
    """

    turn: Count
    offset: Count


class EvaluateStages(StageMessage, kind=55):
    """Server: compute all samples that are held out, together, as the `turn` of that number.

    With a `lease` it is so many of them as that has places, `batch_size` at once. First and last stage get
    them just before: a list of batches, in `Served` messages of `batch_nbytes` bytes in all.
    """

    turn: Count
    lease: LeaseKey | None = None
    batch_size: Positive = 1
    batch_nbytes: Annotated[int, Field(ge=1, le=MAX_BATCH_NBYTES)] | None = None


class StageEvaluated(StageMessage, kind=56):
    """Stage: it has; on the last one with sum and number of terms of loss and metrics."""

    turn: Count
    totals: Annotated[dict[Name, Total], Field(max_length=64)]
    is_finite: bool = True


Kinds = frozenset[type[Message]]
"""Messages that a connection accepts at some moment; no two have the same number."""


@dataclass(frozen=True)
class MessageSet:
    """A protocol: its name, and what may be said in and after a handshake that has agreed on it.

    Two sets that are agreed on together must not share a number; this project's have those below 70.
    """

    name: str
    from_dialler: Kinds
    """What the side that dialled may say after the handshake."""
    from_listener: Kinds
    """What the side that was dialled may say."""
    in_handshake: Kinds = frozenset()

    @property
    def kinds(self) -> Kinds:
        return self.from_dialler | self.from_listener | self.in_handshake

    @cached_property
    def digest(self) -> str:
        """SHA-256 of who may say what, of what it may hold, and how: what two versions must agree on."""
        schemas = {kind.__name__: [kind.KIND, kind.model_json_schema()] for kind in self.kinds}
        sides = (self.from_dialler, self.from_listener, self.in_handshake)
        names = [sorted(kind.__name__ for kind in side) for side in sides]
        agreed = [names, schemas, UNSUMMED]
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()


SESSION = MessageSet(
    "session",
    from_dialler=frozenset({Heartbeat, Goodbye}),
    from_listener=frozenset({Heartbeat, Goodbye, Reject}),
    in_handshake=frozenset({Hello, Challenge, Proof, Accepted, Reject}),
)
"""What every two peers say to each other."""
PS = MessageSet(
    "ps",
    from_dialler=frozenset({Ready, Push, Buffers, Pull, Skip, Telemetry, Logged}),
    from_listener=frozenset(
        {Assignment, Served, Ack, State, Buffers, Reduced, Commit, Cancel, Park, StoreList, End}
    ),
    in_handshake=frozenset({Welcome}),
)
"""What a worker, which dials, and its server say to each other."""
ROUNDS = MessageSet(
    "rounds",
    from_dialler=frozenset({Stepped, Delta, DeltaSent}),
    from_listener=frozenset({Collect, OuterStep, Resumed, SameWeights, Saved}),
)
"""What they say besides where a worker takes many steps of its own between two exchanges."""
STORE = MessageSet(
    "store",
    from_dialler=frozenset({Listening, Arrived, State, Reduced}),
    from_listener=frozenset(
        {Slice, State, TakeMean, TakeStep, Drop, SendWeights, WorkerGone, Gather, End}
    ),
)
"""What a store on another machine, which dials, and the server say to each other."""
SLICES = MessageSet(
    "slices",
    from_dialler=frozenset({Push, Skip, Delta}),
    from_listener=frozenset({State, Reduced, OuterStep}),
)
"""What a worker, which dials, and such a store say to each other."""
LINKS = MessageSet("links", from_dialler=frozenset({Transfer}), from_listener=frozenset({Transfer}))
"""What neighbouring stages of a pipeline say to each other."""
STAGES = MessageSet(
    "stages",
    from_dialler=frozenset(
        {
            LayersMeasured,
            Listening,
            LinkMeasured,
            StageReady,
            StageDone,
            StageEvaluated,
            WantState,
            StageState,
            StageKept,
            CopyPiece,
            Relayed,
        }
    ),
    from_listener=frozenset(
        {
            MeasureLink,
            Planned,
            EvaluateStages,
            KeepStages,
            StageState,
            CopyOrder,
            CopyPiece,
            Relayed,
        }
    ),
)
"""What a worker that has some of the layers, and its server say to each other besides."""
SETS = (SESSION, PS, ROUNDS, STAGES)


def digests_of(sets: Iterable[MessageSet]) -> dict[str, str]:
    """What a Hello says of the sets that its sender speaks."""
    return {each.name: each.digest for each in sets}


def sets_of(algorithm: str) -> tuple[MessageSet, ...]:
    """What the processes of an algorithm speak."""
    named = get_algorithm(algorithm).messages
    return tuple(each for each in SETS if each is SESSION or each.name in named)


ALL_SETS = (SESSION, PS, ROUNDS, STORE, SLICES, LINKS, STAGES)
ALL_KINDS: Kinds = frozenset().union(*(each.kinds for each in ALL_SETS))
MESSAGES = MappingProxyType(dict(sorted((kind.KIND, kind) for kind in ALL_KINDS)))


def from_dialler(sets: Iterable[MessageSet]) -> Kinds:
    """What the side that dialled may say after a handshake that agreed on these sets."""
    return frozenset().union(*(each.from_dialler for each in sets))


def from_listener(sets: Iterable[MessageSet]) -> Kinds:
    """What the side that was dialled may say."""
    return frozenset().union(*(each.from_listener for each in sets))


FROM_WORKER: Kinds = from_dialler(SETS)
"""What a server accepts once a worker has proved itself."""
FROM_SERVER: Kinds = from_listener(SETS)
"""What a worker accepts once it was welcomed."""


@cache
def numbered(kinds: Kinds) -> Mapping[int, type[Message]]:
    """The messages by their numbers.

    Raises:
        ValueError: two have the same one.
    """
    by_number = {kind.KIND: kind for kind in kinds}
    if len(by_number) != len(kinds):
        raise ValueError("two messages of the sets that are spoken have the same number")
    return MappingProxyType(by_number)


def check_kind(kind: int, kinds: Kinds) -> type[Message]:
    """The message that a prefix announces.

    Raises:
        ProtocolError: it is none of `kinds`.
    """
    model = numbered(kinds).get(kind)
    if model is None:
        if kind not in MESSAGES:
            raise ProtocolError(f"unknown message kind {kind}")
        expected = ", ".join(sorted(each.__name__ for each in kinds))
        raise ProtocolError(f"unexpected {MESSAGES[kind].__name__}, expected {expected}")
    return model


def payload_nbytes(message: Message) -> int:
    tensor = getattr(message, "tensor", None)
    return tensor.nbytes if isinstance(tensor, TensorSpec) else 0


def frame_of(message: Message, payload: Buffer = b"") -> Frame:
    """Encode a message and the payload it announces; the payload is referred to, not copied.

    Raises:
        ValueError: the payload's size is not what the message says.
    """
    frame = build_frame(message.KIND, encode(message), payload)
    if frame.payload.nbytes != payload_nbytes(message):
        raise ValueError(
            f"{type(message).__name__} announces {payload_nbytes(message)} bytes of payload, "
            f"got {frame.payload.nbytes}"
        )
    return frame


def encode(message: Message) -> bytes:
    """The message as a frame's header."""
    return message.model_dump_json().encode()


def decode(kind: int, header: bytes, kinds: Kinds = ALL_KINDS) -> Message:
    """Validate a header that came from the network.

    Raises:
        ProtocolError: a kind that is none of `kinds`, or a header that is not exactly one valid message of
            that kind.
    """
    model = check_kind(kind, kinds)
    try:
        message = model.model_validate_json(header)
        # Only our own spelling is free of repeated fields for certain; others are looked at twice.
        if encode(message) != header:
            json.loads(header, object_pairs_hook=_unique)
    except ValidationError as error:
        raise ProtocolError(f"{model.__name__}: {first_problem(error)}") from None
    except ValueError as error:
        raise ProtocolError(f"{model.__name__}: {error}") from None
    return message


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field is given twice")
    return fields


def first_problem(error: ValidationError) -> str:
    """Field and problem; a field's name may be the peer's invention: shortened and escaped."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])[:64]
    where = f"field {place!a}" if place else "header"
    return f"{where}: {problem['msg'][:200]}"
