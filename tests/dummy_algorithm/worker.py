"""Load the weights that come, compute the samples that come, push their gradient."""

if __name__ == "__main__":
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("dummy", "worker"))

import time

from smolcluster.server.assignment import Assigned
from smolcluster.server.link import Link
from smolcluster.server.push import GradientSender
from smolcluster.server.weights import StateReceiver, WeightsArrived
from smolcluster.training.build import TrainingContext
from smolcluster.wire.inbox import MessageReceived
from smolcluster.wire.messages import Ack, Welcome


class Worker:
    unacknowledged = None  # the samples of a push that was lost are handed out again

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        self.training = training
        self.sender = GradientSender(welcome.codec, training.replica)
        self.version = 0

    def new_receiver(self) -> StateReceiver:
        return StateReceiver(self.training.replica.buckets, self.training.replica.params.dtype)

    def take_part(self, link: Link) -> None:
        while True:
            match link.next_event(1.0):
                case WeightsArrived(version, weights):
                    self.training.replica.load(*weights)
                    self.version = version
                case Assigned() as assigned:
                    self.push(link, assigned)
                case MessageReceived(message=Ack() as ack):
                    self.sender.settle(None if ack.outcome == "applied" else 0)

    def push(self, link: Link, assigned: Assigned) -> None:
        started = time.perf_counter()
        loss = assigned.compute(self.training)
        compute_s = time.perf_counter() - started
        for frame in self.sender.frames(assigned.lease, self.version, loss, compute_s):
            link.send_frame(frame)
        self.training.replica.meter.step_done(assigned.num_samples)
