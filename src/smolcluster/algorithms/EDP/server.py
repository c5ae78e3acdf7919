"""The EDP server: an asynchronous, elastic parameter server.

    lease -> worker -> gradient -> s(τ) · learning rate -> optimizer step -> version + 1 -> next lease
                    or weights  -> w <- (1 - α) w + α w_worker (update_rule mixing) -> version + 1

There is no barrier: every push is applied as it comes, weighed by how old the weights were
that it was computed on (`rule.py`). Workers join and leave as ordinary events; their leases go back and are
handed out again, so that every sample of every epoch is applied exactly once. One thread, `Server.run`,
decides everything.

Sources: Dean et al. 2012 (Downpour SGD); Xie et al., 1903.03934 (FedAsync: the weight of a
stale update, and the averaging of weights).
By hand: `uv run server.py`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("edp", "server"))


import math
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.EDP import rule
from smolcluster.algorithms.EDP.config import EDPConfig
from smolcluster.algorithms.leasing import LeasingServer
from smolcluster.data.permutation import Range
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import ServedBatch, assignment_of, send_assignment
from smolcluster.server.buffers import BufferCollector
from smolcluster.server.hosted_stores import HostedStores
from smolcluster.server.leases import Lease
from smolcluster.server.plausible import PushRefused, check_norm
from smolcluster.server.push import GradientBuffers, GradientReceiver, Pushed
from smolcluster.server.store_links import NormsArrived
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.loop import StepTaken
from smolcluster.training.optimizer import clip_factor
from smolcluster.wire.inbox import Event, MessageReceived
from smolcluster.wire.messages import Ack, LeaseKey, Outcome, PartKey, Pull, Skip

LEASES_PER_WORKER = 2
"""One that it computes, and one whose push is on the wire."""
LONGEST_EXPECTED_S = 600.0
"""However slow a worker says it is, its leases expire."""


@dataclass
class Peer:
    """What EDP remembers of a worker that takes part."""

    worker: Worker
    own_versions: deque[int] = field(default_factory=deque)
    unanswered: set[LeaseKey] = field(default_factory=set)
    """Leases that it was given and has not been given an answer for, also when they have expired."""
    heard_at: float = field(default_factory=time.monotonic)
    """When it joined, or its last push came."""
    is_stalled: bool = False
    """Whether it let leases expire and has not pushed since."""
    is_pulling: bool = False
    """Whether it waits for weights with a push of its own, of which not all has arrived."""


def key_of(peer: Peer, lease: LeaseKey) -> PartKey:
    return PartKey(instance=peer.worker.member.instance, of=lease)


class Server(LeasingServer):
    """One run of EDP."""

    stores: HostedStores
    peers: dict[int, Peer]

    def __init__(self, context: ServerContext) -> None:
        self.config = context.run.of(EDPConfig)
        steps_each = self.config.update_rule == "mixing"  # then each worker's optimizer does
        super().__init__(context, context.settings.cluster.num_workers if steps_each else 1)
        self.push_memory = GradientBuffers()
        self.stores = context.hosted_stores(mixes=steps_each)
        self.open()
        self.stores.begin(self.version, self.report.steps_undone)
        self.peers = {}
        self.last_applied: dict[str, LeaseKey] = {}

    def receiver_for(self, session_id: int) -> GradientReceiver:
        replica = self.replica
        collector = BufferCollector(replica.buffers, replica.bucket_bytes)
        return GradientReceiver(
            session_id,
            self.context.codec,
            replica.buckets,
            collector,
            self.push_memory,
            has_loss_scale=replica.scaler is not None,
            span=self.stores.own_span,
        )

    def decide(self, now: float) -> None:
        self.take_back_expired(now)
        self.hand_out()

    def serve(self) -> Summary:
        self.serve_all()
        if self.context.is_attached:
            self.give_result()
        return self.saver.summary()

    def give_result(self) -> None:
        """Send the final weights to loops of a user's own, which go on with them."""
        for peer in self.peers.values():
            self.send_weights(peer)

    def handle(self, event: Event) -> None:
        match event:
            case Pushed(session_id=session_id) if session_id in self.peers:
                self.on_pushed(self.peers[session_id], event)
            case Pushed(session_id=session_id):
                self.report.lost_push(f"session {session_id}", "its worker has gone")
                event.free()
            case NormsArrived(key=PartKey(of=LeaseKey() as lease)) if self.stores.hear(event):
                self.on_norms(event, lease)
            case Joined(worker, ready):
                self.on_join(worker, ready.unacknowledged, ready.samples_per_s)
            case Departed(worker):
                self.on_departure(worker)
            case MessageReceived(session_id=session_id, message=Pull()) if session_id in self.peers:
                self.on_pull(self.peers[session_id])
            case MessageReceived(session_id=session_id, message=Skip() as skip) if (
                session_id in self.peers
            ):
                self.on_skip(self.peers[session_id], skip)
            case _ if self.stores.handle(event):
                for peer in self.peers.values():
                    self.stores.introduce(peer.worker.live_session)

    def on_join(
        self, worker: Worker, unacknowledged: LeaseKey | None, samples_per_s: float
    ) -> None:
        """Give a worker the weights, and say what became of the push that it was unsure of."""
        session = worker.live_session
        peer = self.peers[session.session_id] = Peer(worker)
        if samples_per_s > 0:
            expected_s = LEASES_PER_WORKER * self.train.samples_per_push / samples_per_s
            self.dispatcher.expect(session.session_id, min(expected_s, LONGEST_EXPECTED_S))
        if unacknowledged is not None:
            applied = self.last_applied.get(worker.member.instance) == unacknowledged
            outcome: Outcome = "applied" if applied else "late"
            session.send(Ack(lease=unacknowledged, outcome=outcome, version=self.version))
        if self.stores.introduce(session):
            self.send_weights(peer)

    def on_departure(self, worker: Worker) -> None:
        peer = self.peers.pop(worker.member.session_id)
        for lease_key in peer.unanswered:
            self.stores.forget(key_of(peer, lease_key))
        self.stores.worker_gone(worker.member.instance)
        if peer.worker.live_session.receiver.in_progress:
            self.report.lost_push(worker.name, "its connection broke")
        for lease in self.dispatcher.release_all(worker.member.session_id):
            self.report.lease_returned(worker, lease.range, "its worker has gone")

    def on_pushed(self, peer: Peer, pushed: Pushed) -> None:
        """What belongs here of a push has come; decide on it if all of it has, or nobody waits for it."""
        lease = pushed.push.lease
        if self.stores.take(key_of(peer, lease), pushed) or lease not in peer.unanswered:
            self.on_push(peer, pushed)

    def on_norms(self, told: NormsArrived, lease: LeaseKey) -> None:
        """Another host has its part of a push; when all have, decide on it."""
        named = (p for p in self.peers.values() if key_of(p, lease) == told.key)
        peer = next(named, None)
        if peer is None or lease not in peer.unanswered:
            self.stores.drop_part(told)
        elif (pushed := self.stores.collect(key_of(peer, lease), told)) is not None:
            self.on_push(peer, pushed)

    def on_pull(self, peer: Peer) -> None:
        """Send weights, with what the worker has pushed before it asked."""
        if self.stores.is_partial(peer.worker.member.session_id):
            peer.is_pulling = True
        else:
            self.send_weights(peer)

    def on_push(self, peer: Peer, pushed: Pushed) -> None:
        push, session_id = pushed.push, pushed.session_id
        key = key_of(peer, push.lease)
        self.heard(peer)
        if push.base_version > self.version:
            self.report.lost_push(peer.worker.name, "it was computed on weights of the future")
            self.stores.forget(key)
            peer.worker.live_session.cut(
                f"it claims weights of version {push.base_version}, the newest is {self.version}"
            )
            return
        tau = rule.staleness(self.version, push.base_version, peer.own_versions)
        outcome: Outcome
        verdict = self.dispatcher.judge(push.lease, session_id)
        if verdict != "open":
            outcome = verdict
        elif rule.too_stale(tau, self.config.staleness):
            outcome = "stale"
            for lease in self.dispatcher.release(push.lease, session_id):
                self.report.lease_returned(peer.worker, lease.range, "its push was too stale")
        else:
            try:
                self.apply(peer, pushed, tau)
                outcome = "applied"
            except PushRefused as error:
                self.failed(peer, push.lease, str(error), tau)
                outcome = "non_finite"
        if outcome != "applied" and outcome != "non_finite":  # noqa: PLR1714 - it narrows the type
            self.report.dropped(peer.worker, push.lease, outcome, tau)
        self.stores.forget(key)
        peer.unanswered.discard(push.lease)
        peer.worker.live_session.send(Ack(lease=push.lease, outcome=outcome, version=self.version))
        if peer.is_pulling:
            self.on_pull(peer)

    def on_skip(self, peer: Peer, skip: Skip) -> None:
        self.heard(peer)
        if skip.lease in peer.unanswered:
            peer.unanswered.discard(skip.lease)
            self.stores.forget(key_of(peer, skip.lease))
            self.failed(peer, skip.lease, skip.reason)

    def failed(self, peer: Peer, lease: LeaseKey, reason: str, tau: int | None = None) -> None:
        """Drop a push of NaN or infinity; its samples are handed out again, but not without end.

        Raises:
            NonFiniteLoss: the same samples have failed `MAX_FAILURES` times.
        """
        worker, samples = peer.worker, Range.of(lease)
        self.report.dropped(worker, lease, "non_finite", tau, reason)
        for returned in self.dispatcher.release(lease, worker.member.session_id):
            self.report.lease_returned(worker, returned.range, "its push was not finite")
            self.failures.add(samples)
        self.failures.check(samples, worker.name, reason)

    def heard(self, peer: Peer) -> None:
        peer.heard_at = time.monotonic()
        if peer.is_stalled:
            peer.is_stalled = False
            self.context.log.info("%s answers again", peer.worker.name)

    def apply(self, peer: Peer, pushed: Pushed, tau: int) -> None:
        """One push is one step: of the optimizer, or towards the worker's weights.

        If its gradient has overflowed, the step is skipped: the samples count, the weights are as before.

        What is reported of the latter: the schedule's learning rate, at which the worker stepped, without
        the factor α, and as norms those of w_worker - w.

        Raises:
            PushRefused: it would ruin the weights; nothing has changed.
        """
        self.saver.wait_for_copy()
        push, config = pushed.push, self.config
        epoch, rate = self.dispatcher.epoch, self.learning_rate()
        norm, layer_norms = 0.0, dict[str, float]()
        if push.overflow is None:
            key, clipping = key_of(peer, push.lease), self.train.gradient_clipping
            is_mixing = config.update_rule == "mixing"
            is_clipped = clipping.enabled and not is_mixing
            norm = check_norm(self.stores.norm(key), math.inf if is_clipped else self.norms.limit)
            gradient = self.replica.grads if is_mixing else pushed.values
            layer_norms = self.report.layer_norms(gradient)
            if is_mixing:
                self.stores.mix(
                    key, rule.mixing_weight(tau, config.mixing_rate, config.staleness.exponent)
                )
            else:
                rate *= rule.scale(tau, config.staleness.exponent)
                self.stores.step(key, clip_factor(norm, clipping), rate, clipping.bound)
        # Each worker's own statistics move the whole way to its data between two pulls: all of theirs
        # together may move the server's as far, and no further.
        self.replica.buffers.add(pushed.buffers, num_workers=len(self.peers))
        self.replica.note_step(overflow=push.overflow)
        self.version += 1
        if push.overflow is None:
            self.replica.update_average()
            self.norms.add(norm, f"{peer.worker.name} in step {self.version}")
        self.failures.applied(Range.of(push.lease))
        self.dispatcher.commit(push.lease, pushed.session_id, time.monotonic())
        self.feed.applied(Range.of(push.lease))
        self.last_applied[peer.worker.member.instance] = push.lease
        peer.own_versions.append(self.version)
        while peer.own_versions[0] <= push.base_version:
            peer.own_versions.popleft()
        self.report.contributed(peer.worker, push.num_samples, push.mean_loss, tau)
        self.report.step_taken(
            StepTaken(
                version=self.version,
                samples=Range.of(push.lease),
                loss=push.mean_loss,
                learning_rate=rate,
                grad_norm=norm,
                layer_norms=layer_norms,
                num_terms=push.num_terms,
                **peer.worker.who,
                staleness=tau,
                is_skipped=push.overflow is not None,
            )
        )
        is_due = self.evaluator.is_due(self.version) or self.saver.is_due(self.version)
        if is_due and not self.gather():
            self.context.log.warning("step %d is neither evaluated nor saved", self.version)
            return
        self.saver.after_step(is_evaluated=self.evaluator.after_step(self.version, epoch))

    def hand_out(self) -> None:
        if not (self.pool.started and self.stores.is_ready):
            return
        for session_id, peer in self.peers.items():
            while len(peer.unanswered) < LEASES_PER_WORKER:
                lease = self.dispatcher.grant(session_id, time.monotonic(), is_sent=False)
                if lease is None:
                    break
                peer.unanswered.add(lease.key)
                self.feed.deliver(lease.range, lease.indices, partial(self.send_lease, peer, lease))
                if lease.copied_from is not None:
                    self.context.log.info(
                        "%s is idle and computes %d samples of %s as well: the first push of them counts",
                        peer.worker.name,
                        len(lease.indices),
                        self.peers[lease.copied_from].worker.name,
                    )

    def send_lease(self, peer: Peer, lease: Lease, batch: ServedBatch | None) -> None:
        """Send a lease with its batch, if the server loads that; only now its time begins."""
        if not self.dispatcher.sent(lease.key, lease.holder, time.monotonic()):
            return
        assignment = assignment_of(
            lease.key,
            lease.indices,
            batch,
            version=self.version,
            learning_rate=self.learning_rate(),
            loss_scale=self.replica.run_scale,
        )
        send_assignment(peer.worker.live_session, *assignment, batch)

    def send_weights(self, peer: Peer) -> None:
        """Send the newest weights; whoever pulls the same version shares one copy."""
        peer.is_pulling = False
        for frame in self.stores.send_whole(peer.worker.member.instance, self.version):
            peer.worker.live_session.send_frame(frame)

    def take_back_expired(self, now: float) -> None:
        """Take back the leases whose time is over; `hand_out` gives them to others."""
        for lease in self.dispatcher.expire(now):
            peer = self.peers[lease.holder]
            self.report.lease_returned(peer.worker, lease.range, "its time was over")
            if not peer.is_stalled:
                peer.is_stalled = True
                reason = "its samples go to others, and it gets no more until it pushes"
                self.pool.stalled(peer.worker, now - peer.heard_at, reason)

    def learning_rate(self) -> float:
        return self.rate_after(self.dispatcher.samples_applied)


def serve(context: ServerContext) -> Summary:
    return Server(context).run()
