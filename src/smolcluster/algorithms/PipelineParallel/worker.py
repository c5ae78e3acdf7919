"""A worker of a pipeline: it has some of the layers, and computes every microbatch's way through them.

    plan -> build the layers, reach the neighbours -> (samples -> its instruction list -> norm -> commit)*

The server says which layers, which samples, and by which factor the gradient is stepped; activations and
their gradients go from neighbour to neighbour.

By hand: `uv run worker.py 1 macbook`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("pipeline", "worker"))


import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch

from smolcluster.algorithms.PipelineParallel.automatic import measure
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.execution import Execution, OwnStage, evaluate_stages
from smolcluster.algorithms.PipelineParallel.link_speed import measure_link
from smolcluster.algorithms.PipelineParallel.links import PATIENCE_S, Links, Route
from smolcluster.algorithms.PipelineParallel.part_copy import StagePart, copy_frames
from smolcluster.algorithms.PipelineParallel.plan import schedule_of
from smolcluster.algorithms.PipelineParallel.state import StateLoader, state_frames
from smolcluster.data.dataset import Elsewhere, Place, Sent
from smolcluster.errors import (
    ConnectTimeout,
    OutOfMemory,
    PeerLost,
    ProtocolError,
    SmolclusterError,
)
from smolcluster.server.assignment import Assigned, AssignmentReceiver, HeldOut
from smolcluster.server.link import Link, WorkerSetup
from smolcluster.training.build import TrainingContext, stage_replica
from smolcluster.training.compute import Microbatch
from smolcluster.training.evaluate import LOSS
from smolcluster.utils.device import pick_device
from smolcluster.utils.device_errors import empty_cache, first_line, is_out_of_memory
from smolcluster.utils.words import a_few
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Assignment,
    Commit,
    CopyOrder,
    CopyPiece,
    EvaluateStages,
    KeepStages,
    LayersMeasured,
    LeaseKey,
    LinkMeasured,
    Listening,
    MeasureLink,
    Message,
    Planned,
    Relayed,
    Served,
    StageDone,
    StageEvaluated,
    StageKept,
    StageReady,
    StageState,
    Welcome,
)
from smolcluster.wire.session import Receiver

WAIT_S = 1.0
EVERY_ATTEMPT = 2**62


class PlanChanged(SmolclusterError):
    """What is being computed is void: the server has another plan."""


class StageReceiver(Receiver):
    """What the server says; of a new plan the thread that computes hears at once."""

    links: Links | None = None
    """From when on the server has been told of them."""

    def __init__(self, training: TrainingContext) -> None:
        self._samples = AssignmentReceiver(training)

    def place_for(self, message: Message) -> memoryview | None:
        match message:
            case Served():
                return self._samples.place_for(message)
            case Relayed() if self.links:
                return self.links.relayed(message.instance).place_for(message)
        return None

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        event: Event | None = MessageReceived(0, message)
        match message:
            case Served():
                event = None
            case Relayed() if self.links:
                self.links.relayed(message.instance)(message, payload)
                event = None
            case Assignment():
                event = self._samples.assigned(message, payload)
            case EvaluateStages():
                event = self._samples.held_out(message)
            case StageState() | CopyPiece():
                event = MessageReceived(0, message, bytearray(payload))
            case Planned() | MeasureLink() if self.links:
                self.links.interrupt(PlanChanged("the plan has changed"), message.attempt - 1)
        return event

    def close(self) -> None:
        if self.links:
            gone = PeerLost("the session with the server has ended")
            self.links.interrupt(gone, EVERY_ATTEMPT)


class Worker:
    """A worker's part in a run, over all its sessions."""

    unacknowledged: LeaseKey | None = None
    """A step that breaks off is done again."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        self.welcome, self.training = welcome, training
        self.config = welcome.run.of(PipelineConfig)
        self.train = training.recipe.applied_to(welcome.run.train)
        self.measured: LayersMeasured | None = None
        """Once it has been in a session."""
        self.receiver: StageReceiver
        self.link: Link
        self.links: Links
        self.plan: Planned
        self.stages: dict[int, OwnStage] = {}
        """By their numbers; the layers of the newest plan."""
        self.copy = StagePart((), ())
        """What of the weights lies here, where they are those of a worker with local steps."""
        self.execution: Execution
        self.version = self.turn = 0
        """Of the newest step that it has taken, and of what the stages have done together last."""
        self.told_of: set[str] = set()
        """Buffers that no checkpoint has."""
        self.newest: Event | None = None
        """A plan that has come while another one was begun, or what is asked before a plan."""

    def new_receiver(self) -> StageReceiver:
        self.receiver = StageReceiver(self.training)
        return self.receiver

    def take_part(self, link: Link) -> None:
        """Compute until the link raises. The server says what, from the plan on."""
        place = link.place
        self.link, self.newest = link, None
        self.free()  # layers of the session before would count as used when memory is measured
        self.links = Links(
            place,
            link,
            bucket_bytes=self.welcome.bucket_bytes,
            heartbeat_timeout_s=self.welcome.heartbeat_timeout_s,
        )
        with closing(self.links):
            addresses = place.node.addresses or (link.connection.own_address,)
            self.receiver.links = self.links
            self.tell_speed(link, place)
            link.send(Listening(places=self.links.listen(addresses)))
            while True:
                self.follow(place)

    def tell_speed(self, link: Link, place: WorkerSetup) -> None:
        """Let the server know what each layer takes here, if it cuts the model by that."""
        if self.measured is None:
            device = pick_device(place.node.device)
            with self.memory_told(
                lambda reason: StageReady(
                    attempt=0,
                    reason=f"a single layer does not fit: {reason}",
                    out_of_memory=True,
                )
            ):
                self.measured = measure(self.training, self.train, self.config, device, place.log)
        if self.measured is not None:
            link.send(self.measured)

    def follow(self, place: WorkerSetup) -> None:
        """Do what the server wants next; what a neighbour's loss breaks off it hears of."""
        event, self.newest = self.newest or self.next_event(), None
        try:
            with self.memory_told(
                lambda reason: StageReady(
                    attempt=self.plan.attempt, reason=reason, out_of_memory=True
                )
            ):
                if event is None:
                    self.check_neighbours()
                self.handle(event, place)
        except PlanChanged:
            pass  # which comes next
        except ProtocolError as error:
            self.link.cut(
                str(error)
            )  # it comes back, as where the session itself refuses something
        except (PeerLost, ConnectTimeout) as error:
            self.newest = self.link.next_event(0.0)  # raises where the run is over
            if self.link.is_cut:
                raise
            self.link.send(StageReady(attempt=self.plan.attempt, reason=str(error)))

    @contextmanager
    def memory_told(self, message: Callable[[str], Message]) -> Iterator[None]:
        """Give the layers back where the block runs out of memory, and let the server hear of it."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.free()
            self.link.send(message(first_line(error)))

    def free(self) -> None:
        """Give back what the layers of the newest plan take."""
        self.stages.clear()  # the execution has the same dict
        self.copy = StagePart((), ())
        gc.collect()  # a stage and what computes with it refer to each other
        empty_cache()

    def next_event(self) -> Event | None:
        with self.training.replica.meter("wait"):
            return self.link.next_event(WAIT_S)

    def handle(self, event: Event | None, place: WorkerSetup) -> None:
        match event:
            case MessageReceived(message=MeasureLink() as wanted):
                self.measure_link(wanted)
            case MessageReceived(message=Planned() as plan):
                self.begin(plan, place)
            case Assigned() as step if self.is_new(step.assignment.version):
                self.compute(step)
            case MessageReceived(message=Commit() as commit) if commit.version > self.version:
                self.step(commit)
            case HeldOut(wanted=wanted, samples=samples) if self.is_new(wanted.turn):
                self.evaluate(wanted, samples)
            case MessageReceived(message=KeepStages() as wanted):
                self.send_state(wanted)
            case MessageReceived(message=CopyOrder() as order) if self.is_planned(order.attempt):
                self.obey(order)
            case MessageReceived(message=CopyPiece() as piece) if self.is_planned(piece.attempt):
                if self.copy.arrive(piece, event.payload):
                    self.link.send(StageKept(attempt=piece.attempt, step=piece.turn))

    def check_neighbours(self) -> None:
        """See to it that nobody waits for this stage to connect, which believes that all are ready.

        Raises:
            PeerLost: a neighbour was lost before the first turn of the plan, and may wait so.
        """
        if self.stages and self.turn == self.plan.turn:
            self.links.check(self.plan.attempt)

    def measure_link(self, wanted: MeasureLink) -> None:
        """Say how much is carried from here to another worker, or why that is not known.

        Where memory is short, the layers of the last plan are freed.
        """
        attempt = wanted.attempt
        route = Route(
            rank=wanted.rank,
            attempt=attempt,
            step=0,
            ranks=(0, 1),
            neighbours=(wanted.neighbour,),
            codec="fp32",
        )
        with self.memory_told(lambda reason: LinkMeasured(attempt=attempt, reason=reason)):
            try:
                found = measure_link(self.links, route)
            except (PeerLost, ConnectTimeout) as error:
                if self.link.is_cut:
                    raise
                self.link.send(LinkMeasured(attempt=attempt, reason=str(error)))
            else:
                speed, latency = found.bytes_s, found.latency_s
                self.link.send(LinkMeasured(attempt=attempt, bytes_s=speed, latency_s=latency))

    def begin(self, plan: Planned, place: WorkerSetup) -> None:
        """Build the layers that are one's own now, and reach the neighbours."""
        self.plan, training = plan, self.training
        self.version, self.turn = plan.step or 0, plan.turn
        device = pick_device(place.node.device)
        self.free()
        for stage, rank in enumerate(plan.ranks):
            if rank == plan.rank:
                layers = range(plan.cuts[stage], plan.cuts[stage + 1])
                replica = stage_replica(training, self.train, layers, device, place.log)
                self.stages[stage] = OwnStage.of(
                    replica, training.workload, training.seed, recompute=self.config.recomputes
                )
                self.stages[stage].compute.doubles = training.replica.doubles
                if self.config.microbatches > 1:
                    self.stages[stage].compute.cut_check = training.cut_check
        if plan.step is not None:
            self.load_state(plan)
        route = Route(
            rank=plan.rank,
            attempt=plan.attempt,
            step=plan.turn,
            ranks=plan.ranks,
            neighbours=plan.neighbours,
            codec=self.config.activation_codec,
        )
        self.links.connect(route, PATIENCE_S)
        self.copy = StagePart(list(self.stages.values()), training.replica.layers)
        meter = training.replica.meter
        self.execution = Execution(self.stages, plan.ranks, self.links, meter)
        self.link.send(StageReady(attempt=plan.attempt, places=self.copy.places))

    def is_new(self, turn: int) -> bool:
        """Whether a turn is told for the first time; the other stages would not compute it again."""
        before, self.turn = self.turn, max(turn, self.turn)
        return turn > before

    def is_planned(self, attempt: int) -> bool:
        """Whether it is of the newest plan, and not void."""
        return attempt == self.plan.attempt

    def load_state(self, plan: Planned) -> None:
        """Fill one's layers with what they were after the plan's step.

        Raises:
            PlanChanged: another plan has come meanwhile, or a question before one.
        """
        loader = StateLoader(list(self.stages.values()), plan)
        for wanted in loader.wanted():
            self.link.send(wanted)
        while not loader.is_whole:
            match self.next_event():
                case MessageReceived(message=StageState() as piece, payload=payload):
                    loader.take(piece, payload)
                case MessageReceived(message=Planned() | MeasureLink()) as newest:
                    self.newest = newest
                    raise PlanChanged("the plan has changed")

    def send_state(self, wanted: KeepStages) -> None:
        """Send all that a checkpoint holds of one's layers."""
        attempt, step = wanted.attempt, wanted.step
        for stage in self.stages.values():
            if lost := set(stage.replica.buffers.passing) - self.told_of:
                self.told_of |= lost
                self.link.place.log.warning(
                    "buffers that are not persistent change, and are in no checkpoint of a pipeline: %s",
                    a_few(sorted(lost)),
                )
            for frame in state_frames(stage, attempt, step, self.welcome.bucket_bytes):
                self.link.send_frame(frame)
        self.link.send(StageKept(attempt=attempt, step=step))

    def compute(self, step: Assigned) -> None:
        """Compute the loss and the gradients of a step, and say what they have come to."""
        if self.training.prefetch is not None:  # a stage in the middle takes none of them
            place = Place(self.training.seed, step.lease.epoch, step.lease.start)
            self.training.prefetch.forget_before(place)
        parts = self.parts(step)
        lists = schedule_of(self.config, 1 + max(self.plan.ranks), len(parts))
        outcome = self.execution.run(step.assignment.version, lists[self.plan.rank], parts)
        has_loss = math.isfinite(outcome.loss.total)
        is_finite = math.isfinite(outcome.squared_norm)
        self.link.send(
            StageDone(
                attempt=self.plan.attempt,
                lease=step.lease,
                loss=outcome.loss.total if has_loss else None,
                num_terms=outcome.loss.num_terms,
                squared_norm=outcome.squared_norm if is_finite else None,
                seconds=outcome.seconds,
                sent_bytes=self.links.take_sent(),
            )
        )
        loss, num_terms = outcome.loss.total, outcome.loss.num_terms
        step.note(self.training, loss / num_terms if num_terms else math.nan)
        self.training.replica.meter.step_done(step.num_samples)

    def parts(self, step: Assigned) -> Sequence[Microbatch]:
        """A step's samples, cut into microbatches; of an epoch's last step there may be fewer."""
        lease, size = step.lease, self.train.samples_per_step // self.config.microbatches
        if step.assignment.batch_nbytes is None:
            return self.training.parts(step.indices, lease.epoch, lease.start, size)
        return self.training.received_parts(
            step.batch, step.num_samples, lease.epoch, lease.start, size
        )

    @torch.no_grad()
    def step(self, commit: Commit) -> None:
        """Step all one's layers: their gradients are multiplied by a factor that is the same everywhere."""
        bound = self.train.gradient_clipping.bound
        for each in self.stages.values():
            each.replica.grads.mul_(commit.clip)
            if bound is not None:
                each.replica.grads.clamp_(-bound, bound)
            each.replica.step(commit.learning_rate)
        self.version = commit.version

    @torch.no_grad()
    def obey(self, order: CopyOrder) -> None:
        """Do to one's part of a worker's copy what all stages do."""
        is_done, found = True, None
        match order.order:
            case "change":
                values, nbytes = self.copy.change(order), self.welcome.bucket_bytes
                for frame in copy_frames(order.attempt, order.turn, [values], nbytes):
                    self.link.send_frame(frame)
            case "save":
                if self.link.kept is not None:
                    moments = self.copy.moments
                    self.link.kept.save(order.step, moments, max(1, order.keep_last))
            case "take_up":
                found = self.take_up(order.step)
            case _:
                is_done = self.copy.obey(order)
        if is_done:
            self.link.send(StageKept(attempt=order.attempt, step=order.turn, found=found))

    def take_up(self, step: int) -> int | None:
        """Go on with the moments that were kept under a step; returns it, or None: there are none."""
        found = None if self.link.kept is None else self.link.kept.load(step)
        is_ours = found is not None and found[0] == step and self.copy.resume(found[1])
        return step if is_ours else None

    def evaluate(self, wanted: EvaluateStages, sent: Sent | OutOfMemory | None) -> None:
        """Compute what is held out, or `sent` of it, with all others; the last stage says what came of it."""
        if isinstance(sent, OutOfMemory):
            raise sent
        workload, totals = self.training.workload, dict[str, tuple[float, float]]()
        held_out, size = sent or workload.validation, wanted.batch_size
        if sent is None:
            size = workload.eval_batch_size or self.train.batch_size
        if held_out is not None and not isinstance(held_out, Elsewhere):
            found = evaluate_stages(self.execution, self.training, wanted.turn, held_out, size)
            totals.update(found)
        finite = {name: each for name, each in totals.items() if math.isfinite(each[0])}
        self.link.send(
            StageEvaluated(
                attempt=self.plan.attempt,
                turn=wanted.turn,
                totals=finite,
                is_finite=LOSS in finite or not totals,
            )
        )
