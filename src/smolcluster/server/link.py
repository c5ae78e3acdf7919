"""The worker's side of a run: joins, builds what is trained, takes part, and comes back when it was cut off.

`follow` is the life of a worker process. What it does in a run is the algorithm's `Participant`, which lives
as long as the run does; a `Link` is one session of it.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from smolcluster.configs.schema import NodeConfig, RunConfig
from smolcluster.configs.spec import spec_of
from smolcluster.errors import (
    ConfigError,
    NonFiniteLoss,
    PeerLost,
    Rejected,
    RunFailed,
    SmolclusterError,
    UserCodeError,
)
from smolcluster.server.joining import Follower, RunOver, check_goes_on
from smolcluster.server.process_stats import ProcessStats
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import served_workload
from smolcluster.training.first_loss import first_losses
from smolcluster.training.kept import KeptSteps
from smolcluster.training.named import load_named
from smolcluster.training.workload import Workload
from smolcluster.utils.device import describe, pick_device
from smolcluster.utils.device_errors import device_error
from smolcluster.utils.meter import Meter
from smolcluster.wire.connection import Connection
from smolcluster.wire.dialling import Address
from smolcluster.wire.inbox import Event, Inbox, MessageReceived, SessionClosed
from smolcluster.wire.messages import (
    FROM_SERVER,
    Goodbye,
    LeaseKey,
    Message,
    MessageSet,
    Ready,
    Telemetry,
    Welcome,
)
from smolcluster.wire.node import MAX_QUEUED
from smolcluster.wire.session import Receiver, Session

SHUTDOWN_TIMEOUT_S = 5.0
WAIT_S = 1.0
"""How long a worker waits for the next event before it looks up."""


@dataclass(frozen=True, kw_only=True)
class WorkerSetup(Follower):
    """A worker process: its machine, who it is, and the way to the server."""

    node: NodeConfig
    workload: Workload | str | None = None
    """What is trained, or the name of the function that makes it, which only this process's user knows; None:
    what the server's configuration names."""
    build: Callable[[Welcome], TrainingContext] | None = None
    """Makes what is trained instead of this module; None: a model and data of this process."""
    spread: Callable[[Welcome, TrainingContext], TrainingContext] | None = None
    """Spreads what is trained, of which there is an outline, over other processes, which may still have to
    come."""
    meter: Meter = field(default_factory=Meter)
    own_folder: Callable[[str], Path] | None = None
    """Where the worker keeps what is its own of the run of that id; None: nowhere."""
    on_run_known: Callable[[RunConfig], object] = lambda _: None
    on_ready: Callable[[], object] = lambda: None
    """Called when what is trained is built and the server is told so."""
    on_stats: Callable[[Telemetry], None] = lambda _: None
    """Hears of every report that goes to the server, in the session's thread; must not block."""


class Participant(Protocol):
    """What an algorithm does with a worker, over all sessions of a run."""

    @property
    def unacknowledged(self) -> LeaseKey | None:
        """The push whose outcome is unknown, if any."""

    def new_receiver(self) -> Receiver:
        """What takes the messages of a new session."""

    def take_part(self, link: "Link") -> None:
        """Work until the link raises."""


class Unready(Receiver):
    """Takes what the server says until the algorithm's own receiver is there."""

    def __call__(self, message: Message, _payload: memoryview) -> Event:
        return MessageReceived(0, message)


class Link(Session):
    """A session with the server.

    Memory that a queued frame refers to must not change before the server has answered or the link is left.
    """

    def __init__(
        self,
        connection: Connection,
        heartbeat_timeout_s: float,
        report: Callable[["Link"], Message | None],
        place: WorkerSetup,
        kept: KeptSteps | None,
    ) -> None:
        """`report`: what to tell the server of this worker with each heartbeat. `place`: this process."""
        self.kept = kept
        """Where the worker keeps what is its own of this run; None: nowhere."""
        self.place, self._whom = place, place.whom
        self._told_trouble = ""
        self._others: list[Session] = []
        """Sessions with other peers, which last as long as this one."""
        self.heard = False
        """Whether the server has answered this worker's Ready."""
        super().__init__(
            connection,
            session_id=0,
            receiver=Unready(),
            inbox=Inbox(),
            heartbeat_timeout_s=heartbeat_timeout_s,
            max_queued=MAX_QUEUED,
            kinds=FROM_SERVER,
            report=lambda: report(self),
        )
        self.start()

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes (sent, received) by this session and those with other peers."""
        connections = [each.connection for each in (self, *self._others)]
        return (
            sum(each.bytes_sent for each in connections),
            sum(each.bytes_received for each in connections),
        )

    def begin(self, receiver: Receiver, ready: Ready) -> None:
        """Say that this worker is ready; the server's answers go to `receiver`."""
        self.receiver = receiver
        self.send(ready)

    def dial(
        self, address: Address, sets: Sequence[MessageSet], receiver: Receiver, timeout_s: float
    ) -> Session:
        """A session with another process of the run, whose events come with the server's.

        When it ends, so does this one.

        Raises:
            ConnectTimeout: nobody answered in time.
            Rejected, VersionDiffers, AuthError: it does not let this worker in.
        """
        session = self.place.dial_session(
            address,
            sets,
            session_id=1 + len(self._others),
            receiver=receiver,
            inbox=self._inbox,
            timeout_s=timeout_s,
            whom="the store",
        )
        self._others.append(session)
        session.start()
        return session

    def hear_trouble(self, trouble: str) -> None:
        """Log what the server cannot do, once each time that it changes."""
        before, self._told_trouble = self._told_trouble, trouble
        if trouble == before:
            return
        said = f"{self._whom} says: {trouble}" if trouble else f"{self._whom} can save again"
        self.place.log.log(logging.WARNING if trouble else logging.INFO, "%s", said)

    def next_event(self, timeout_s: float) -> Event | None:
        """The next event, or None when there is none within `timeout_s` seconds.

        Raises:
            RunOver: the run has ended well.
            RunFailed: it has ended badly.
            Rejected: the server does not want this worker.
            PeerLost: the session has ended, or the server has said that it ends it.
        """
        event = self._inbox.get(timeout_s)
        self.heard |= event is not None and not isinstance(event, SessionClosed)
        check_goes_on(event, self._whom)
        if isinstance(event, SessionClosed):
            raise PeerLost(f"a store is lost: {event.reason}")
        return event

    def check(self) -> None:
        """Hear of the server's end while this worker prepares: before it is ready nothing else is said.

        Raises:
            SmolclusterError: as `next_event`.
        """
        if isinstance(self.receiver, Unready):
            self.next_event(0.0)

    def leave(self, close_message: Message | None) -> None:
        """Say goodbye if there is somebody to hear it, and wait until the session's memory is free."""
        if close_message is not None:
            self.end_with(close_message)
        else:
            self.finish()
        self.join_or_cut(SHUTDOWN_TIMEOUT_S)
        for other in self._others:
            other.cut("the session with the server has ended")
            other.join(None)
        for each in (self, *self._others):  # others may still hold them until the next session
            each.receiver = Unready()


def wait_until(
    link: Link, condition: Callable[[], bool], handle: Callable[[Event], None], meter: Meter
) -> None:
    """Have `handle` take all that has arrived, and wait until `condition` holds.

    Raises:
        SmolclusterError: as `next_event`.
    """
    while True:
        with meter("wait"):
            event = link.next_event(0.0 if condition() else WAIT_S)
        if event is not None:
            handle(event)
        elif condition():
            return


def follow(
    place: WorkerSetup, make_participant: Callable[[Welcome, TrainingContext], Participant]
) -> None:
    """Join the server, take part, and come back after every lost connection, until the run is over.

    Raises:
        ConnectTimeout: no server in time, at the start or after a loss.
        RunFailed: the run ended badly.
        Rejected, AuthError, DataError, ConfigError, NonFiniteLoss, UserCodeError: this worker cannot go on.
    """
    try:
        with closing(_Life(place, make_participant)) as life:
            place.come_back(Welcome, life.spend_session, life.patience_s)
    except RunOver as news:
        place.log.info("the run is over: %s", news)


class _Life:
    """What a worker keeps from one session to the next."""

    def __init__(
        self,
        place: WorkerSetup,
        make_participant: Callable[[Welcome, TrainingContext], Participant],
    ) -> None:
        self._place = place
        self._make_participant = make_participant
        self._welcome: Welcome | None = None
        """By which what is trained was built."""
        self._training: TrainingContext
        self._participant: Participant | None = None
        self._open = ExitStack()
        self._samples_per_s: float | None = None
        self._process_stats = ProcessStats(place.meter)
        self._made_progress = False
        """Whether the last session was answered after Ready, or was the first to build what is trained."""
        self._reconnect_timeout_s = 0.0

    def close(self) -> None:
        """Close what is trained, which learns from the exception that is on its way how the run has ended."""
        self._open.close()

    def patience_s(self) -> float | None:
        return self._reconnect_timeout_s if self._made_progress else None

    def spend_session(self, connection: Connection, welcome: Welcome) -> None:
        """Take part over one connection; it ends with an exception, and is closed then."""
        link = Link(
            connection,
            welcome.heartbeat_timeout_s,
            self._report,
            self._place,
            self._kept(welcome.run_id),
        )
        self._made_progress = False
        self._reconnect_timeout_s = welcome.run.reconnect_timeout_s
        close_message: Message | None = Goodbye(reason="it was stopped")
        try:
            self._place.on_run_known(welcome.run)
            participant = self._prepare(welcome, link.check)
            link.begin(participant.new_receiver(), self._ready(participant, welcome.run))
            self._place.on_ready()
            participant.take_part(link)
        except (RunOver, RunFailed):
            close_message = Goodbye(reason="the run is over")
            raise
        except (Rejected, PeerLost):
            close_message = None
            raise
        except Exception as error:
            close_message = _close_message(error)
            raise
        finally:
            self._made_progress |= link.heard
            link.leave(close_message)

    def _report(self, link: Link) -> Telemetry:
        """What this worker has done so far."""
        meter, clocks = self._place.meter, link.clocks.best
        if clocks is not None:
            meter.clock_offset_s = -clocks.offset_s
        is_dated = clocks is not None  # or the server could not say when its spans were
        report = self._process_stats.report(link.bytes_moved(), link.backlog, with_spans=is_dated)
        self._place.on_stats(report)
        return report

    def _kept(self, run_id: str) -> KeptSteps | None:
        folder = self._place.own_folder
        return KeptSteps(folder(run_id), self._place.log) if folder else None

    def _prepare(self, welcome: Welcome, check: Callable[[], None]) -> Participant:
        """Build what is trained, unless it is there from the last session with this same server.

        `check`: see `TrainingContext.wait_until_ready`.
        """
        before, place = self._welcome, self._place
        if before is None or not _same_bench(before, welcome):
            self._build(welcome)
        elif (before.run, before.incarnation) != (welcome.run, welcome.incarnation):
            place.log.info("%s was started again; starting afresh with it", place.whom)
            self._training.replica.optimizer.reset()  # the server sends the weights
            self._participant = None  # the server knows nothing of what it was owed
            gc.collect()  # it may refer to itself, and have several copies of the weights
        self._welcome = welcome
        self._training.wait_until_ready(check)
        if self._participant is not None:
            place.log.info("back in run %s", welcome.run_id)
            return self._participant
        if self._samples_per_s is None:
            self._samples_per_s = measure_speed(self._training, welcome.run.train.batch_size)
            place.log.info(
                "joined run %s at %s: %s on %s, %s",
                welcome.run_id,
                place.address,
                type(self._training.replica.model).__name__,
                self._training.workload.name,
                describe(pick_device(place.node.device)),
            )
        self._participant = self._make_participant(welcome, self._training)
        self._made_progress = True
        return self._participant

    def _build(self, welcome: Welcome) -> None:
        self._open.close()  # of a run before
        self._welcome = self._participant = self._samples_per_s = None
        made = (self._place.build or self._built)(welcome)
        self._training = self._open.enter_context(closing(made))
        self._made_progress = True

    def _workload(self, run: RunConfig) -> Workload | None:
        """What this process was told to train; None: what the server's configuration names.

        Raises:
            ConfigError: the server trains a workload of which nothing was told, or trains none.
        """
        stated = self._place.workload
        if run.workload is not None and stated is None:
            raise ConfigError(
                f"run {run.run_id} trains the workload {run.workload}, whose code this machine's user has to "
                "name: start this worker with --workload FILE.py:FUNCTION"
            )
        if not isinstance(stated, str):
            return stated
        if run.workload is None:
            raise ConfigError(
                f"run {run.run_id} trains {run.train.dataset.name}, not a workload: start this worker "
                f"without --workload {stated}"
            )
        return load_named(stated, run.train.workload_args, run.seed)

    def _built(self, welcome: Welcome) -> TrainingContext:
        """What is trained, of a model and data of this process."""
        run, place = welcome.run, self._place
        workload = self._workload(run)
        if welcome.data is not None:
            workload = served_workload(run.train, welcome.data, workload)
        built = build(
            run.train,
            run.seed,
            place.node.dataset,
            pick_device(place.node.device),
            bucket_bytes=welcome.bucket_bytes,
            microbatch=place.node.microbatch,
            workload=workload,
            meter=place.meter,
            log=place.log,
            is_outline=place.spread is not None or not spec_of(run.algorithm).has_whole_model,
        )
        if place.spread is not None:
            return place.spread(welcome, built)
        return replace(built, first_losses=first_losses(built.workload, built.replica))

    def _ready(self, participant: Participant, run: RunConfig) -> Ready:
        replica = self._training.replica
        says_weights = spec_of(run.algorithm).has_local_steps and not replica.params.is_meta
        return Ready(
            source=self._training.workload.source,
            dataset_fingerprint=self._training.workload.fingerprint,
            model_fingerprint=replica.fingerprint,
            samples=self._training.workload.sample_marks,
            order=self._training.workload.order_mark(run.seed),
            first_weights=self._training.first_losses.weights,
            first_losses=self._training.first_losses.losses,
            device=describe(pick_device(self._place.node.device)),
            samples_per_s=self._samples_per_s or 0.0,
            unacknowledged=participant.unacknowledged,
            weights=replica.digest() if says_weights else None,
            steps_alone=self._training.steps_alone,
        )


def _same_bench(before: Welcome, now: Welcome) -> bool:
    """Whether dataset and model would be built just as they were."""
    built_from = (before.run, before.bucket_bytes, before.data)
    return built_from == (now.run, now.bucket_bytes, now.data)


def measure_speed(training: TrainingContext, batch_size: int) -> float:
    """Samples a second that this machine computes, from one batch after a warm-up; 0: nobody knows yet."""
    num_samples = min(batch_size, training.num_samples)
    if not training.rehearse(num_samples):
        return 0.0
    started = time.perf_counter()
    training.rehearse(num_samples)
    return num_samples / max(time.perf_counter() - started, 1e-9)


def _close_message(error: Exception) -> Message:
    """What the server is told; from a fault it concludes whether the run has failed."""
    error = device_error(error) or error
    if isinstance(error, NonFiniteLoss):
        return Goodbye(reason=str(error), fault="non-finite")
    if isinstance(error, UserCodeError):
        return Goodbye(reason=str(error), fault="user-code")
    what = error if isinstance(error, SmolclusterError) else f"internal error: {error!r}"
    return Goodbye(reason=f"it cannot go on: {what}", fault="own")
