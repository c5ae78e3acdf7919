"""The SyncPS server: a synchronous parameter server whose result does not depend on who is present.

    global batch -> parts -> members -> sum of their gradients -> mean to everybody -> commit -> next batch

A step is over when every part of its batch has counted, once. A part whose holder has gone is given to
another member at once; `timeout` seconds after the first whole part, or when its holders have taken far
longer than they should have, a late one is given to one more member as well, and whoever is first wins.
Nothing is dropped, so neither changes what is learned. One thread, `Server.run`, decides everything; sums are
made by the threads that receive.

Sources: Chen et al., 1604.00981 (synchronous SGD with backup workers); Li et al. 2014 (the parameter server).
By hand: `uv run server.py`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("syncps", "server"))


import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.SynchronousPS.config import SyncPSConfig
from smolcluster.algorithms.SynchronousPS.members import Members, StepMember
from smolcluster.algorithms.SynchronousPS.reducing_links import MeanArrived, ReducingLinks
from smolcluster.algorithms.SynchronousPS.reduction import (
    PartArrived,
    PartReceiver,
    Reduction,
    commit_frame,
    commit_of,
)
from smolcluster.algorithms.SynchronousPS.sharing import patience_s, rest_after, sizes_by_share
from smolcluster.algorithms.SynchronousPS.step import Part, PartAssignment, Step
from smolcluster.data.permutation import EpochOrders, Range, global_batches
from smolcluster.errors import NonFiniteLoss
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import ServedBatch
from smolcluster.server.buffers import BufferCollector, buffer_frames
from smolcluster.server.saver import CheckpointSource
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.loop import StepTaken
from smolcluster.training.optimizer import clip_factor
from smolcluster.training.schedule import learning_rate
from smolcluster.utils.cadence import is_power_of_two
from smolcluster.utils.units import format_bytes, format_duration
from smolcluster.utils.words import a_few
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import Counted, Fault, Pull, Push, Ready, Skip
from smolcluster.wire.session import HEARTBEATS_PER_TIMEOUT

TICK_S = 0.02


class Server:
    """One run of SyncPS."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.cluster = context.settings.cluster
        self.train = context.training.recipe.applied_to(context.run.train)
        self.replica = context.training.replica
        num_samples = context.training.num_samples
        self.orders = EpochOrders(context.training.order)
        self.total_samples = self.train.num_epochs * num_samples
        self.config = context.run.of(SyncPSConfig)
        shares = self.config.batch_share
        self.shares = None if shares is None else self.cluster.by_any_name(shares)
        self.num_grants = 0
        self.step: Step | None = None
        self.reduced: set[int] = set()
        """Buckets of the open step whose mean has been sent."""
        self.reduced_at = 0.0
        """When the newest one was."""
        self.ended_at = 0.0
        """When a member's push last ended here."""
        self.arrived: set[int] = set()
        """Those whose mean has come from stores on other hosts, which send it to everybody."""
        self.waiting: dict[int, tuple[Worker, Ready]] = {}
        """Workers, by session id, that have not reached all stores yet."""
        self.readies: dict[int, Ready] = {}
        """What those that take part said when they joined."""
        self.first_part_at: float | None = None
        """When the first part of the open step was whole."""
        self.step_s = 0.0
        """How long the last step took."""
        self.opened_at = 0.0
        self.parked: set[int] = set()
        """Ids of the workers that were parked before."""
        self.has_told_of_buffers = False
        self.reduction = Reduction(self.replica, context.codec)
        self.links = context.store_links(partial(ReducingLinks, reduction=self.reduction))
        self.feed = context.open_feed()
        self.pool = context.open_pool(self.receiver_for, self.links)
        self.report = self.pool.report
        self.evaluator = context.new_evaluator()
        source = CheckpointSource(self.replica, dict, self.reduction.residual)
        self.version = self.samples_applied = 0
        if state := context.resume(source, self.report):
            self.version, self.samples_applied = state.step, state.samples_applied
            self.reduction.resume()
        self.links.begin(self.version, self.on_store_lost)
        self.stores = context.open_stores()
        self.members = Members(
            self.stores,
            self.shares,
            context.incarnation,
            self.reduction.num_buffers,
            is_whole=context.settings.train.batch == "whole",
        )
        self.saver = context.new_saver(source, self.report)

    def receiver_for(self, session_id: int) -> PartReceiver:
        replica = self.replica
        collector = BufferCollector(replica.buffers, replica.bucket_bytes)
        return PartReceiver(
            *(session_id, self.reduction, self.context.codec, replica.buckets, collector),
            has_loss_scale=replica.scaler is not None,
            span=self.links.own_span,
        )

    def run(self) -> Summary:
        told = self.links.told(lambda: self.report.counts.ending)
        with closing(self.feed), self.pool, told, self.evaluator, self.saver:
            try:
                self.serve()
            except BaseException as error:
                self.gather_for_the_end(error)
                raise
            self.gather_for_the_end()
            return self.saver.summary()

    def serve(self) -> None:
        while not self.report.counts.is_over:
            for event in self.pool.next_events(TICK_S):
                self.handle(event)
            self.links.check_patience(time.monotonic())
            self.advance(time.monotonic())
            self.saver.tick()
            self.report.tick()

    def gather_for_the_end(self, error: BaseException | None = None) -> None:
        """Let what is saved when the run ends so hold what stores owe then."""
        if not self.saver.saves_end(error):
            return
        self.saver.wait_for_copy()
        if not self.links.gather(self.version):
            self.context.log.warning("step %d is saved without what stores owe", self.version)

    def handle(self, event: Event) -> None:
        match event:
            case PartArrived(session_id=session_id, push=push):
                if event.whole:
                    self.on_end(session_id, push)
                if event.reduced:
                    self.on_reduced(push.bucket)
            case MessageReceived(session_id=session_id, message=Skip() as skip):
                self.on_end(session_id, skip)
            case MessageReceived(session_id=session_id, message=Pull(buckets=None)) if (
                session_id in self.waiting
            ):
                self.on_reached(session_id)
            case MessageReceived(session_id=session_id, message=Pull(buckets=None)):
                self.on_fallen_behind(session_id)
            case MessageReceived(session_id=session_id, message=Pull(buckets=tuple() as buckets)):
                self.on_drift(session_id, buckets)
            case Joined(worker, ready):
                self.on_join(worker, ready)
            case Departed(worker):
                self.on_departure(worker)
            case _:
                self.handle_stores(event)

    def handle_stores(self, event: Event) -> None:
        match event:
            case MeanArrived(bucket=bucket, attempt=attempt):
                self.on_mean(bucket, attempt)
            case MessageReceived(session_id=session_id, message=Counted() as counted):
                self.on_counted(session_id, counted)
            case MessageReceived(message=Fault(sentence=sentence), session_id=session_id) if (
                self.links.node_of(session_id)
            ):
                raise NonFiniteLoss(sentence)
            case _ if self.links.handle(event):
                for worker, _ in self.waiting.values():
                    self.links.introduce(worker.live_session)

    def advance(self, now: float) -> None:
        """Do what nobody asks for: open a step, replace who is gone or late, let joiners catch up."""
        if self.step is None and self.pool.started and self.links.is_ready:
            self.open_step(now)
        is_stuck = self.step is None
        if self.step is not None:
            for part in self.step.orphans():
                taker = self.members.best_for(part)
                is_stuck |= taker is None
                self.assign(part, taker, now)
            self.tell_overdue(self.step, now)
            for part in self.step.late(now, is_late=self.is_late(now)):
                taker = self.members.idle_for(part)
                is_stuck |= taker is None and part.is_overdue(now)
                self.assign(part, taker, now)
            self.cut_silent_stores(self.step, now)
        self.members.resume(now, at_once=is_stuck)
        for joiner in self.members.joining:
            if not joiner.has_buffers:
                self.send_buffers(joiner)
            self.members.catch_up(joiner, self.version, self.reduced, self.reduction)

    def cut_silent_stores(self, step: Step, now: float) -> None:
        """Cut stores that owe means, though members have brought all: before, some may still compute."""
        is_reduced_here = len(self.reduced) == len(self.links.own_span)
        if is_reduced_here and step.has_ended_here:
            self.links.cut_silent(self.arrived, max(self.reduced_at, self.ended_at), now)

    def send_buffers(self, joiner: StepMember) -> None:
        """Send a joiner the buffers that have changed, before its first bucket; commits bring newer ones."""
        joiner.has_buffers = True
        replica = self.replica
        values = replica.buffers.values()
        for frame in buffer_frames(values, replica.bucket_bytes, version=self.version):
            joiner.session.send_frame(frame)

    def open_step(self, now: float) -> None:
        """Cut the next global batch into a part for each member that is free, and hand them out."""
        if not self.members.free:
            return
        for laggard in self.members.laggards:
            self.park(laggard, now)
        free = self.members.awake(self.version)
        batch = self.next_batch(len(free)) if free else None
        if batch is None:
            return
        sizes, expected_s = self.members.sizes(free, batch.num_samples)
        if self.context.counts_samples:
            sizes = sizes_by_share([1 / len(free)] * len(free), batch.num_samples)
        taking = [(member, size) for member, size in zip(free, sizes, strict=True) if size]
        self.step = Step(
            self.version + 1,
            batch,
            [size for _, size in taking],
            len(self.links.own_span),
            self.context.incarnation,
            others=self.links.others,
        )
        self.step.expected_s = expected_s
        self.reduction.open(self.step)
        self.links.open_step(self.step)
        self.first_part_at, self.opened_at = None, now
        for part, (member, _) in zip(self.step.parts, taking, strict=True):
            self.assign(part, member, now)

    def next_batch(self, num_members: int) -> Range | None:
        """The samples of the next step; where they are only counted, a batch of each member's own."""
        each = self.train.samples_per_push
        size = each * num_members if self.context.counts_samples else self.train.samples_per_step
        num_samples, num_epochs = self.context.training.num_samples, self.train.num_epochs
        batches = global_batches(num_samples, num_epochs, size, first=self.samples_applied)
        return next(batches, None)

    def assign(self, part: Part, member: StepMember | None, now: float) -> None:
        """Give a part to a member; without one it stays where it is."""
        if self.step is None or member is None:
            return
        self.num_grants += 1
        late = next(
            (assignment.holder for assignment in part.assignments if not assignment.superseded),
            None,
        )
        assignment = self.step.grant(part, member.worker, self.num_grants, now)
        if assignment.first_bucket == self.step.num_buckets:  # it has just been finished
            self.step.give_up(assignment)
            return
        indices = self.orders[self.step.batch.epoch][part.start : part.stop]
        scale = self.replica.run_scale
        send = member.give(
            assignment, self.version, self.learning_rate(), indices, loss_scale=scale
        )
        deliver = partial(self.send_part, self.step, assignment, member, send)
        self.feed.deliver(Range.of(assignment.key), indices, deliver)
        if assignment.backup:
            self.context.log.info(
                "%s takes over %d samples of step %d%s",
                *(member.name, part.num_samples, self.step.version),
                f" from {late.name}, which is late" if late else "",
            )
        if late:
            samples = Range.of(assignment.key)
            self.report.lease_returned(late, samples, f"it is late: {member.name} has it too")

    def send_part(
        self,
        step: Step,
        assignment: PartAssignment,
        member: StepMember,
        send: Callable[[ServedBatch | None], None],
        batch: ServedBatch | None,
    ) -> None:
        """Send a part with its batch, if the server loads that; only now its time begins."""
        if batch is not None:
            assignment.granted_at = time.monotonic()
        assignment.is_sent = True
        self.set_deadline(step, assignment, member)
        send(batch)

    def set_deadline(self, step: Step, assignment: PartAssignment, member: StepMember) -> None:
        """When a part is overdue: what is expected of its holder counts up to twice the step's own time.

        While its batch is being loaded, it is not.
        """
        if not assignment.is_sent:
            return
        heartbeat_timeout_s = self.context.run.heartbeat_timeout_s
        least_s = self.config.timeout or heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        if not self.members.any_measured:
            least_s = max(least_s, heartbeat_timeout_s)
        expected_s = min(self.members.expected_s(member), 2 * step.expected_s)
        assignment.expected_s = expected_s
        assignment.due_at = assignment.granted_at + patience_s(expected_s, least_s)
        assignment.say_at = assignment.due_at

    def is_late(self, now: float) -> bool:
        patience_s = self.config.timeout
        if patience_s is None or self.first_part_at is None:
            return False
        return now - self.first_part_at >= patience_s

    def tell_overdue(self, step: Step, now: float) -> None:
        """Say who holds up the step, again at twice the time; ever more seldom if it happens often."""
        for assignment in step.overdue(now):
            waited_s = now - assignment.granted_at
            is_news = not assignment.is_told
            assignment.is_told, assignment.say_at = True, now + waited_s
            member = self.members.get(assignment.session_id)
            if member is None:
                continue
            member.num_overdue += is_news
            reason = (
                f"it has had {assignment.part.num_samples} samples for {format_duration(waited_s)}, "
                f"expected were {format_duration(assignment.expected_s)}"
            )
            if not self.members.free:
                reason += "; nobody is free to take them over"
            self.report.overdue(member.worker, step.version, reason)
            if not is_news or is_power_of_two(member.num_overdue):
                self.context.log.warning(
                    "step %d waits for %s: %s", step.version, member.name, reason
                )

    def park(self, member: StepMember, now: float) -> None:
        """A member does not keep up: send it no more steps until its link has drained.

        Where stores on other hosts send it a part of each, it has to come back instead.
        """
        if self.links.others:
            member.session.cut("it does not keep up with the steps")
            return
        self.take_from(member.worker, "it does not keep up")
        self.members.park(member, now)
        reason = (
            f"each step sends it {format_bytes(self.replica.params.nbytes)}, and takes "
            f"{format_duration(self.step_s)}"
        )
        self.report.parked(member.worker, self.version, reason)
        if member.worker.member.worker_id not in self.parked:
            self.parked.add(member.worker.member.worker_id)
            self.context.log.warning(
                "%s does not keep up: %s. It is parked, and gets the newest weights now and then when its "
                "link has drained; such links and machines suit EDP better (launch_edp.sh)",
                *(member.name, reason),
            )

    def on_fallen_behind(self, session_id: int) -> None:
        """A member has left steps out, or it has been parked: it needs the whole state."""
        member = self.members.get(session_id)
        if member is None:
            return
        if not member.is_parked:
            self.park(member, time.monotonic())
        else:
            member.has_asked = True
            member.unanswered.clear()

    def on_join(self, worker: Worker, ready: Ready) -> None:
        if self.links.introduce(worker.live_session):
            self.welcome(worker, ready)
        else:
            self.waiting[worker.member.session_id] = worker, ready

    def on_reached(self, session_id: int) -> None:
        """A worker has reached all stores: it follows the steps from the open one on."""
        if self.links.is_ready:
            worker, ready = self.waiting.pop(session_id)
            self.links.send_means(worker.member.instance)
            self.welcome(worker, ready)

    def welcome(self, worker: Worker, ready: Ready) -> None:
        self.members.welcome(worker, ready)
        self.readies[worker.member.session_id] = ready
        if self.shares is not None and worker.member.node not in self.shares:
            self.context.log.info(
                "%s has no share in batch_share: it only stands in for others", worker.name
            )

    def on_store_lost(self) -> None:
        """The open step's sums are lost with a store: it is done again, by those who come back."""
        for worker in self.members.workers:
            self.members.forget(worker)
            ready = self.readies.pop(worker.member.session_id)
            self.waiting[worker.member.session_id] = worker, ready
        if self.step is not None:
            self.step.abandon()
            self.reduction.abandon()
            self.step = None
            self.reduced.clear()
            self.arrived.clear()

    def on_end(self, session_id: int, answer: Push | Skip) -> None:
        """What a member sends here of a part has ended; it answers when it has everywhere."""
        assignment = self.members.unanswered(session_id, answer.lease)
        if assignment is None:
            self.on_answer(session_id, answer)
            return
        assignment.answer, self.ended_at = answer, time.monotonic()
        self.ended(assignment, "")

    def on_counted(self, store_id: int, counted: Counted) -> None:
        node, session_id = self.links.node_of(store_id), self.members.session_of(counted.instance)
        if node is None or session_id is None:
            return
        assignment = self.members.unanswered(session_id, counted.lease)
        if assignment is None or node not in assignment.awaited:
            return
        step, num_buckets = assignment.step, counted.num_buckets
        if num_buckets > self.links.others[node]:
            self.links.cut(node, "it counted more buckets than it has")
            return
        step.counted(assignment, node, num_buckets, is_finished=counted.is_finished)
        self.ended(assignment, node)
        self.commit_if_whole()

    def ended(self, assignment: PartAssignment, node: str) -> None:
        assignment.awaited.discard(node)
        if not assignment.awaited and assignment.answer is not None:
            self.on_answer(assignment.session_id, assignment.answer)

    def on_answer(self, session_id: int, answer: Push | Skip) -> None:
        now = time.monotonic()
        assignment = self.members.take_back(session_id, answer, now)
        if assignment is None:
            self.report.lost_push(f"session {session_id}", "it was not waited for")
            return
        member = self.members.get(session_id)
        if assignment.is_told and member is not None:
            member.rests_until = self.version + rest_after(member.num_overdue)
        is_open = self.step is not None and assignment.part in self.step.parts
        if assignment.won:
            if is_open:
                self.first_part_at = self.first_part_at or now
                self.expect_as_long(self.step, now)
            self.members.cancel_others(assignment)
            if assignment.is_partial and not assignment.backup:
                self.members.cancel(assignment)  # so that it keeps no residual of its push
        elif isinstance(answer, Push):
            self.report.dropped(assignment.holder, answer.lease, "duplicate", 0)
            self.members.cancel(assignment)
        elif is_open and not assignment.is_cancelled and assignment.part.finished_by is None:
            assignment.holder.live_session.cut("it skipped a part that is wanted")
        if self.step is not None:
            self.step.give_up(assignment)

    def expect_as_long(self, step: Step | None, now: float) -> None:
        """Expect of the first parts of a run, of which nothing was known, what the first whole one took."""
        if step is None or math.isfinite(step.expected_s):
            return
        step.expected_s = now - self.opened_at
        for assignment in step.assignments:
            member = self.members.get(assignment.session_id)
            if member is not None:
                self.set_deadline(step, assignment, member)

    def on_reduced(self, bucket: int) -> None:
        """Send the mean of a bucket to everybody; after the last one, commit."""
        if self.step is None:
            return
        self.members.send_mean(bucket, self.reduction.frame(self.step.version, bucket))
        self.reduced.add(bucket)
        self.reduced_at = time.monotonic()
        self.commit_if_whole()

    def on_mean(self, bucket: int, attempt: int) -> None:
        """A store has added up a bucket of the open step, and sent it to everybody."""
        if self.step is not None and attempt == self.links.attempt:
            self.reduction.check(self.step.version, bucket)
            self.arrived.add(bucket)
            self.commit_if_whole()

    def commit_if_whole(self) -> None:
        num_reduced = len(self.reduced) + len(self.arrived)
        is_whole = self.step is not None and num_reduced == len(self.replica.buckets)
        if self.step is not None and is_whole and self.step.is_whole:
            self.commit(self.step)

    def commit(self, step: Step) -> None:
        """Everybody takes the step; then the next one begins, while the server takes it itself."""
        self.saver.wait_for_copy()
        norm = self.reduction.norm()
        rate = self.learning_rate() if step.learning_rate is None else step.learning_rate
        clip = clip_factor(norm, self.train.gradient_clipping)
        compare = step.version % self.cluster.worker_update_interval == 0
        digests = self.stores.digests() if compare else []
        self.members.settle(step)
        for part in step.parts:
            self.feed.applied(Range(step.batch.epoch, part.start, part.stop))
        self.members.broadcast(*self.commit_buffers(step), commit_frame(step, clip, rate, digests))
        self.links.commit(commit_of(step, clip, rate))
        self.reduction.close()
        self.replica.note_step(overflow=step.overflow)
        self.version, self.step = step.version, None
        self.reduced.clear()
        self.arrived.clear()
        self.step_s = time.monotonic() - self.opened_at
        self.samples_applied += step.batch.num_samples
        self.open_step(time.monotonic())
        mean = self.reduction.mean(step.version)
        layer_norms = self.report.layer_norms(mean)
        if step.overflow is None:
            self.stores.take(mean, owned=not self.reduction.is_lossless)
            self.stores.step(clip, rate, self.train.gradient_clipping.bound)
            self.replica.update_average()
        self.tell(step, norm, rate, layer_norms)

    def commit_buffers(self, step: Step) -> list[Frame]:
        """Take the mean of the parts' buffers; returns frames of these for everybody."""
        replica, added = self.replica, step.buffers
        if not added:
            return []
        replica.buffers.add(added)
        if len(step.parts) > 1 and not self.has_told_of_buffers:
            self.has_told_of_buffers = True
            self.context.log.info(
                "the model changes buffers as it computes (%s): each worker changes its own, and each step "
                "takes their mean; so this is not equal to training in one process",
                a_few([replica.buffers.names[number] for number in added]),
            )
        return buffer_frames(replica.buffers.values(), replica.bucket_bytes, version=step.version)

    def on_drift(self, session_id: int, buckets: Sequence[int]) -> None:
        member = self.members.send_weights(session_id, self.version, buckets)
        if member is not None and is_power_of_two(member.num_drifts):
            self.context.log.warning(
                "%s: %d of %d buckets of its weights differ from the server's after step %d (time %d that "
                "they do); blended with polyak_alpha = %g",
                *(member.name, len(buckets), len(self.replica.buckets), self.version),
                *(member.num_drifts, self.config.polyak_alpha),
            )

    def on_departure(self, worker: Worker) -> None:
        """Take everything out of a worker's hands; `advance` gives it to others."""
        self.waiting.pop(worker.member.session_id, None)
        self.readies.pop(worker.member.session_id, None)
        self.links.worker_gone(worker.member.instance)
        member = self.members.forget(worker)
        if member is None:
            return
        if worker.live_session.receiver.in_progress:
            self.report.lost_push(worker.name, "its connection broke")
        self.take_from(worker, "its worker has gone")

    def take_from(self, worker: Worker, reason: str) -> None:
        """Nothing of the open step's parts that this worker holds counts any more."""
        for assignment in self.step.drop(worker.member.session_id) if self.step else ():
            self.members.remember(assignment)
            if assignment.part.finished_by is None and not assignment.part.num_hopeful:
                self.report.lease_returned(worker, Range.of(assignment.key), reason)

    def tell(self, step: Step, norm: float, rate: float, layer_norms: Mapping[str, float]) -> None:
        """Report a step that has been taken, and evaluate if it is time."""
        for part in step.parts:
            if part.finished_by:
                self.report.contributed(part.finished_by.holder, part.num_samples, part.loss.mean)
        self.report.step_taken(
            StepTaken(
                version=step.version,
                samples=step.batch,
                loss=step.loss.mean,
                learning_rate=rate,
                grad_norm=norm,
                layer_norms=layer_norms,
                num_terms=step.loss.num_terms,
                is_skipped=step.overflow is not None,
            )
        )
        is_evaluated = self.evaluator.after_step(step.version, step.batch.epoch)
        if self.saver.is_due(step.version) and not self.links.gather(
            step.version, self.context.check_stop
        ):
            self.context.log.warning("step %d is saved without what stores owe", step.version)
        self.saver.after_step(is_evaluated=is_evaluated)

    def learning_rate(self) -> float:
        schedule = self.context.training.recipe.schedule
        return learning_rate(self.train, self.samples_applied, self.total_samples, schedule)


def serve(context: ServerContext) -> Summary:
    return Server(context).run()
