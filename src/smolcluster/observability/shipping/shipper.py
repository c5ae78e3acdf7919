"""Pushing a run's logs to Loki until asked to end; then what is left, for a few seconds."""

import random
import threading
import time
from collections.abc import Callable, Iterator

from smolcluster.errors import SmolclusterError
from smolcluster.observability.shipping.loki import PushReply, push_body
from smolcluster.observability.shipping.spool import Batch, Spool
from smolcluster.utils.cadence import Cadence
from smolcluster.utils.retry import Deadline, backoff_delays
from smolcluster.utils.units import format_count

POLL_S = 0.5
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 10.0
WARN_EVERY_S = 60.0

Push = Callable[[bytes], PushReply]


class Shipper:
    """Takes lines from a spool and pushes them; for one thread.

    `say` gets warnings, each a sentence, one a minute at most.
    """

    def __init__(
        self,
        spool: Spool,
        push: Push,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spool = spool
        self._push = push
        self._say = say
        self._clock = clock
        self._cadence = Cadence(0, WARN_EVERY_S, clock)
        self._unsaid = 0
        self._waiting: Batch | None = None
        self._delays = _delays()
        self.refusal = ""
        """Why Loki did not take some lines; empty: it took all that it was given."""
        self.unreadable = ""
        """Why the logs could not be read at the last try, in a sentence; empty: they could."""

    def run(self, asked: threading.Event, flush_s: float) -> bool:
        """Push until `asked`, then what is left within `flush_s` seconds; whether all of it arrived."""
        while not asked.is_set():
            delay_s = self.step()
            asked.wait(POLL_S if delay_s is None else delay_s)
        return self.flush(flush_s)

    def flush(self, timeout_s: float, *, patient: bool = False) -> bool:
        """Push all that is there, a last line without an end included; whether all of it arrived.

        With `patient` it may take `timeout_s` seconds anew after each batch that Loki has dealt with.
        """
        deadline = Deadline(timeout_s, self._clock)
        self._delays = _delays()
        while (delay_s := self.step(at_end=True)) is not None:
            if patient and self._waiting is None:
                deadline = Deadline(timeout_s, self._clock)
            if deadline.expired:
                return False
            time.sleep(min(delay_s, deadline.remaining()))
        return not (self.refusal or self.unreadable)

    def step(self, *, at_end: bool = False) -> float | None:
        """Push one batch; returns the seconds after which to try the next, None: there is none.

        Where a batch was refused, or cannot be stored, who ships these logs anew begins with it.
        """
        lost_nbytes = self.spool.lost_nbytes
        self.unreadable = ""
        try:
            batch = self._waiting = self._waiting or self.spool.next_batch(at_end=at_end)
        except OSError as error:
            self.unreadable = f"the logs in {self.spool.folder} cannot be read: {error.strerror}"
            self._warn(self.unreadable)
            return None
        if lost_nbytes := self.spool.lost_nbytes - lost_nbytes:
            self._warn(f"{lost_nbytes:,} bytes of logs were removed before Loki had them")
        if batch is None:
            return None
        reply = self._push(push_body(batch.entries)) if batch.entries else PushReply("accepted")
        if reply.verdict == "later":
            self._warn(f"Loki does not take the logs, which wait in their files: {reply.reason}")
            return max(next(self._delays), reply.retry_after_s)
        if reply.verdict == "refused":
            lines = format_count(len(batch.entries), "line")
            self._warn(f"Loki refuses some of {lines}, which stay in their files: {reply.reason}")
            self.refusal = reply.reason
        self._waiting, self._delays = None, _delays()
        try:
            self.spool.commit(batch, stored=not self.refusal)
        except SmolclusterError as error:
            self._warn(f"{error}; a restart would send lines again")
        return 0.0

    def _warn(self, sentence: str) -> None:
        if not self._cadence.take():
            self._unsaid += 1
            return
        more = f" ({self._unsaid} warnings since the last one)" if self._unsaid else ""
        self._unsaid = 0
        self._say(sentence + more)


def _delays() -> Iterator[float]:
    return backoff_delays(FIRST_DELAY_S, cap_s=MAX_DELAY_S, jitter=random.Random())  # noqa: S311
