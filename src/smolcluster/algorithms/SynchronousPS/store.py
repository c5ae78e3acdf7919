"""A store of SyncPS: adds up the gradients of its buckets, on a machine that need not be the server's.

    coordinator -> TakeMean         the parts of a step, whoever sends them
    worker      -> Push             added to the sum of each of its buckets; Arrived when it has ended
    store       -> Reduced          the mean of a bucket, to all workers and the coordinator
    coordinator -> TakeStep         the step is over
    coordinator -> Drop             the step is void: it is done again

What it says and hears is that of every store: see `server/store_host.py`. It holds no weights: all replicas,
the coordinator's too, take the step themselves. So when it is lost nothing is but the open step, which is
done again. With as many stores as workers, on their machines, each link carries what it does in a ring:
2 (N - 1) / N times the gradient a step (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"),
and the coordinator's the gradient once more.

Which machines have one: `servers` in the cluster file. By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("syncps", "store"))


import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smolcluster.algorithms.SynchronousPS.reduction import (
    PartReceiver,
    PushArrived,
    Reduction,
)
from smolcluster.algorithms.SynchronousPS.step import Part, Step
from smolcluster.codec.registry import get_codec
from smolcluster.errors import NonFiniteLoss, PeerLost, ProtocolError
from smolcluster.server.slices import arrived, place_of, read_norms
from smolcluster.server.store import PartArrived
from smolcluster.server.store_host import TICK_S, SliceHost
from smolcluster.server.store_links import RemoteStore, StoreLinks
from smolcluster.training.replica import Replica
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Arrived,
    Commit,
    CountedPart,
    Drop,
    Goodbye,
    LeaseKey,
    Message,
    PartKey,
    Reduced,
    SendWeights,
    Skip,
    TakeMean,
    TakeStep,
)
from smolcluster.wire.session import Session
from smolcluster.wire.streams import Assembler, span_pieces


class Held(SliceHost):
    """A slice of the gradient, of which a store sends back the mean over all parts of a step."""

    _slice: Reduction

    def _new_slice(self, values: Mapping[str, Tensor]) -> Reduction:
        given, place = self._given, place_of(self._buckets, self._span)
        held = Reduction(
            self._buckets,
            given.codec,
            torch.empty(place.stop - place.start, dtype=get_codec(given.codec).dtype),
            lambda number: f"of weight {place.start + number}",  # it knows no parameters' names
            span=self._span,
            kept=self._span,
            incarnation=given.incarnation,
        )
        owed = held.contents()
        if given.owes_residual and owed.keys() <= values.keys():
            for name, residual in owed.items():
                residual.copy_(values[name])
            held.resume()
        return held

    def _receiver_for(self, session_id: int) -> PartReceiver:
        return PartReceiver(
            session_id,
            self._slice,
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
        while not self._slice.await_step(version, TICK_S):
            if self._closed.is_set():
                raise PeerLost("the store has lost its slice")

    def _on_event(self, event: Event, coordinator: Session) -> None:
        match event:
            case PushArrived(session_id=session_id, push=push):
                if event.whole:
                    self._tell_counted(session_id, push.lease, coordinator)
                self._spread(coordinator)
            case MessageReceived(session_id, Skip(lease=lease)):
                self._tell_counted(session_id, lease, coordinator)

    def _tell_counted(self, session_id: int, lease: LeaseKey, coordinator: Session) -> None:
        """A push has ended here."""
        instance, step = self._instance_of(session_id), self._slice.newest
        if instance is None:  # the coordinator hears that it has gone
            return
        count, is_whole = (0, False) if step is None else step.counted_here(lease)
        key, no_norms = PartKey(instance=instance, of=lease), torch.empty(0, count)
        coordinator.send(*arrived(key, 0, self._span.start, no_norms, is_whole=is_whole))

    def _spread(self, coordinator: Session) -> None:
        """Send means to everybody, once, in the order of their buckets."""
        try:
            for frame in self._slice.new_means():
                coordinator.send_frame(frame)
                for instance in self._slice.followers:
                    self._send(instance, [frame])
        except NonFiniteLoss as error:
            coordinator.send(Goodbye(reason=str(error), fault="non-finite"))

    def _forget(self, session_id: int) -> None:
        """A worker that comes back begins anew with a SendWeights: what comes before is not for it."""
        if (instance := self._instance_of(session_id)) is not None:
            self._slice.leave(instance)
        super()._forget(session_id)


class ReducingLinks(StoreLinks[PartArrived]):
    """The hosts that add up a part of the buckets each. All weights are here, and all means come here.

    What a lossy codec owes is a slice's own, and gathered for checkpoints.
    """

    own: Reduction

    def __init__(self, replica: Replica, nodes: Sequence[str], **links: Any) -> None:
        """`links`: see `StoreLinks`."""
        super().__init__(replica, nodes, **links)
        self.own = Reduction(
            replica.buckets,
            self._codec,
            replica.grads,
            replica.parameter_at,
            span=self.own_span,
            kept=range(len(replica.buckets)),
            incarnation=self._incarnation,
        )
        self._has_stepped = False
        """Whether a step has been taken since the slices were gathered."""
        self._wanted = TakeMean(parts=(_part_of(Part(0, 0, 1)),))
        """What stores were told to add up last."""
        self._reduced: set[int] = set()
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
            lambda *_, **__: self.own.mean(self._wanted.version)[place],
        )

    @property
    def others(self) -> dict[str, int]:
        """How many buckets each other host has, by node."""
        return {store.node: len(store.span) for store in self._stores}

    def node_of(self, session_id: int) -> str | None:
        store = self._of_session(session_id)
        return None if store is None else store.node

    def open_step(self, step: Step) -> None:
        """Let all hosts add up the parts of a step."""
        self.own.open(step)
        self._wanted = TakeMean(
            attempt=self._wanted.attempt + 1,
            version=step.version,
            epoch=step.batch.epoch,
            parts=tuple(map(_part_of, step.parts)),
        )
        self._reduced.clear()
        self._tell(self._wanted)

    def note_mean(self, reduced: Reduced) -> None:
        """A store has added up a bucket, and sent it to everybody.

        Raises:
            NonFiniteLoss: it is not finite.
        """
        if reduced.attempt == self._wanted.attempt:
            self.own.check(reduced.version, reduced.bucket)
            self._reduced.add(reduced.bucket)

    @property
    def has_all_means(self) -> bool:
        """Whether all means of the open step are here."""
        return self.own.is_whole and len(self._reduced) == sum(self.others.values())

    def cut_silent(self, since: float, now: float) -> None:
        """Cut stores that owe means, though they have all parts `since` then, and say nothing for long."""
        for store in self._stores:
            is_owed = not self._reduced >= set(store.span)
            is_silent = now - max(since, store.heard_at) > self._cluster.empty_cluster_timeout_s
            if store.session is not None and is_owed and is_silent:
                store.session.cut("it does not send the means of its buckets")

    def commit(self, commit: Commit) -> None:
        """The open step is over, on all hosts."""
        self._has_stepped = True
        rate = None if commit.is_skipped else commit.learning_rate
        step = TakeStep(version=commit.version, parts=(), clip=commit.clip, learning_rate=rate)
        self._tell(step)
        self.own.take_step(step)

    def send_means(self, instance: str, version: int) -> None:
        """Let a worker, which gets the weights of `version`, have all means that lead on from there."""
        self._tell(SendWeights(instance=instance, version=version))

    def _contents(self, place: slice) -> dict[str, Tensor]:
        return {name: values[place] for name, values in self.own.contents().items()}

    def _owes_residual(self) -> bool:
        return not self._has_stepped  # else the step has paid it

    def _remember_copy(self, version: int) -> None:
        super()._remember_copy(version)
        self._has_stepped = False

    def _on_lost(self, store: RemoteStore) -> None:
        """What all hosts have of the open step is void."""
        key = self._wanted.parts[0].key
        self._tell(Drop(key=key))
        self.own.drop(key)
        super()._on_lost(store)

    def _hear(
        self, store: RemoteStore, session_id: int, message: Message, payload: memoryview
    ) -> Event | None:
        store.heard_at = time.monotonic()
        if isinstance(message, Arrived):
            read_norms(message, payload, store.span)
        elif isinstance(message, Reduced):
            if message.attempt != self._wanted.attempt:  # it is of a step that is done again
                return None
            self._take(store, message, payload)
        return MessageReceived(session_id, message)

    def _take(self, store: RemoteStore, reduced: Reduced, payload: memoryview) -> None:
        """Put the mean of a bucket into its place."""
        if reduced.version != self._wanted.version:
            raise ProtocolError(
                f"it sent a mean of step {reduced.version}, open is {self._wanted.version}"
            )
        means = self._means[store.node]
        if means.first is not None and means.first.attempt != reduced.attempt:
            means.first = None
        mean, _ = means.take(reduced, payload)
        self.own.arrived(reduced.bucket, mean)


def _part_of(part: Part) -> CountedPart:
    """A part of a step, from whichever workers send it."""
    return CountedPart(key=PartKey(instance=None, of=part.start), weight=part.num_samples)
