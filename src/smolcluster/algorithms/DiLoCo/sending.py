"""What a DiLoCo server sends its workers, each in the order of its outbox: weights, batches and messages."""

from collections.abc import Sequence
from functools import cached_property, partial

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.DiLoCo.outer_links import OuterLinks
from smolcluster.algorithms.DiLoCo.peers import Peer
from smolcluster.server.assignment import ServedBatch, assignment_of, send_assignment
from smolcluster.server.leases import Lease
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Message, Ready, SameWeights


class Sender:
    """Sends workers the weights, of which it notes the versions that each has, and their batches."""

    def __init__(self, context: ServerContext, stores: OuterLinks) -> None:
        self._stores = stores
        self._replica = context.training.replica

    def send_lease(
        self,
        peer: Peer,
        lease: Lease,
        rate: float,
        fragments: frozenset[int],
        batch: ServedBatch | None,
        *,
        is_gradient: bool,
    ) -> None:
        """Send a batch at once; its place in the outbox is the caller's matter.

        Args:
            peer: who computes it.
            lease: its samples.
            rate: the learning rate of its local step.
            fragments: those in which the samples have not been applied yet.
            batch: the samples, where workers have no data of their own.
            is_gradient: their gradient is wanted next.
        """
        is_whole = len(fragments) == len(self._stores.versions)
        assignment = assignment_of(
            lease.key,
            lease.indices,
            batch,
            version=self._stores.version,
            learning_rate=rate,
            loss_scale=self._replica.run_scale,
            fragments=None if is_whole else sorted(fragments),
            is_gradient=is_gradient,
        )
        send_assignment(peer.worker.live_session, *assignment, batch)

    @cached_property
    def _first_digest(self) -> str:
        """Of the weights before the first outer step."""
        return self._replica.digest()

    def has_first_weights(self, ready: Ready) -> bool:
        """Whether a worker has made itself, from the run's seed, what it would be sent."""
        return self._stores.version == 0 and ready.weights == self._first_digest

    def confirm_weights(self, peer: Peer) -> None:
        """Tell a worker that its weights are the run's."""
        peer.versions = list(self._stores.versions)
        self._stores.follow(peer.worker.member.instance)
        tell(peer, SameWeights())

    def send_weights(self, peer: Peer) -> None:
        """Send the whole weights: what the worker was sent before, and has not answered, is void.

        Raises:
            NonFiniteLoss: they are not finite.
        """
        peer.versions = list(self._stores.versions)
        instance = peer.worker.member.instance
        _send(peer, self._stores.send_whole(instance, self._stores.version))

    def send_fragment(self, peer: Peer, number: int) -> None:
        """Send a worker what has become of a fragment."""
        instance = peer.worker.member.instance
        frames = self._stores.send_fragment(instance, number, peer.versions[number])
        peer.versions[number] = self._stores.versions[number]
        _send(peer, frames)


def tell(peer: Peer, message: Message) -> None:
    peer.outbox.put(partial(peer.worker.live_session.send, message))


def _send(peer: Peer, frames: Sequence[Frame]) -> None:
    def send() -> None:
        for frame in frames:
            peer.worker.live_session.send_frame(frame)

    peer.outbox.put(send)
