"""A store's slice of the sums: gradients are added up where they arrive, and their mean goes out from there.

    coordinator -> OpenStep         the parts of a step
    worker      -> Push             added to the sum of each of its buckets; Counted when it has ended
    store       -> Reduced          the mean of a bucket, to all workers and the coordinator
    coordinator -> Commit           the step is over

It holds no weights: all replicas, the coordinator's too, take the step themselves. So when it is lost nothing
is but the open step, which is done again. With as many stores as workers, on their machines, each link
carries what it does in a ring: 2 (N - 1) / N times the gradient a step (Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms"), and the coordinator's the gradient once more.
"""

import threading
from collections import Counter
from collections.abc import Sequence
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
from smolcluster.codec.registry import get_codec
from smolcluster.data.permutation import Range
from smolcluster.errors import NonFiniteLoss, PeerLost
from smolcluster.server.slices import place_of
from smolcluster.server.store_host import TICK_S, HeldSlice
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Commit,
    Counted,
    Fault,
    LeaseKey,
    Message,
    OpenStep,
    Push,
    SendMeans,
    Skip,
)
from smolcluster.wire.session import Session


@dataclass(frozen=True)
class GradientSlice:
    """What sums need to know of a slice: its `buckets`, counted from its own beginning."""

    buckets: Sequence[slice]
    grads: Tensor
    first: int

    @property
    def num_params(self) -> int:
        return self.grads.numel()

    def parameter_at(self, place: int) -> str:
        """A store knows no parameters' names."""
        return f"of weight {self.first + place}"


@dataclass(eq=False)
class SlicePart:
    """A contiguous range of the batch, and how many of its buckets here have counted."""

    name: str
    num_samples: int
    num_counted: int = 0


class SliceStep:
    """The books of an open step: which buckets have counted. Readers claim them, so claims are atomic."""

    def __init__(self, opened: OpenStep, span: range) -> None:
        self.version, self.attempt = opened.version, opened.attempt
        self.batch = Range(opened.epoch, opened.start, opened.start + sum(opened.sizes))
        self.overflow: float | None = None
        self._span = span
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], SlicePart] = {}
        self._counts = Counter[LeaseKey]()
        start = opened.start
        for size in opened.sizes:
            name = f"samples {start} to {start + size - 1} of epoch {opened.epoch}"
            self._parts[start, start + size] = SlicePart(name, size)
            start += size

    @property
    def parts(self) -> Sequence[SlicePart]:
        return list(self._parts.values())

    def claim(self, _session_id: int, push: Push) -> SlicePart | None:
        """Whether this bucket counts: it is the next one that is missing of a part of this step."""
        with self._lock:
            part = self._parts.get((push.lease.start, push.lease.stop))
            is_of_step = (push.base_version + 1, push.lease.epoch) == (
                self.version,
                self.batch.epoch,
            )
            if part is None or not is_of_step or push.bucket != self._span.start + part.num_counted:
                return None
            part.num_counted += 1
            self._counts[push.lease] += 1
            return part

    def counted(self, lease: LeaseKey) -> tuple[int, bool]:
        """How many buckets of a push have counted, and whether of its part all have."""
        with self._lock:
            part = self._parts.get((lease.start, lease.stop))
            is_of_step = part is not None and lease.epoch == self.batch.epoch
            is_finished = part is not None and part.num_counted == len(self._span)
            return self._counts[lease], is_of_step and is_finished


class ReducingSlice(HeldSlice):
    """A slice of the gradient, of which it sends back the mean over all parts of a step."""

    def __init__(self, *session: Any) -> None:
        super().__init__(*session)
        given, codec = self._given, get_codec(self._given.codec)
        place = place_of(self._buckets, self._span)
        own = self._buckets[given.first : given.stop]
        self._slice = GradientSlice(
            [slice(each.start - place.start, each.stop - place.start) for each in own],
            torch.empty(place.stop - place.start, dtype=codec.dtype),
            place.start,
        )
        self._reduction = Reduction(
            self._slice, given.codec, first=given.first, num_buckets=len(self._buckets)
        )
        residual = self._reduction.residual()
        if residual and given.owes_residual and RESIDUAL in self._contents:
            residual[RESIDUAL].copy_(self._contents[RESIDUAL])
            self._reduction.resume()
        self._contents = residual
        self._step: SliceStep | None = None
        self._opened = threading.Condition()
        self._means: dict[int, Frame] = {}
        """Of the open step, by bucket, as far as they are there."""
        self._followers: set[str] = set()
        """Instances of the workers that are sent all means."""

    def _receiver_for(self, session_id: int) -> PartReceiver:
        return SlicePartReceiver(self, session_id)

    def new_order(self) -> dict[str, Any]:
        """How its workers' pushes come: for `PartReceiver`."""
        return {"has_loss_scale": self._given.has_loss_scale, "span": self._span}

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
                if self._reduction.is_reduced(push.bucket):
                    self._spread(push.bucket, coordinator)
            case MessageReceived(session_id, Skip(lease=lease)):
                self._tell_counted(session_id, lease, coordinator)

    def _tell_counted(self, session_id: int, lease: LeaseKey, coordinator: Session) -> None:
        instance = self._instance_of(session_id)
        if instance is None:  # the coordinator hears that it has gone
            return
        count, is_finished = (0, False) if self._step is None else self._step.counted(lease)
        told = Counted(instance=instance, lease=lease, num_buckets=count, is_finished=is_finished)
        coordinator.send(told)

    def _spread(self, number: int, coordinator: Session) -> None:
        """Send the mean of a bucket to everybody, once."""
        if self._step is None or number in self._means:
            return
        try:
            frame = self._reduction.frame(self._step.version, number)
        except NonFiniteLoss as error:
            coordinator.send(Fault(code="non-finite", sentence=str(error)))
            return
        self._means[number] = frame
        coordinator.send_frame(frame)
        for instance in self._followers:
            self._send(instance, [frame])

    def _obey(self, message: Message, _coordinator: Session) -> None:
        match message:
            case OpenStep():
                self._open(message)
            case Commit(is_skipped=is_skipped) if self._step is not None:
                self._step.overflow = 1.0 if is_skipped else None
                self._means.clear()
                self._reduction.close()
                self._contents = self._reduction.residual()
            case SendMeans(instance=instance):
                self._followers.add(instance)
                self._send(instance, list(self._means.values()))

    def _open(self, opened: OpenStep) -> None:
        self._reduction.abandon()  # if one is open, it is void
        self._means.clear()
        step = SliceStep(opened, self._span)
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

    def receiver_parts(self) -> tuple[Reduction, str, Sequence[slice]]:
        return self._reduction, self._given.codec, self._buckets


class SlicePartReceiver(PartReceiver):
    """Takes one worker's pushes, each when its step is open here."""

    def __init__(self, held: ReducingSlice, session_id: int) -> None:
        super().__init__(session_id, *held.receiver_parts(), **held.new_order())
        self._held = held

    def __call__(self, message: Message, payload: memoryview) -> Event | None:
        if isinstance(message, Push) and not self.in_progress:
            self._held.await_step(message.base_version + 1)
        return super().__call__(message, payload)
