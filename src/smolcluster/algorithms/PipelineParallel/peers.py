"""The workers of a pipeline as its server knows them."""

from collections.abc import Sequence
from dataclasses import dataclass

from smolcluster.algorithms.PipelineParallel.automatic import Reported
from smolcluster.server.worker import Worker
from smolcluster.wire.messages import LayersMeasured, Listening, StageNeighbour


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
