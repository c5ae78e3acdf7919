"""The pipeline's server: says which layers are whose, which samples, and when all stages step.

    plan -> all stages ready -> (samples -> every stage's part of loss and norm -> one Commit for all)*

It holds no weights. Each question goes to all stages, and nothing follows before all have answered, so that
no stage steps twice or not at all. When a stage is lost, the layers are dealt out again over those that are
there, and training goes on from the state that was kept last. One thread, `Server.run`, decides everything.

Sources: GPipe (Huang et al., 1811.06965); PipeDream-Flush (Narayanan et al., 2006.09503).
By hand: `uv run server.py`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("pipeline", "server"))


import math
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property, partial
from itertools import takewhile

from pydantic import ValidationError
from torch import Tensor

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.PipelineParallel.coordinator import (
    PATIENCE_S,
    Coordinator,
    StageReceiver,
)
from smolcluster.algorithms.PipelineParallel.crew import (
    Crew,
    Peer,
    Questions,
    computed,
    stage_figures,
)
from smolcluster.algorithms.PipelineParallel.moving import seconds_computed
from smolcluster.algorithms.PipelineParallel.state import Keeper, Kept
from smolcluster.algorithms.planning.plan_file import PLAN
from smolcluster.data.loading import every_index
from smolcluster.data.permutation import EpochOrders, Range, global_batches
from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.runs.events import LayersMoved
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import ServedBatch, assignment_of, send_assignment
from smolcluster.server.report import Report
from smolcluster.server.worker_pool import WorkerPool
from smolcluster.training.checkpoint import TrainingState
from smolcluster.training.evaluate import LOSS, Evaluation, Totals, evaluation_of
from smolcluster.training.loop import StepTaken
from smolcluster.training.optimizer import clip_factor
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.training.schedule import learning_rate
from smolcluster.training.workload import OfLoss, Workload
from smolcluster.utils.stopping import Interrupted
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import (
    Commit,
    EvaluateStages,
    KeepStages,
    LeaseKey,
    Message,
    StageDone,
    StageEvaluated,
    StageKept,
    StageReady,
    StageState,
    WantState,
    first_problem,
    frame_of,
)

TICK_S = 0.1


class KeepingReceiver(StageReceiver):
    """Pieces of what stages have go to the disk at once."""

    def __init__(self, keeper: Keeper, session_id: int) -> None:
        super().__init__(session_id)
        self._keeper = keeper

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, StageState):
            self._keeper.take(message, payload)
            return None
        return super().__call__(message, payload)


class Server(Coordinator):
    """One run of PipelineParallel."""

    context: ServerContext
    pool: WorkerPool[Report]

    def __init__(self, context: ServerContext) -> None:
        outline = context.training.replica
        self.keeper = Keeper(context.store, outline, context.log)
        num_tensors = len(outline.parameters) * (1 + len(outline.optimizer.state))
        super().__init__(context)
        check_metrics(context.training.workload)
        receiver_for = partial(KeepingReceiver, self.keeper)
        self.pool = context.open_pool(
            receiver_for, num_more=2 * num_tensors, check_stop=lambda: None
        )
        self.report = self.pool.listener
        self.orders = EpochOrders(context.training.order)
        self.feed = context.open_feed()
        self.held_out = HeldOut(
            context, batch_size=self.train.batch_size, num_batches=self.config.microbatches
        )
        self.keeper.on_saved, self.keeper.on_not_saved = self.report.saved, self.report.not_saved
        self.keeper.kept = Kept(self.report.training_state({}), context.initial)
        if context.checkpoint is not None:
            self.keeper.kept = Kept(context.checkpoint.state, context.checkpoint.path)
            self.report.resume(context.checkpoint.state)
        self.evaluated_version: int | None = None
        """Of the weights that stages have evaluated last."""
        self.keeping_s = 0.0
        """How long it took the last time until all stages had sent their state."""
        self.is_stopping = False
        """Whether the run ends as soon as its stages have sent what they have."""

    @property
    def version(self) -> int:
        return self.report.counts.version

    @property
    def is_over(self) -> bool:
        """Whether every sample has been applied, and all that is due after the last step is done."""
        return self.crew is None and self.report.counts.is_over and self.is_evaluated

    @property
    def is_evaluated(self) -> bool:
        """Whether the newest weights are, by this start of the run or one before, or nothing is held out."""
        kept = self.keeper.kept.state
        is_known = kept.step == self.version and kept.val_loss is not None
        return is_known or self.evaluated_version == self.version or self.held_out.num_samples == 0

    def run(self) -> Summary:
        """Serve until every sample of every epoch has been applied.

        Raises:
            NonFiniteLoss: a loss or a gradient is NaN or infinite; the message names the stage.
        """
        with closing(self.feed), closing(self.held_out), self.pool, closing(self.keeper):
            while not self.is_over:
                self.heed_stop()
                for event in self.pool.next_events(TICK_S):
                    self.handle(event)
                if not self.is_over:
                    self.advance()
                self.report.tick()
            return self.report.summary()

    def heed_stop(self) -> None:
        """Stop if that is asked for: when the state is kept, if there are stages that can send it.

        They have the same patience as without: a stage that is silent for longer is cut.

        Raises:
            Interrupted: now.
        """
        try:
            self.context.check_stop()
        except Interrupted:
            self.keeper.settle(wait=True)
            is_newer = self.version > self.keeper.kept.state.step
            if not (is_newer and self.keeper.can_keep and self.crew and self.crew.question):
                raise
            if not self.is_stopping:
                self.context.log.info("the run stops when its stages have sent their state")
            self.is_stopping = True

    @property
    def num_pieces(self) -> int:
        return self.keeper.num_pieces

    @property
    def step_kept(self) -> int | None:
        return None if self.keeper.kept.folder is None else self.version

    def advance(self) -> None:
        self.keeper.settle()
        super().advance()

    def plan(self) -> Crew | None:
        crew = super().plan()
        if crew is None:
            return None
        for each in self.dealer.peers.values():
            if each not in crew.peers:  # the layers that it had are not its own any more
                self.report.board.measured(each.worker)
        if self.context.records.folder is not None:
            PLAN.write(RunPaths(self.context.records.folder).plan, crew.cut.document)
        return crew

    def work(self, crew: Crew, _ready: list[StageReady]) -> Questions[None]:
        """Take steps, evaluate and keep what they come to, until the run is over or the layers move."""
        can_keep, every = self.keeper.can_keep, self.context.settings.cluster.checkpoint_steps
        while self.has_steps_left():
            yield from self.step(crew)
            if not self.has_steps_left():
                break
            if self.is_time(self.train.eval_steps) and not self.is_stopping:
                yield from self.evaluate(crew)
            if can_keep and (self.is_time(every) or crew.moving is not None or self.is_stopping):
                yield from self.keep(crew)
                while self.is_stopping:  # `heed_stop` ends the run
                    yield None
                if self.are_to_move(crew):
                    return
        if can_keep and self.keeper.kept.state.step != self.version:  # an evaluation may fail
            yield from self.keep(crew)
        if not self.is_evaluated:
            yield from self.evaluate(crew)
        if can_keep and not self.keeper.tell(self.state):
            yield from self.keep(crew)

    def has_steps_left(self) -> bool:
        return not self.report.counts.is_over

    def is_time(self, every: int | None) -> bool:
        """Whether the last step was one of those."""
        return bool(every and self.version % every == 0)

    @property
    def state(self) -> TrainingState:
        """Where the run stands."""
        return self.report.with_evaluation(self.report.training_state({}))

    def evaluate(self, crew: Crew) -> Questions[None]:
        """Have the stages compute what is held out; where it is sent, a part after the other.

        Raises:
            NonFiniteLoss: the loss is not finite.
        """
        num_steps = math.ceil(self.held_out.num_samples / self.train.samples_per_step)
        patience_s = max(PATIENCE_S, num_steps * self.step_patience_s)
        totals: dict[str, tuple[float, float]] = {}
        for part in self.held_out.parts():
            self.turn += 1
            tell = partial(self.tell_held_out, part, crew)
            answers = yield from self.ask(crew, (StageEvaluated, self.turn), tell, patience_s)
            if not all(each.is_finite for each in answers):
                raise NonFiniteLoss(
                    f"the validation loss after step {self.version} is not finite; {DIVERGENCE_REMEDY}"
                )
            for each in answers:
                for name, (total, count) in each.totals.items():
                    before = totals.get(name, (0.0, 0.0))
                    totals[name] = before[0] + total, before[1] + count
        self.evaluated_version = self.version
        if LOSS in totals:
            epoch = (
                max(0, self.report.counts.samples_applied - 1) // self.context.training.num_samples
            )
            self.report.evaluated(self.version, epoch, self.held_out.evaluation(totals))

    def tell_held_out(self, part: Range | None, crew: Crew, rank: int) -> None:
        """Have a stage compute what is held out; where it is sent, first and last stage get that part."""
        wanted = EvaluateStages(attempt=crew.attempt, turn=self.turn)
        if part is None:
            self.tell(wanted, crew, rank)
            return
        lease, size = self.lease_of(part, self.turn), self.held_out.batch_size
        if rank not in (crew.map.ranks[0], crew.map.ranks[-1]):
            self.tell(wanted.model_copy(update={"lease": lease, "batch_size": size}), crew, rank)
            return
        session = crew.peers[rank].worker.live_session

        def send(batch: ServedBatch | None) -> None:
            if self.crew is crew and batch is not None:
                told = {"lease": lease, "batch_size": size, "batch_nbytes": batch.nbytes}
                frames = batch.frames(lease)
                session.send_frames([*frames, frame_of(wanted.model_copy(update=told))])

        self.held_out.deliver(part, send)

    def keep(self, crew: Crew) -> Questions[None]:
        """Have all stages send what they have."""
        self.turn += 1
        self.keeper.begin(crew.attempt, self.state)
        tell = partial(self.tell, KeepStages(attempt=crew.attempt, step=self.version), crew)
        yield from self.ask(crew, (StageKept, self.version), tell)
        self.keeper.finish()
        self.keeping_s = self.took_s

    def are_to_move(self, crew: Crew) -> bool:
        """Whether the layers are dealt out again, for a reason, now that nothing would be lost."""
        newcomers, moving = self.dealer.newcomers(crew), crew.moving
        if not (newcomers or moving):
            return False
        self.keeper.settle(wait=True)
        if self.keeper.kept.state.step != self.version:
            return False
        reasons = [moving.reason] if moving else []
        if newcomers:
            reasons.append(f"with {', '.join(each.worker.name for each in newcomers)}")
        reason = "; ".join(reasons)
        self.context.log.info("the layers are dealt out again: %s", reason)
        self.report.happened(LayersMoved(step=self.version, reason=reason))
        if moving:
            self.dealer.take_as_measured(crew, moving)
        return True

    def step(self, crew: Crew) -> Questions[None]:
        """Give all stages the samples of the next step, and have them step together."""
        batches = global_batches(
            self.context.training.num_samples,
            self.report.counts.total_samples,
            self.train.samples_per_step,
            first=self.report.counts.samples_applied,
        )
        samples = next(batches)
        self.turn += 1
        self.num_grants += 1
        lease = self.lease_of(samples, self.num_grants)
        tell = partial(self.assign, samples, lease, crew)
        answers = yield from self.ask(crew, (StageDone, lease), tell, self.step_patience_s)
        self.commit(crew, samples, answers)

    def assign(self, samples: Range, lease: LeaseKey, crew: Crew, rank: int) -> None:
        indices = self.orders[samples.epoch][samples.start : samples.stop]
        turn, session = self.turn, crew.peers[rank].worker.live_session

        def send(batch: ServedBatch | None) -> None:
            if self.crew is not crew:
                return  # the layers have been dealt out anew since
            told = assignment_of(lease, indices, batch, version=turn, learning_rate=0.0)
            send_assignment(session, *told, batch)

        self.feed.deliver(samples, indices, send)

    def commit(self, crew: Crew, samples: Range, answers: list[StageDone]) -> None:
        """All stages have their gradients: have all step by the same factor.

        Raises:
            NonFiniteLoss: those of one, or the loss, are not finite.
        """
        for rank, each in enumerate(answers):
            if each.loss is None or each.squared_norm is None:
                what = "the loss" if each.loss is None else "the gradient"
                raise NonFiniteLoss(
                    f"step {self.version + 1}: {what} of {crew.peers[rank].worker.name}, layers "
                    f"{crew.map.layers_of(rank)}, is not finite; {DIVERGENCE_REMEDY}"
                )
        self.step_s = max(self.step_s, self.took_s)
        for rank, each in enumerate(answers):
            figures = stage_figures(crew, rank, each, self.took_s)
            self.report.board.measured(crew.peers[rank].worker, **figures)
        found, norm = computed(answers)
        loss, num_terms = found.mean, found.num_terms or 1.0
        counts, schedule = self.report.counts, self.context.training.recipe.schedule
        rate = learning_rate(self.train, counts.samples_applied, counts.total_samples, schedule)
        message = Commit(
            version=self.version + 1,
            num_samples=samples.num_samples,
            clip=clip_factor(norm, self.train.gradient_clipping) / num_terms,
            learning_rate=rate,
        )
        for rank in range(len(crew.peers)):
            self.tell(message, crew, rank)
        self.feed.applied(samples)
        for peer in crew.peers:
            self.report.contributed(peer.worker, samples.num_samples, loss)
        self.report.step_taken(
            StepTaken(
                version=message.version,
                samples=samples,
                loss=loss,
                learning_rate=rate,
                grad_norm=norm,
                layer_norms={},
                num_terms=num_terms,
            )
        )
        self.judge(crew, samples, answers)

    def judge(self, crew: Crew, samples: Range, answers: list[StageDone]) -> None:
        """See whether stages take what was planned; the last step of an epoch may have fewer samples."""
        if crew.times is None or samples.num_samples < self.train.samples_per_step:
            return
        num = self.config.microbatches
        crew.times.add(
            {
                name: seconds_computed(each.seconds) / num
                for name, each in zip(crew.map.nodes, answers, strict=True)
            },
            self.took_s,
        )
        move_s = self.keeping_s + self.dealing_s
        if self.keeper.can_keep:
            crew.moving = crew.times.decide(self.report.counts.steps_left, move_s)

    def hear(self, peer: Peer, message: Message, payload: bytes | bytearray) -> None:
        if isinstance(message, WantState):
            self.send_state(peer, message)
        else:
            super().hear(peer, message, payload)

    def send_state(self, peer: Peer, wanted: WantState) -> None:
        """Send a stage what it wants of the state that is kept."""
        crew = self.crew
        if crew is None or wanted.attempt != crew.attempt:
            return
        frames = self.keeper.frames(wanted, self.context.training.replica.bucket_bytes)
        # read as they are sent, since a model may be larger than memory, and no more once they are void
        valid = takewhile(lambda _: self.crew is crew, frames)
        peer.worker.live_session.send_frames(valid)

    def begin_again(self, reason: str) -> None:
        """Deal the layers out anew; what was computed since the state that was kept last is done again."""
        self.disband()
        self.keeper.drop()
        self.keeper.settle(wait=True)
        state = self.keeper.kept.state
        self.report.resume(state)
        self.context.log.warning(
            "%s; the layers are dealt out again, and %s step %d",
            reason,
            "what is held out is evaluated after"
            if self.report.counts.is_over
            else "training goes on from",
            state.step,
        )


def serve(context: ServerContext) -> Summary:
    return Server(context).run()


def check_metrics(workload: Workload) -> None:
    """See to it that the last stage can tell what it has measured.

    Raises:
        ConfigError: a metric's name is too long, or there are too many.
    """
    measured = [name for name, of in workload.metrics.items() if not isinstance(of, OfLoss)]
    try:
        StageEvaluated(attempt=0, turn=0, totals=dict.fromkeys([LOSS, *measured], (0.0, 0)))
    except ValidationError as error:
        raise ConfigError(
            f"metrics: the last stage of a pipeline tells the server of at most 63, whose names have at most "
            f"64 characters on one line: {first_problem(error)}"
        ) from None


class HeldOut:
    """What is evaluated of a run: the stages have it, or it is sent a part at a time."""

    def __init__(self, context: ServerContext, *, batch_size: int, num_batches: int) -> None:
        """`num_batches` of the workload's batch size, or of `batch_size`, are a part."""
        workload = context.training.workload
        self.batch_size = workload.eval_batch_size or batch_size
        self._samples, self._metrics = workload.validation, workload.metrics
        self._part_size = num_batches * self.batch_size
        self._feed = context.open_held_out_feed(self.batch_size)
        self._log, self._missing = context.log, set[str]()

    @property
    def num_samples(self) -> int:
        return 0 if self._samples is None else self._samples.num_samples

    def parts(self) -> Iterator[Range | None]:
        """The places of the samples that are sent together, which go with the next one.

        None: the stages have all, or nobody has any.
        """
        if self._feed is None:
            yield None
            return
        for start in range(0, self.num_samples, self._part_size):
            part = Range(0, start, min(start + self._part_size, self.num_samples))
            yield part
            self._feed.applied(part)

    @cached_property
    def _order(self) -> Tensor:
        assert self._samples is not None  # noqa: S101 - there is a feed only where there are some
        return every_index(self._samples)

    def deliver(self, part: Range, deliver: Callable[[ServedBatch | None], None]) -> None:
        """Call `deliver` with the batches of a part, in the deciding thread, when they are there."""
        assert self._feed is not None  # noqa: S101 - there are `parts`
        self._feed.deliver(part, self._order[part.start : part.stop], deliver)

    def evaluation(self, totals: Totals) -> Evaluation:
        """What came of all parts.

        Raises:
            NonFiniteLoss, UserCodeError: as `evaluation_of`.
        """
        measured = {name for name, of in self._metrics.items() if not isinstance(of, OfLoss)}
        for name in sorted(measured - totals.keys() - self._missing):
            self._missing.add(name)
            self._log.warning(
                "metric %s is missing: the worker with the last layers computes it, and was not given it, "
                "such as by NetworkWorker(metrics=...), or it is NaN or infinite",
                name,
            )
        return evaluation_of(totals, self._metrics)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
