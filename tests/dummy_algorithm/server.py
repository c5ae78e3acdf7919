"""A lease and the newest weights to whoever has none; a step for each gradient that comes back."""

if __name__ == "__main__":
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("dummy", "server"))

import time

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.leasing import LeasingServer
from smolcluster.data.permutation import Range
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import assignment_of
from smolcluster.server.hosted_stores import HostedStores
from smolcluster.server.push import GradientReceiver, Pushed
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.loop import StepTaken
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import Ack, PartKey


class Server(LeasingServer):
    stores: HostedStores
    peers: dict[int, Worker]

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context, num_optimizers=1)
        self.peers, self.idle = {}, set[int]()
        self.stores = context.hosted_stores()
        self.open()
        self.stores.begin(self.version, self.report.steps_undone)

    def receiver_for(self, session_id: int) -> GradientReceiver:
        return GradientReceiver(session_id, self.context.codec, self.replica.buckets)

    def serve(self) -> Summary:
        self.serve_all()
        return self.saver.summary()

    def handle(self, event: Event) -> None:
        match event:
            case Joined(worker):
                self.peers[worker.member.session_id] = worker
                self.idle.add(worker.member.session_id)
            case Departed(worker):
                del self.peers[worker.member.session_id]
                self.idle.discard(worker.member.session_id)
                self.dispatcher.release_all(worker.member.session_id)
            case Pushed(session_id=session_id) if session_id in self.peers:
                self.idle.add(session_id)
                verdict = self.dispatcher.judge(event.push.lease, session_id)
                key = PartKey(instance=self.peers[session_id].member.instance, of=event.push.lease)
                self.stores.take(key, event)
                if verdict == "open":
                    self.apply(self.peers[session_id], event, key)
                self.stores.forget(key)
                outcome = "applied" if verdict == "open" else verdict
                ack = Ack(lease=event.push.lease, outcome=outcome, version=self.version)
                self.peers[session_id].live_session.send(ack)

    def apply(self, worker: Worker, pushed: Pushed, key: PartKey) -> None:
        push, samples, rate = pushed.push, Range.of(pushed.push.lease), self.learning_rate()
        norm = self.stores.norm(key)
        self.stores.step(key, 1.0, rate)
        self.version += 1
        self.dispatcher.commit(push.lease, pushed.session_id, time.monotonic())
        self.report.contributed(worker, push.num_samples, push.mean_loss)
        self.report.step_taken(
            StepTaken(
                *(self.version, samples, push.mean_loss, rate, norm, {}, push.num_terms),
                **worker.who,
            )
        )
        is_evaluated = self.evaluator.after_step(self.version, samples.epoch)
        self.saver.after_step(is_evaluated=is_evaluated)

    def decide(self, now: float) -> None:
        self.dispatcher.expire(now)
        for session_id in sorted(self.idle if self.pool.started else ()):
            if lease := self.dispatcher.grant(session_id, now):
                self.idle.discard(session_id)
                member, session = self.peers[session_id].member, self.peers[session_id].live_session
                for frame in self.stores.send_whole(member.instance, self.version):
                    session.send_frame(frame)
                version, rate = self.version, self.learning_rate()
                sent = assignment_of(lease.key, lease.indices, version=version, learning_rate=rate)
                session.send(*sent)

    def learning_rate(self) -> float:
        return self.rate_after(self.dispatcher.samples_applied)


def serve(context: ServerContext) -> Summary:
    return Server(context).run()
