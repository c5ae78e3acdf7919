"""A store of SyncPS: adds up the gradients of its buckets, on a machine that need not be the server's.

    coordinator -> OpenStep         the parts of a step
    worker      -> Push             added to the sum of each of its buckets; Counted when it has ended
    store       -> Reduced          the mean of a bucket, to all workers and the coordinator
    coordinator -> Commit           the step is over

It holds no weights: all replicas, the coordinator's too, take the step themselves. So when it is lost nothing
is but the open step, which is done again. With as many stores as workers, on their machines, each link
carries what it does in a ring: 2 (N - 1) / N times the gradient a step (Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms"), and the coordinator's the gradient once more.

Which machines have one: `servers` in the cluster file. By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("syncps", "store"))


import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smolcluster.algorithms.SynchronousPS.reduction import (
    RESIDUAL,
    PartArrived,
    PartReceiver,
    Reduction,
)
from smolcluster.algorithms.SynchronousPS.step import SliceStep, Step
from smolcluster.codec.registry import get_codec
from smolcluster.data.permutation import Range
from smolcluster.errors import NonFiniteLoss, PeerLost, ProtocolError
from smolcluster.server.slices import place_of
from smolcluster.server.store_host import TICK_S, HeldSlice
from smolcluster.server.store_links import RemoteStore, StoreLinks
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Commit,
    Counted,
    Fault,
    LeaseKey,
    Message,
    OpenStep,
    Reduced,
    SendMeans,
    Skip,
)
from smolcluster.wire.session import Session
from smolcluster.wire.streams import Assembler, span_pieces


class Held(HeldSlice):
    """A slice of the gradient, of which it sends back the mean over all parts of a step."""

    def __init__(self, *session: Any) -> None:
        super().__init__(*session)
        given, place = self._given, place_of(self._buckets, self._span)
        self._reduction = Reduction(
            self._buckets,
            given.codec,
            torch.empty(place.stop - place.start, dtype=get_codec(given.codec).dtype),
            lambda number: f"of weight {place.start + number}",  # it knows no parameters' names
            span=self._span,
        )
        residual = self._reduction.residual()
        if residual and given.owes_residual and RESIDUAL in self._contents:
            residual[RESIDUAL].copy_(self._contents[RESIDUAL])
            self._reduction.resume()
        self._contents = residual
        self._step: SliceStep | None = None
        self._opened = threading.Condition()
        self._means: list[Frame] = []
        """Of the open step, from the first bucket on, as far as they are there."""
        self._followers: set[str] = set()
        """Instances of the workers that are sent all means."""

    def _receiver_for(self, session_id: int) -> PartReceiver:
        return PartReceiver(
            session_id,
            self._reduction,
            self._given.codec,
            self._buckets,
            has_loss_scale=self._given.has_loss_scale,
            span=self._span,
            await_step=self.await_step,
        )

    def await_step(self, version: int) -> None:
        """Wait until the step that makes `version` is open; a worker may hear of it earlier. Any reader.

        Raises:
            PeerLost: the store has lost its slice.
        """
        with self._opened:
            while self._step is None or self._step.version < version:
                if self._closed.is_set():
                    raise PeerLost("the store has lost its slice")
                self._opened.wait(TICK_S)

    def _on_event(self, event: Event, coordinator: Session) -> None:
        match event:
            case PartArrived(session_id=session_id, push=push):
                if event.whole:
                    self._tell_counted(session_id, push.lease, coordinator)
                self._spread(coordinator)
            case MessageReceived(session_id, Skip(lease=lease)):
                self._tell_counted(session_id, lease, coordinator)

    def _tell_counted(self, session_id: int, lease: LeaseKey, coordinator: Session) -> None:
        instance = self._instance_of(session_id)
        if instance is None:  # the coordinator hears that it has gone
            return
        count, is_finished = (0, False) if self._step is None else self._step.counted_here(lease)
        told = Counted(instance=instance, lease=lease, num_buckets=count, is_finished=is_finished)
        coordinator.send(told)

    def _spread(self, coordinator: Session) -> None:
        """Send means to everybody, once, in the order of their buckets."""
        while (step := self._step) is not None and len(self._means) < len(self._span):
            number = self._span.start + len(self._means)
            if not self._reduction.is_reduced(number):
                return
            try:
                frame = self._reduction.frame(step.version, number)
            except NonFiniteLoss as error:
                coordinator.send(Fault(code="non-finite", sentence=str(error)))
                return
            self._means.append(frame)
            coordinator.send_frame(frame)
            for instance in self._followers:
                self._send(instance, [frame])

    def _obey(self, message: Message, _coordinator: Session) -> None:
        match message:
            case OpenStep():
                self._open(message)
            case Commit(is_skipped=is_skipped) if self._step is not None:
                self._means.clear()
                self._reduction.close(is_skipped=is_skipped)
                self._contents = self._reduction.residual()
            case SendMeans(instance=instance):
                self._followers.add(instance)
                self._send(instance, self._means)

    def _open(self, opened: OpenStep) -> None:
        self._reduction.abandon()  # if one is open, it is void
        self._means.clear()
        batch = Range(opened.epoch, opened.start, opened.start + sum(opened.sizes))
        step = SliceStep(opened.version, batch, opened.sizes, self._span)
        self._reduction.attempt = opened.attempt
        self._reduction.open(step)
        with self._opened:
            self._step = step
            self._opened.notify_all()

    def _on_gone(self, instance: str) -> None:
        super()._on_gone(instance)
        self._followers.discard(instance)

    def _forget(self, session_id: int) -> None:
        """A worker that comes back begins anew with a SendMeans: what comes before is not for it."""
        if (instance := self._instance_of(session_id)) is not None:
            self._followers.discard(instance)
        super()._forget(session_id)


@dataclass(frozen=True)
class MeanArrived(Event):
    """The mean of a bucket has come from the store that has added it up."""

    bucket: int
    attempt: int


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
