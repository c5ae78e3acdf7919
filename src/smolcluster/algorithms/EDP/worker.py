"""An EDP worker: takes leases, computes gradients, pushes them, and pulls weights now and then.

    lease -> forward, backward -> push (in the background) -> a step of its own copy, or a pull
    lease -> forward, backward -> a step of its own copy -> push of the weights (update_rule mixing)

It computes the next batch while the last push is on the wire. Every `worker_update_interval` steps the
server's weights replace its own; in between it steps its own copy with an optimizer of the same class.
Should that copy diverge, nothing is pushed: it begins again from the server's weights, and only when it fails
on these as well the run must end.
With an interval of 1 it waits for each pull, which with one worker and gradients is sequential training.
Mixing: Xie et al., 1903.03934 (FedAsync).
By hand: `uv run worker.py 1 macbook`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("edp", "worker"))


import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from smolcluster.algorithms.EDP.config import EDPConfig
from smolcluster.errors import NonFiniteLoss
from smolcluster.server.assignment import Assigned
from smolcluster.server.buffers import BufferCollector, buffer_frames
from smolcluster.server.link import Link, wait_until
from smolcluster.server.plausible import RefusedAgain, check_norm
from smolcluster.server.push import GradientSender
from smolcluster.server.store_client import StoreClient
from smolcluster.server.weights import StateReceiver, WeightsArrived
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.training.scaler import ScaleFollower
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Ack,
    LeaseKey,
    Pull,
    Skip,
    StoreList,
    Welcome,
)


class Worker:
    """A worker's part in a run, over all its sessions."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        self.train = training.recipe.applied_to(welcome.run.train)
        self.interval = welcome.run.worker_update_interval
        self.mixing = welcome.run.of(EDPConfig).update_rule == "mixing"
        self.training = training
        self.replica = training.replica
        self.sender = GradientSender(welcome.codec, training.replica)
        self.stepped: Tensor | None = None
        """With mixing, the weights (num_params,) to push: a pull may replace the copy before the push."""
        self.scale = ScaleFollower()
        self.steps = 0
        self.base_version = 0
        self.unacknowledged: LeaseKey | None = None
        self.pulling = True
        self.must_restart = False
        """Whether its own copy is not to be trusted any more."""
        self.has_restarted = False
        """Whether it has replaced that copy by the server's weights, and not computed on them yet."""
        self.pushed_afresh = False
        """Whether the last push was computed on such weights."""
        self.leases: deque[Assigned] = deque()
        self.link: Link
        replica = training.replica
        self.stores = StoreClient(
            len(replica.buckets),
            lambda span: StateReceiver(replica.buckets, replica.params.dtype, span=span),
        )

    def new_receiver(self) -> StateReceiver:
        replica = self.replica
        collector = BufferCollector(replica.buffers, replica.bucket_bytes)
        return StateReceiver(replica.buckets, replica.params.dtype, collector, self.training)

    def take_part(self, link: Link) -> None:
        """Train until the link raises. The server sends its weights first."""
        self.link, self.pulling = link, True
        self.stores.begin(link)
        self.leases.clear()
        self.wait_until(lambda: not self.pulling)
        while True:
            self.wait_until(lambda: bool(self.leases))
            self.step(self.leases.popleft())

    def step(self, lease: Assigned) -> None:
        """Compute one lease's gradient and push it; then follow the server, or step alone.

        With mixing it steps first, and pushes where that has brought it.

        Raises:
            NonFiniteLoss: it came to NaN or infinity on weights that it had got because of just that.
            RefusedAgain: the server has refused the push before, which was computed on such weights.
        """
        if self.must_restart:
            self.restart()
        is_fresh, self.has_restarted = self.has_restarted, False
        base_version, learning_rate = self.base_version, lease.assignment.learning_rate
        self.steps += 1
        started = time.perf_counter()
        try:
            self.replica.buffers.mark()
            self.replica.loss_scale = self.scale.after(lease.assignment.loss_scale)
            loss = self.compute(lease)
            self.scale.note(loss.overflow)
            buffers = self.replica.buffers.difference()
            compute_s = time.perf_counter() - started
            lease.examine(self.training, loss=False, buffers=True)
            if self.mixing:
                self.step_alone(learning_rate, loss)
                self.stepped = self.replica.snapshot(self.stepped)
            if self.unacknowledged is not None:
                with self.replica.meter("send"):
                    self.stores.flush()
            self.wait_until(lambda: self.unacknowledged is None)
            frames = self.frames(lease.lease, base_version, loss, compute_s)
        except RefusedAgain:
            raise
        except NonFiniteLoss as error:
            if is_fresh:
                raise NonFiniteLoss(self.failure(str(error))) from error
            compute_s = time.perf_counter() - started
            self.link.send(Skip(lease=lease.lease, compute_s=compute_s, reason=str(error)))
            self.must_restart = True
            return
        self.unacknowledged, self.pushed_afresh = lease.lease, is_fresh
        nbytes, key = self.replica.bucket_bytes, lease.lease
        self.stores.push(buffer_frames(buffers, nbytes, version=base_version, lease=key), frames)
        if self.steps % self.interval == 0 and not self.pulling:
            self.pull()
        elif not self.mixing:
            try:
                self.step_alone(learning_rate, loss)
            except NonFiniteLoss:
                self.must_restart = True
        self.replica.meter.step_done(lease.num_samples)

    def compute(self, lease: Assigned) -> BatchLoss:
        return lease.compute(self.training)

    def frames(
        self, lease: LeaseKey, base_version: int, loss: BatchLoss, compute_s: float
    ) -> list[Frame]:
        """Encode the gradient, or the weights: all before any is sent, because a bucket may hold NaN."""
        try:
            frames = list(self.sender.frames(lease, base_version, loss, compute_s, self.stepped))
        except NonFiniteLoss:
            self.sender.settle(0)
            raise
        if loss.overflow is not None:
            self.sender.settle(0)  # the server applies nothing of it
        return frames

    def restart(self) -> None:
        """Replace this worker's copy by the server's weights, with an optimizer that begins."""
        self.replica.optimizer.reset()
        if not self.pulling:
            self.ask_for_weights()
        self.wait_until(lambda: not self.pulling)
        self.must_restart, self.has_restarted = False, True

    def failure(self, what: str) -> str:
        """Why it must leave."""
        weights = f"the server's weights of step {self.base_version}"
        return f"step {self.steps}: {what} (again, now on {weights})"

    def pull(self) -> None:
        """Ask for the server's weights; with an interval of 1, wait for them."""
        self.ask_for_weights()
        if self.interval == 1:
            self.wait_until(lambda: not self.pulling)

    def ask_for_weights(self) -> None:
        self.pulling = True
        self.link.send(Pull())

    def step_alone(self, learning_rate: float, loss: BatchLoss) -> None:
        """Apply the gradient to this worker's own copy as a server of gradients does to its.

        Raises:
            NonFiniteLoss: it is so large that the optimizer would never recover; the copy is as before.
        """
        if loss.overflow is not None:
            return
        norm = self.replica.clip(self.train.gradient_clipping)
        if not self.train.gradient_clipping.enabled:
            check_norm(norm)
        self.replica.step(learning_rate)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Take in all that has arrived, and go on until `condition` holds."""
        wait_until(self.link, condition, self.handle, self.replica.meter)

    def handle(self, event: Event) -> None:
        match event:
            case Assigned():
                self.leases.append(event)
            case WeightsArrived():
                is_result = not self.pulling  # the run's, which a user's loop gets unasked
                if parts := self.stores.weights(event):
                    self.replica.load(*(bucket for part in parts for bucket in part.weights))
                    self.replica.buffers.load(parts[0].buffers)
                    self.base_version, self.pulling = parts[0].version, False
                    if is_result:  # a lease in hand must not step on it
                        self.wait_until(lambda: False)
            case MessageReceived(message=StoreList() as stores):
                self.pulling = True
                self.stores.reach(stores)
            case MessageReceived(message=Ack() as ack) if ack.lease == self.unacknowledged:
                self.sender.settle(None if ack.outcome == "applied" else 0)
                self.unacknowledged = None
                if ack.outcome == "non_finite":
                    if self.pushed_afresh:
                        what = f"the server has refused its push; {DIVERGENCE_REMEDY}"
                        raise RefusedAgain(self.failure(what))
                    self.must_restart = True
                if ack.outcome == "stale" and not self.pulling:
                    self.ask_for_weights()
