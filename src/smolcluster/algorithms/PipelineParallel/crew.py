"""The workers of a pipeline: who has or can have layers, what they are asked, and what is shown of steps."""

import math
import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smolcluster.algorithms.PipelineParallel.link_speed import UNMEASURED
from smolcluster.algorithms.PipelineParallel.moving import Decision, StageTimes
from smolcluster.algorithms.PipelineParallel.plan import Cut, StageMap
from smolcluster.observability.view.stages import numbers_of
from smolcluster.server.worker import Worker
from smolcluster.training.compute import BatchLoss
from smolcluster.training.schedules.instructions import Op
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import (
    LayersMeasured,
    Listening,
    Message,
    StageDone,
    StageEvaluated,
    StageKept,
    StageNeighbour,
)


@dataclass
class Peer:
    """A worker that is there, and where its neighbours reach it; it has layers or is a spare."""

    worker: Worker
    listening: Listening | None = None
    measured: LayersMeasured | None = None
    """What layers take there; comes before it listens. None: it could not measure."""
    building_attempt: int | None = None
    """The plan whose layers it was told and has not said yet that it has; None: there is none."""

    @property
    def id(self) -> int:
        return self.worker.member.session_id

    @property
    def instance(self) -> str:
        return self.worker.member.instance

    @property
    def host(self) -> str:
        """Equal of processes of one machine, which share its memory."""
        return self.listening.places[0].host if self.listening else ""

    @property
    def place(self) -> tuple[str, str]:
        """Equal of processes that share one memory: a device of a host, such as `cuda:0`."""
        device = "" if self.measured is None else self.measured.device
        return self.host, device.partition(" ")[0]

    def as_neighbour(self, rank: int) -> StageNeighbour:
        """How others reach it, as the one of that rank in a plan."""
        assert self.listening is not None  # noqa: S101 - layers are dealt to those that listen
        member, places = self.worker.member, self.listening.places
        return StageNeighbour(rank=rank, node=member.node, instance=member.instance, places=places)


def named(peers: Sequence[Peer]) -> dict[str, Peer]:
    """Workers by their machines; of several on one machine all but the first have their number added."""
    found: dict[str, Peer] = {}
    for each in peers:
        member = each.worker.member
        node = member.node
        found[f"{node} (worker {member.worker_id})" if node in found else node] = each
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

    def built(self, member: Member) -> None:
        self.num_lost[member.worker_id] = 0
        self.unable.pop(member.worker_id, None)

    def failed(self, member: Member, reason: str) -> None:
        """It says itself that it cannot."""
        self.num_lost.pop(member.worker_id, None)
        self.unable.setdefault(member.worker_id, {})[member.instance] = reason

    def lost(self, member: Member, name: str) -> None:
        """It was there no more before it had built its layers."""
        worker_id = member.worker_id
        if worker_id in self.unable:
            self.unable[worker_id].setdefault(member.instance, self.reason(worker_id))
            return
        times = self.num_lost.get(worker_id, 0) + 1
        self.num_lost[worker_id] = times
        if times >= MOST_LOST:
            reason = f"{name} was lost {times} times while it built its layers (out of memory?)"
            self.failed(member, reason)

    def may_build(self, member: Member) -> bool:
        """Whether that process of a worker may be given layers."""
        unable = self.unable.get(member.worker_id, {})
        return member.instance not in unable and len(unable) < MOST_FAILED

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


OPS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward_input",
    Op.BACKWARD_WEIGHT: "backward_weight",
}


@dataclass
class Question:
    """What all stages have been asked, and who has yet to answer."""

    subject: tuple[object, ...]
    """What an answer must be about."""
    patience_s: float
    begun_at: float = field(default_factory=time.monotonic)
    quiet_since: float = field(default_factory=time.monotonic)
    """When something had moved for the last time."""
    answers: dict[int, Message] = field(default_factory=dict)
    """By session."""
    moved: tuple[int, ...] = ()
    """How much of what takes long had been sent and received when it was looked last."""


T = TypeVar("T")
Questions = Generator[Question | None, Any, T]
"""Asks all stages one question after the other, and returns what comes of them.

It yields each question when the stages have been asked, and is sent their answers, by rank; it yields None
while it has nothing to ask.
"""


@dataclass
class Crew:
    """The workers that have the layers, by rank, from one plan to the next."""

    attempt: int
    cut: Cut
    peers: list[Peer]
    times: StageTimes | None = None
    """None: the layers were not dealt out by what they take."""
    question: Question | None = None
    moving: Decision | None = None
    """To deal the layers out again when the state has been kept."""

    @property
    def map(self) -> StageMap:
        return self.cut.map


def subject_of(answer: Message) -> tuple[object, ...]:
    """What an answer is about."""
    match answer:
        case StageDone():
            return StageDone, answer.lease
        case StageEvaluated():
            return StageEvaluated, answer.turn
        case StageKept():
            return StageKept, answer.step
    return (type(answer),)


def computed(answers: Sequence[StageDone]) -> tuple[BatchLoss, float]:
    """What stages have come to, all together: the loss, and the norm of the mean gradient.

    Both are NaN where a stage's are not finite.
    """
    num_terms = sum(each.num_terms for each in answers)
    divisor = num_terms or 1.0
    losses = [math.nan if each.loss is None else each.loss for each in answers]
    squares = [math.nan if each.squared_norm is None else each.squared_norm for each in answers]
    norm = math.sqrt(math.fsum(squares)) / divisor
    return BatchLoss(sum(losses) / divisor, num_terms), norm


def stage_figures(crew: Crew, rank: int, done: StageDone, took_s: float) -> dict[str, float]:
    """What is shown of a worker's part in a step that took so long, by the names of its status."""
    layers = {
        stage: (crew.map.cuts[stage], crew.map.cuts[stage + 1])
        for stage, of in enumerate(crew.map.ranks)
        if of == rank
    }
    op_s = {name: done.seconds[op] for op, name in OPS.items() if op in done.seconds}
    busy_s = math.fsum(op_s.values())
    sends = {
        crew.peers[other].worker.rank: nbytes / took_s
        for other, nbytes in enumerate(done.sent_bytes[: len(crew.peers)])
        if nbytes and took_s > 0
    }
    capacities = {
        crew.peers[other].worker.rank: link.bytes_s
        for other, name in enumerate(crew.map.nodes)
        if (link := crew.cut.links.get((crew.map.nodes[rank], name))) and link != UNMEASURED
    }
    bubble = max(0.0, 1 - busy_s / took_s) if took_s > 0 else 0.0
    return numbers_of(layers, op_s, bubble, sends, capacities)
