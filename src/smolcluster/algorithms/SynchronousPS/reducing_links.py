"""The server's links to stores that add up gradients: `reducing_slice.py` is the other side."""

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor

from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.errors import ProtocolError
from smolcluster.server.store_links import RemoteStore, StoreLinks
from smolcluster.training.replica import Replica
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import Commit, Message, OpenStep, Reduced, SendMeans


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

    def cut_silent(self, arrived: AbstractSet[int], since: float, now: float) -> None:
        """Cut stores that have had all their parts `since` then, and have sent nothing for too long."""
        for store in self._stores:
            is_owed = not arrived >= set(store.span)
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
        if message.bucket not in store.span:
            raise ProtocolError(f"it sent the mean of bucket {message.bucket}, which it has not")
        if message.attempt == self.attempt:
            if message.version != self._open_version:
                raise ProtocolError(
                    f"it sent a mean of step {message.version}, open is {self._open_version}"
                )
            self._reduction.receive(message, payload)
        return MeanArrived(message.bucket, message.attempt)
