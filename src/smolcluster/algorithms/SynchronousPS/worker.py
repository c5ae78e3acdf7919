"""A SyncPS worker: computes its parts of each global batch, and takes every step that the server commits.

    assignment -> forward, backward -> push -> mean gradients of all -> commit -> optimizer step

It begins with a copy of the server's weights and optimizer state, and keeps equal to the server by taking
the same steps. Every `worker_update_interval` steps it compares digests of the weights; where they differ,
because its processor rounds otherwise, it blends the server's weights into its own.
By hand: `uv run worker.py 1 pi5`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("syncps", "worker"))


import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from smolcluster.algorithms.SynchronousPS import rule
from smolcluster.algorithms.SynchronousPS.config import SyncPSConfig
from smolcluster.algorithms.SynchronousPS.step_receiver import (
    Committed,
    FellBehind,
    MeanReceiver,
    MeanWhole,
    Outgoing,
    StateArrived,
    StepReceiver,
)
from smolcluster.data.permutation import EpochOrders
from smolcluster.errors import NonFiniteLoss, PeerLost
from smolcluster.server.assignment import Assigned
from smolcluster.server.buffers import buffer_frames
from smolcluster.server.link import Link
from smolcluster.server.push import GradientSender
from smolcluster.server.store import Store, state_of
from smolcluster.server.store_client import StoreClient
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    MAX_PULLED_BUCKETS,
    WEIGHTS,
    Cancel,
    Commit,
    LeaseKey,
    Park,
    Pull,
    Skip,
    StoreList,
    Welcome,
)
from smolcluster.wire.session import HEARTBEATS_PER_TIMEOUT, Session

WAIT_S = 1.0
FLUSH_S = 0.1


class Worker:
    """A worker's part in a run, over all its sessions."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        self.codec = welcome.codec
        config = welcome.run.of(SyncPSConfig)
        self.polyak_alpha = config.polyak_alpha
        self.patience_s = config.timeout or math.inf
        self.longest_wait_s = welcome.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        self.training = training
        self.bound = training.recipe.applied_to(welcome.run.train).gradient_clipping.bound
        self.train = welcome.run.train
        self.orders = EpochOrders(training.order)
        self.replica = training.replica
        self.store = Store.of(training.replica)
        """The same as the server's, and they take the same steps."""
        self.sender = GradientSender(welcome.codec, training.replica, in_place=True)
        self.version = 0
        self.has_state = False
        """Whether the server's whole state has arrived in this session."""
        self.fell_behind = False
        """Whether steps were left out; the server has been told, and will begin anew."""
        self.tasks: deque[Assigned] = deque()
        self.num_computed = 0
        """Samples since the last step."""
        self.cancelled: set[LeaseKey] = set()
        """Of parts that are computed, or have not even come: a Cancel is quicker than what it cancels."""
        self.newest_grant = -1
        self.outgoing: dict[Session, Outgoing] = {}
        """The last push, by where its buckets go to."""
        self.deferred: deque[Event] = deque()
        """A commit whose mean has not all come from stores, and what the server has said after it."""
        self.unacknowledged: LeaseKey | None = None
        self.unacknowledged_terms = 0.0
        """Loss terms of that push."""
        self.client = StoreClient(len(self.replica.buckets), self.mean_receiver)
        self.link: Link
        self.receiver: StepReceiver

    @property
    def joined(self) -> bool:
        """Whether this replica is whole, and all steps so far have come to it."""
        return self.has_state and not self.fell_behind

    def new_receiver(self) -> StepReceiver:
        self.receiver = StepReceiver(self.replica, self.codec, self.patience_s, self.longest_wait_s)
        return self.receiver

    def mean_receiver(self, span: range) -> MeanReceiver:
        return self.receiver.from_store(span)

    def take_part(self, link: Link) -> None:
        """Train until the link raises. The server sends its state first."""
        self.link = link
        self.client.begin(link)
        self.deferred.clear()
        self.has_state = self.fell_behind = False
        self.tasks.clear()
        self.cancelled.clear()
        self.outgoing.clear()
        try:
            while True:
                is_busy = bool(self.tasks) and not self.deferred
                with self.replica.meter("wait"):
                    event = link.next_event(0.0 if is_busy else WAIT_S)
                if event is not None:
                    self.handle(event)
                elif is_busy:
                    self.work_on(self.tasks.popleft())
        finally:
            self.receiver.close()
            del self.receiver  # its memory is free before the next session takes its own

    def work_on(self, task: Assigned) -> None:
        """Compute a part's gradient and push it, unless it is wanted no more."""
        compute_s = 0.0
        if self.is_wanted(task):
            self.await_sent()
        if self.is_wanted(task):
            self.want_next(task)
            started = time.perf_counter()
            try:
                self.replica.buffers.restore()  # each part begins as the step does
                self.replica.loss_scale = task.assignment.loss_scale
                loss = task.compute(self.training)
                buffers = self.replica.buffers.difference()
            except NonFiniteLoss as error:
                raise NonFiniteLoss(f"step {self.version + 1}: {error}") from error
            compute_s = time.perf_counter() - started
            if self.is_first_part(task):
                is_cut = task.num_samples < task.assignment.batch_samples
                task.examine(self.training, loss=is_cut, buffers=is_cut)
            self.num_computed += task.num_samples
            self.hear()
        if self.is_wanted(task):
            nbytes, key = self.replica.bucket_bytes, task.lease
            for frame in buffer_frames(buffers, nbytes, version=self.version, lease=key):
                self.link.send_frame(frame)
            self.push(task, loss, compute_s)
        else:
            self.skip(task.lease, compute_s)

    def is_first_part(self, task: Assigned) -> bool:
        """Whether the task begins a step's batch: of a step's workers one has it."""
        return task.lease.start % self.train.samples_per_step == 0 and not task.assignment.backup

    def skip(self, lease: LeaseKey, compute_s: float = 0.0) -> None:
        """Nothing of this part is pushed: tell all who might wait for it."""
        for session in self.client.sessions:
            session.send(Skip(lease=lease, compute_s=compute_s))

    def want_next(self, task: Assigned) -> None:
        """Begin to load the same part of the next batch: most likely the next one to be computed here."""
        if task.assignment.batch_nbytes is not None or self.training.prefetch is None:
            return
        batch_size, lease = self.train.samples_per_step, task.lease
        epoch, start = lease.epoch, lease.start + batch_size
        if start >= self.training.num_samples:
            epoch, start = epoch + 1, lease.start % batch_size
        if epoch < self.train.num_epochs:
            indices = self.orders[epoch][start : start + task.num_samples]
            self.training.want(indices, epoch, start)

    def await_sent(self) -> None:
        """Wait for the last push, which is the replica's own memory, unless it is called off meanwhile."""
        while True:
            with self.replica.meter("send"):
                is_sent = self.client.flush(FLUSH_S)
            if is_sent:
                return
            self.hear()

    def hear(self) -> None:
        while (event := self.link.next_event(0.0)) is not None:
            self.handle(event)

    def is_wanted(self, task: Assigned) -> bool:
        """Whether the step of this task is still open, as far as is known here."""
        is_current = self.joined and task.assignment.version == self.version
        return is_current and task.lease not in self.cancelled

    def push(self, task: Assigned, loss: BatchLoss, compute_s: float) -> None:
        """Send the gradient; as a backup for somebody else, only what is missing, and lossless."""
        what = task.lease, self.version, loss, compute_s
        if task.assignment.backup:
            pushes = self.sender.pushes(*what, backup_from=task.assignment.first_bucket)
            hold = None
        else:
            share = task.num_samples / max(task.num_samples, task.assignment.batch_samples)
            pushes = self.sender.pushes(*what, share=share)
            hold = self.receiver.means.hold
            self.unacknowledged, self.unacknowledged_terms = task.lease, loss.num_terms
            self.receiver.means.pace(paced=not self.tasks)
        self.outgoing = {
            session: Outgoing(task.lease, compute_s, hold) for session in self.client.sessions
        }
        for push, payload in pushes:
            session = self.client.session_of(push.bucket)
            session.send_later(partial(self.outgoing[session].frame, push, payload))
        for session, outgoing in self.outgoing.items():
            session.send_later(outgoing.ending)

    def handle(self, event: Event) -> None:
        """Act on what has come, in the server's order; a commit waits for what stores have of its mean."""
        match event:
            case MeanWhole():
                while self.deferred and self.is_complete(self.deferred[0]):
                    self.act(self.deferred.popleft())
            case MessageReceived(message=Cancel() as cancel):
                self.on_cancel(cancel)
            case MessageReceived(message=StoreList() as stores):
                self.client.reach(stores)
            case _ if self.deferred or not self.is_complete(event):
                self.deferred.append(event)
            case _:
                self.act(event)

    def is_complete(self, event: Event) -> bool:
        """Whether it need not wait for means; of a commit that does not follow none are to come."""
        if not isinstance(event, Committed) or event.commit.version != self.version + 1:
            return True
        return self.receiver.means.is_whole(event.commit.version)

    def act(self, event: Event) -> None:
        match event:
            case Assigned():
                self.receiver.means.pace(paced=False)  # what waits may be what the mean waits for
                self.newest_grant = event.lease.grant
                event.begin_to_load(self.training)
                self.tasks.append(event)
            case Committed():
                self.take_step(event)
            case StateArrived() if self.joined:
                self.blend(event.state.bucket, event.values)
            case StateArrived() if not self.fell_behind:
                self.join(event)
            case MessageReceived(message=Park() as park):
                self.begin_anew(park)
            case FellBehind() if self.receiver.means.has_fallen_behind:
                self.fell_behind = True
                self.link.send(Pull())

    def take_step(self, committed: Committed) -> None:
        """Take the step that everybody takes.

        Raises:
            PeerLost: it does not follow on this replica; the next session brings the whole state.
        """
        commit = committed.commit
        if not self.joined or commit.version != self.version + 1:
            raise PeerLost(f"step {commit.version} does not follow on step {self.version} here")
        if committed.digests:
            self.compare(committed.digests)
        mean = self.receiver.means.take(commit.version)
        if not commit.is_skipped:
            with self.replica.meter("apply"):
                self.store.take(mean, owned=True)  # the replica's `grads` may still be on their way
                self.store.step(commit.clip, commit.learning_rate, self.bound)
        self.receiver.means.give_back(mean)
        if committed.buffers:
            self.replica.buffers.load(committed.buffers)
        self.version = commit.version
        self.cancelled = {lease for lease in self.cancelled if lease.grant > self.newest_grant}
        self.settle_step(commit)
        self.replica.meter.step_done(self.num_computed)
        self.num_computed = 0

    def compare(self, digests: Sequence[bytes]) -> None:
        pairs = zip(self.store.digests(), digests, strict=True)
        drifted = tuple(number for number, (own, theirs) in enumerate(pairs) if own != theirs)
        if drifted:
            self.link.send(Pull(buckets=drifted[:MAX_PULLED_BUCKETS]))

    def blend(self, bucket: int, weights: Tensor) -> None:
        own = self.replica.params[self.replica.buckets[bucket]]
        rule.blend(own, weights.to(own.device), self.polyak_alpha)

    def join(self, arrived: StateArrived) -> None:
        """Take a tensor of the server's state; with the last one this worker is a member."""
        contents, state = state_of(self.replica), arrived.state
        contents[state.content].copy_(arrived.values)
        if state.content == WEIGHTS:
            self.replica.buffers.load(arrived.buffers)
        self.version = state.version
        if STEP_COUNT in self.replica.optimizer.state:
            self.replica.optimizer.state[STEP_COUNT].fill_(state.version - state.num_skipped)
        self.has_state = state.content == list(contents)[-1]

    def on_cancel(self, cancel: Cancel) -> None:
        """Drop a part, or what has not been sent of its push; learn how much of that has counted."""
        self.call_off(cancel.lease)
        waiting = next((task for task in self.tasks if task.lease == cancel.lease), None)
        if waiting is not None:
            self.tasks.remove(waiting)
            self.skip(cancel.lease)
        elif cancel.lease == self.unacknowledged:
            self.settle_as_told(cancel.num_buckets)
        else:
            self.cancelled.add(cancel.lease)

    def call_off(self, lease: LeaseKey | None) -> None:
        """Leave out what has not begun to be sent of the last push, if it is of this lease (None: any)."""
        for outgoing in self.outgoing.values():
            if lease in (None, outgoing.lease):
                outgoing.is_wanted = False
                self.receiver.means.pace(paced=False)

    def begin_anew(self, park: Park) -> None:
        """The server has given up sending every step: forget all but the run, and ask for the state."""
        self.call_off(None)
        self.settle_as_told(park.num_buckets if park.lease == self.unacknowledged else 0)
        self.tasks.clear()
        self.cancelled.clear()
        self.has_state = self.fell_behind = False
        self.link.send(Pull())

    def settle_step(self, commit: Commit) -> None:
        """The last push has counted, by its part of the step's loss terms, unless the step is skipped."""
        terms = self.unacknowledged_terms
        share = terms / commit.num_terms if terms and commit.num_terms else None
        self.settle(0 if commit.is_skipped else None, share)

    def settle_as_told(self, num_buckets: int | None) -> None:
        """So many buckets of the last push have counted; None: which is not known, so nothing is owed."""
        if num_buckets is None:
            self.sender.forget()
        self.settle(num_buckets or 0)

    def settle(self, num_buckets: int | None, share: float | None = None) -> None:
        """So many buckets (None: all) of the last push have counted; forget the others' residual."""
        self.receiver.means.pace(paced=False)
        if self.unacknowledged is not None:
            self.sender.settle(num_buckets, share)
            self.unacknowledged = None
