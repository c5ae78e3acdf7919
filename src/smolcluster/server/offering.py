"""How a server learns what is trained from the first process that attaches, before the run begins.

    attached process -> Offer, OfferedWeights …  -> server waits for them -> OfferTaken -> the run begins

The server needs no code of the model: parameters of these names and shapes, with nothing to compute, are its
model. Whoever else wants to join meanwhile is refused with the code `NO_MODEL`.
"""

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

import psutil
import torch
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from torch import Tensor, nn

from smolcluster.configs.schema import ClusterConfig, OptimizerArgs
from smolcluster.data.dataset import Batch, Elsewhere, Place
from smolcluster.data.marks import SAME_DATA, Mark, chosen, first_difference
from smolcluster.errors import (
    ClusterEmpty,
    ConfigError,
    DataError,
    PeerLost,
    ProtocolError,
    Rejected,
    VersionDiffers,
)
from smolcluster.server.joining import Follower
from smolcluster.server.listening import listening_addresses
from smolcluster.training.buffers import plain_name
from smolcluster.training.fingerprint import frozen_digest
from smolcluster.training.lazy import check_shapes
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, trained_parameters
from smolcluster.training.stages.cut import place_at
from smolcluster.training.workload import Workload
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_bytes, format_duration
from smolcluster.wire.acceptor import LetIn, SessionOpened
from smolcluster.wire.frames import MAX_HEADER_NBYTES, Frame
from smolcluster.wire.handshake import VERSION
from smolcluster.wire.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.membership import Refused
from smolcluster.wire.messages import (
    MAX_SAMPLE_MARKS,
    SESSION,
    Accepted,
    BucketMessage,
    Hello,
    Message,
    MessageSet,
    Positive,
    Reject,
    SampleMark,
    Sentence,
    digests_of,
    first_problem,
    frame_of,
)
from smolcluster.wire.node import Node
from smolcluster.wire.session import Receiver, Session
from smolcluster.wire.streams import Assembler, Piece, spec_of, stream_frames

ATTACHED_DATA = "attached"
"""What a run of attached processes calls its workload and its dataset."""
NO_MODEL = "no-model"
"""A Reject's code: the server waits for an offer."""
NO_OPTIMIZER = "optimizer"
"""A Reject's code: the server has no such optimizer."""
BAD_OFFER = "offer"
"""A Reject's code: the server cannot train as it is offered."""
MAX_LAYOUT_NBYTES = 16 * 1024 * 1024
MAX_PLAN_CHARS = MAX_HEADER_NBYTES - 4096
"""A plan is most of an offer, or of a welcome."""
MAX_VALUES = 2**37
"""How many numbers may be offered."""
MAX_SCRATCH_NBYTES = 2**33
"""How much memory buffers may take whose values are not offered."""
TICK_S = 0.2
DTYPES = frozenset({"float32", "float64"})
OptimizerName = Literal["adam", "adamw", "sgd"]


class Offer(Message, kind=67):
    """Client: what is trained (`plan`), and how; null: as the server is configured."""

    plan: str
    batch_size: Positive | None = None
    num_epochs: Positive | None = None
    optimizer: OptimizerName | None = None
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    weight_decay: float | None = None
    optimizer_args: OptimizerArgs | None = None
    obstacle: Sentence = ""
    """Why there is no optimizer here, where the server needs one of its own."""


class OfferedWeights(BucketMessage, kind=68):
    """Client: the weights that the run begins with, a bucket of bytes a message, in the plan's order."""


class OfferTaken(Message, kind=69):
    """Server: the run begins with these weights; join it."""


OFFER = MessageSet(
    "offer",
    from_dialler=frozenset({Offer, OfferedWeights}),
    from_listener=frozenset({OfferTaken}),
)


def _is_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no type of a tensor")  # noqa: TRY004 - as pydantic wants it
    return name


class Layer(NamedTuple):
    """A trainable parameter, or a buffer: of the model's state, or scratch, whose values are not offered."""

    kind: Literal["parameter", "buffer", "scratch"]
    name: Annotated[str, StringConstraints(pattern=r"^[^.]+(\.[^.]+)*$")]
    shape: tuple[Annotated[int, Field(ge=0, lt=2**40)], ...]
    dtype: Annotated[str, AfterValidator(_is_dtype)]

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype}"

    @property
    def numel(self) -> int:
        return 0 if self.kind == "scratch" else math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


def state_of(model: nn.Module) -> Iterator[tuple[Layer, Tensor]]:
    """A model's trainable parameters and its buffers, module by module."""
    known = set()
    for prefix, module in model.named_modules():
        scratch = module._non_persistent_buffers_set
        own = [
            *(("parameter", *each) for each in module.named_parameters(recurse=False)),
            *(
                ("scratch" if name in scratch or tensor.is_complex() else "buffer", name, tensor)
                for name, tensor in module.named_buffers(recurse=False)
            ),
        ]
        for kind, name, tensor in own:
            if id(tensor) in known or (kind == "parameter" and not tensor.requires_grad):
                continue
            known.add(id(tensor))
            full = plain_name(f"{prefix}.{name}" if prefix else name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield Layer(kind, full, tuple(tensor.shape), dtype), tensor


PLAN = TypeAdapter(
    tuple[
        tuple[Layer, ...],
        Annotated[int, Field(ge=1, lt=2**31)],
        bool,
        str,
        Annotated[tuple[SampleMark, ...], Field(max_length=MAX_SAMPLE_MARKS)],
    ],
    config=ConfigDict(strict=True),
)
"""A plan as it travels."""


@dataclass(frozen=True)
class Plan:
    """What is trained in a run of attached processes.

    Attributes:
        layers: the trainable parameters and the buffers, module by module.
        num_samples: samples of an epoch.
        is_counted: whether each process draws its samples itself, and the run counts how many.
        frozen: SHA-256 over the frozen parameters, which every process has of its own; empty: none.
        samples: what some samples are known by (`data/marks.py`); empty: each process draws its own.
    """

    layers: tuple[Layer, ...]
    num_samples: int
    is_counted: bool
    frozen: str = ""
    samples: tuple[Mark, ...] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        num_samples: int,
        *,
        is_counted: bool,
        samples: tuple[Mark, ...] = (),
    ) -> Self:
        """What a model and its data are.

        Raises:
            ConfigError: the model cannot be trained, or has too many tensors for a message.
        """
        check_shapes(model)
        trained_parameters(model)  # refuses what cannot be trained
        layers = tuple(layer for layer, _ in state_of(model))
        plan = cls(layers, num_samples, is_counted, frozen_digest(model), samples)
        if len(plan.text) > MAX_PLAN_CHARS:
            raise ConfigError(
                f"model: the names and shapes of its {len(layers)} tensors take {len(plan.text)} bytes, must "
                f"be at most {MAX_PLAN_CHARS}: freeze some, or train it as a workload (`launch --workload`)"
            )
        return plan

    @property
    def text(self) -> str:
        """The plan as it travels: compressed, because a header has little room."""
        content = json.dumps([*self._compared, self.samples]).encode()
        return base64.b64encode(zlib.compress(content)).decode()

    @property
    def fingerprint(self) -> str:
        """Of all but the samples, which are compared one by one."""
        return hashlib.sha256(json.dumps(self._compared).encode()).hexdigest()

    @property
    def _compared(self) -> list[Any]:
        return [self.layers, self.num_samples, self.is_counted, self.frozen]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `text` gives.

        Raises:
            ProtocolError: it is no plan.
        """
        try:
            inflate = zlib.decompressobj()
            content = inflate.decompress(base64.b64decode(text, validate=True), MAX_LAYOUT_NBYTES)
            plan = cls(*PLAN.validate_json(content))
        except (ValueError, zlib.error) as error:
            why = first_problem(error) if isinstance(error, ValidationError) else error
            raise ProtocolError(f"the plan of what is trained cannot be read: {why}") from None
        if not any(layer.kind == "parameter" and layer.numel for layer in plan.layers):
            raise ProtocolError("the plan of what is trained has no parameters")
        scratch_nbytes = sum(layer.nbytes for layer in plan.layers if layer.kind == "scratch")
        if plan.num_values > MAX_VALUES or scratch_nbytes > MAX_SCRATCH_NBYTES:
            raise ProtocolError(
                f"the plan of what is trained has {plan.num_values} values (at most {MAX_VALUES}) and "
                f"{scratch_nbytes} bytes of non-persistent buffers (at most {MAX_SCRATCH_NBYTES})"
            )
        return plan

    @property
    def num_values(self) -> int:
        """How many numbers are offered."""
        return sum(layer.numel for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """How many bytes are offered: each tensor as it is, so that none is rounded."""
        return sum(layer.nbytes for layer in self.layers if layer.kind != "scratch")

    def check_types(self) -> None:
        """Refuse parameters that are not trained.

        Raises:
            ConfigError: they are of several types, or one that is not trained.
        """
        names = {layer.dtype for layer in self.layers if layer.kind == "parameter"}
        if len(names) > 1 or not names <= DTYPES:
            raise ConfigError(
                f"model: its parameters are {', '.join(sorted(names))}, must all be one of "
                f"{', '.join(sorted(DTYPES))}"
            )

    def sample_difference(self, other: "Plan") -> str | None:
        """The first sample that is another one than the run's, in words; None: none is seen."""
        place = first_difference(self.samples, other.samples)
        if place is None:
            return None
        number = chosen(self.num_samples)[place]
        return f"sample {number} of this process's training data is not the run's: {SAME_DATA}"

    def difference(self, other: "Plan") -> str | None:
        """The first difference to the run's plan, `other`, in words; None: there is none."""
        for own, theirs in zip(self.layers, other.layers, strict=False):
            if own != theirs:
                return f"model: {own.kind} {own} is {theirs} in the run"
        if len(self.layers) != len(other.layers):
            longer, here = max((self.layers, True), (other.layers, False), key=lambda e: len(e[0]))
            extra = longer[min(len(self.layers), len(other.layers))]
            return f"model: {extra.kind} {extra} is only {'here' if here else 'in the run'}"
        if self.frozen != other.frozen:
            return (
                "model: its frozen weights are not those of the run; load them from the same file"
            )
        if self.is_counted != other.is_counted:
            how = "are counted (num_samples)" if other.is_counted else "come from cluster.sampler"
            return f"samples: in the run they {how}; do the same in all of its processes"
        if self.num_samples != other.num_samples:
            return f"samples: an epoch has {self.num_samples}, in the run {other.num_samples}"
        return None


@dataclass(frozen=True)
class Drawn(Elsewhere):
    """Training samples that the server has not: attached processes draw them."""

    def batch(self, indices: Tensor, place: Place | None = None) -> Batch:  # noqa: ARG002
        raise DataError(f"the {len(indices)} samples are only where the model is computed")


class PlannedWorkload(Workload):
    """What a run of attached processes trains: parameters that the server keeps, and cannot compute with."""

    def __init__(self, plan: Plan, model: Callable[[], nn.Module]) -> None:
        super().__init__(
            model,
            _computed_elsewhere,
            Drawn(plan.num_samples),
            name=ATTACHED_DATA,
            fingerprint=plan.fingerprint,
        )
        self.plan = plan
        self.is_scaled_elsewhere = True


def _computed_elsewhere(_model: nn.Module, _batch: Batch) -> Tensor:
    raise DataError("a server of attached processes computes no loss")


def values_of(model: nn.Module, plan: Plan) -> Tensor:
    """What is offered of a model: its bytes, uint8 (nbytes,), on the CPU.

    Raises:
        ConfigError: see `Plan.check_types`.
    """
    plan.check_types()
    state = [tensor for layer, tensor in state_of(model) if layer.kind != "scratch"]
    return torch.cat([tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in state])


def module_of(plan: Plan, values: Tensor) -> nn.Module:
    """A module of the plan's parameters and buffers, with these `values` (nbytes,): it cannot compute.

    Raises:
        ProtocolError: two of the names cannot be in one module.
    """
    root, start = nn.Module(), 0
    for layer in plan.layers:
        stop = start + (0 if layer.kind == "scratch" else layer.nbytes)
        tensor = _tensor_of(layer, values[start:stop])
        try:
            place_at(root, layer.name, tensor, is_kept=layer.kind != "scratch")
        except (KeyError, AttributeError, TypeError) as error:
            raise ProtocolError(f"the plan of what is trained: {layer.name}: {error}") from None
        start = stop
    return root


def _tensor_of(layer: Layer, values: Tensor) -> Tensor:
    if layer.kind == "scratch":
        return torch.zeros(layer.shape, dtype=layer.torch_dtype)
    tensor = values.clone().view(layer.torch_dtype).view(layer.shape)
    return tensor if layer.kind == "buffer" else nn.Parameter(tensor)


@dataclass(frozen=True)
class Offered(Event):
    """A whole offer: the plan, the bytes (nbytes,) in its order, and the rest."""

    session_id: int
    offer: Offer
    plan: Plan
    weights: Tensor

    @property
    def workload(self) -> PlannedWorkload:
        return PlannedWorkload(self.plan, lambda: module_of(self.plan, self.weights))


@dataclass(frozen=True)
class OfferUnusable(Event):
    """An offer that is no offer, or that this machine cannot hold."""

    session_id: int
    reason: str


def offer_pieces(nbytes: int) -> list[Piece]:
    """The stream of an offer's bytes, in buckets."""
    starts = range(0, nbytes, DEFAULT_BUCKET_BYTES)
    sizes = [min(DEFAULT_BUCKET_BYTES, nbytes - start) for start in starts]
    return [
        Piece(
            {
                "bucket": number,
                "num_buckets": len(starts),
                "tensor": spec_of("raw", "uint8", size, size),
            },
            slice(start, start + size),
        )
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def offer_frames(values: Tensor) -> list[Frame]:
    """The frames of an offer's bytes (nbytes,)."""
    pieces = offer_pieces(values.numel())
    return stream_frames(OfferedWeights, pieces, (values[each.place] for each in pieces))


def memory_for(nbytes: int, **_: object) -> Tensor:
    """For the bytes of an offer.

    Raises:
        ProtocolError: this machine has none.
    """
    free_nbytes = psutil.virtual_memory().available
    if nbytes > free_nbytes:
        raise ProtocolError(
            f"its weights take {format_bytes(nbytes)} of memory, and this machine has "
            f"{format_bytes(free_nbytes)} free"
        )
    return torch.empty(nbytes, dtype=torch.uint8)


class _OfferReceiver(Receiver):
    """Puts an offer together; of one that cannot be used the rest is read and dropped."""

    def __init__(self, session_id: int) -> None:
        self._session_id = session_id
        self._offer: tuple[Offer, Plan, Assembler[OfferedWeights]] | None = None

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        try:
            return self._take(message, payload)
        except (ProtocolError, ConfigError) as error:
            self._offer = None
            return OfferUnusable(self._session_id, str(error))

    def _take(self, message: Message, payload: memoryview) -> Event | None:
        match message:
            case Offer():
                plan = Plan.parse(message.plan)
                plan.check_types()
                pieces = offer_pieces(plan.nbytes)
                self._offer = message, plan, Assembler("offer", lambda _: pieces, memory_for)
            case OfferedWeights() if self._offer is not None:
                offer, plan, assembler = self._offer
                _, weights = assembler.take(message, payload)
                if weights is None:
                    return MessageReceived(self._session_id, message)
                return Offered(self._session_id, offer, plan, weights)
        return None


def wait_for_offer(
    cluster: ClusterConfig,
    node: Node,
    *,
    needs_optimizer: bool = False,
    check: Callable[[Offer], object] = lambda _: None,
) -> Offered:
    """Listen on the server's port until a process has offered what it trains; then the port is free.

    With `needs_optimizer` an offer without one is refused, as is one for which `check` raises ConfigError.

    Raises:
        ClusterEmpty: nothing of an offer has come for `start_timeout_s`.
        PortBusy, ConfigError: it cannot listen.
    """

    def admit(session_id: int, hello: Hello) -> LetIn | Refused:
        if OFFER.name not in hello.sets:
            return Refused(
                "no-model", "the server waits for a process that attaches and offers it a model"
            )
        accepted = Accepted(
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
        )
        return accepted, _OfferReceiver(session_id)

    inbox = Inbox()
    addresses = listening_addresses(cluster)
    acceptor = node.listen(
        addresses,
        cluster.port,
        sets=(SESSION, OFFER),
        inbox=inbox,
        admit=admit,
        max_queued=64,
    )
    acceptor.open()
    node.log.info(
        "listening on %s, port %d, for the first process that attaches",
        ", ".join(addresses),
        cluster.port,
    )
    try:
        return _first_taken(inbox, cluster, node, partial(_refusal, needs_optimizer, check))
    finally:
        acceptor.close()


def _first_taken(
    inbox: Inbox,
    cluster: ClusterConfig,
    node: Node,
    refusal_of: Callable[[Offer], Reject | None],
) -> Offered:
    """Answer offers until one is taken.

    Raises:
        ClusterEmpty: see `wait_for_offer`.
    """
    sessions: dict[int, Session] = {}
    refused = ""

    def refuse(session_id: int, refusal: Reject) -> None:
        nonlocal refused
        refused = f", but for one whose offer was refused: {refusal.sentence}"
        sessions[session_id].end_with(refusal)
        node.log.warning("an offer is refused: %s", refusal.sentence)

    deadline = Deadline(cluster.start_timeout_s)
    while not deadline.expired:
        match inbox.get(TICK_S):
            case SessionOpened() as opened:
                sessions[opened.session_id] = opened.session
            case SessionClosed(session_id):
                sessions.pop(session_id, None)
            case MessageReceived():  # some of an offer has come
                deadline = Deadline(cluster.start_timeout_s)
            case OfferUnusable(session_id, reason):
                refuse(session_id, Reject(code=BAD_OFFER, sentence=reason))
            case Offered() as offered:
                if refusal := refusal_of(offered.offer):
                    refuse(offered.session_id, refusal)
                    continue
                session = sessions[offered.session_id]
                session.send(OfferTaken())
                session.finish()
                session.join(cluster.heartbeat_timeout_s)
                return offered
    raise ClusterEmpty(
        f"no process has attached within {format_duration(cluster.start_timeout_s)} (start_timeout_s)"
        f"{refused}; start a script that does, then the server again"
    )


def _refusal(
    needs_optimizer: bool, check: Callable[[Offer], object], offer: Offer
) -> Reject | None:
    if needs_optimizer and offer.optimizer is None:
        return Reject(code=NO_OPTIMIZER, sentence=offer.obstacle)
    try:
        check(offer)
    except ConfigError as error:
        return Reject(code=BAD_OFFER, sentence=str(error))
    return None


def make_offer(follower: Follower, offer: Offer, weights: Tensor) -> None:
    """Offer a server what it shall train; `weights` (nbytes,) in the plan's order, on the CPU.

    Whether this offer or another one's was taken is unknown: join in either case.

    Raises:
        Rejected: the server cannot take it.
        ConnectTimeout, AuthError: see `Node.dial`.
    """
    try:
        connection, _ = follower.dial(
            follower.address,
            Accepted,
            timeout_s=follower.start_timeout_s,
            digests=digests_of((SESSION, OFFER)),
        )
    except (Rejected, VersionDiffers) as error:
        if isinstance(error, Rejected) and error.code != VERSION:
            raise
        return  # it has a model already
    try:
        connection.send_frame(frame_of(offer))
        for frame in offer_frames(weights):
            connection.send_frame(frame)
        kinds = SESSION.from_listener | OFFER.from_listener
        while not isinstance(answer := connection.receive(kinds)[0], OfferTaken):
            if isinstance(answer, Reject):
                raise Rejected(answer.sentence, answer.code)
    except PeerLost as error:
        follower.log.debug("an offer was not taken: %s", error)
    finally:
        connection.close()


def optimizer_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Those of an offer's fields that are the training configuration's and stated."""
    return {
        name: value
        for name, value in values.items()
        if value is not None and name not in ("plan", "obstacle")
    }
