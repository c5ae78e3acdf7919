"""Who has which layers of a pipeline: what holds for its stages, whatever they are asked to compute.

    plan -> all stages ready -> (a question to all stages -> all their answers)*

Each question goes to all stages, and nothing follows before all have answered. When a stage is lost, the
layers are dealt out again over those that are there. One thread decides everything. What is asked, and in
which order, is one generator, `Coordinator.work`, of those that are a `Coordinator`: the server of a run
(`server.py`), and a worker of another algorithm that has its layers on several machines (`head.py`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smolcluster.algorithms.context import PoolContext
from smolcluster.algorithms.PipelineParallel.automatic import Cut
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import (
    Crew,
    Peer,
    Question,
    Turns,
    named,
    subject_of,
)
from smolcluster.algorithms.PipelineParallel.dealing import Dealer
from smolcluster.algorithms.PipelineParallel.moving import StageTimes, rest_after
from smolcluster.data.permutation import Range
from smolcluster.errors import ConfigError, OutOfMemory, RunFailed
from smolcluster.server.worker import Worker
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
            num_layers(context.training.workload),
            context.log,
            num_copies=self.num_copies,
            role=self.role,
        )
        self.builders = Builders()
        self.peers: dict[int, Peer] = {}
        self.crew: Crew | None = None
        self.turns: Turns[None]
        """What the crew does."""
        self.considered: set[int] = set()
        """Workers, by their sessions, that the plan takes or leaves out for good reason."""
        self.turn = 0
        """What the stages do together is counted over all plans, steps and evaluations alike."""
        self.num_grants = 0
        self.took_s = 0.0
        """How long it took until all had answered the last question."""
        self.step_s = 0.0
        """The longest step of this plan so far."""
        self.dealing_s = 0.0
        """What it took the last time until all stages had their layers."""
        self.num_moves = 0
        """How often layers were dealt out again because stages did not take what was planned."""

    @property
    @abstractmethod
    def num_pieces(self) -> int:
        """Pieces of tensors that have come from stages: while they come, nobody hangs."""

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
    def work(self, crew: Crew, ready: list[StageReady]) -> Turns[None]:
        """What the stages do once they have their layers; when it ends, the plan is over."""

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

    def plan(self) -> Cut | None:
        """Deal the layers out, once enough workers are there; None: they are not yet.

        Raises:
            RunFailed: none of them can build layers.
        """
        if not self.pool.started:
            return None
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
            return None
        self.considered = {each.id for each in ready}
        self.step_s = 0.0
        peers = [by_name[name] for name in cut.map.nodes]
        times = None
        if cut.problem and cut.plan:
            hosts = {name: each.host for name, each in by_name.items()}
            rest_s = rest_after(self.num_moves)
            times = StageTimes(cut.problem, cut.plan, hosts=hosts, rest_s=rest_s)
        links = cut.problem.links if cut.problem else {}
        crew = self.crew = Crew(self.dealer.attempt, cut.map, peers, cut.plan, times, links)
        self.context.log.info("layers: %s", ": ".join(filter(None, (str(cut.map), cut.words))))
        for each in self.peers.values():
            each.building_attempt = None
        self.turns = self.follow(crew)
        self.go_on(crew)
        return cut

    def follow(self, crew: Crew) -> Turns[None]:
        """What the stages of a plan do, from their layers on."""
        ready = yield from self.ask(crew, (StageReady,), partial(self.planned, crew))
        self.dealing_s = self.took_s
        yield from self.work(crew, ready)

    def go_on(self, crew: Crew, answers: list[Any] | None = None) -> None:
        """Have the stages do what comes next; `answers`: to the question that they were asked, if any."""
        try:
            crew.question = self.turns.send(answers)
        except StopIteration:
            self.crew = None

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
            step=self.step_kept,
        )
        self.tell(message, crew, rank)

    def ask(
        self,
        crew: Crew,
        subject: tuple[object, ...],
        tell: Callable[[int], None],
        patience_s: float = PATIENCE_S,
    ) -> Turns[list[Any]]:
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
        there = self.crew.peers if self.crew else self.ready
        target = next((each for each in there if each.instance == relayed.instance), None)
        if sender in there and target is not None:
            told = relayed.model_copy(update={"instance": sender.instance})
            target.worker.live_session.send(told, payload)

    def note_failure(self, peer: Peer) -> None:
        """Remember that a worker has gone while it built its layers, if that is so."""
        worker, member = peer.worker, peer.worker.member
        if peer.building_attempt is None:
            return
        if worker.goodbye is None:
            self.builders.lost(member.worker_id, member.instance, worker.name)
        elif worker.goodbye.fault is not None:
            reason = f"{worker.name}: {worker.goodbye.reason}"
            self.builders.failed(member.worker_id, member.instance, reason)

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
        own = self.context.settings.cluster.node_of(member.node)
        if isinstance(self.config.shard_plan, dict) and own in self.config.shard_plan:
            raise OutOfMemory(f"{what}; leave it out of shard_plan, or raise microbatches")
        self.builders.failed(member.worker_id, member.instance, what)
        self.context.log.warning("%s; it takes no part", what)

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
            case MessageReceived(session_id=id_, message=message) if id_ in self.peers:
                self.hear(self.peers[id_], message, event.payload)

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
            case StageReady() if message.reason:
                self.on_trouble(peer, message)
            case StageReady():
                if message.attempt == peer.building_attempt:
                    peer.building_attempt = None
                    self.builders.built(peer.worker.member.worker_id)
                self.on_answer(peer.id, message.attempt, message)
            case StageDone() | StageEvaluated() | StageKept():
                self.on_answer(peer.id, message.attempt, message)

    def on_departure(self, worker: Worker) -> None:
        peer = self.peers.pop(worker.member.session_id, None)
        if peer is None:
            return
        self.dealer.is_gone(peer)
        self.note_failure(peer)
        if self.crew is not None and peer in self.crew.peers:
            self.begin_again(f"{worker.name} is gone")

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


MOST_LOST = 3
"""A worker that is lost so often in a row while it builds, without a word, cannot: its memory runs out."""
MOST_FAILED = 2
"""After so many of its processes that could not build layers a worker is given none any more."""


@dataclass
class Builders:
    """What has come of the layers that each worker was given, by its number.

    One that cannot build them is given none again, except once, to another process of it.

    Attributes:
        num_lost: how often in a row a worker was lost while it built; 0: it built its layers last.
        unable: of a worker that cannot, why its processes, by their instances, could not.
    """

    num_lost: dict[int, int] = field(default_factory=dict)
    unable: dict[int, dict[str, str]] = field(default_factory=dict)

    def built(self, worker_id: int) -> None:
        self.num_lost[worker_id] = 0
        self.unable.pop(worker_id, None)

    def failed(self, worker_id: int, instance: str, reason: str) -> None:
        """It says itself that it cannot."""
        self.num_lost.pop(worker_id, None)
        self.unable.setdefault(worker_id, {})[instance] = reason

    def lost(self, worker_id: int, instance: str, name: str) -> None:
        """It was there no more before it had built its layers."""
        if worker_id in self.unable:
            self.unable[worker_id].setdefault(instance, self.reason(worker_id))
            return
        times = self.num_lost.get(worker_id, 0) + 1
        self.num_lost[worker_id] = times
        if times >= MOST_LOST:
            reason = f"{name} was lost {times} times while it built its layers (out of memory?)"
            self.failed(worker_id, instance, reason)

    def may_build(self, worker_id: int, instance: str) -> bool:
        """Whether that process of a worker may be given layers."""
        unable = self.unable.get(worker_id, {})
        return instance not in unable and len(unable) < MOST_FAILED

    def reason(self, worker_id: int) -> str:
        """Why a worker cannot build layers, as its newest process has shown."""
        return list(self.unable[worker_id].values())[-1]

    def why_not(self, able: Collection[int]) -> str:
        """The reasons of all but the workers `able`, which may be given layers; "": none is known."""
        return "; ".join(map(self.reason, sorted(self.unable.keys() - set(able))))

    def why_none_is_left(self, able: Collection[int]) -> str | None:
        """The reasons of all, where nobody could build layers; None: somebody may.

        `able`: the workers that are there and may be given layers.
        """
        if not self.unable or self.num_lost or able:
            return None
        return self.why_not(())
