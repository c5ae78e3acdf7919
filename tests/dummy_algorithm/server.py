"""A lease and the newest weights to whoever has none; a step for each gradient that comes back."""

if __name__ == "__main__":
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("dummy", "server"))

import time

from smolcluster.algorithms.context import ServerContext
from smolcluster.data.permutation import Range
from smolcluster.runs.summary import Summary
from smolcluster.server.assignment import assignment_of
from smolcluster.server.leases import Dispatcher
from smolcluster.server.push import GradientReceiver, Pushed
from smolcluster.server.slices import slice_frames
from smolcluster.server.store import Store
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.loop import StepTaken
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import WEIGHTS, Ack


class Server:
    def __init__(self, context: ServerContext) -> None:
        train, self.replica = context.run.train, context.training.replica
        self.context, self.rate, self.version = context, train.learning_rate, 0
        num_samples, buckets = context.training.num_samples, self.replica.buckets
        self.dispatcher = Dispatcher(
            incarnation=context.incarnation,
            num_samples=num_samples,
            total_samples=train.total_samples(num_samples),
            batch_size=train.batch_size,
            permutation=context.training.order,
        )
        self.pool = context.open_pool(lambda id_: GradientReceiver(id_, context.codec, buckets))
        self.store, self.evaluator = Store.of(self.replica), context.new_evaluator()
        self.idle: dict[int, Worker] = {}
        self.busy: dict[int, Worker] = {}

    def serve(self) -> Summary:
        with self.pool, self.evaluator:
            while not (self.dispatcher.done or self.pool.listener.counts.is_over):
                for event in self.pool.next_events(0.1):
                    self.handle(event)
                self.dispatcher.expire(time.monotonic())
                for session_id, worker in list(self.idle.items() if self.pool.started else ()):
                    self.hand_out(session_id, worker)
                self.pool.listener.tick()
            return self.pool.listener.summary()

    def handle(self, event: Event) -> None:
        match event:
            case Joined(worker):
                self.idle[worker.member.session_id] = worker
            case Departed(worker):
                for workers in (self.idle, self.busy):
                    workers.pop(worker.member.session_id, None)
                self.dispatcher.release_all(worker.member.session_id)
            case Pushed(session_id=session_id) if session_id in self.busy:
                worker = self.idle[session_id] = self.busy.pop(session_id)
                verdict = self.dispatcher.judge(event.push.lease, session_id)
                if verdict == "open":
                    self.apply(worker, event)
                event.receiver.free()
                outcome = "applied" if verdict == "open" else verdict
                worker.live_session.send(
                    Ack(lease=event.push.lease, outcome=outcome, version=self.version)
                )

    def apply(self, worker: Worker, pushed: Pushed) -> None:
        push, samples, report = pushed.push, Range.of(pushed.push.lease), self.pool.listener
        self.store.take(pushed.gradient)
        norm = self.store.norm()
        self.store.step(1.0, self.rate)
        self.version += 1
        self.dispatcher.commit(push.lease, pushed.session_id, time.monotonic())
        report.contributed(worker, push.num_samples, push.mean_loss)
        loss, terms, rate = push.mean_loss, push.num_terms, self.rate
        step = StepTaken(self.version, samples, loss, rate, norm, {}, terms, **worker.who)
        report.step_taken(step)
        self.evaluator.after_step(self.version, samples.epoch)

    def hand_out(self, session_id: int, worker: Worker) -> None:
        lease = self.dispatcher.grant(session_id, time.monotonic())
        if lease is None:
            return
        self.busy[session_id] = self.idle.pop(session_id)
        version, rate, indices = self.version, self.rate, lease.indices
        what = {WEIGHTS: self.replica.params}, self.replica.buckets
        for frame in slice_frames(*what, incarnation=self.context.incarnation, version=version):
            worker.live_session.send_frame(frame)
        sent = assignment_of(lease.key, indices, version=version, learning_rate=rate)
        worker.live_session.send(*sent)


def serve(context: ServerContext) -> Summary:
    return Server(context).serve()
