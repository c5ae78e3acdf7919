"""The server's links to stores that add up gradients: `reducing_slice.py` is the other side."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.codec.registry import get_codec
from smolcluster.errors import ProtocolError
from smolcluster.server.slices import place_of
from smolcluster.server.store_links import RemoteStore, StoreLinks
from smolcluster.training.replica import Replica
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import Commit, Message, OpenStep, Reduced, SendMeans
from smolcluster.wire.streams import Assembler, span_pieces


class MeanArrived(Event):
    """The mean of a bucket has come from the store that has added it up."""

    def __init__(self, bucket: int, attempt: int) -> None:
        self.bucket = bucket
        self.attempt = attempt


class ReducingLinks(StoreLinks):
    """The stores on other hosts that add up a part of the buckets. The replica here has all weights.

    What a lossy codec owes is a slice's own, and gathered for checkpoints.
    """

    def __init__(
        self, replica: Replica, nodes: Sequence[str], *, reduction: Reduction, **links: Any
    ) -> None:
        super().__init__(replica, nodes, **links)
        self._reduction = reduction
        self.attempt = 0
        """Counts the steps that were opened, also those that had to be done again."""
        self._version = 0
        """What the last commit made."""
        self._open_version = 0
        self._on_store_lost: Callable[[], None] = lambda: None
        self._arrived: set[int] = set()
        """Buckets of the open step whose mean has come."""
        self._means = {store.node: self._stream_from(store) for store in self._stores}

    def _stream_from(self, store: RemoteStore) -> Assembler[Reduced]:
        """Puts the means that a store sends into their place of the open step's."""
        buckets = self._replica.buckets
        place = place_of(buckets, store.span)
        pieces = span_pieces(get_codec(self._codec), buckets, store.span)
        return Assembler(
            "mean gradient",
            lambda _: pieces,
            lambda *_, **__: self._reduction.mean(self._open_version)[place],
        )

    def begin(self, version: int, on_store_lost: Callable[[], None]) -> None:
        """The run stands at `version`; `on_store_lost` hears that the open step cannot be finished."""
        self._on_store_lost, self._version = on_store_lost, version
        self._remember_copy(version)

    @property
    def others(self) -> dict[str, int]:
        """How many buckets each other host has, by node."""
        return {store.node: len(store.span) for store in self._stores}

    def node_of(self, session_id: int) -> str | None:
        store = self._of_session(session_id)
        return None if store is None else store.node

    def open_step(self, step: Step) -> None:
        self.attempt += 1
        self._open_version = step.version
        self._arrived.clear()
        self._tell(
            self.others,
            OpenStep(
                attempt=self.attempt,
                version=step.version,
                epoch=step.batch.epoch,
                start=step.batch.start,
                sizes=tuple(part.num_samples for part in step.parts),
            ),
        )

    def take_mean(self, event: MeanArrived) -> None:
        """A store has added up a bucket, and sent it to everybody.

        Raises:
            NonFiniteLoss: it is not finite.
        """
        if event.attempt == self.attempt:
            self._reduction.check(self._open_version, event.bucket)
            self._arrived.add(event.bucket)

    @property
    def has_all_means(self) -> bool:
        """Whether all means that stores owe of the open step are here."""
        return len(self._arrived) == sum(self.others.values())

    def cut_silent(self, since: float, now: float) -> None:
        """Cut stores that owe means, though they have all parts `since` then, and say nothing for long."""
        for store in self._stores:
            is_owed = not self._arrived >= set(store.span)
            silent_s = now - max(since, store.heard_at)
            if store.session is not None and is_owed and silent_s > self._patience.lost_s:
                store.session.cut("it does not send the means of its buckets")

    def commit(self, commit: Commit) -> None:
        self._version = commit.version
        self._tell(self.others, commit)

    def send_means(self, instance: str) -> None:
        """Let a worker have all means from the open step on."""
        self._tell(self.others, SendMeans(instance=instance))

    def _contents(self, place: slice) -> dict[str, Tensor]:
        return {name: values[place] for name, values in self._reduction.residual().items()}

    def _owes_residual(self) -> bool:
        return self._copied_version == self._version  # else a step has paid it

    def _on_lost(self, _store: RemoteStore) -> None:
        self._on_store_lost()

    def _hear(
        self, store: RemoteStore, session_id: int, message: Message, payload: memoryview
    ) -> Event | None:
        store.heard_at = time.monotonic()
        if not isinstance(message, Reduced):
            return MessageReceived(session_id, message)
        if message.attempt != self.attempt:  # it is of a step that is done again
            return None
        if message.version != self._open_version:
            raise ProtocolError(
                f"it sent a mean of step {message.version}, open is {self._open_version}"
            )
        means = self._means[store.node]
        if means.first is not None and means.first.attempt != message.attempt:
            means.first = None
        mean, _ = means.take(message, payload)
        self._reduction.arrived(message.bucket, mean)
        return MeanArrived(message.bucket, message.attempt)
