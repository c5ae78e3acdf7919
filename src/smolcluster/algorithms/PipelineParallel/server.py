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
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.PipelineParallel.automatic import slowed
from smolcluster.algorithms.PipelineParallel.builders import Builders
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import (
    Crew,
    Question,
    stage_figures,
    subject_of,
)
from smolcluster.algorithms.PipelineParallel.dealing import Dealer
from smolcluster.algorithms.PipelineParallel.moving import (
    Decision,
    StageTimes,
    seconds_computed,
)
from smolcluster.algorithms.PipelineParallel.peers import Peer, named
from smolcluster.algorithms.PipelineParallel.state import Keeper, Kept
from smolcluster.algorithms.planning.plan_file import PLAN, PLAN_NAME
from smolcluster.cluster.report import StepTaken
from smolcluster.cluster.worker import Worker
from smolcluster.cluster.worker_pool import Departed, Joined
from smolcluster.data.permutation import EpochOrders, Range, global_batches
from smolcluster.errors import ConfigError, NonFiniteLoss, OutOfMemory, RunFailed
from smolcluster.net.inbox import Event, MessageReceived
from smolcluster.net.session import Receiver
from smolcluster.ps.assignment import ServedBatch, assignment_of, send_assignment
from smolcluster.runs.summary import Summary
from smolcluster.training.evaluate import Evaluation
from smolcluster.training.optimizer import clip_factor
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.training.schedule import learning_rate
from smolcluster.training.stages.build import num_layers
from smolcluster.transport.messages import (
    Commit,
    EvaluateStages,
    KeepStages,
    LayersMeasured,
    LeaseKey,
    LinkMeasured,
    Listening,
    Message,
    Planned,
    Relayed,
    StageDone,
    StageEvaluated,
    StageKept,
    StageReady,
    StageState,
    WantState,
)
from smolcluster.utils.stopping import Interrupted
from smolcluster.utils.units import format_duration

TICK_S = 0.1
STOP_TIMEOUT_S = 20.0
"""How long a run that shall stop waits for its stages to send what they have."""
PATIENCE_S, LEAST_PATIENCE_S = 600.0, 30.0
"""How long stages may take over anything, and over a step at least."""


@dataclass(frozen=True)
class RelayWanted(Event):
    """What a stage says to another one that it cannot reach."""

    session_id: int
    relayed: Relayed
    payload: bytes


class StageReceiver(Receiver):
    """What a stage says; what it sends a neighbour through the server is handed on."""

    def __init__(self, keeper: Keeper, session_id: int) -> None:
        self._keeper, self._session_id = keeper, session_id

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, StageState):
            self._keeper.take(message, payload)
            return None
        if isinstance(message, Relayed):
            return RelayWanted(self._session_id, message, bytes(payload))
        return MessageReceived(self._session_id, message)


class Server:
    """One run of PipelineParallel."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.train = context.training.recipe.applied_to(context.settings.train)
        self.config = context.run.of(PipelineConfig)
        self.config.check_training(context.training.recipe, self.train)
        self.dealer = Dealer(
            self.config,
            self.train,
            context.settings.cluster,
            num_layers(context.training.workload),
            context.log,
        )
        self.builders = Builders()
        self.orders = EpochOrders(context.training.order)
        self.feed = context.open_feed()
        outline = context.training.replica
        self.keeper = Keeper(context.store, outline, context.log)
        num_tensors = len(outline.parameters) * (1 + len(outline.optimizer.state))
        self.pool = context.open_pool(
            partial(StageReceiver, self.keeper),
            num_more=2 * num_tensors,
            check_stop=lambda: None,
        )
        self.report = self.pool.report
        self.keeper.on_saved = self.report.saved
        self.keeper.kept = Kept(self.report.training_state({}), context.initial)
        if context.checkpoint is not None:
            self.keeper.kept = Kept(context.checkpoint.state, context.checkpoint.path)
            self.report.resume(context.checkpoint.state)
        self.peers: dict[int, Peer] = {}
        self.crew: Crew | None = None
        self.num_grants = 0
        self.considered: set[int] = set()
        """Workers, by their sessions, that the plan takes or leaves out for good reason."""
        self.turn = 0
        """What the stages do together is counted over all plans, steps and evaluations alike."""
        self.is_evaluated = self.is_kept = True
        """Whether the last step is, as far as that is due."""
        self.step_s = self.step_began_at = 0.0
        """The longest step of this plan so far, and when the newest one was begun."""
        self.dealing_s = 0.0
        """What it took the last time until all stages had their layers."""
        self.stop_by: float | None = None
        """When the run stops at the latest, once that was asked for."""

    @property
    def version(self) -> int:
        return self.report.version

    def run(self) -> Summary:
        """Serve until every sample of every epoch has been applied.

        Raises:
            NonFiniteLoss: a loss or a gradient is NaN or infinite; the message names the stage.
        """
        with closing(self.feed), self.pool, closing(self.keeper):
            while not (self.report.is_over and self.is_evaluated and self.is_kept):
                self.heed_stop()
                for event in self.pool.next_events(TICK_S):
                    self.handle(event)
                self.advance()
                self.report.tick()
            return self.report.summary()

    def heed_stop(self) -> None:
        """Stop if that is asked for: when the state is kept, if there are stages that can send it.

        Raises:
            Interrupted: now.
        """
        try:
            self.context.check_stop()
        except Interrupted:
            now = time.monotonic()
            self.stop_by = self.stop_by or now + STOP_TIMEOUT_S
            self.keeper.settle(wait=True)
            is_newer = self.version > self.keeper.kept.state.step
            if not (self.crew and self.keeper.can_keep and is_newer) or now >= self.stop_by:
                raise

    def advance(self) -> None:
        """Begin what comes next, where nothing is being waited for."""
        self.keeper.settle()
        if self.crew is None:
            self.plan()
        elif self.crew.question is None:
            self.next_turn(self.crew)
        else:
            self.cut_silent(self.crew, self.crew.question)

    def plan(self) -> None:
        """Deal the layers out, once enough workers are there.

        Raises:
            RunFailed: none of them can build layers.
        """
        if not self.pool.started:
            return
        able = [each.member.worker_id for each in self.pool.workers if self.may_build(each)]
        why_none = self.builders.why_none_is_left(able)
        if why_none is not None and not self.pool.is_preparing:
            raise RunFailed(f"no worker is left that can build its layers: {why_none}")
        ready = self.ready
        by_name = named(ready)
        unable = sum(not self.may_build(each.worker) for each in self.peers.values())
        cut = self.dealer.deal(
            by_name,
            are_all_ready=len(ready) + unable == len(self.peers),
            num_unable=unable,
            why_missing=self.builders.why_not([each.worker.member.worker_id for each in ready]),
        )
        if cut is None:
            return
        self.considered = {each.id for each in ready}
        self.step_s = 0.0
        peers = [by_name[name] for name in cut.map.nodes]
        times = StageTimes(cut.problem, cut.plan) if cut.problem and cut.plan else None
        crew = self.crew = Crew(self.dealer.attempt, cut.map, peers, cut.plan, times)
        self.context.log.info("layers: %s", ": ".join(filter(None, (str(cut.map), cut.words))))
        for each in self.peers.values():
            each.building_attempt = None
            if each not in peers:  # the layers that it had are not its own any more
                self.report.board.measured(each.worker)
        if self.context.folder is not None:
            PLAN.write(self.context.folder / PLAN_NAME, cut.document)
        self.ask(crew, (StageReady,), self.planned, partial(self.dealt, crew))

    def dealt(self, crew: Crew, _answers: list[StageReady]) -> None:
        """All stages have their layers."""
        self.dealing_s = time.monotonic() - crew.begun_at

    @property
    def ready(self) -> list[Peer]:
        """The workers that neighbours could reach, and that can have layers."""
        found = [
            each
            for each in self.peers.values()
            if each.listening is not None and self.may_build(each.worker)
        ]
        return sorted(found, key=lambda each: each.worker.member.worker_id)

    def may_build(self, worker: Worker) -> bool:
        return self.builders.may_build(worker.member.worker_id, worker.member.instance)

    def planned(self, crew: Crew, rank: int) -> None:
        """Tell a worker which layers are its own, and who its neighbours are."""
        layers = crew.map
        crew.peers[rank].building_attempt = crew.attempt
        neighbours = [
            crew.peers[other].as_neighbour(other) for other in sorted(layers.neighbours(rank))
        ]
        message = Planned(
            attempt=crew.attempt,
            rank=rank,
            cuts=layers.cuts,
            ranks=layers.ranks,
            neighbours=tuple(neighbours),
            turn=self.turn,
            step=None if self.keeper.kept.folder is None else self.version,
        )
        self.tell(message, crew, rank)

    def ask(
        self,
        crew: Crew,
        subject: tuple[object, ...],
        tell: Callable[[Crew, int], None],
        then: Callable[[list[Any]], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Tell all stages something, and go on when all have answered."""
        crew.question = Question(subject, then, time.monotonic(), patience_s)
        for rank in range(len(crew.peers)):
            tell(crew, rank)

    def on_answer(self, session_id: int, attempt: int, answer: Message) -> None:
        crew = self.crew
        if crew is None or crew.question is None or attempt != crew.attempt:
            return
        if subject_of(answer) != crew.question.subject:
            return
        answers, then = crew.question.answers, crew.question.then
        answers[session_id] = answer
        ids = [each.id for each in crew.peers]
        if answers.keys() >= set(ids):
            crew.question = None
            then([answers[each] for each in ids])

    def cut_silent(self, crew: Crew, question: Question) -> None:
        """Cut the stage that holds all up, once that is certain: of those asked the one that waits least."""
        backlogs = (each.worker.live_session.backlog for each in crew.peers)
        moved = (self.keeper.num_pieces, *backlogs)
        if moved != question.moved:
            question.moved, question.asked_at = moved, time.monotonic()
        silent_s = time.monotonic() - question.asked_at
        if silent_s < question.patience_s:
            return
        silent = [each.worker for each in crew.peers if each.id not in question.answers]
        worker = min(silent, key=lambda each: each.gauge.values.get("share/wait", 0.0))
        reason = f"it has not answered for {format_duration(silent_s)}"
        self.report.stalled(worker, silent_s, reason)
        worker.live_session.cut(reason)
        question.asked_at = time.monotonic()

    def next_turn(self, crew: Crew) -> None:
        """Have the stages take a step, or evaluate or send what the last one has come to."""
        self.turn += 1
        if not self.is_evaluated:
            evaluate = EvaluateStages(attempt=crew.attempt, turn=self.turn)
            subject = StageEvaluated, self.turn
            tell, patience_s = partial(self.tell, evaluate), self.evaluation_patience_s
            self.ask(crew, subject, tell, self.evaluated, patience_s)
        elif not self.is_kept or self.stop_by:
            self.keep(crew)
        elif not self.report.is_over:
            self.begin_step(crew)

    @property
    def step_patience_s(self) -> float:
        """How long a step may take: by what others of this plan took, or long."""
        return max(LEAST_PATIENCE_S, 10 * self.step_s) if self.step_s else PATIENCE_S

    @property
    def evaluation_patience_s(self) -> float:
        held_out = self.context.training.workload.validation
        num_samples = 0 if held_out is None else held_out.num_samples
        num_steps = math.ceil(num_samples / self.train.samples_per_step)
        return max(PATIENCE_S, num_steps * self.step_patience_s)

    def is_time(self, every: int | None) -> bool:
        """Whether the last step was one of those, or the last one of all."""
        return self.report.is_over or bool(every and self.version % every == 0)

    def keep(self, crew: Crew) -> None:
        """Have all stages send what they have."""
        state = self.report.with_evaluation(self.report.training_state({}))
        self.keeper.begin(crew.attempt, state)
        keep = KeepStages(attempt=crew.attempt, step=self.version)
        subject = StageKept, self.version
        self.ask(crew, subject, partial(self.tell, keep), self.on_kept)

    def on_kept(self, _answers: list[StageKept]) -> None:
        """Nothing would be lost now: deal the layers out again, if there is a reason."""
        self.keeper.finish()
        self.is_kept = True
        crew, newcomers = self.crew, self.newcomers()
        moving = crew.moving if crew else None
        if not (newcomers or moving) or self.report.is_over:
            return
        self.keeper.settle(wait=True)
        if self.keeper.kept.state.step == self.version:
            reasons = [moving.reason] if moving else []
            if newcomers:
                reasons.append(f"with {', '.join(each.worker.name for each in newcomers)}")
            self.report.layers_moved("; ".join(reasons))
            if crew and moving:
                self.take_as_measured(crew, moving)
            self.crew = None

    def take_as_measured(self, crew: Crew, decision: Decision) -> None:
        """Plan with what stages took from now on."""
        for name, peer in zip(crew.map.nodes, crew.peers, strict=True):
            if peer.measured is not None and name in decision.slowness:
                peer.measured = slowed(peer.measured, decision.slowness[name])

    def newcomers(self) -> list[Peer]:
        """Workers that could take layers and have none."""
        here = {each.id for each in self.ready}
        if isinstance(self.config.shard_plan, dict) or here <= self.considered:
            return []
        peers = self.crew.peers if self.crew else []
        by_name = named(self.ready)
        try:
            chosen = [by_name[name] for name in self.dealer.cut(by_name).map.nodes]
        except ConfigError:
            chosen = []
        found = [each for each in chosen if each not in peers]
        if not found:
            self.considered = here
        return found

    def begin_step(self, crew: Crew) -> None:
        """Give all stages the samples of the next step."""
        batches = global_batches(
            self.context.training.num_samples,
            self.train.num_epochs,
            self.train.samples_per_step,
            first=self.report.samples_applied,
        )
        samples = next(batches)
        self.num_grants += 1
        self.step_began_at = time.monotonic()
        lease = LeaseKey(
            incarnation=self.context.incarnation,
            epoch=samples.epoch,
            start=samples.start,
            stop=samples.stop,
            grant=self.num_grants,
        )
        self.ask(
            crew,
            (StageDone, lease),
            partial(self.assign, samples, lease),
            partial(self.commit, crew, samples),
            self.step_patience_s,
        )

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
                raise NonFiniteLoss(self.not_finite(crew, rank, each))
        took_s = time.monotonic() - self.step_began_at
        self.step_s = max(self.step_s, took_s)
        for rank, each in enumerate(answers):
            figures = stage_figures(crew, rank, each, took_s)
            self.report.board.measured(crew.peers[rank].worker, **figures)
        num_terms = max(1, sum(each.num_terms for each in answers))
        loss = sum(each.loss for each in answers if each.loss is not None) / num_terms
        squares = [each.squared_norm for each in answers if each.squared_norm is not None]
        norm = math.sqrt(math.fsum(squares)) / num_terms
        rate = self.learning_rate()
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
        every = self.config.redundancy or self.context.settings.cluster.checkpoint_steps
        self.is_evaluated = not self.is_time(self.train.eval_steps)
        self.judge(crew, samples, answers)
        is_due = self.is_time(every) or crew.moving is not None
        self.is_kept = not (self.keeper.can_keep and is_due)

    def judge(self, crew: Crew, samples: Range, answers: list[StageDone]) -> None:
        """See whether stages take what was planned; the last step of an epoch may have fewer samples."""
        if crew.times is None or samples.num_samples < self.train.samples_per_step:
            return
        num = self.config.microbatches
        crew.times.add(
            {
                name: seconds_computed(each.seconds) / num
                for name, each in zip(crew.map.nodes, answers, strict=True)
            }
        )
        decision = crew.times.decide(self.report.steps_left, self.dealing_s)
        crew.moving = decision if decision.moves and self.keeper.can_keep else None

    def not_finite(self, crew: Crew, rank: int, answer: StageDone) -> str:
        name = crew.peers[rank].worker.name
        what = "the loss" if answer.loss is None else "the gradient"
        return (
            f"step {self.version + 1}: {what} of {name}, layers {crew.map.layers_of(rank)}, is not finite; "
            f"{DIVERGENCE_REMEDY}"
        )

    def evaluated(self, answers: list[StageEvaluated]) -> None:
        """All stages have computed what is held out.

        Raises:
            NonFiniteLoss: the loss is not finite.
        """
        self.is_evaluated = True
        if not all(each.is_finite for each in answers):
            raise NonFiniteLoss(
                f"the validation loss after step {self.version} is not finite; {DIVERGENCE_REMEDY}"
            )
        values = {name: value for each in answers for name, value in each.values.items()}
        if "val_loss" in values:
            loss = values.pop("val_loss")
            metrics = {name.removeprefix("val_"): value for name, value in values.items()}
            epoch = max(0, self.report.samples_applied - 1) // self.context.training.num_samples
            self.report.evaluated(self.version, epoch, Evaluation(loss, metrics))
        if self.report.is_over and self.keeper.can_keep:
            self.is_kept = False

    def learning_rate(self) -> float:
        total = self.train.num_epochs * self.context.training.num_samples
        schedule = self.context.training.recipe.schedule
        return learning_rate(self.train, self.report.samples_applied, total, schedule)

    def tell(self, message: Message, crew: Crew, rank: int) -> None:
        crew.peers[rank].worker.live_session.send(message)

    def handle(self, event: Event) -> None:
        match event:
            case Joined(worker):
                peer = Peer(worker)
                self.peers[peer.id] = peer
                if not self.may_build(worker):
                    why = self.builders.reason(worker.member.worker_id)
                    self.context.log.warning("%s is back and takes no part: %s", worker.name, why)
            case Departed(worker):
                self.on_departure(worker)
            case RelayWanted():
                self.relay(event)
            case MessageReceived(session_id=id_, message=message) if id_ in self.peers:
                self.hear(self.peers[id_], message)

    def hear(self, peer: Peer, message: Message) -> None:
        match message:
            case LayersMeasured():
                peer.measured = message
            case Listening():
                peer.listening = message
            case LinkMeasured():
                self.dealer.take_link(peer, message)
            case StageReady() if message.reason:
                self.on_trouble(peer, message)
            case StageReady():
                if message.attempt == peer.building_attempt:
                    peer.building_attempt = None
                    self.builders.built(peer.worker.member.worker_id)
                self.on_answer(peer.id, message.attempt, message)
            case StageDone() | StageEvaluated() | StageKept():
                self.on_answer(peer.id, message.attempt, message)
            case WantState():
                self.send_state(peer, message)

    def relay(self, wanted: RelayWanted) -> None:
        """Hand on what one stage of the plan, or of a pair that is measured, says to another one."""
        there = self.crew.peers if self.crew else self.ready
        peers = {each.id: each for each in there}
        instances = {each.worker.member.instance: each for each in peers.values()}
        sender, target = peers.get(wanted.session_id), instances.get(wanted.relayed.instance)
        if sender is not None and target is not None:
            told = wanted.relayed.model_copy(update={"instance": sender.worker.member.instance})
            target.worker.live_session.send(told, wanted.payload)

    def send_state(self, peer: Peer, wanted: WantState) -> None:
        """Send a stage what it wants of the state that is kept."""
        if self.crew is None or wanted.attempt != self.crew.attempt:
            return
        for frame in self.keeper.frames(wanted, self.context.training.replica.bucket_bytes):
            peer.worker.live_session.send_frame(frame)

    def on_departure(self, worker: Worker) -> None:
        peer = self.peers.pop(worker.member.session_id, None)
        if peer is None:
            return
        self.dealer.is_gone(peer)
        self.note_failure(peer)
        if self.crew is not None and peer in self.crew.peers:
            self.begin_again(f"{worker.name} is gone")

    def note_failure(self, peer: Peer) -> None:
        """Remember that a worker has gone while it built its layers, if that is so."""
        worker, member = peer.worker, peer.worker.member
        if peer.building_attempt is None:
            return
        if worker.has_failed:
            reason = f"{worker.name}: {worker.goodbye}"
            self.builders.failed(member.worker_id, member.instance, reason)
        elif worker.goodbye is None:
            self.builders.lost(member.worker_id, member.instance, worker.name)

    def on_trouble(self, peer: Peer, ready: StageReady) -> None:
        """A stage cannot reach a neighbour, has lost it, or has too little memory."""
        if ready.attempt == peer.building_attempt:
            peer.building_attempt = None
        if not ready.attempt:
            self.on_unable(peer, ready.reason)
        if self.crew is not None and ready.attempt == self.crew.attempt:
            if ready.out_of_memory:
                self.dealer.relieve(self.crew, peer, ready.reason, self.ready)
            self.begin_again(f"{peer.worker.name}: {ready.reason}")

    def on_unable(self, peer: Peer, reason: str) -> None:
        """A worker has no memory for a single layer: it stays without, and the others share them.

        Raises:
            OutOfMemory: `shard_plan` gives it some.
        """
        worker, member = peer.worker, peer.worker.member
        what = f"{worker.name} can have no layers: {reason}"
        if isinstance(self.config.shard_plan, dict) and member.node in self.config.shard_plan:
            raise OutOfMemory(f"{what}; leave it out of shard_plan, or raise microbatches")
        self.builders.failed(member.worker_id, member.instance, what)
        self.context.log.warning("%s; it takes no part", what)

    def begin_again(self, reason: str) -> None:
        """Deal the layers out anew; what was computed since the state that was kept last is done again."""
        self.crew = None
        self.keeper.drop()
        self.keeper.settle(wait=True)
        state = self.keeper.kept.state
        self.context.log.warning(
            "%s; the layers are dealt out again, and training goes on from step %d",
            reason,
            state.step,
        )
        self.report.resume(state)
        self.is_evaluated = self.is_kept = True


def serve(context: ServerContext) -> Summary:
    return Server(context).run()
