"""A server that hands out samples in leases, its weights on one host or several: EDP's and DiLoCo's.

What it makes of what workers send is an algorithm's own. A lease counts when what covers it has been applied;
the weights of all hosts are brought together at the run's end, and now and then before.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import closing, contextmanager
from typing import Any

from torch import Tensor

from smolcluster.algorithms.context import ServerContext
from smolcluster.errors import NonFiniteLoss
from smolcluster.runs.summary import Summary
from smolcluster.server.leases import Dispatcher, DispatcherState
from smolcluster.server.plausible import Failures, Norms
from smolcluster.server.saver import CheckpointSource
from smolcluster.server.store_links import StoreLinks
from smolcluster.training.checkpoint import CheckpointState, Progress, parse_progress
from smolcluster.training.schedule import SCHEDULE, ScheduleState, learning_rate
from smolcluster.wire.inbox import Event
from smolcluster.wire.session import Receiver

DISPATCHER = "dispatcher"
"""Where a checkpoint's progress has its state."""
TICK_S = 0.1
HELD_UP_S = 1.0
"""While the server evaluated, gathered, or did something else for so long, nobody was heard."""


class LeasingServer(ABC):
    """One run. One thread, `run`, decides everything."""

    stores: StoreLinks[Any]
    """The weights, on all hosts; made before `open`."""
    peers: Sized
    """The workers that take part."""

    def __init__(self, context: ServerContext, num_optimizers: int) -> None:
        """`num_optimizers`: that take the schedule's steps; a resumed run counts as many as it began with."""
        self.context = context
        self.train = context.training.recipe.applied_to(context.settings.train)
        self.replica = context.training.replica
        self.num_optimizers = num_optimizers
        self.version = 0
        """Steps of the run."""
        self.dispatcher = Dispatcher(
            incarnation=context.incarnation,
            num_samples=context.training.num_samples,
            total_samples=self.train.total_samples(context.training.num_samples),
            batch_size=self.train.samples_per_push,
            permutation=context.training.order,
        )
        self.norms, self.failures = Norms(), Failures()
        self.decided_at = time.monotonic()
        """When it looked last at what workers do."""

    def open(
        self, extra: Callable[[], Mapping[str, Tensor]] = dict, num_more: int = 0
    ) -> CheckpointState | None:
        """Listen for workers and stores, and go on from the checkpoint, if there is one; returns its state.

        `extra`: the algorithm's own tensors in a checkpoint. `num_more`: see `PoolContext.listen`.
        """
        context = self.context
        self.feed = context.open_feed()
        self.pool = context.open_pool(self.receiver_for, self.stores, num_more=num_more)
        self.report = self.pool.listener
        self.evaluator = context.new_evaluator(self.report)
        source = CheckpointSource(self.replica, self.progress, extra)
        if state := context.resume(source, self.report):
            self.version = state.step
            stored = parse_progress(DispatcherState, state.progress.get(DISPATCHER), state.step)
            self.dispatcher.resume(stored, state.samples_applied)
            schedule = parse_progress(ScheduleState, state.progress.get(SCHEDULE, {}), state.step)
            self.num_optimizers = schedule.num_optimizers
        self.saver = context.new_saver(source, self.report)
        return state

    def progress(self) -> Progress:
        """Where it stands, for a checkpoint."""
        return {
            DISPATCHER: self.dispatcher.state.model_dump(mode="json"),
            SCHEDULE: ScheduleState(num_optimizers=self.num_optimizers).model_dump(mode="json"),
        }

    @abstractmethod
    def receiver_for(self, session_id: int) -> Receiver:
        """Takes what a worker sends."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Something has happened."""

    @abstractmethod
    def decide(self, now: float) -> None:
        """Hand out samples, and step with what has come; `now` is of the monotonic clock, in seconds."""

    def was_away(self, away_s: float, now: float) -> None:
        """Give workers that much more time: what they have sent meanwhile may wait in the inbox."""
        self.dispatcher.was_away(away_s, now)

    def run(self) -> Summary:
        """Serve until every sample of every epoch has been applied.

        Raises:
            NonFiniteLoss: the weights are ruined; the message names what may have done it.
        """
        is_whole = self._whole_at_the_end()
        with closing(self.feed), self.pool, self.evaluator, self.saver, is_whole:
            return self.serve()

    @abstractmethod
    def serve(self) -> Summary:
        """Serve until nothing is left to do, and sum the run up."""

    def serve_all(self) -> None:
        """Serve until all samples have been applied, and the weights are whole here."""
        while not (self.dispatcher.done or self.report.counts.is_over):
            self.serve_next()
        while not self.gather():
            self.serve_next()
        self.replica.check_weights("at the end of the run")

    def serve_next(self) -> None:
        for event in self.pool.next_events(TICK_S):
            self.handle(event)
        now = time.monotonic()
        self.decide_at(now)
        self.saver.tick()
        self.report.tick()
        self.stores.check_patience(now)
        # a copy for when a store is lost; while workers are at work also to see that all stores answer
        if self.stores.is_copy_due(now) or (self.peers and self.stores.are_silent(now)):
            self.gather()

    def decide_at(self, now: float) -> None:
        """Decide, without taking the time in which the server heard nobody for workers' silence."""
        away_s, self.decided_at = now - self.decided_at, now
        if away_s > HELD_UP_S:
            self.was_away(away_s, now)
        self.decide(now)

    def gather(self) -> bool:
        """Bring the weights of all hosts together; False: a store is missing.

        Raises:
            Interrupted: a signal asked this process to stop.
        """
        self.saver.wait_for_copy()
        return self.stores.gather(self.version, self.context.check_stop)

    @contextmanager
    def _whole_at_the_end(self) -> Iterator[None]:
        """Let what is saved when the block fails be of one version, or let nothing be saved.

        Raises:
            NonFiniteLoss: that of the block, with the push that may have ruined the weights.
        """
        try:
            yield
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"{error}{self.norms.suspect}") from error
        except BaseException as error:
            if self.saver.saves_end(error):
                self.saver.wait_for_copy()
                if not self.stores.gather(self.version):
                    self.saver.skip_end()
            raise

    def rate_after(self, samples_before: int) -> float:
        """The schedule's learning rate of a batch before which so many samples are applied."""
        total, own = self.dispatcher.total_samples, self.context.training.recipe.schedule
        return learning_rate(self.train, samples_before, total, own, self.num_optimizers)
