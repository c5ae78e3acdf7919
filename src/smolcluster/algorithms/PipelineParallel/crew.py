"""The workers of a pipeline: who has layers, what they have been asked, and what is shown of their steps."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolcluster.algorithms.PipelineParallel.automatic import Reported
from smolcluster.algorithms.PipelineParallel.link_speed import UNMEASURED
from smolcluster.algorithms.PipelineParallel.moving import Decision, StageTimes
from smolcluster.algorithms.PipelineParallel.plan import StageMap
from smolcluster.algorithms.planning.layers import LayerPlan, Link
from smolcluster.observability.view.stages import numbers_of
from smolcluster.server.worker import Worker
from smolcluster.training.schedules.instructions import Op
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
    """Comes before it listens, if at all."""
    building_attempt: int | None = None
    """The plan whose layers it was told and has not said yet that it has; None: there is none."""

    @property
    def id(self) -> int:
        return self.worker.member.session_id

    @property
    def instance(self) -> str:
        return self.worker.member.instance

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


def reported(peer: Peer) -> Reported:
    host = peer.listening.places[0].host if peer.listening else ""
    return Reported(host, peer.measured)


OPS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward_input",
    Op.BACKWARD_WEIGHT: "backward_weight",
}


@dataclass
class Question:
    """What all stages have been asked, who has yet to answer, and what comes then."""

    subject: tuple[object, ...]
    """What an answer must be about."""
    then: Callable[[list[Any]], None]
    """Is given all answers, by rank."""
    asked_at: float
    patience_s: float
    answers: dict[int, Message] = field(default_factory=dict)
    """By session."""
    moved: tuple[int, ...] = ()
    """How much of what takes long had been sent and received when it was looked last."""


@dataclass
class Crew:
    """The workers that have the layers, by rank, from one plan to the next."""

    attempt: int
    map: StageMap
    peers: list[Peer]
    plan: LayerPlan | None = None
    times: StageTimes | None = None
    """None: the layers were not dealt out by what they take."""
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """What was measured between workers, by the names of sender and receiver."""
    question: Question | None = None
    moving: Decision | None = None
    """To deal the layers out again when the state has been kept."""
    begun_at: float = field(default_factory=time.monotonic)


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
        if (link := crew.links.get((crew.map.nodes[rank], name))) and link != UNMEASURED
    }
    bubble = max(0.0, 1 - busy_s / took_s) if took_s > 0 else 0.0
    return numbers_of(layers, op_s, bubble, sends, capacities)
