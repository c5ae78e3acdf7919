"""A process's way into a run: it dials the server, and hears how a run ended that it comes too late for."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from smolcluster.errors import ConnectTimeout, PeerLost, Rejected, RunFailed, VersionDiffers
from smolcluster.utils.retry import Deadline, backoff_delays
from smolcluster.utils.units import format_duration
from smolcluster.wire.connection import Connection
from smolcluster.wire.dialling import Address
from smolcluster.wire.inbox import Event, MessageReceived, SessionClosed
from smolcluster.wire.messages import Accepted, End, Goodbye, Reject, Welcome
from smolcluster.wire.node import LONGEST_DELAY_S, Node

SETTLED_S = 4.0
"""A session that lasted so long lets the delays between reconnects begin anew."""

A = TypeVar("A", bound=Accepted)


class RunOver(Exception):
    """The server says that the run has ended well."""


def check_goes_on(event: Event | None, whom: str) -> None:
    """See whether what has happened ends a process's session with its server, which has the number 0.

    Raises:
        RunOver: the run has ended well.
        RunFailed: it has ended badly.
        Rejected: the server does not want this process.
        PeerLost: the session has ended, or `whom`, the server, has said that it ends it, or asks to be tried
            again later.
    """
    match event:
        case MessageReceived(session_id=0, message=End() as end):
            raise RunOver(end.sentence) if end.ok else RunFailed(end.sentence)
        case MessageReceived(session_id=0, message=Reject(retry_after_s=float()) as reject):
            raise PeerLost(f"{whom} does not let this process in yet: {reject.sentence}")
        case MessageReceived(session_id=0, message=Reject() as reject):
            raise Rejected(reject.sentence, reject.code)
        case MessageReceived(session_id=0, message=Goodbye() as goodbye):
            raise PeerLost(f"{whom} has left: {goodbye.reason}")
        case SessionClosed(session_id=0, reason=reason):
            raise PeerLost(f"{whom} is lost: {reason}")


@dataclass(frozen=True, kw_only=True)
class Follower(Node):
    """A process that follows a server, or `whom`, at an address; it looks for it for `start_timeout_s`."""

    address: Address
    start_timeout_s: float
    whom: str = "the server"

    def join(self, answer: type[A], timeout_s: float) -> tuple[Connection, A]:
        """Try until the server lets this process in with an `answer`; see `Node.dial`.

        Raises:
            RunOver: the run has ended well in the meantime.
            RunFailed: it has ended badly.
            VersionDiffers: this version does not understand the run's settings, or see `Node.dial`.
            ConnectTimeout, Rejected, AuthError: see `Node.dial`.
        """
        try:
            connection, accepted = self.dial(
                self.address, answer, timeout_s=timeout_s, whom=self.whom
            )
        except Rejected as error:
            if error.is_proved and error.code == "over":
                raise RunOver(str(error)) from None
            if error.is_proved and error.code == "failed":
                raise RunFailed(str(error)) from None
            raise
        try:
            if isinstance(accepted, Welcome):
                accepted.run  # noqa: B018 - says what this version does not understand
        except VersionDiffers:
            connection.close()
            raise
        return connection, accepted

    def come_back(
        self,
        answer: type[A],
        spend_session: Callable[[Connection, A], object],
        patience_s: Callable[[], float | None],
    ) -> NoReturn:
        """Join, take part, and come back after every lost connection.

        Args:
            answer: how the server lets this process in.
            spend_session: takes part over one connection; it ends with an exception.
            patience_s: how long to look for the server that was lost, in seconds; None: the last session has
                come to nothing, and what time it had is all.

        Raises:
            RunOver: the run has ended well.
            PeerLost: the server was lost, and there is no time left.
            SmolclusterError: as `join` and `spend_session`.
        """
        patience, delays_s = Deadline(self.start_timeout_s), backoff_delays(cap_s=LONGEST_DELAY_S)
        while True:
            connection, accepted = self.join(answer, patience.remaining())
            settled = Deadline(SETTLED_S)
            try:
                spend_session(connection, accepted)
            except PeerLost as error:
                if (again_s := patience_s()) is not None:
                    patience = Deadline(again_s)
                elif patience.expired:
                    raise
                left = format_duration(patience.remaining())
                self.log.warning("%s; trying to reconnect for %s", error, left)
                if settled.expired:
                    delays_s = backoff_delays(cap_s=LONGEST_DELAY_S)
                time.sleep(next(delays_s))
            gc.collect()  # sessions and what takes their messages, with its memory, refer to each other

    def ask(self) -> Welcome:
        """What the run is, and a worker id for this node, which it comes in under later.

        Raises:
            Rejected: the server refuses, at last; a name may stay that of a live worker.
            RunOver, RunFailed, ConnectTimeout, VersionDiffers, AuthError: see `join`.
        """
        try:
            connection, welcome = self.join(Welcome, self.start_timeout_s)
        except ConnectTimeout as error:
            if isinstance(error.__cause__, Rejected):
                raise error.__cause__ from None
            raise
        connection.close()
        return welcome
