"""A pipeline as one worker of another algorithm: layers on several machines, one session with its server.

This process, the head, has no weights. What the algorithm wants goes as an order to all stages, which are
this process's workers as they are a pipeline's server's; weights go to and from those that have them, a
bucket at a time.

When a stage is lost, what was computed since the server's weights were taken last is lost with it. Whoever
waits hears `PeerLost`: the session with the algorithm's server ends, which hands its samples out again. When
the layers have been dealt out anew the worker is back, and begins with the server's weights.
"""

import copy
import logging
import math
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from smolcluster.algorithms.context import PoolContext
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.coordinator import Coordinator, StageReceiver
from smolcluster.algorithms.PipelineParallel.crew import Crew, Peer, Questions, computed
from smolcluster.algorithms.PipelineParallel.part_copy import (
    MOST_COPIES,
    CopyStream,
    copy_frames,
)
from smolcluster.algorithms.spreading import SpreadContext, check_can_be_spread, parts_of
from smolcluster.algorithms.supervision import is_started_again
from smolcluster.configs.schema import RunConfig, Settings, StagesConfig, TrainConfig, config_of
from smolcluster.configs.spec import algorithm_of_stages, get_algorithm
from smolcluster.data.permutation import Range
from smolcluster.errors import (
    ClusterEmpty,
    ConfigError,
    PeerLost,
    PortBusy,
    ProtocolError,
    RunFailed,
    SmolclusterError,
)
from smolcluster.server.assignment import assignment_of
from smolcluster.server.joining import RunOver
from smolcluster.server.worker import Listener
from smolcluster.server.worker_pool import WorkerPool
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.local_copy import Given, Place, ends
from smolcluster.training.places import common, meeting, pieces, total, without
from smolcluster.utils.meter import Meter
from smolcluster.wire.inbox import Call
from smolcluster.wire.messages import (
    CopyOrder,
    CopyPiece,
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


@dataclass
class Order:
    """What all stages are to do together, once they have their layers.

    Attributes:
        work: what that is, and what comes of it.
        needs_weights: whether it goes on from weights that a lost stage has taken with it.
    """

    work: Callable[[Crew], Questions[Any]]
    needs_weights: bool = True
    outcome: "Future[Any]" = field(default_factory=Future)


class Head(Coordinator):
    """The stages of one worker, which compute for it.

    Its own thread decides; another one gives orders, one after the other.

    Attributes:
        grad_norm: of the newest batch's mean gradient; NaN where a stage's is not finite.
        divisor: loss terms of that batch, whose gradients the stages have added up.
    """

    num_copies, role = MOST_COPIES, "stage"
    num_pieces = 0
    moments: Mapping[str, Tensor] = MappingProxyType({})
    grad_norm, divisor = math.nan, 1.0

    def __init__(self, context: PoolContext) -> None:
        super().__init__(context)
        replica = context.training.replica
        num_frames = len(replica.buckets) + 2 * len(replica.layers)
        self.pool = WorkerPool(
            cluster=context.settings.cluster,
            inbox=context.inbox,
            acceptor=context.listen(StageReceiver, num_more=4 * num_frames),
            training=context.training,
            listener=Listener(Meter()),  # the replica's own meter counts what the worker waits for
            log=context.log,
            role=self.role,
        )
        self.fragments: tuple[tuple[Place, ...], ...] | None = None
        """Those that the worker's copy follows, once it has one."""
        self.places: list[list[slice]] = []
        self.told_places: list[list[slice]] = []
        """By rank: what of the flat weights it has, and what of that none before it has."""
        self.lost: str | None = None
        """Why the worker's weights are gone, until whole ones come."""
        self.waiting: Order | None = None
        self.streams: dict[int, CopyStream] = {}
        """By session: what each stage sends of the change that was asked for."""
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

    def close(self) -> None:
        """Let the stages go, and hear of the exception that is being handled why this worker leaves them."""
        self.context.inbox.put(Call(partial(self._end, sys.exc_info()[1])))
        self._thread.join()

    def compute(self, indices: Tensor, epoch: int, start: int, scale: float) -> BatchLoss:  # noqa: ARG002
        def work(crew: Crew) -> Questions[BatchLoss]:
            self.num_grants += 1
            lease = self.lease_of(Range(epoch, start, start + len(indices)), self.num_grants)
            told, payload = assignment_of(lease, indices, version=self.turn, learning_rate=0.0)

            def tell(rank: int) -> None:
                crew.peers[rank].worker.live_session.send(told, payload)

            answers = yield from self.ask(crew, (StageDone, lease), tell, self.step_patience_s)
            self.step_s = max(self.step_s, self.took_s)
            loss, self.grad_norm = computed(answers)
            self.divisor = loss.num_terms or 1.0
            return loss

        found: BatchLoss = self.do(Order(work))
        return found

    def wait_until_ready(self, check: Callable[[], None] | None = None) -> None:
        def work(_crew: Crew) -> Questions[None]:
            yield from ()

        self.check_session = check or self.check_session
        self.do(Order(work, needs_weights=False))

    def order(self, name: str, *given: Any, **told: Any) -> Any:
        told.pop("folder", None)  # each stage keeps its moments on its own machine
        work: Callable[[Crew], Questions[Any]]
        needs_weights = name != "begin"
        match name:
            case "take":
                work = partial(self.give, list(*given), **told)
                needs_weights = told["fragment"] is not None
            case "read":
                work = partial(self.read, **told)
            case _:
                work = partial(self.have_done, {"order": name, **told})
        return self.do(Order(work, needs_weights))

    # what stages do, which the deciding thread asks them

    def have_done(self, told: Mapping[str, Any], crew: Crew) -> Questions[bool]:
        """What takes no values; returns whether all have found the step that is told."""
        answers = yield from self.ask_to(partial(self.tell_order, told, crew), crew)
        if told["order"] == "begin":
            self.fragments = told["fragments"]
        return all(each.found == told.get("step") for each in answers)

    def give(
        self, values: Given, crew: Crew, *, fragment: int | None, is_difference: bool
    ) -> Questions[None]:
        """Take a fragment's values, or all weights: each what lies in its places."""
        nbytes = self.context.training.replica.bucket_bytes
        order = "load" if fragment is None else "follow"
        told = {"order": order, "fragment": fragment or 0, "is_difference": is_difference}

        def tell(rank: int) -> None:
            self.tell_order(told, crew, rank)
            own = (
                each[meeting(place, here)[0]]
                for place, each in values
                for here in self.places[rank]
            )
            for frame in copy_frames(crew.attempt, self.turn, own, nbytes):
                crew.peers[rank].worker.live_session.send_frame(frame)

        yield from self.ask_to(tell, crew)
        if fragment is None:  # what was lost before does not matter any more
            self.lost = None

    def read(
        self, crew: Crew, *, fragment: int, places: Sequence[Place], is_gradient: bool
    ) -> Questions[Tensor]:
        """Send what each tells of these places in a fragment's change; returns all of it, (numel,)."""
        flat = [slice(*place) for place in places]
        dtype = self.context.training.replica.params.dtype
        told = {"order": "change", "fragment": fragment, "is_gradient": is_gradient}

        def tell(rank: int) -> None:
            wanted = common(flat, self.told_places[rank])
            self.streams[crew.peers[rank].id] = CopyStream(wanted, dtype)
            self.tell_order({**told, "places": ends(wanted)}, crew, rank)

        yield from self.ask_to(tell, crew)
        return assembled(flat, list(self.streams.values()), dtype)

    def ask_to(self, tell: Callable[[int], None], crew: Crew) -> Questions[list[StageKept]]:
        """Ask stages to do what a `CopyOrder` says."""
        return self.ask(crew, (StageKept, self.turn), tell)

    def tell_order(self, told: Mapping[str, Any], crew: Crew, rank: int) -> None:
        message = CopyOrder.model_validate({"attempt": crew.attempt, "turn": self.turn, **told})
        self.tell(message, crew, rank)

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
        is_void = order.needs_weights and self.lost is not None
        self.waiting = None if is_void else order
        if is_void:
            order.outcome.set_exception(PeerLost(self.lost))

    def hear(self, peer: Peer, message: Message, payload: bytes | bytearray) -> None:
        if not isinstance(message, CopyPiece):
            super().hear(peer, message, payload)
            return
        self.num_pieces += 1
        if self.crew is None or peer.id not in self.streams:
            return
        if (message.attempt, message.turn) == (self.crew.attempt, self.turn):
            try:
                self.streams[peer.id].take(message, payload)
            except ProtocolError as error:
                peer.worker.live_session.cut(str(error))

    def advance(self) -> None:
        newcomers = self.dealer.newcomers(self.crew) if self.crew else []
        if newcomers:
            self.begin_again(f"with {', '.join(each.worker.name for each in newcomers)}")
        super().advance()

    def work(self, crew: Crew, ready: list[StageReady]) -> Questions[None]:
        """Do one order after the other."""
        self.places = [[slice(*place) for place in each.places] for each in ready]
        self.told_places = [
            without(places, chain.from_iterable(self.places[:rank]))
            for rank, places in enumerate(self.places)
        ]
        if self.fragments is not None:  # the worker's copy follows them already
            told = {"order": "begin", "fragments": self.fragments}
            yield from self.carry_out(Order(partial(self.have_done, told)), crew)
        while True:
            order, self.waiting = self.waiting, None
            if order is None:
                yield None
            else:
                yield from self.carry_out(order, crew)

    def carry_out(self, order: Order, crew: Crew) -> Questions[None]:
        self.turn += 1
        try:
            outcome = yield from order.work(crew)
        except SmolclusterError as error:
            order.outcome.set_exception(error)
        except GeneratorExit:  # a stage is lost: see `disband`
            order.outcome.set_exception(PeerLost(self.lost))
            raise
        else:
            order.outcome.set_result(outcome)
        finally:
            self.streams = {}

    def begin_again(self, reason: str) -> None:
        self.lost = f"this worker's weights are lost: {reason}"
        self.context.log.warning("%s; this worker's layers are dealt out again", reason)
        self.disband()
        if self.waiting is not None:
            self.take(self.waiting)


def assembled(places: Sequence[slice], streams: Sequence[CopyStream], dtype: torch.dtype) -> Tensor:
    """What the stages have sent of these places, (numel,).

    Raises:
        PeerLost: they have not sent all of it.
    """
    values = torch.empty(total(places), dtype=dtype)
    num_sent = 0
    for place, sent in chain.from_iterable(each.given for each in streams if each.is_whole):
        for flat, within in pieces(places, slice(0, len(values))):
            there, own = meeting(flat, place)
            values[within][there] = sent[own]
        num_sent += len(sent)
    if num_sent != len(values):
        raise PeerLost(f"the stages have sent {num_sent} of {len(values)} values of a change")
    return values


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


def spread(
    welcome: Welcome,
    training: TrainingContext,
    *,
    settings: Settings,
    name: str,
    secret: Secret,
    log: logging.Logger,
) -> SpreadContext:
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
    context = PoolContext(
        settings=settings_of(settings, run.train, stages, name),
        run=run,
        training=without_average(training),
        node=name,
        secret=secret,
        incarnation=secrets.token_hex(4),
        log=log,
    )
    with naming(f"nodes.{name}.stages"):
        run.of(PipelineConfig).check(context.settings)
        head = Head(context)
    log.info("this worker has %d stages: %s", len(stages.host_ip), stages)
    head.start()
    return SpreadContext(**parts_of(training), others=head)


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


def without_average(training: TrainingContext) -> TrainingContext:
    """The same without the average of the weights, which is the run's server's."""
    workload = copy.copy(training.workload)
    workload.training = replace(training.recipe, ema_decay=None)
    return replace(training, workload=workload)
