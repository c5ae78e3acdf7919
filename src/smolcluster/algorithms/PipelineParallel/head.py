"""A pipeline as one worker of another algorithm: layers on several machines, one session with its server.

This process, the head, has no weights. An algorithm whose workers take local steps finds in `PipelineContext`
what it finds in any process: what computes a batch, and a `LocalCopy`. What it wants goes as an order to all
stages, which are this process's workers as they are a pipeline's server's; weights go to and from those that
have them, a bucket at a time.

When a stage is lost, what was computed since the server's weights were taken last is lost with it. Whoever
waits hears `PeerLost`: the session with the algorithm's server ends, which hands its samples out again. When
the layers have been dealt out anew the worker is back, and begins with the server's weights.
"""

import copy
import logging
import math
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.coordinator import (
    PATIENCE_S,
    Coordinator,
    StageReceiver,
)
from smolcluster.algorithms.PipelineParallel.crew import Crew
from smolcluster.algorithms.PipelineParallel.part_copy import (
    MOST_COPIES,
    Place,
    piece_frame,
    values_of,
)
from smolcluster.algorithms.spreading import GatheredChange, check_can_be_spread, parts_of
from smolcluster.algorithms.supervision import is_started_again
from smolcluster.configs.resolve import Settings
from smolcluster.configs.schema import (
    GradientClipping,
    RunConfig,
    StagesConfig,
    TrainConfig,
    config_of,
)
from smolcluster.configs.spec import algorithm_of_stages, get_algorithm
from smolcluster.errors import (
    ClusterEmpty,
    ConfigError,
    NonFiniteLoss,
    PeerLost,
    PortBusy,
    RunFailed,
    SmolclusterError,
)
from smolcluster.observability.metrics import Metrics
from smolcluster.runs.events import EventLog
from smolcluster.server.assignment import assignment_of
from smolcluster.server.joining import RunOver
from smolcluster.server.records import Records
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.hooks import NO_HOOKS
from smolcluster.training.kept import KeptSteps
from smolcluster.training.local_copy import Fragments, LocalCopy, Values
from smolcluster.training.optimizer import clip_factor
from smolcluster.training.places import meeting, pieces
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.utils.meter import Meter
from smolcluster.wire.inbox import Call, Event
from smolcluster.wire.messages import (
    CopyOrder,
    CopyPiece,
    LeaseKey,
    Message,
    StageDone,
    StageKept,
    StageReady,
    Welcome,
)
from smolcluster.wire.security import Secret

TICK_S = 0.1
POLL_S = 1.0
FAILED = "the run failed: "
"""What the server's sentence about a failed run begins with, and that of a worker to its stages."""
MOST_PIECES = 2000
"""Places of fragments in the flat weights, which are told in one message."""


class Computed(NamedTuple):
    """Of a batch: the mean of its loss terms, how many these are, and the norm of the mean's gradient.

    Loss and norm are NaN where a stage's are not finite.
    """

    loss: float
    num_terms: float
    grad_norm: float


@dataclass
class Order:
    """What all stages are to do together.

    Attributes:
        tell: tells a rank, given the turn; None: nobody, it is enough that all have their layers.
        subject: what an answer must be about, by the turn.
        then: from the answers, by rank, to the outcome.
        needs_weights: whether it goes on from weights that a lost stage has taken with it.
    """

    tell: Callable[[int, Crew, int], None] | None = None
    subject: Callable[[int], tuple[object, ...]] = lambda turn: (StageKept, turn)
    then: Callable[[list[Any]], Any] = lambda _: None
    needs_weights: bool = True
    patience_s: float = PATIENCE_S
    outcome: "Future[Any]" = field(default_factory=Future)


@dataclass(frozen=True)
class PieceArrived(Event):
    """A piece of a change."""

    piece: CopyPiece
    values: Tensor


class HeadReceiver(StageReceiver):
    """Passes on what stages send of a change."""

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, CopyPiece):
            return PieceArrived(message, values_of(message, payload))
        return super().__call__(message, payload)


class Head(Coordinator):
    """The stages of one worker. Its own thread decides; another one gives orders, one after the other."""

    num_copies = MOST_COPIES
    num_pieces = 0

    def __init__(self, context: ServerContext) -> None:
        replica = context.training.replica
        num_frames = len(replica.buckets) + 2 * len(replica.layers)
        super().__init__(
            context, HeadReceiver, num_more=4 * num_frames, check_stop=context.check_stop
        )
        self.report.meter = Meter()  # the other one counts what the worker waits for
        self.fragments: tuple[tuple[Place, ...], ...] | None = None
        """Those that the worker's copy follows, once it has one."""
        self.has_begun = False
        """Whether the stages of this plan know them."""
        self.places: list[list[slice]] = []
        """What of the flat weights each rank has."""
        self.lost: str | None = None
        """Why the worker's weights are gone, until whole ones come."""
        self.waiting: Order | None = None
        self.running: Order | None = None
        self.arrived: list[PieceArrived] = []
        """Of the change that was asked for."""
        self.newest = Computed(math.nan, 1, math.nan)
        """Whose gradient the stages have."""
        self.num_grants = 0
        self.is_over = False
        self.failure: BaseException | None = None
        """What the stages are told; None: the run has ended well."""
        self.check_session: Callable[[], None] = lambda: None
        """Raises when the session with the algorithm's server has ended while this worker prepares."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="stages", daemon=True)

    # the thread that gives orders

    def start(self) -> None:
        self._thread.start()

    def do(self, order: Order) -> Any:
        """Have all stages do this; returns what has come of it.

        Raises:
            PeerLost: a stage is lost, and the worker's weights with it.
            SmolclusterError: what else has ended the pipeline, or the session with the algorithm's server.
        """
        self.context.inbox.put(Call(partial(self.take, order)))
        while not order.outcome.done():
            if not order.needs_weights:  # the others have failed where stages have to come
                self.check_session()
            if self._ended.is_set() and not order.outcome.done():
                raise self._error or PeerLost("the stages of this worker have been left")
            wait([order.outcome], POLL_S)
        return order.outcome.result()

    def end(self, error: BaseException | None) -> None:
        """Let the stages go, for which `error` says why this worker leaves them."""
        self.context.inbox.put(Call(partial(self._end, error)))
        self._thread.join()

    # the deciding thread

    def _serve(self) -> None:
        try:
            self.run()
        except ClusterEmpty as error:
            self._error = ClusterEmpty(f"the stages of this worker: {error}")
        except BaseException as error:  # raised where an order is given
            self._error = error
        finally:
            self._ended.set()

    def run(self) -> None:
        """Have the stages do what is ordered until it is over."""
        with self.pool:
            while not self.is_over:
                for event in self.pool.next_events(TICK_S):
                    self.handle(event)
                if not self.is_over:
                    self.advance()
            if self.failure is not None:
                raise self.failure

    def _end(self, error: BaseException | None) -> None:
        self.is_over, self.failure = True, what_stages_hear(error)

    def take(self, order: Order) -> None:
        """Carry an order out as soon as all stages have their layers."""
        if order.needs_weights and self.lost is not None:
            order.outcome.set_exception(PeerLost(self.lost))
        else:
            self.waiting = order

    def handle(self, event: Event) -> None:
        if isinstance(event, PieceArrived):
            self.num_pieces += 1
            if self.is_running(event.piece):
                self.arrived.append(event)
        else:
            super().handle(event)

    def is_running(self, piece: CopyPiece) -> bool:
        """Whether it answers the order that is being carried out."""
        if self.crew is None or self.running is None:
            return False
        return (piece.attempt, piece.turn) == (self.crew.attempt, self.turn)

    def advance(self) -> None:
        newcomers = self.newcomers() if self.crew is not None else []
        if newcomers:
            self.begin_again(f"with {', '.join(each.worker.name for each in newcomers)}")
        super().advance()

    def dealt(self, crew: Crew, answers: list[StageReady]) -> None:
        super().dealt(crew, answers)
        self.has_begun = False
        self.places = [[slice(*place) for place in each.places] for each in answers]

    def next_turn(self, crew: Crew) -> None:
        if self.fragments is not None and not self.has_begun:
            self.carry_out(crew, self.beginning(self.fragments))
        elif self.waiting is not None:
            order, self.waiting = self.waiting, None
            self.carry_out(crew, order)

    def carry_out(self, crew: Crew, order: Order) -> None:
        self.turn += 1
        self.running, self.arrived = order, []
        if order.tell is None:
            self.finish(order, [])
            return
        tell = partial(order.tell, self.turn)
        then = partial(self.finish, order)
        self.ask(crew, order.subject(self.turn), tell, then, order.patience_s)

    def finish(self, order: Order, answers: list[Any]) -> None:
        self.running = None
        try:
            order.outcome.set_result(order.then(answers))
        except SmolclusterError as error:
            order.outcome.set_exception(error)

    def begin_again(self, reason: str) -> None:
        self.crew, self.lost = None, f"this worker's weights are lost: {reason}"
        self.context.log.warning("%s; this worker's layers are dealt out again", reason)
        broken_off, self.running = self.running, None
        if broken_off is not None:
            broken_off.outcome.set_exception(PeerLost(self.lost))
        if self.waiting is not None:
            order, self.waiting = self.waiting, None
            self.take(order)

    # orders

    def beginning(self, fragments: tuple[tuple[Place, ...], ...]) -> Order:
        """Have the stages follow these fragments, with fresh moments."""

        def then(_answers: list[StageKept]) -> None:
            self.fragments, self.has_begun = fragments, True

        tell = partial(self._tell_order, {"order": "begin", "fragments": fragments})
        return Order(tell, then=then, needs_weights=False)

    def ordered(self, order: str, **told: Any) -> Order:
        return Order(partial(self._tell_order, {"order": order, **told}))

    def batch(self, indices: Tensor, epoch: int, start: int) -> Order:
        """Have the stages compute a batch: the outcome is `Computed`."""
        self.num_grants += 1
        lease = LeaseKey(
            incarnation=self.context.incarnation,
            epoch=epoch,
            start=start,
            stop=start + len(indices),
            grant=self.num_grants,
        )

        def tell(turn: int, crew: Crew, rank: int) -> None:
            told, payload = assignment_of(lease, indices, version=turn, learning_rate=0.0)
            crew.peers[rank].worker.live_session.send(told, payload)

        began_at = time.monotonic()

        def then(answers: list[StageDone]) -> Computed:
            self.step_s = max(self.step_s, time.monotonic() - began_at)
            self.newest = computed(answers)
            return self.newest

        return Order(tell, lambda _: (StageDone, lease), then, patience_s=self.step_patience_s)

    def change(self, fragment: int, place: slice) -> Order:
        """Fetch a place in a fragment's values of θ_start - θ: the outcome is those (n,)."""
        part = {"start": place.start, "stop": place.stop}
        tell = partial(self._tell_order, {"order": "change", "fragment": fragment, **part})
        return Order(tell, then=lambda _: self.assembled(fragment, place))

    def assembled(self, fragment: int, place: slice) -> Tensor:
        """What the stages have sent of a place in a fragment's change.

        Raises:
            PeerLost: they have not sent all of it.
        """
        dtype = self.context.training.replica.params.dtype
        values = torch.empty(place.stop - place.start, dtype=dtype)
        has_come = torch.zeros(len(values), dtype=torch.bool)
        for flat, within in pieces(self.flat_places(fragment), place):
            for each in self.arrived:
                given = slice(each.piece.start, each.piece.start + len(each.values))
                there, own = meeting(flat, given)
                values[within][there] = each.values[own]
                has_come[within][there] = True
        if (num := int(has_come.sum())) != len(values):
            raise PeerLost(f"the stages have sent {num} of {len(values)} values of a change")
        return values

    def flat_places(self, fragment: int) -> list[slice]:
        assert self.fragments is not None  # noqa: S101 - `LocalCopy` begins with them
        return [slice(*place) for place in self.fragments[fragment]]

    def taking_up(self, step: int) -> Order:
        """Have the stages go on with the moments of a step: the outcome is whether all have them."""

        def then(answers: list[StageKept]) -> bool:
            return all(each.found == step for each in answers)

        return Order(partial(self._tell_order, {"order": "take_up", "step": step}), then=then)

    def following(self, fragment: int, values: Tensor, *, is_difference: bool) -> Order:
        """Give the stages a fragment's new values (numel,)."""
        places = self.flat_places(fragment)
        found = pieces(places, slice(0, len(values)))
        sources = [(flat.start, values[within]) for flat, within in found]
        told = {"order": "follow", "fragment": fragment, "is_difference": is_difference}
        return Order(partial(self._tell_values, told, sources))

    def loading(self, weights: Sequence[Tensor]) -> Order:
        """Give the stages flat weights, in pieces: what was lost before does not matter any more."""
        sources, start = [], 0
        for each in weights:
            sources.append((start, each))
            start += len(each)

        def then(_answers: list[StageKept]) -> None:
            self.lost = None

        tell = partial(self._tell_values, {"order": "load"}, sources)
        return Order(tell, then=then, needs_weights=False)

    def _tell_order(self, told: Mapping[str, Any], turn: int, crew: Crew, rank: int) -> None:
        message = CopyOrder.model_validate({"attempt": crew.attempt, "turn": turn, **told})
        self.tell(message, crew, rank)

    def _tell_values(
        self,
        told: Mapping[str, Any],
        sources: Sequence[tuple[int, Tensor]],
        turn: int,
        crew: Crew,
        rank: int,
    ) -> None:
        """An order, and behind it what of `sources`, values from an element on, this rank has."""
        self._tell_order(told, turn, crew, rank)
        session, most = crew.peers[rank].worker.live_session, self._piece_length
        for start, values in sources:
            for place in self.places[rank]:
                own, _ = meeting(slice(start, start + len(values)), place)
                for first in range(own.start, own.stop, most):
                    part = values[first : min(first + most, own.stop)]
                    session.send_frame(piece_frame(crew.attempt, turn, start + first, part))

    @property
    def _piece_length(self) -> int:
        replica = self.context.training.replica
        return max(1, replica.bucket_bytes // replica.params.dtype.itemsize)


def what_stages_hear(error: BaseException | None) -> BaseException | None:
    """What ends their run where `error` ends their worker's; None: it has ended well.

    Where their worker may be back it is an interrupt: they look for it.
    """
    match error:
        case RunOver():
            return None
        case RunFailed():
            return RunFailed(str(error).removeprefix(FAILED))
        case SmolclusterError() if not is_started_again(error.exit_code):
            return error
    return KeyboardInterrupt()


def computed(answers: Sequence[StageDone]) -> Computed:
    """What stages have come to, all together."""
    num_terms = sum(each.num_terms for each in answers)
    divisor = num_terms or 1.0
    losses = [math.nan if each.loss is None else each.loss for each in answers]
    squares = [math.nan if each.squared_norm is None else each.squared_norm for each in answers]
    return Computed(sum(losses) / divisor, num_terms, math.sqrt(math.fsum(squares)) / divisor)


@dataclass(frozen=True, kw_only=True)
class PipelineContext(TrainingContext):
    """What a pipeline trains with; `replica` is an outline."""

    head: Head
    rooms: ExitStack
    """What ends with it."""

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        found: Computed = self.head.do(self.head.batch(indices, epoch, start))
        if math.isfinite(found.loss) and math.isfinite(found.grad_norm):
            return BatchLoss(found.loss, found.num_terms)
        what = "gradient" if math.isfinite(found.loss) else "loss"
        raise NonFiniteLoss(f"the {what} is not finite; {DIVERGENCE_REMEDY}")

    def rehearse(self, num_samples: int) -> bool:
        try:
            self.head.do(self.head.batch(self.order(0)[:num_samples], 0, 0))
        except PeerLost:
            self.wait_until_ready()
            return False
        return True

    def wait_until_ready(self, check: Callable[[], None] | None = None) -> None:
        self.head.check_session = check or self.head.check_session
        self.head.do(Order(needs_weights=False))

    def local_copy(self, fragments: Fragments) -> LocalCopy:
        return PipelineCopy(self, fragments)

    def close(self) -> None:
        self.rooms.__exit__(*sys.exc_info())
        super().close()


class PipelineCopy:
    """A `LocalCopy` of which each stage has a part."""

    def __init__(self, context: PipelineContext, fragments: Fragments) -> None:
        self._head, self._clip = context.head, 1.0
        self.sent: set[int] = set()
        places = tuple(tuple((place.start, place.stop) for place in each) for each in fragments)
        self._head.do(self._head.beginning(places))

    def clip(self, clipping: GradientClipping) -> float:
        newest = self._head.newest
        self._clip = clip_factor(newest.grad_norm, clipping) / (newest.num_terms or 1.0)
        return newest.grad_norm

    def step(self, learning_rate: float, held: Collection[int] = ()) -> None:
        told = {"clip": self._clip, "learning_rate": learning_rate, "held": tuple(sorted(held))}
        self._head.do(self._head.ordered("step", **told))

    def change(self, fragment: int) -> Values:
        return GatheredChange(lambda place: self._head.do(self._head.change(fragment, place)))

    def mark_sent(self, fragment: int) -> None:
        self._head.do(self._head.ordered("mark_sent", fragment=fragment))
        self.sent.add(fragment)

    def follow(self, fragment: int, values: Tensor, *, is_difference: bool) -> None:
        self._head.do(self._head.following(fragment, values, is_difference=is_difference))
        self.sent.discard(fragment)

    def load(self, weights: Sequence[Tensor]) -> None:
        self.sent.clear()
        self._head.do(self._head.loading(weights))

    def forget_sent(self) -> None:
        """Whole weights come next, with which the stages forget it as well."""
        self.sent.clear()

    def reset(self) -> None:
        self._head.do(self._head.ordered("reset"))

    def save(self, kept: KeptSteps, step: int, more: Mapping[str, Tensor], keep_last: int) -> None:
        """Each stage keeps its moments on its own machine."""
        kept.save(step, more, keep_last)
        self._head.do(self._head.ordered("save", step=step, keep_last=keep_last))

    def take_up(self, kept: KeptSteps, step: int) -> tuple[int, Mapping[str, Tensor]] | None:
        found = kept.load(step)
        if found is None:
            return None
        if not self._head.do(self._head.taking_up(found[0])):
            self.reset()
            return None
        return found


def spread(
    welcome: Welcome,
    training: TrainingContext,
    *,
    settings: Settings,
    name: str,
    secret: Secret,
    log: logging.Logger,
) -> PipelineContext:
    """Spread what is trained over the stages of node `name`; `training` is its outline.

    From now on they may come; `wait_until_ready` waits for them.

    Raises:
        ConfigError: this machine, the model or the run does not allow it.
        PortBusy: another process listens where they are to come.
    """
    stages = settings.node.stages
    assert stages is not None  # noqa: S101 - else nobody asks
    check_can_be_spread(welcome, training, name, "stages")
    own = config_of(get_algorithm(welcome.run.algorithm))
    welcome.run.of(own).check_pieces(training.replica.layers, MOST_PIECES)
    run = pipeline_run(welcome.run, stages)
    incarnation = secrets.token_hex(4)
    with ExitStack() as rooms:
        folder = rooms.enter_context(tempfile.TemporaryDirectory(prefix="smolcluster-stages-"))
        events = EventLog(Path(folder) / "events.jsonl", incarnation, warn=log.debug)
        rooms.callback(events.close)
        context = ServerContext(
            settings=settings_of(settings, run.train, stages, name),
            run=run,
            training=without_servers_part(training),
            node=name,
            secret=secret,
            records=Records(Metrics(), events, incarnation),
            log=log,
            role_of_workers="stage",
        )
        with naming(f"nodes.{name}.stages"):
            run.of(PipelineConfig).check(context.settings)
            head = Head(context)
        log.info("this worker has %d stages: %s", len(stages.host_ip), stages)
        head.start()
        rooms.push(lambda _kind, error, _trace: head.end(error))
        return PipelineContext(**parts_of(training), head=head, rooms=rooms.pop_all())


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Say of which key's value an error is.

    Raises:
        ConfigError, PortBusy: as they were, after the key.
    """
    try:
        yield
    except (ConfigError, PortBusy) as error:
        raise type(error)(f"{key}: {error}") from error


def pipeline_run(run: RunConfig, stages: StagesConfig) -> RunConfig:
    """The run as the stages are told it: that of a pipeline, of which a step is a worker's batch."""
    own = stages.model_dump(mode="json", include=set(PipelineConfig.model_fields))
    config = PipelineConfig.model_validate(own)
    return run.model_copy(
        update={
            "algorithm": algorithm_of_stages().name,
            "own": config.model_dump(mode="json"),
            "train": run.train.model_copy(update={"global_batch_size": None, "ema_decay": None}),
            "codec": None,
            "use_quantization": False,
        }
    )


def settings_of(
    settings: Settings, train: TrainConfig, stages: StagesConfig, name: str
) -> Settings:
    """What the head is told as its stages' server."""
    names = tuple(stages.host_ip)
    cluster = {
        "host_ip": stages.host_ip,
        "local_names": {},  # stages are called as they are listed
        "port": stages.port,
        "bind": None,
        "server": name,
        "servers": None,
        "workers": names,
        "num_workers": len(names),
        "min_workers": len(names),
        "elastic": False,
        "start_timeout_s": min(
            settings.cluster.start_timeout_s, settings.cluster.prepare_timeout_s
        ),
    }
    return replace(settings, cluster=settings.cluster.model_copy(update=cluster), train=train)


def without_servers_part(training: TrainingContext) -> TrainingContext:
    """The same without what the run's server does: it calls the user's functions, and averages weights."""
    workload = copy.copy(training.workload)
    workload.training = replace(training.recipe, hooks=NO_HOOKS, ema_decay=None)
    return replace(training, workload=workload)
