"""The server's side of all its workers: admits, checks, counts and dismisses them.

An algorithm's loop asks `next_events` and hears of three things: a worker `Joined` (it is proved, admitted,
and its data and model are the server's), a worker `Departed`, and whatever the algorithm's receiver made of
the messages in between; and of all that concerns stores. Knocks, fingerprints, fencing and the quorum are
settled here, by the caller's thread, and how the run ends is told to workers and stores alike.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

from smolcluster.configs.schema import ClusterConfig
from smolcluster.data.marks import SAME_DATA, SAME_ORDER, first_difference
from smolcluster.errors import ClusterEmpty, NonFiniteLoss, UserCodeError
from smolcluster.runs.events import (
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRejected,
    WorkerStalled,
)
from smolcluster.server.report import why_ended
from smolcluster.server.worker import Listener, Worker
from smolcluster.training.build import TrainingContext
from smolcluster.training.first_loss import difference
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_duration
from smolcluster.wire.acceptor import Acceptor, SessionOpened
from smolcluster.wire.inbox import Call, Event, Inbox, JoinRequest, MessageReceived, SessionClosed
from smolcluster.wire.membership import (
    Admitted,
    Member,
    Refused,
    admit,
    assign,
    quorum,
)
from smolcluster.wire.messages import (
    PS,
    End,
    Goodbye,
    Logged,
    Ready,
    Reject,
    Telemetry,
)
from smolcluster.wire.session import Session

PRESENT_S = 5.0
"""How long the end of the run waits at most for workers and stores that have been told of it to close their
connections, seconds."""
GOODBYE_S = 0.5
"""How long a server that is stopped waits at most for the same: it may have little time."""
LEAST_RECEIVED_NBYTES = 64 * 1024
"""More than a worker receives of heartbeats while it is waited for."""
SHUTDOWN_TIMEOUT_S = 3.0
"""How long the end of the run waits for workers that have lost their connection, seconds."""
LONG_PREPARED_S = 60.0
"""After so many seconds it is said who is not ready."""


@dataclass(frozen=True)
class Joined(Event):
    """A worker takes part from now on."""

    worker: Worker
    ready: Ready


@dataclass(frozen=True)
class Departed(Event):
    """A worker that took part does so no more."""

    worker: Worker


L = TypeVar("L", bound=Listener)


class WorkerPool(Generic[L]):
    """Owns the sessions. Only the deciding thread calls it."""

    def __init__(
        self,
        *,
        cluster: ClusterConfig,
        inbox: Inbox,
        acceptor: Acceptor,
        training: TrainingContext,
        listener: L,
        log: logging.Logger,
        check_stop: Callable[[], None] = lambda: None,
        role: str = "worker",
        worker_command: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sends_results: bool = False,
    ) -> None:
        """Begin without workers.

        Args:
            check_stop: raises when a signal has asked this process to stop.
            role: what its members are to people.
            worker_command: starts a worker, for a person who has to; None: it is started by others.
            clock: how long workers are waited for goes by it, seconds.
            sends_results: whether workers need what is queued for them when the run ends well.
        """
        self._sends_results = sends_results
        self._clock = clock
        self._role = role
        self._worker_command = worker_command
        self._told_waiting = ""
        """What was said last of the workers that it waits for."""
        self.started = False
        self._check_stop = check_stop
        self._cluster = cluster
        self._inbox = inbox
        self._acceptor = acceptor
        self._training = training
        self.listener = listener
        self._log = log
        self._workers: dict[int, Worker] = {}
        self._stores: dict[int, Session] = {}
        """Sessions of stores, by id."""
        self._missing: set[int] = set()
        self._known: set[str] = set()
        self._refused: set[str] = set()
        self._promised: dict[int, tuple[str, Deadline]] = {}
        """Worker ids of nodes that asked for one and have not taken part under it, and until when they are
        theirs: a connection may break while they prepare."""
        self._alone_since = self._active_at = clock()

    def __enter__(self) -> Self:
        self._acceptor.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """See everybody out, with the reason, and close the door.

        After a signal the run is not over: the server may be started again, and workers and stores look for
        it.
        """
        sentence = self.listener.ending if error is None else why_ended(error)
        try:
            if isinstance(error, KeyboardInterrupt):
                self.say_goodbye(sentence)
            else:
                self.drain(error is None, sentence)
        finally:
            self.listener.ended(error)
            self._acceptor.close()

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.ready]

    @property
    def is_preparing(self) -> bool:
        """Whether a worker loads its data and builds its model before it takes part."""
        return any(not worker.ready for worker in self._workers.values())

    def next_events(self, timeout_s: float) -> Iterator[Event]:
        """What happened next; nothing when `timeout_s` seconds passed without.

        Raises:
            Interrupted: a signal asked this process to stop.
            ClusterEmpty: there have been too few workers for too long.
            SmolclusterError: what another thread did has failed.
        """
        self._check_stop()
        event = self._next_but_reports(timeout_s)
        self._check_quorum()
        if event is not None:
            yield from self._take(event)

    def _next_but_reports(self, timeout_s: float) -> Event | None:
        """The next event but for what workers report of themselves, which is settled on the way.

        After an event a server looks at all its workers. Their reports, one a second of each, call for none
        of that, and would make it quadratic in their number.
        """
        deadline = Deadline(timeout_s)
        while True:
            with self.listener.meter("wait"):
                event = self._inbox.get(deadline.remaining())
            match event:
                case MessageReceived(session_id, Telemetry() as report):
                    self._hear(session_id, report)
                case _:
                    return event
            if deadline.expired:
                return None

    def _take(self, event: Event) -> Iterator[Event]:
        """Settle what is settled here; of all else the algorithm hears."""
        if self._is_of_store(event):
            yield event
            return
        match event:
            case Call(run):
                run()
            case JoinRequest():
                yield from self._answer(event)
            case SessionOpened():
                self._open_session(event)
            case SessionClosed():
                yield from self._depart(event.session_id, event.reason)
            case MessageReceived(session_id, Ready() as ready):
                yield from self._join(session_id, ready)
            case MessageReceived(session_id, Goodbye(fault="non-finite" | "user-code") as fault):
                self._hear_fault(session_id, fault)
            case MessageReceived(session_id, Goodbye() | Logged() as message):
                self._hear(session_id, message)
            case _:
                yield event

    def _is_of_store(self, event: Event) -> bool:
        """Whether it is of a store's session, and so the algorithm's matter."""
        match event:
            case SessionOpened(session=session, client=client) if PS not in client.sets:
                self._stores[session.session_id] = session
            case SessionClosed(session_id=session_id) if session_id in self._stores:
                del self._stores[session_id]
            case _:
                return isinstance(event, MessageReceived) and event.session_id in self._stores
        return True

    def say_goodbye(self, reason: str) -> None:
        """Tell all workers that this server leaves, and wait a moment until they have heard it."""
        sessions = [each.session for each in self._workers.values() if each.session]
        for session in sessions:
            session.end_with(Goodbye(reason=reason))
        deadline = Deadline(GOODBYE_S)
        for session in sessions:
            session.join(deadline.remaining())

    def drain(self, ok: bool, sentence: str) -> None:
        """Tell everybody that the run is over, and stay a moment for those who have not heard it.

        Whoever has says Goodbye and closes its side; of a connection that broke, nobody knows. A run that had
        nothing left to do when it was resumed waits for those that took part before. Who needs what is queued
        for it hears of the end behind that, and is waited for as long as it goes on coming.

        Raises:
            Interrupted: a signal asked this process to stop meanwhile.
        """
        end, sends_results = End(ok=ok, sentence=sentence), ok and self._sends_results
        if ok and not self._known:
            self._missing.update(self.listener.known_nodes)
        for session in self._sessions:
            tell = session.send if sends_results else session.send_at_once
            tell(end)
        leaving = {*self._workers, *self._stores}
        arrived = self._arrived
        present, absent = self._patience(sends_results), Deadline(SHUTDOWN_TIMEOUT_S)
        while (leaving and not present.expired) or (self._missing and not absent.expired):
            self._see_out(self._inbox.get(0.1), end, leaving)
            if not sends_results:
                continue
            self._check_stop()  # it may take long
            before, arrived = arrived, self._arrived
            if arrived != before:
                present = self._patience(sends_results)

    def _see_out(self, event: Event | None, end: End, leaving: set[int]) -> None:
        """Take what happens after the end of the run; `leaving`: sessions that are still waited for."""
        match event:
            case JoinRequest(session_id, hello, answer):
                answer.set_result(Refused("over" if end.ok else "failed", end.sentence))
                self._missing.discard(hello.worker_id)
                leaving.add(session_id)  # until it has been told
            case SessionOpened() as opened:
                opened.session.send_at_once(end)
            case MessageReceived(session_id, Goodbye() | Telemetry() as message):
                self._hear(session_id, message)
            case SessionClosed(session_id):
                leaving.discard(session_id)
                gone = self._workers.get(session_id)
                if gone is not None and gone.ready and gone.goodbye is None:
                    self._missing.add(gone.member.worker_id)

    @property
    def _sessions(self) -> list[Session]:
        workers = [each.session for each in self._workers.values() if each.session]
        return [*workers, *self._stores.values()]

    @property
    def _arrived(self) -> list[tuple[int, int, int]]:
        """How far all that is queued has come: to this machine's network, and as far as workers have told."""
        return [
            (
                session.num_gone,
                session.connection.bytes_sent if session.backlog else 0,
                each.gauge.received_bytes // LEAST_RECEIVED_NBYTES,
            )
            for each in self._workers.values()
            if (session := each.session) is not None
        ]

    def _patience(self, sends_results: bool) -> Deadline:
        """How long the end of the run waits for the next thing to come, or for workers to close."""
        is_sending = sends_results and any(each.backlog for each in self._sessions)
        return Deadline(self._cluster.heartbeat_timeout_s if is_sending else PRESENT_S)

    def _hear_fault(self, session_id: int, fault: Goodbye) -> None:
        """A worker gives up. The others go on without it, unless the run's own code is to blame.

        Raises:
            NonFiniteLoss: what it computes is not finite, and no other worker is there: it is the run.
            UserCodeError: the user's code failed in training, or before with no other worker there.
        """
        worker = self._workers.get(session_id)
        if worker is None:
            return
        others = [other for other in self.workers if other is not worker and other.goodbye is None]
        is_users = fault.fault == "user-code"
        if not (self._missing or others) or (is_users and worker.ready):
            sentence = f"{worker.name}: {fault.reason}"
            if is_users:
                raise UserCodeError(sentence, f"its traceback is in the log of {worker.name}\n")
            raise NonFiniteLoss(sentence)
        self._log.error("%s takes part no more: %s", worker.name, fault.reason)
        self._hear(session_id, fault)

    def _hear(self, session_id: int, message: Goodbye | Telemetry | Logged) -> None:
        worker = self._workers.get(session_id)
        if worker is None or worker.session is None:
            return
        if not isinstance(message, Goodbye):
            self.listener.heard(worker, message)
        elif worker.goodbye is None:
            worker.goodbye = message
        else:
            worker.session.cut("it said goodbye twice")

    def stalled(self, worker: Worker, silent_s: float, reason: str) -> None:
        """Tell that a worker has not answered for so many seconds; `reason` says what follows."""
        self._log.warning(
            "%s has not answered for %s: %s", worker.name, format_duration(silent_s), reason
        )
        event = WorkerStalled(**worker.who, silent_s=silent_s, reason=reason)
        self.listener.happened(event, worker)

    def _check_quorum(self) -> None:
        """Begin training when there are enough workers; give up when there have been too few for too long.

        A worker that still prepares (loads data, builds the model) holds back giving up, because that
        may take longer than the deadline: for `prepare_timeout_s`, whoever does it.

        Raises:
            ClusterEmpty: it gave up.
        """
        now, present = self._clock(), len(self.workers)
        preparing = [worker for worker in self._workers.values() if not worker.ready]
        for worker in preparing:
            self._check_prepares(worker, now - worker.admitted_at)
        if present and self.started:
            self._alone_since = self._active_at = now
        elif preparing and now - self._active_at < self._cluster.prepare_timeout_s:
            self._alone_since = now
        waited_s = now - self._alone_since
        decision = quorum(
            present, self._cluster, started=self.started, waited_s=waited_s, role=self._role
        )
        if decision.verdict == "give up":
            raise ClusterEmpty(decision.reason)
        if decision.verdict == "go" and not self.started:
            begins = "training starts: " if self._role == "worker" else ""
            self._log.info("%s%s", begins, decision.reason)
            self.started = True
            self.listener.begun()
        if decision.verdict == "wait" and not self.started:
            self._tell_waiting(decision.reason)
        self.listener.is_waiting = not (present and self.started)

    def _tell_waiting(self, reason: str) -> None:
        """Say for whom training waits, each time that this changes."""
        if reason == self._told_waiting:
            return
        is_first = not self._told_waiting
        how = f"; start one with `{self._worker_command}`"
        self._log.info("%s%s", reason, how if is_first and self._worker_command else "")
        self._told_waiting = reason

    def _check_prepares(self, worker: Worker, waited_s: float) -> None:
        """Say who has not been ready for long; cut who has not been for too long, so that its id is free."""
        limit_s = self._cluster.prepare_timeout_s
        if worker.session is None or worker.session.is_cut:
            return
        if waited_s >= limit_s:
            reason = f"it was not ready within {format_duration(limit_s)} (prepare_timeout_s)"
            self._reject(worker.member.node, worker.member.worker_id, "not-ready", reason)
            worker.session.cut(reason)
        elif waited_s >= LONG_PREPARED_S and not worker.is_slow:
            worker.is_slow = True
            self._log.warning(
                "%s has prepared its data and model for %s; it is cut after %s (prepare_timeout_s)",
                worker.name,
                format_duration(waited_s),
                format_duration(limit_s),
            )

    def _answer(self, request: JoinRequest) -> Iterator[Event]:
        hello = request.hello
        members = [worker.member for worker in self._workers.values()]
        if not hello.worker_id:
            request.answer.set_result(self._assign(members, hello.node))
            return
        decision = admit(members, hello.worker_id, hello.node, hello.instance, self._cluster)
        if isinstance(decision, Refused):
            if hello.instance not in self._refused:
                self._reject(hello.node, hello.worker_id, decision.code, decision.sentence)
            self._refused.add(hello.instance)
        else:
            yield from self._fence(decision)
            member = Member(request.session_id, hello.worker_id, hello.node, hello.instance)
            self._workers[request.session_id] = Worker(
                member, admitted_at=self._clock(), role=self._role
            )
        request.answer.set_result(decision)

    def _assign(self, members: list[Member], node: str) -> Admitted | Refused:
        """A worker id for a node that asks for one; two that ask at the same time get two.

        It is the node's for `prepare_timeout_s`, as it is that of a worker that prepares.
        """
        self._promised = {
            number: promise for number, promise in self._promised.items() if not promise[1].expired
        }
        promised = {number: name for number, (name, _) in self._promised.items()}
        taken = {**promised, **self.listener.known_nodes}
        decision = assign(members, node, taken, self._cluster)
        if isinstance(decision, Admitted) and decision.worker_id is not None:
            until = Deadline(self._cluster.prepare_timeout_s, self._clock)
            self._promised[decision.worker_id] = node, until
        return decision

    def _free(self, member: Member) -> None:
        """Let others have the worker id that a node was promised: it does not come back."""
        if self._promised.get(member.worker_id, ("",))[0] == member.node:
            del self._promised[member.worker_id]

    def _fence(self, decision: Admitted) -> Iterator[Event]:
        if decision.fences is not None:
            old = self._workers[decision.fences].session
            if old:
                old.cut("the same process has connected again")
            yield from self._depart(decision.fences, "the same process has connected again")

    def _open_session(self, opened: SessionOpened) -> None:
        worker = self._workers.get(opened.session_id)
        if worker is None:
            opened.session.cut("its place was taken in the meantime")
        else:
            worker.session = opened.session

    def _join(self, session_id: int, ready: Ready) -> Iterator[Event]:
        worker = self._workers.get(session_id)
        if worker is None or worker.session is None or worker.ready:
            return
        difference = self._difference(ready)
        if difference:
            code, what, remedy = difference
            sentence = f"{what}: {remedy}" if remedy else what
            self._reject(worker.member.node, worker.member.worker_id, code, sentence, shown=what)
            worker.session.end_with(Reject(code=code, sentence=sentence))
            del self._workers[session_id]
            self._free(worker.member)
            return
        worker.ready = ready
        self._promised.pop(worker.member.worker_id, None)
        self._missing.discard(worker.member.worker_id)
        rejoined = worker.member.instance in self._known
        self._known.add(worker.member.instance)
        self._log.info(
            "%s %s, on %s", worker.name, "is back" if rejoined else "joined", ready.device
        )
        joined = WorkerJoined(
            **worker.who,
            device=ready.device,
            samples_per_s=ready.samples_per_s,
            rejoined=rejoined,
        )
        self.listener.happened(joined, worker)
        yield Joined(worker, ready)

    @cached_property
    def _order(self) -> str | None:
        return self._training.workload.order_mark(self._training.seed)

    def _difference(self, ready: Ready) -> tuple[str, str, str] | None:
        """Why a worker cannot take part: a code, what differs, and what to do there, if that is known."""
        workload = self._training.workload
        if workload.source is not None and ready.source != workload.source:
            return (
                "workload",
                f"this worker's code of the workload differs from the server's (SHA-256 "
                f"{(ready.source or 'none')[:12]}, server {workload.source[:12]})",
                "copy the server's file and what it imports from its folder, and start this worker again",
            )
        theirs, ours = ready.dataset_fingerprint, self._training.workload.fingerprint
        if theirs != ours:
            return (
                "dataset",
                f"this worker's dataset differs from the server's (fingerprint {theirs[:12]}, server "
                f"{ours[:12]})",
                "copy the server's files to its dataset.root; for text, see that tokenizer and Python are "
                "the server's, or set dataset.source=server there",
            )
        if (place := first_difference(ready.samples, workload.sample_marks)) is not None:
            number = workload.marked_samples[place]
            return (
                "dataset",
                f"sample {number} of this worker's training data is not the server's",
                SAME_DATA,
            )
        if ready.order is not None and ready.order != self._order:
            return (
                "dataset",
                "this worker's sampler gives another order than the server's under the same seed",
                SAME_ORDER,
            )
        if ready.model_fingerprint != self._training.replica.fingerprint:
            return (
                "model",
                "this worker built another model than the server's, with parameters of other names, shapes "
                "or types, or frozen weights of other values",
                "give both the same code and versions of smolcluster and torch, and make frozen random "
                "weights from the same seed",
            )
        first = self._training.first_losses
        told = difference(first, ready.first_weights, ready.first_losses)
        return None if told is None else ("model", told, "")

    def _reject(
        self, node: str, worker_id: int, code: str, sentence: str, *, shown: str | None = None
    ) -> None:
        """`shown`: what the log says of it; None: all. What to do is told where it can be done."""
        self._log.warning("worker %d (%s) refused: %s", worker_id, node, shown or sentence)
        self.listener.happened(
            WorkerRejected(node=node, worker_id=worker_id, code=code, reason=sentence)
        )

    def _depart(self, session_id: int, reason: str) -> Iterator[Event]:
        worker = self._workers.pop(session_id, None)
        if worker is None:
            return
        goodbye = worker.goodbye
        if worker.ready is None:
            why = goodbye.reason if goodbye else reason
            self._log.warning("%s never took part: %s", worker.name, why)
            if goodbye is not None:
                self._free(worker.member)
            return
        if goodbye is not None:
            self._log.info("%s left: %s", worker.name, goodbye.reason)
            self.listener.happened(WorkerLeft(**worker.who, reason=goodbye.reason), worker)
        else:
            self._missing.add(worker.member.worker_id)
            self._log.warning("%s is lost: %s", worker.name, reason)
            self.listener.happened(WorkerLost(**worker.who, reason=reason), worker)
        if self.started and not self.workers:
            patience = format_duration(self._cluster.empty_cluster_timeout_s)
            self._log.warning("all %ss have gone; waiting up to %s for one", self._role, patience)
        yield Departed(worker)
