"""Who has which layers of a pipeline: what holds for its stages, whatever they are asked to compute.

    plan -> all stages ready -> (a question to all stages -> all their answers)*

Each question goes to all stages, and nothing follows before all have answered. When a stage is lost, the
layers are dealt out again over those that are there. One thread decides everything. What is asked, and in
which order, is one generator, `Coordinator.work`, of those that are a `Coordinator`: the server of a run
(`server.py`), and a worker of another algorithm that has its layers on several machines (`head.py`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from smolcluster.algorithms.context import PoolContext
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import (
    Crew,
    Peer,
    Question,
    Questions,
    subject_of,
)
from smolcluster.algorithms.PipelineParallel.dealing import Dealer
from smolcluster.data.permutation import Range
from smolcluster.server.worker_pool import Departed, Joined, WorkerPool
from smolcluster.training.stages.build import num_layers
from smolcluster.utils.units import format_duration
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
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
)
from smolcluster.wire.session import Receiver

PATIENCE_S, LEAST_PATIENCE_S = 600.0, 30.0
"""How long stages may take over anything, and over a step at least."""


class StageReceiver(Receiver):
    """What a stage says, and what it sends a neighbour through the server."""

    def __init__(self, session_id: int) -> None:
        self._session_id = session_id

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        return MessageReceived(self._session_id, message, bytearray(payload))


class Coordinator(ABC):
    """The stages of a pipeline, from one plan to the next."""

    pool: WorkerPool[Any]
    """Opened by those that are a `Coordinator`, once this has found nothing wrong."""
    num_copies = 0
    """Of the trained weights, which a stage keeps besides weights, gradients and moments."""
    role = "worker"
    """What people read of those that join."""

    def __init__(self, context: PoolContext) -> None:
        self.context = context
        self.train = context.training.recipe.applied_to(context.settings.train)
        self.config = context.run.of(PipelineConfig)
        self.config.check_training(context.training.recipe, self.train)
        self.dealer = Dealer(
            self.config,
            self.train,
            context.settings.cluster,
            num_layers(context.training.workload, shares_ends_alone=True),
            context.log,
            num_copies=self.num_copies,
            role=self.role,
        )
        self.crew: Crew | None = None
        self.questions: Questions[None]
        """What the crew is asked."""
        self.turn = 0
        """What the stages do together is counted over all plans, steps and evaluations alike."""
        self.num_grants = 0
        self.took_s = 0.0
        """How long it took until all had answered the last question."""
        self.step_s = 0.0
        """The longest step of this plan so far."""
        self.dealing_s = 0.0
        """What it took the last time until all stages had their layers."""

    @property
    @abstractmethod
    def num_pieces(self) -> int:
        """Pieces of tensors that have come from stages or gone to them: meanwhile nobody hangs."""

    def lease_of(self, samples: Range, grant: int) -> LeaseKey:
        return LeaseKey(
            incarnation=self.context.incarnation,
            epoch=samples.epoch,
            start=samples.start,
            stop=samples.stop,
            grant=grant,
        )

    @property
    def step_kept(self) -> int | None:
        """The step whose state a plan's stages ask for; None: they begin with the initial weights."""
        return None

    @abstractmethod
    def work(self, crew: Crew, ready: list[StageReady]) -> Questions[None]:
        """Ask the stages what they are to do once they have their layers; at its end the plan is over."""

    @abstractmethod
    def begin_again(self, reason: str) -> None:
        """A stage is lost, or cannot go on: the layers are dealt out anew."""

    def advance(self) -> None:
        """Begin what comes next, where nothing is being waited for."""
        if self.crew is None:
            self.plan()
        elif self.crew.question is None:
            self.go_on(self.crew)
        else:
            self.cut_silent(self.crew, self.crew.question)

    def plan(self) -> Crew | None:
        """Deal the layers out, once enough workers are there; None: they are not yet.

        Raises:
            RunFailed: none of them can build layers.
        """
        if not self.pool.started:
            return None
        crew = self.crew = self.dealer.deal(is_preparing=self.pool.is_preparing)
        if crew is not None:
            self.step_s = 0.0
            self.questions = self.follow(crew)
            self.go_on(crew)
        return crew

    def follow(self, crew: Crew) -> Questions[None]:
        """Ask the stages of a plan everything, first for their layers."""
        ready = yield from self.ask(crew, (StageReady,), partial(self.planned, crew))
        self.dealing_s = self.took_s
        yield from self.work(crew, ready)

    def go_on(self, crew: Crew, answers: list[Any] | None = None) -> None:
        """Have the stages do what comes next; `answers`: to the question that they were asked, if any."""
        try:
            crew.question = self.questions.send(answers)
        except StopIteration:
            self.crew = None

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
            step=self.step_kept,
        )
        self.tell(message, crew, rank)

    def disband(self) -> None:
        """The plan is void: what its stages are asked holds no memory any more."""
        self.questions.close()
        self.crew = None

    def ask(
        self,
        crew: Crew,
        subject: tuple[object, ...],
        tell: Callable[[int], None],
        patience_s: float = PATIENCE_S,
    ) -> Questions[list[Any]]:
        """Tell each stage something, by its rank; returns what all have answered."""
        question = Question(subject, patience_s)
        for rank in range(len(crew.peers)):
            tell(rank)
        answers: list[Any] = yield question
        self.took_s = time.monotonic() - question.begun_at
        return answers

    def on_answer(self, session_id: int, attempt: int, answer: Message) -> None:
        crew = self.crew
        if crew is None or crew.question is None or attempt != crew.attempt:
            return
        if subject_of(answer) != crew.question.subject:
            return
        question, ids = crew.question, [each.id for each in crew.peers]
        question.answers[session_id] = answer
        if question.answers.keys() >= set(ids):
            self.go_on(crew, [question.answers[each] for each in ids])

    def cut_silent(self, crew: Crew, question: Question) -> None:
        """Cut the stage that holds all up, once that is certain: of those asked the one that waits least."""
        backlogs = (each.worker.live_session.backlog for each in crew.peers)
        moved = (self.num_pieces, *backlogs)
        if moved != question.moved:
            question.moved, question.quiet_since = moved, time.monotonic()
        silent_s = time.monotonic() - question.quiet_since
        if silent_s < question.patience_s:
            return
        silent = [each.worker for each in crew.peers if each.id not in question.answers]
        worker = min(silent, key=lambda each: each.gauge.values.get("share/wait", 0.0))
        reason = f"it has not answered for {format_duration(silent_s)}"
        self.pool.stalled(worker, silent_s, reason)
        worker.live_session.cut(reason)
        question.quiet_since = time.monotonic()

    @property
    def step_patience_s(self) -> float:
        """How long a step may take: by what others of this plan took, or long."""
        return max(LEAST_PATIENCE_S, 10 * self.step_s) if self.step_s else PATIENCE_S

    def tell(self, message: Message, crew: Crew, rank: int) -> None:
        crew.peers[rank].worker.live_session.send(message)

    def relay(self, sender: Peer, relayed: Relayed, payload: bytes | bytearray) -> None:
        """Hand on what one stage of the plan, or of a pair that is measured, says to another one."""
        there = self.crew.peers if self.crew else self.dealer.ready
        target = next((each for each in there if each.instance == relayed.instance), None)
        if sender in there and target is not None:
            told = relayed.model_copy(update={"instance": sender.instance})
            target.worker.live_session.send(told, payload)

    def on_ready(self, peer: Peer, ready: StageReady) -> None:
        """A stage has its layers; or has no memory, cannot reach a neighbour, or has lost it."""
        is_newest = ready.attempt == peer.building_attempt
        if is_newest:
            peer.building_attempt = None
        if not ready.reason:
            if is_newest:
                self.dealer.builders.built(peer.worker.member)
            self.on_answer(peer.id, ready.attempt, ready)
            return
        if not ready.attempt:
            self.dealer.leave_out(peer, ready.reason)
        if self.crew is not None and ready.attempt == self.crew.attempt:
            if ready.out_of_memory:
                self.dealer.relieve(self.crew, peer, ready.reason)
            self.begin_again(f"{peer.worker.name}: {ready.reason}")

    def handle(self, event: Event) -> None:
        peers = self.dealer.peers
        match event:
            case Joined(worker):
                self.dealer.join(worker)
            case Departed(worker):
                peer = self.dealer.leave(worker)
                if self.crew is not None and peer in self.crew.peers:
                    self.begin_again(f"{worker.name} is gone")
            case MessageReceived(session_id=id_, message=message) if id_ in peers:
                self.hear(peers[id_], message, event.payload)

    def hear(self, peer: Peer, message: Message, payload: bytes | bytearray) -> None:
        match message:
            case Relayed():
                self.relay(peer, message, payload)
            case LayersMeasured():
                peer.measured = message
            case Listening():
                peer.listening = message
            case LinkMeasured():
                self.dealer.take_link(peer, message)
            case StageReady():
                self.on_ready(peer, message)
            case StageDone() | StageEvaluated() | StageKept():
                self.on_answer(peer.id, message.attempt, message)
