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
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.SynchronousPS.config import SyncPSConfig
from smolcluster.algorithms.SynchronousPS.members import Members, StepMember
from smolcluster.algorithms.SynchronousPS.reduction import PartReceiver, PushArrived
from smolcluster.algorithms.SynchronousPS.sharing import rest_after, sizes_by_share
from smolcluster.algorithms.SynchronousPS.step import (
    Need,
    Part,
    PartAssignment,
    Step,
    is_overdue,
    needs_holder,
)
from smolcluster.algorithms.SynchronousPS.store import ReducingLinks
from smolcluster.data.permutation import EpochOrders, Range, global_batches
from smolcluster.runs.events import StepOverdue, WorkerParked
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import ServedBatch, assignment_of, send_assignment
from smolcluster.server.buffers import BufferCollector, buffer_frames
from smolcluster.server.push import digests_spec
from smolcluster.server.saver import CheckpointSource
from smolcluster.server.store import Store
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
from smolcluster.wire.messages import (
    Arrived,
    Commit,
    Pull,
    Push,
    Reduced,
    Skip,
    frame_of,
)
from smolcluster.wire.session import HEARTBEATS_PER_TIMEOUT

TICK_S = 0.02


class Server:
    """One run of SyncPS."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.cluster = context.settings.cluster
        self.train = context.training.recipe.applied_to(context.run.train)
        self.replica = context.training.replica
        self.orders = EpochOrders(context.training.order)
        self.total_samples = self.train.total_samples(context.training.num_samples)
        self.config = context.run.of(SyncPSConfig)
        shares = self.config.batch_share
        self.shares = None if shares is None else self.cluster.by_any_name(shares)
        self.num_grants = 0
        self.step: Step | None = None
        """The open one."""
        self.is_stuck = True
        """Whether somebody is needed: no step is open, or nobody can take a part that needs somebody."""
        self.step_s = 0.0
        """How long the last step took."""
        self.waiting: dict[int, Worker] = {}
        """Workers, by session id, that have not reached all stores yet."""
        self.parked: set[int] = set()
        """Ids of the workers that were parked before."""
        self.has_told_of_buffers = False
        replica = self.replica
        self.links = context.store_links(ReducingLinks)
        self.reduction = self.links.own
        self.feed = context.open_feed()
        self.pool = context.open_pool(self.receiver_for, self.links)
        self.report = self.pool.listener
        self.evaluator = context.new_evaluator(self.report)
        source = CheckpointSource(self.replica, dict, self.reduction.contents)
        self.version = self.samples_applied = 0
        if state := context.resume(source, self.report):
            self.version, self.samples_applied = state.step, state.samples_applied
            self.reduction.resume()
        self.links.begin(self.version, self.report.steps_undone, self.on_store_lost)
        self.store = Store.of(replica)
        self.members = Members(
            replica,
            self.shares,
            context.incarnation,
            self.reduction.num_buffers,
            is_whole=context.settings.train.batch == "whole",
        )
        self.saver = context.new_saver(source, self.report)

    def receiver_for(self, session_id: int) -> PartReceiver:
        replica = self.replica
        return PartReceiver(
            session_id,
            self.reduction,
            self.context.codec,
            replica.buckets,
            BufferCollector(replica.buffers, replica.bucket_bytes),
            has_loss_scale=replica.scaler is not None,
            span=self.reduction.span,
        )

    def run(self) -> Summary:
        with closing(self.feed), self.pool, self.evaluator, self.saver:
            try:
                self.serve()
            except BaseException as error:
                self.gather_for_the_end(error)
                raise
            self.gather_for_the_end()
            if self.context.is_attached:
                self.give_result()
            return self.saver.summary()

    def serve(self) -> None:
        while not self.report.counts.is_over:
            for event in self.pool.next_events(TICK_S):
                self.handle(event)
            self.links.check_patience(time.monotonic())
            self.advance(time.monotonic())
            self.saver.tick()
            self.report.tick()

    def give_result(self) -> None:
        """Send loops of a user's own that are parked the final state; the others have taken all steps."""
        for member in self.members.parked:
            self.send_state(member)

    def gather_for_the_end(self, error: BaseException | None = None) -> None:
        """Let what is saved when the run ends so hold what stores owe then."""
        if not self.saver.saves_end(error):
            return
        self.saver.wait_for_copy()
        if not self.links.gather(self.version):
            self.context.log.warning("step %d is saved without what stores owe", self.version)

    def advance(self, now: float) -> None:
        """Go on with the open step, and let members take part that have caught up."""
        self.members.note_joined()
        while self.take_step(now):
            self.context.check_stop()  # workers may bring the next step while it is dealt
        for member in self.members.returning(now, at_once=self.is_stuck):
            self.send_state(member)

    def take_step(self, now: float) -> bool:
        """Take one step of the run as far as it goes; returns whether it has been taken.

        It is called again whenever something has come. `v` is the version of the weights, `c` clips.
        """
        step = self.step or self.open_step(now)  # the next N samples, cut into parts of n_i
        if step is None:
            return False  # nobody is free, or nothing is left
        self.deal(step, now)  # each part to a member, and to another if that is gone or late
        if not self.collect(step, now):  # g = Σ (t_i / T) · g_i, sent back bucket by bucket
            return False
        taken = self.commit(step)  # everybody: w = optimizer(w, c·g, η); then it is version v + 1
        self.tell(step, taken)  # the world, the evaluation, the checkpoint
        return True

    # A step's phases.

    def open_step(self, now: float) -> Step | None:
        """Cut the next global batch into a part for each member that is free; None: there is none."""
        self.is_stuck = True
        if not (self.pool.started and self.links.is_ready and self.members.free):
            return None
        for laggard, reason in self.members.laggards:
            self.park(laggard, reason, now)
        free = self.members.awake(self.version)
        batch = self.next_batch(len(free)) if free else None
        if batch is None:
            return None
        sizes, expected_s = self.members.sizes(free, batch.num_samples)
        if self.context.counts_samples:
            sizes = sizes_by_share([1 / len(free)] * len(free), batch.num_samples)
        taking = [(member, size) for member, size in zip(free, sizes, strict=True) if size]
        self.step = Step(
            self.version + 1,
            batch,
            [size for _, size in taking],
            len(self.reduction.span),
            self.context.incarnation,
            others=self.links.others,
            expected_s=expected_s,
            opened_at=now,
        )
        for part, (member, _) in zip(self.step.parts, taking, strict=True):
            part.meant_for = member.worker.member.session_id
        self.links.open_step(self.step)
        return self.step

    def next_batch(self, num_members: int) -> Range | None:
        """The samples of the next step; where they are only counted, a batch of each member's own."""
        each = self.train.samples_per_push
        size = each * num_members if self.context.counts_samples else self.train.samples_per_step
        num_samples = self.context.training.num_samples
        batches = global_batches(num_samples, self.total_samples, size, first=self.samples_applied)
        return next(batches, None)

    def deal(self, step: Step, now: float) -> None:
        """Give each part that needs a holder to a member; without one it stays where it is."""
        self.is_stuck = False
        self.tell_overdue(step, now)
        for part in step.unfinished():
            need = needs_holder(part, now, is_late=self.is_late(now))
            if need is None:
                continue
            taker = self.members.taker_of(part, is_orphan=need is Need.ORPHAN)
            if taker is not None:
                self.assign(step, part, taker, now)
            elif need is not Need.LATE:
                self.is_stuck = True

    def assign(self, step: Step, part: Part, member: StepMember, now: float) -> None:
        self.num_grants += 1
        late = next((each.holder for each in part.hopeful), None)
        assignment = step.grant(part, member.worker, self.num_grants, now)
        if assignment.first_bucket == step.num_buckets:  # it has just been finished
            step.give_up(assignment)
            return
        samples = Range.of(assignment.key)
        indices = self.orders[samples.epoch][part.start : part.stop]
        member.unanswered[assignment.key] = assignment
        message_of = partial(
            assignment_of,
            assignment.key,
            indices,
            version=self.version,
            learning_rate=self.learning_rate(),
            loss_scale=self.replica.run_scale,
            batch_samples=step.batch.num_samples,
            first_bucket=assignment.first_bucket,
            backup=assignment.backup,
        )

        def send(batch: ServedBatch | None) -> None:
            if batch is not None:
                assignment.term.since = time.monotonic()  # only now its time begins
            self.set_term(assignment, member)
            if assignment.key in member.unanswered and not member.is_parked:
                send_assignment(member.session, *message_of(batch), batch)

        self.feed.deliver(samples, indices, send)
        if assignment.backup:
            self.context.log.info(
                "%s takes over %d samples of step %d%s",
                member.name,
                part.num_samples,
                step.version,
                f" from {late.name}, which is late" if late else "",
            )
        if late:
            self.report.lease_returned(late, samples, f"it is late: {member.name} has it too")

    def set_term(self, assignment: PartAssignment, member: StepMember) -> None:
        """When a part is overdue: what is expected of its holder counts up to twice the step's own time."""
        heartbeat_timeout_s = self.context.run.heartbeat_timeout_s
        least_s = self.config.timeout or heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        if not self.members.any_measured:
            least_s = max(least_s, heartbeat_timeout_s)
        expected_s = min(self.members.expected_s(member), 2 * assignment.step.expected_s)
        assignment.term.expect(expected_s, least_s)

    def is_late(self, now: float) -> bool:
        """Whether a part that one member works on is given to a second one."""
        patience_s, step = self.config.timeout, self.step
        if patience_s is None or step is None or step.first_part_at is None:
            return False
        return now - step.first_part_at >= patience_s

    def tell_overdue(self, step: Step, now: float) -> None:
        """Say who holds up the step, again at twice the time; ever more seldom if it happens often."""
        for assignment in step.assignments:
            member = self.members.get(assignment.session_id)
            reason = is_overdue(assignment, now)
            if reason is None or member is None:
                continue
            if not self.members.free:
                reason += "; nobody is free to take them over"
            is_news = assignment.term.tell(now)
            member.num_overdue += is_news
            self.report.happened(StepOverdue(**member.worker.who, step=step.version, reason=reason))
            if not is_news or is_power_of_two(member.num_overdue):
                self.context.log.warning(
                    "step %d waits for %s: %s", step.version, member.name, reason
                )

    def collect(self, step: Step, now: float) -> bool:
        """Send everybody the mean of each bucket that all parts have brought; whether the step is whole."""
        for frame in self.reduction.new_means():
            self.members.send_mean(frame)
            step.heard_at = now
        if self.reduction.is_whole and step.has_ended_here:
            self.links.cut_silent(step.heard_at, now)
        return self.links.has_all_means and not step.unfinished()

    def commit(self, step: Step) -> StepTaken:
        """Everybody takes the step, and so does this server; then it stands at the next version."""
        self.saver.wait_for_copy()
        norm, mean = self.reduction.norm(), self.reduction.mean(step.version)
        rate = self.members.learning_rate(step)
        if rate is None:
            rate = self.learning_rate()
        clip = clip_factor(norm, self.train.gradient_clipping)
        compare = step.version % self.cluster.worker_update_interval == 0
        digests = self.store.digests() if compare else []
        commit = Commit(
            version=step.version,
            num_samples=step.batch.num_samples,
            num_terms=step.loss.num_terms,
            clip=clip,
            is_skipped=step.overflow is not None,
            learning_rate=rate,
            tensor=digests_spec(len(digests)) if digests else None,
        )
        self.members.settle(step)
        for part in step.parts:
            self.feed.applied(Range(step.batch.epoch, part.start, part.stop))
        committed = frame_of(commit, b"".join(digests))
        self.members.broadcast(*self.commit_buffers(step), committed)
        self.links.commit(commit)
        layer_norms = self.report.layer_norms(mean)
        if not commit.is_skipped:
            with self.replica.meter("apply"):
                self.store.take(mean, owned=not self.reduction.is_lossless)
                self.store.step(clip, rate, self.train.gradient_clipping.bound)
            self.replica.update_average()
        self.replica.note_step(overflow=step.overflow)
        self.version, self.step = step.version, None
        self.samples_applied += step.batch.num_samples
        self.step_s = time.monotonic() - step.opened_at
        return StepTaken(
            version=step.version,
            samples=step.batch,
            loss=step.loss.mean,
            learning_rate=rate,
            grad_norm=norm,
            layer_norms=layer_norms,
            num_terms=step.loss.num_terms,
            is_skipped=commit.is_skipped,
        )

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

    def tell(self, step: Step, taken: StepTaken) -> None:
        """Report a step that has been taken, evaluate and save if it is time."""
        for part in step.parts:
            if part.finished_by:
                self.report.contributed(part.finished_by.holder, part.num_samples, part.loss.mean)
        self.report.step_taken(taken)
        is_evaluated = self.evaluator.after_step(step.version, step.batch.epoch)
        if self.saver.is_due(step.version) and not self.links.gather(
            step.version, self.context.check_stop
        ):
            self.context.log.warning("step %d is saved without what stores owe", step.version)
        self.saver.after_step(is_evaluated=is_evaluated)

    def learning_rate(self) -> float:
        schedule = self.context.training.recipe.schedule
        return learning_rate(self.train, self.samples_applied, self.total_samples, schedule)

    # What comes between.

    def handle(self, event: Event) -> None:
        """Note what has come; `advance` acts on it."""
        match event:
            case PushArrived(session_id=session_id, push=push):
                if event.whole:
                    self.on_end(session_id, push)
            case MessageReceived(session_id=session_id, message=Skip() as skip):
                self.on_end(session_id, skip)
            case MessageReceived(session_id=session_id, message=Pull(buckets=None)):
                self.on_pull(session_id)
            case MessageReceived(session_id=session_id, message=Pull(buckets=tuple() as buckets)):
                self.on_drift(session_id, buckets)
            case Joined(worker):
                if self.links.introduce(worker.live_session):
                    self.welcome(worker)
                else:
                    self.waiting[worker.member.session_id] = worker
            case Departed(worker):
                self.on_departure(worker)
            case _:
                self.handle_stores(event)

    def handle_stores(self, event: Event) -> None:
        match event:
            case MessageReceived(message=Reduced() as reduced):
                self.links.note_mean(reduced)
            case MessageReceived(session_id=store_id, message=Arrived() as told):
                self.on_counted(store_id, told)
            case _ if self.links.handle(event):
                for worker in self.waiting.values():
                    self.links.introduce(worker.live_session)

    def on_end(self, session_id: int, answer: Push | Skip) -> None:
        """What a member sends here of a part has ended; it has answered when it has ended everywhere."""
        assignment = self.members.unanswered(session_id, answer.lease)
        if assignment is None:
            self.report.lost_push(f"session {session_id}", "it was not waited for")
            return
        assignment.push.answer = answer
        assignment.step.heard_at = time.monotonic()
        self.ended(assignment, "")

    def on_counted(self, store_id: int, told: Arrived) -> None:
        """A push has ended at a store, where some of its buckets have counted."""
        node, key = self.links.node_of(store_id), told.key
        assignment = key and self.members.unanswered_by(key)
        if node is None or not assignment or node not in assignment.push.awaited:
            return
        num_buckets = told.tensor.shape[1]
        assignment.step.counted(assignment, node, num_buckets, is_finished=told.is_whole)
        self.ended(assignment, node)

    def ended(self, assignment: PartAssignment, node: str) -> None:
        assignment.push.awaited.discard(node)
        if not assignment.push.awaited and assignment.push.answer is not None:
            self.on_answer(assignment, assignment.push.answer)

    def on_answer(self, assignment: PartAssignment, answer: Push | Skip) -> None:
        """A member has answered for a part: it won, it was beaten, or it has given it back."""
        now, step = time.monotonic(), assignment.step
        member = self.members.take_back(assignment, answer, now)
        if assignment.term.is_told:
            member.rests_until = self.version + rest_after(member.num_overdue)
        is_open = step is self.step
        if assignment.won:
            if is_open:
                step.first_part_at = step.first_part_at or now
                self.expect_as_long(step, now)
            for other in assignment.part.assignments:
                if other is not assignment:
                    self.members.cancel(other)
            if assignment.is_partial and not assignment.backup:
                self.members.cancel(assignment)  # so that it keeps no residual of its push
        elif isinstance(answer, Push):
            self.report.dropped(assignment.holder, answer.lease, "duplicate", 0)
            self.members.cancel(assignment)
        elif is_open and not assignment.push.is_cancelled and assignment.part.finished_by is None:
            member.session.cut("it skipped a part that is wanted")
        step.give_up(assignment)

    def expect_as_long(self, step: Step, now: float) -> None:
        """Expect of the first parts of a run, of which nothing was known, what the first whole one took."""
        if math.isfinite(step.expected_s):
            return
        step.expected_s = now - step.opened_at
        for assignment in step.assignments:
            member = self.members.get(assignment.session_id)
            if member is not None and assignment.term.has_begun:
                self.set_term(assignment, member)

    def on_pull(self, session_id: int) -> None:
        """A worker asks for the whole state: it has reached all stores, left steps out, or been parked."""
        member = self.members.get(session_id)
        if session_id in self.waiting:
            if self.links.is_ready:
                worker = self.waiting.pop(session_id)
                self.links.send_means(worker.member.instance, self.version)
                self.welcome(worker)
        elif member is None:
            pass
        elif member.is_parked:
            member.has_asked = True
            member.unanswered.clear()
        else:
            self.park(member, "it has left steps out", time.monotonic())

    def welcome(self, worker: Worker) -> None:
        """Send a worker the state, which it follows from then on."""
        self.send_state(self.members.welcome(worker))
        if self.shares is not None and worker.member.node not in self.shares:
            self.context.log.info(
                "%s has no share in batch_share: it only stands in for others", worker.name
            )

    def send_state(self, member: StepMember) -> None:
        """Send a member all that the last step has left, and what the open one has of its mean."""
        self.members.send_state(member, self.version, self.reduction.means)

    def park(self, member: StepMember, reason: str, now: float) -> None:
        """A member does not keep up: send it no more steps until its link has drained.

        Where stores on other hosts send it a part of each, it has to come back instead.
        """
        if self.links.others:
            member.session.cut(f"it does not keep up with the steps: {reason}")
            return
        self.take_from(member.worker, "it does not keep up")
        self.members.park(member, now)
        reason += (
            f"; each sends it {format_bytes(self.replica.params.nbytes)}, and takes "
            f"{format_duration(self.step_s)}"
        )
        self.report.happened(WorkerParked(**member.worker.who, step=self.version, reason=reason))
        if member.worker.member.worker_id not in self.parked:
            self.parked.add(member.worker.member.worker_id)
            self.context.log.warning(
                "%s does not keep up: %s. It is parked, and gets the newest weights now and then when its "
                "link has drained; such links and machines suit EDP better (launch_edp.sh)",
                member.name,
                reason,
            )

    def on_drift(self, session_id: int, buckets: Sequence[int]) -> None:
        member = self.members.send_weights(session_id, self.version, buckets)
        if member is not None and is_power_of_two(member.num_drifts):
            self.context.log.warning(
                "%s: %d of %d buckets of its weights differ from the server's after step %d (time %d that "
                "they do); blended with polyak_alpha = %g",
                member.name,
                len(buckets),
                len(self.replica.buckets),
                self.version,
                member.num_drifts,
                self.config.polyak_alpha,
            )

    def on_departure(self, worker: Worker) -> None:
        """Take everything out of a worker's hands; `deal` gives it to others."""
        self.waiting.pop(worker.member.session_id, None)
        self.links.worker_gone(worker.member.instance)
        if self.members.forget(worker) is None:
            return
        if worker.live_session.receiver.in_progress:
            self.report.lost_push(worker.name, "its connection broke")
        self.take_from(worker, "its worker has gone")

    def take_from(self, worker: Worker, reason: str) -> None:
        """Nothing of the open step's parts that this worker holds counts any more."""
        for assignment in self.step.drop(worker.member.session_id) if self.step else ():
            self.members.remember(assignment)
            if needs_holder(assignment.part, -math.inf, is_late=False) is Need.ORPHAN:
                self.report.lease_returned(worker, Range.of(assignment.key), reason)

    def on_store_lost(self) -> None:
        """The open step's sums are lost with a store: it is done again, by those who come back."""
        for worker in self.members.workers:
            self.members.forget(worker)
            self.waiting[worker.member.session_id] = worker
        if self.step is not None:
            self.step.abandon()
            self.step = None


def serve(context: ServerContext) -> Summary:
    return Server(context).run()
