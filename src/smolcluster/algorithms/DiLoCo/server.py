"""The DiLoCo server: hands out samples, collects what workers have changed, and takes outer steps.

    leases -> workers, many local steps each -> Δ_w = θ_start - θ_w -> Δ̄ = Σ n_w Δ_w / Σ n_w
           -> m = β m + Δ̄;  θ = θ - γ (Δ̄ + β m) -> new weights for everybody -> the next round

A round is `local_steps` batches a worker on average: who is faster gets more of them, so that all arrive
together. What a lost worker has computed and not sent goes to others, so that every sample of every epoch is
applied exactly once. Streaming does all that for a fragment of the weights at a time, while workers go on
computing. Asynchronously each worker brings its change when it has taken its own steps, and the server
applies it at once; the first rounds are synchronous. One thread, `Server.run`, decides everything.

Sources: DiLoCo (Douillard et al., 2311.08105); Streaming DiLoCo (Douillard et al., 2501.18512); asynchronous
local SGD (Liu et al., 2401.09135).
By hand: `uv run server.py`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("diloco", "server"))


import math
import time
from collections.abc import Sequence
from functools import cached_property, partial
from statistics import fmean

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig, gradient_codec
from smolcluster.algorithms.DiLoCo.exchange import ChangeReceiver, DeltaArrived
from smolcluster.algorithms.DiLoCo.fragments import filled
from smolcluster.algorithms.DiLoCo.ledger import Applied, Ledger, Request, RoundsState
from smolcluster.algorithms.DiLoCo.outer import new_outer
from smolcluster.algorithms.DiLoCo.outer_links import (
    WHOLE,
    Change,
    OuterLinks,
    new_stores,
)
from smolcluster.algorithms.DiLoCo.peers import (
    Peer,
    local_step,
    share_of,
    tell,
)
from smolcluster.algorithms.DiLoCo.rounds import (
    LEAST_STEP_S,
    MOST_BEHIND,
    MOST_STEP_S,
    Pacing,
    SyncBeginning,
    why_none,
)
from smolcluster.algorithms.leasing import LeasingServer
from smolcluster.data.permutation import Range
from smolcluster.runs.events import BeginningEnded
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import ServedBatch, assignment_of, send_assignment
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.plausible import PushRefused, check_norm
from smolcluster.server.store_links import NormsArrived
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.checkpoint import Progress, parse_progress
from smolcluster.utils.units import format_count
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import (
    Ack,
    Collect,
    LeaseKey,
    PartKey,
    Pull,
    Ready,
    Resumed,
    SameWeights,
    Saved,
    Skip,
    Stepped,
)

ROUNDS = "rounds"
"""Where a checkpoint's progress has their state."""
LONGEST_SILENCE_S = 120.0
"""Who was left behind, and is silent for so long, is cut."""
UNKNOWN_STEP_S = 1.0


class Server(LeasingServer):
    """One run of DiLoCo. `version` counts batches that have been applied, `stores.version` outer steps."""

    stores: OuterLinks
    peers: dict[int, Peer]

    def __init__(self, context: ServerContext) -> None:
        # each worker's optimizer takes the schedule's steps, however many workers are present
        super().__init__(context, context.settings.cluster.num_workers)
        self.config = context.run.of(DiLoCoConfig)
        epoch_batches = math.ceil(context.training.num_samples / self.train.samples_per_push)
        total_batches = self.train.num_batches(context.training.num_samples)
        warn_of_long_rounds(context, epoch_batches)
        num_fragments = self.config.num_fragments(len(filled(self.replica.layers)))
        self.outer = new_outer(context, total_batches)
        self.stores = new_stores(context, self.outer, num_fragments)
        self.ledger = Ledger(num_fragments)
        self.beginning = new_beginning(context, total_batches)
        self.pacing = Pacing(
            self.config.mode,
            num_fragments,
            local_steps=self.config.local_steps,
            total_batches=total_batches,
            num_workers=context.settings.cluster.num_workers,
            beginning=self.beginning,
        )
        self.round = self.pacing.round
        self.numbers = self.round.numbers
        state = self.open(
            lambda: self.stores.tensors, num_more=self.stores.own.num_frames + MOST_BEHIND
        )
        self.resumed_at = None if state is None else state.step
        """The batches applied when the run went on from a checkpoint; with the next it is over."""
        if state is not None:
            rounds = parse_progress(RoundsState, state.progress.get(ROUNDS), state.step)
            self.go_on_from(rounds)
        self.stores.begin(
            self.version,
            self.report.steps_undone,
            self.on_store_lost,
            begins_together=self.pacing.is_synchronous and not self.beginning.reason,
        )
        self.peers = {}
        self.workers: dict[int, Worker] = {}
        """All that have ever taken part, by session."""
        self.changes: dict[int, list[Change]] = {each: [] for each in self.numbers}
        """By fragment: those that wait for others'."""

    def go_on_from(self, rounds: RoundsState) -> None:
        """Take up a checkpoint's state, and what the run has begun with where nothing is said.

        Raises:
            CheckpointError: the weights were cut into other fragments, or momentum is laid otherwise.
        """
        rounds.check(len(self.numbers))
        self.stores.resume(rounds.version)
        self.ledger.resume(rounds.partly_applied)
        if self.config.outer_lr is None:
            self.outer.learning_rate = rounds.outer_lr
        if self.config.outer_momentum is None:
            self.outer.momentum = rounds.outer_momentum
        if rounds.local_steps is not None:
            self.round.begin(rounds.local_steps)
        if rounds.sync_steps is None:
            self.beginning.is_over = True
        else:
            self.beginning.num_steps = rounds.sync_steps
            self.beginning.waited_s = rounds.sync_waited_s

    def progress(self) -> Progress:
        beginning = self.beginning
        rounds = RoundsState(
            version=self.stores.version,
            num_fragments=len(self.numbers),
            outer_lr=self.outer.learning_rate,
            outer_momentum=self.outer.momentum,
            partly_applied=self.ledger.partly_applied,
            momentum_order="weights",
            local_steps=self.round.local_steps,
            sync_steps=None if beginning.is_over else beginning.num_steps,
            sync_waited_s=beginning.waited_s,
        )
        return super().progress() | {ROUNDS: rounds.model_dump(mode="json")}

    def receiver_for(self, session_id: int) -> ChangeReceiver:
        collector = BufferCollector(self.replica.buffers, self.replica.bucket_bytes)
        return ChangeReceiver(session_id, self.context.codec, self.stores.own.layout, collector)

    def serve(self) -> Summary:
        self.begin_round()
        self.serve_all()
        if self.context.is_attached:
            self.give_result()
        return self.saver.summary()

    def give_result(self) -> None:
        """Send the final weights to loops of a user's own, which may be in the middle of a round."""
        for peer in self.peers.values():
            peer.outbox.clear()
            self.send_weights(peer)

    def decide(self, now: float) -> None:
        self.leave_late(now)
        self.step(now)
        for _ in self.numbers:
            self.hand_out(now)
            self.collect(now)

    def begin_round(self) -> None:
        """Take in workers anew, and choose how many batches each takes on average in this round."""
        if self.pacing.is_synchronous:
            self.beginning.begin_step(self.dispatcher.samples_applied, self.active)
            if self.beginning.is_over:
                self.end_beginning()
        self.pacing.begin_round(self.active, self.stores.version)

    def end_beginning(self) -> None:
        """Go on in rounds: workers step by themselves, and exchanges are measured anew."""
        self.saver.wait_for_copy()
        self.replica.optimizer.reset()
        self.round.exchange_s.clear()
        for peer in self.peers.values():
            peer.on_way_s.clear()
        steps = format_count(self.beginning.num_steps, "step")
        share = self.dispatcher.samples_applied / self.dispatcher.total_samples
        why = f", because {self.beginning.reason}" if self.beginning.reason else ""
        codec = gradient_codec(self.context.codec)
        way = f", gradients sent as {codec}" if codec != self.context.codec else ""
        reason = f"{steps}, {share:.1%} of the samples{way}{why}"
        self.context.log.info("the synchronous beginning is over: %s", reason)
        self.report.happened(BeginningEnded(step=self.version, reason=reason))

    def hand_out(self, now: float) -> None:
        """Give workers a few of the batches that they are to have in this round."""
        if not (self.pool.started and self.stores.is_ready):
            return
        takers = {
            peer.id: peer
            for peer in self.active
            if not (peer.is_asked or (peer.steps_alone and self.pacing.is_synchronous))
        }
        for id_, number in self.pacing.batches(takers, len(self.active), now).items():
            for _ in range(number):
                self.give(takers[id_])

    def give(self, peer: Peer) -> None:
        lease = self.dispatcher.grant(peer.id, time.monotonic(), is_sent=False, may_copy=False)
        if lease is None:
            return
        rate = self.learning_rate()
        fragments = self.ledger.assign(lease.key, peer.id, rate)
        peer.gets(lease.key, time.monotonic())
        self.round.given(peer.id)
        fill, is_gradient = peer.outbox.place(), self.pacing.is_synchronous

        def send(batch: ServedBatch | None) -> None:
            assignment = assignment_of(
                lease.key,
                lease.indices,
                batch,
                version=self.stores.version,
                learning_rate=rate,
                loss_scale=self.replica.run_scale,
                fragments=sorted(fragments) if len(fragments) < len(self.numbers) else None,
                is_gradient=is_gradient,
            )
            send_assignment(peer.worker.live_session, *assignment, batch)

        self.feed.deliver(lease.range, lease.indices, lambda batch: fill(partial(send, batch)))

    def collect(self, now: float) -> None:
        """Ask for what workers have changed in the fragments whose turn has come."""
        asked = self.pacing.requests(
            {peer.id: peer for peer in self.active},
            now,
            owes_change=self.ledger.owes_change,
            has_more=self.dispatcher.has_more,
            has_open=self.ledger.num_open_samples > 0,
        )
        for id_, number in asked:
            self.ask(self.peers[id_], number)

    def ask(self, peer: Peer, number: int) -> None:
        request = self.ledger.request(peer.id, number)
        if request is None:
            return
        peer.asked(number, time.monotonic(), waits=self.pacing.waits)
        # at a request that waits the worker reads no further one
        waits = peer.is_asked and number == self.numbers[-1]
        tell(peer, Collect(request=request.number, fragment=number, wait=waits))

    def step(self, now: float) -> None:
        """Take the outer steps for which all have brought what they have changed; then a round may end."""
        if self.pacing.is_async:
            changes, self.changes[WHOLE] = self.changes[WHOLE], []
            for each in changes:
                self.apply(each)
                self.pacing.choose_steps(self.active, self.stores.version)
            return
        waiting = [each for each in self.round.gathering if self.ledger.is_waiting(each)]
        if self.pacing.is_synchronous:
            if self.round.is_asked and not waiting and self.take_synchronous_step():
                for number in self.numbers:
                    self.round.gathered(number, now)
                self.begin_round()
            elif self.beginning.reason and not (
                self.ledger.num_open_samples or any(self.changes.values())
            ):
                self.begin_round()
            return
        for number in [each for each in self.round.gathering if each not in waiting]:
            self.round.gathered(number, now)
            if self.changes[number]:
                self.take_outer_step(number)
        if self.pacing.is_round_over:
            self.begin_round()

    def apply(self, change: Change) -> None:
        """Apply one worker's change as it has come, and send it what the weights are now."""
        self.saver.wait_for_copy()
        self.stores.apply(change)
        self.replica.check_weights(f"after outer step {self.stores.version}")
        peer = self.peers.get(change.request.holder)
        if peer is not None and not peer.is_stalled:
            self.send_fragment(peer, WHOLE)
        self.applied([change])

    def take_outer_step(self, number: int) -> None:
        """Step a fragment along the mean of what workers have changed, and send it to all."""
        self.saver.wait_for_copy()
        changes, self.changes[number] = in_order(self.changes[number]), []
        self.stores.step(number, changes)
        self.replica.check_weights(f"after outer step {self.stores.version}")
        for peer in self.active:
            self.send_fragment(peer, number)
        self.applied(changes)

    def take_synchronous_step(self) -> bool:
        """Take one step of the inner optimizer along the mean gradient of all workers, and send it to all.

        Returns False while hosts have not told all norms of that mean. If one is lost, so are the gradients.
        """
        self.saver.wait_for_copy()
        changes = [in_order(self.changes[number]) for number in self.numbers]
        if not any(changes):
            return True
        steps = [
            step
            for of_fragment in changes
            for each in of_fragment
            for step in self.ledger.steps_of(each.request)
        ]
        rates = [step.learning_rate for step in steps if step.learning_rate is not None]
        rate = fmean(rates) if rates else self.rate_after(self.dispatcher.samples_applied)
        if not self.stores.step_together(changes, rate, self.train.gradient_clipping):
            return False
        self.changes = {each: [] for each in self.numbers}
        self.replica.check_weights(f"after synchronous step {self.beginning.num_steps + 1}")
        self.beginning.stepped()
        for peer in self.active:
            for number in self.numbers:
                self.send_fragment(peer, number)
        for of_fragment in changes:
            self.applied(of_fragment)
        return True

    def applied(self, changes: Sequence[Change]) -> None:
        """An outer step has applied these changes of a fragment: their samples may count now."""
        applied = self.ledger.apply(each.request for each in changes)
        self.replica.update_average(len(applied) / self.num_optimizers)
        for each in changes:
            name = self.workers[each.request.holder].name
            self.norms.add(each.norm, f"{name} in outer step {self.stores.version}")
        self.count(applied)

    def count(self, applied: Sequence[Applied]) -> None:
        """These batches have been applied: each is a step of the run."""
        for each in applied:
            samples, worker, stepped = Range.of(each.key), self.workers[each.holder], each.stepped
            self.dispatcher.commit(each.key, each.holder, time.monotonic())
            self.feed.applied(samples)
            self.failures.applied(samples)
            self.version += 1
            self.replica.note_step(overflow=stepped.overflow)
            self.report.contributed(worker, samples.num_samples, stepped.mean_loss)
            peer = self.peers.get(each.holder)
            drift = peer.drift if peer else None
            self.report.step_taken(
                local_step(each, worker, self.version, self.stores.version, drift)
            )
        num_steps = len(applied)
        is_due = self.evaluator.is_due(self.version, num_steps) or self.saver.is_due(
            self.version, num_steps
        )
        if not applied or not is_due:
            return
        if not self.gather():
            self.context.log.warning("step %d is neither evaluated nor saved", self.version)
            return
        is_evaluated = self.evaluator.after_step(self.version, applied[-1].key.epoch, num_steps)
        if self.saver.after_step(is_evaluated=is_evaluated, num_steps=num_steps):
            saved = Saved(step=self.version, keep_last=self.context.settings.cluster.keep_last)
            for peer in self.active:
                tell(peer, saved)

    def handle(self, event: Event) -> None:
        match event:
            case MessageReceived(session_id=id_, message=Stepped() as stepped) if id_ in self.peers:
                self.on_stepped(self.peers[id_], stepped)
            case DeltaArrived(session_id=id_, of=number) if id_ in self.peers:
                peer = self.peers[id_]
                self.on_part(peer, PartKey(instance=peer.worker.member.instance, of=number), event)
            case NormsArrived():
                self.on_norms(event)
            case MessageReceived(session_id=id_, message=Pull()) if id_ in self.peers:
                self.welcome(self.peers[id_])
            case MessageReceived(session_id=id_, message=Skip() as skip) if id_ in self.peers:
                self.on_skip(self.peers[id_], skip)
            case Joined(worker, ready):
                self.on_join(worker, ready)
            case Departed(worker):
                self.on_departure(worker)
            case _ if self.stores.handle(event):
                for peer in self.peers.values():
                    self.stores.introduce(peer.worker.live_session)

    def on_join(self, worker: Worker, ready: Ready) -> None:
        speed = ready.samples_per_s
        step_s = self.train.samples_per_push / speed if speed else UNKNOWN_STEP_S
        step_s = min(MOST_STEP_S, max(LEAST_STEP_S, step_s))
        peer = self.peers[worker.member.session_id] = Peer(step_s, worker=worker)
        self.workers[peer.id] = worker
        peer.is_joining = True
        peer.steps_alone = ready.steps_alone
        if peer.steps_alone and self.pacing.is_synchronous:
            self.beginning.end(f"{worker.name} is a loop whose optimizer the server has not")
        if self.stores.introduce(worker.live_session):
            self.welcome(peer, has_weights=self.has_first_weights(ready))

    def welcome(self, peer: Peer, *, has_weights: bool = False) -> None:
        """A worker reaches all hosts: send it the weights unless it has them; it can be given work."""
        if not (peer.is_joining and self.stores.is_ready):
            return
        peer.is_joining = False
        if has_weights:
            self.confirm_weights(peer)
        else:
            self.send_weights(peer)
        if self.version == self.resumed_at:  # else what it kept then is of long ago
            tell(peer, Resumed(step=self.version))

    def has_first_weights(self, ready: Ready) -> bool:
        """Whether a worker has made itself, from the run's seed, what it would be sent."""
        return self.stores.version == 0 and ready.weights == self.first_digest

    def confirm_weights(self, peer: Peer) -> None:
        """Tell a worker that it has the weights already."""
        peer.versions = list(self.stores.own.versions)
        self.stores.own.follow(peer.worker.member.instance)
        tell(peer, SameWeights())

    def send_weights(self, peer: Peer) -> None:
        """Send the whole weights; what the worker was sent before is void.

        Raises:
            NonFiniteLoss: they are not finite.
        """
        peer.versions = list(self.stores.own.versions)
        frames = self.stores.send_whole(peer.worker.member.instance, self.stores.version)
        send_frames(peer, frames)

    def send_fragment(self, peer: Peer, number: int) -> None:
        """Send a worker what has become of a fragment."""
        instance = peer.worker.member.instance
        frames = self.stores.send_fragment(instance, number, peer.versions[number])
        peer.versions[number] = self.stores.own.versions[number]
        send_frames(peer, frames)

    def on_departure(self, worker: Worker) -> None:
        peer = self.peers.pop(worker.member.session_id)
        self.stores.worker_gone(worker.member.instance)
        if worker.live_session.receiver.in_progress:
            self.report.lost_push(worker.name, "its connection broke")
        self.take_back(peer, "its worker has gone")
        worker.session = None  # its buffers go
        # who it was is needed when its changes are applied, of what it reported and said nothing
        self.workers[peer.id] = Worker(worker.member, role=worker.role)

    def on_stepped(self, peer: Peer, stepped: Stepped) -> None:
        """A worker has taken a local step; it counts when the change that holds it has been applied."""
        self.heard(peer)
        peer.unanswered.discard(stepped.lease)
        if self.ledger.stepped(peer.id, stepped):
            peer.stepped(stepped.compute_s, time.monotonic())

    def on_norms(self, part: NormsArrived) -> None:
        """A store has a bucket of a change."""
        key = part.key
        if not self.stores.hear(part) or key is None:
            return
        of_instance = (p for p in self.peers.values() if p.worker.member.instance == key.instance)
        peer = next(of_instance, None)
        if peer is None:
            self.stores.drop_part(part)
        else:
            self.on_part(peer, key, part)

    def on_part(self, peer: Peer, key: PartKey, part: DeltaArrived | NormsArrived) -> None:
        """Some of a worker's change is where it belongs; when all of it is, decide on it."""
        peer.progressed_at = time.monotonic()
        request = None
        if isinstance(key.of, int):
            request = self.ledger.asked(key.of, peer.id, part.fragment)
        if request is not None:
            if (change := self.stores.whole(request, key, part)) is not None:
                self.on_change(peer, change)
        elif isinstance(part, NormsArrived):
            self.stores.drop_part(part)
        elif part.part is not None:
            part.free()
            self.report.lost_push(peer.worker.name, "its samples had been taken back")
            self.heard(peer)  # only now that it has sent all of it can it turn to anything else

    def on_change(self, peer: Peer, change: Change) -> None:
        """A worker's change has come: from now on its samples are safe, whatever befalls the worker."""
        request = change.request
        steps = self.ledger.steps_of(request)
        if len(steps) < len(request.leases):
            self.stores.drop(change)
            peer.worker.live_session.cut("it sent a change before it had taken its steps")
            return
        try:
            check_norm(change.norm, self.norms.limit)
        except PushRefused as error:
            self.stores.drop(change)
            self.refuse(peer, request, str(error))
            return
        if not self.pacing.is_synchronous:
            peer.drift = change.norm / (change.weights_norm or 1.0)
            self.report.board.measured(peer.worker, local_steps=len(steps), drift=peer.drift)
        change.weight = float(sum(each.num_terms for each in steps if each.overflow is None))
        change.num_samples = sum(Range.of(each).num_samples for each in request.leases)
        self.ledger.arrived(request)
        peer.answered(request.fragment, time.monotonic())
        if steps:
            peer.step_terms = change.weight / len(steps)
        change.share = share_of(peer, [each for each in self.active if each is not peer])
        self.changes[request.fragment].append(change)

    def on_skip(self, peer: Peer, skip: Skip) -> None:
        """A worker's copy has come to NaN or infinity: it begins again, and its samples go to others.

        Raises:
            NonFiniteLoss: these samples have led to that too often.
        """
        self.heard(peer)
        if self.ledger.holds(peer.id, skip.lease):  # else it has been sent whole weights since
            self.take_back(peer, "its worker's copy is not finite")
            self.fail(peer, [skip.lease], skip.reason)
            self.send_weights(peer)

    def refuse(self, peer: Peer, request: Request, reason: str) -> None:
        """Apply nothing of a change; its worker begins again from the server's weights.

        Raises:
            NonFiniteLoss: its samples have led to that too often.
        """
        returned = set(self.take_back(peer, "its change was refused"))
        ack = Ack(lease=request.leases[-1], outcome="non_finite", version=self.stores.version)
        peer.worker.live_session.send(ack)
        self.fail(peer, [each for each in request.leases if each in returned], reason)
        self.send_weights(peer)

    def fail(self, peer: Peer, leases: Sequence[LeaseKey], reason: str) -> None:
        self.report.dropped(peer.worker, leases[-1], "non_finite", None, reason)
        for lease in leases:
            self.failures.add(Range.of(lease))
            self.failures.check(Range.of(lease), peer.worker.name, reason)

    def take_back(self, peer: Peer, reason: str) -> list[LeaseKey]:
        """Give to others what a worker was given since its last change that has come; returns that."""
        returned = self.take_back_from(peer.id, reason)
        self.stores.forget_worker(peer.worker.member.instance)
        peer.outbox.clear()
        peer.unanswered.clear()
        peer.num_before.clear()
        peer.begin()
        return returned

    def take_back_from(self, holder: int, reason: str) -> list[LeaseKey]:
        self.beginning.disturb()
        returned = self.ledger.take_back(holder)
        for lease in returned:
            self.dispatcher.release(lease, holder)
            self.report.lease_returned(self.workers[holder], Range.of(lease), reason)
        self.round.num_handed -= len(returned)
        return returned

    def on_store_lost(self) -> None:
        """A store is lost, with its part of all changes that wait for others: their samples are done again.

        Workers begin anew, as soon as it is back: what is on its way between them and other hosts is void.
        """
        lost = [each for waiting in self.changes.values() for each in waiting]
        self.changes = {each: [] for each in self.numbers}
        holders = self.ledger.lose(each.request for each in lost)
        for each in lost:
            self.stores.drop(each)
        for holder in holders.difference(self.peers):
            self.take_back_from(holder, "a store was lost")
        for peer in self.peers.values():
            peer.worker.live_session.cut("a store was lost")

    def heard(self, peer: Peer) -> None:
        if peer.is_stalled:
            peer.is_stalled, peer.progressed_at = False, time.monotonic()
            self.context.log.info("%s answers again", peer.worker.name)
            self.send_weights(peer)

    def was_away(self, away_s: float, now: float) -> None:
        for peer in self.peers.values():
            peer.progressed_at = min(now, peer.progressed_at + away_s)

    def leave_late(self, now: float) -> None:
        """Go on without those who are late; they begin again when they are heard of, or have come back."""
        for peer in self.peers.values():
            if peer.is_stalled:
                if now - peer.progressed_at >= LONGEST_SILENCE_S:
                    peer.worker.live_session.cut("it has not answered for too long")
            elif peer.is_late(
                now,
                owes_change=self.ledger.owes_change(peer.id),
                grace=self.config.grace,
            ):
                silent_s = now - peer.progressed_at
                self.take_back(peer, "its time was over")
                peer.is_stalled = True
                reason = "its samples go to others, and it gets no more until it answers"
                self.pool.stalled(peer.worker, silent_s, reason)

    @cached_property
    def first_digest(self) -> str:
        """Of the weights before the first outer step."""
        return self.replica.digest()

    @property
    def active(self) -> list[Peer]:
        return [each for each in self.peers.values() if not (each.is_stalled or each.is_joining)]

    def learning_rate(self) -> float:
        """That of the next batch to be handed out: where all before it have been applied."""
        return self.rate_after(self.dispatcher.samples_applied + self.ledger.num_open_samples)


def warn_of_long_rounds(context: ServerContext, epoch_batches: int) -> None:
    """Say that a round has more batches than an epoch, if it has."""
    local_steps = context.run.of(DiLoCoConfig).local_steps
    if local_steps is None:
        return
    round_batches = local_steps * context.settings.cluster.num_workers
    if round_batches > epoch_batches:
        context.log.warning(
            "local_steps is %d: a round has %d batches, an epoch %d; lower it, or set it to null",
            local_steps,
            round_batches,
            epoch_batches,
        )


def new_beginning(context: ServerContext, total_batches: int) -> SyncBeginning:
    """The synchronous beginning, which ends before its first step where there is to be none."""
    config, cluster = context.run.of(DiLoCoConfig), context.settings.cluster
    total = context.settings.train.total_samples(context.training.num_samples)
    beginning = SyncBeginning(round(config.sync_fraction * total), total_batches)
    optimizer = context.training.replica.optimizer.name
    beginning.end(why_none(len(cluster.store_nodes), optimizer))
    return beginning


def send_frames(peer: Peer, frames: Sequence[Frame]) -> None:
    def send() -> None:
        for frame in frames:
            peer.worker.live_session.send_frame(frame)

    peer.outbox.put(send)


def in_order(changes: Sequence[Change]) -> list[Change]:
    """A sum must not depend on who came first."""
    return sorted(changes, key=lambda each: each.request.holder)


def serve(context: ServerContext) -> Summary:
    return Server(context).run()
