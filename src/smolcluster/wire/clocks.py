"""Two machines' clocks: the round trip between them and their difference, from the heartbeats of a session.

Of the last few pairs of heartbeats the one with the shortest round trip counts, because what delays a
heartbeat on one way only shifts the difference by half of it (NTP's clock filter, RFC 5905).
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from smolcluster.wire.messages import Heartbeat

NUM_SAMPLES = 8


class Sample(NamedTuple):
    """What a pair of heartbeats told: seconds of round trip, and the peer's clock minus one's own."""

    round_trip_s: float
    offset_s: float


class Clocks:
    """Makes a session's heartbeats and listens to the peer's; each in a thread of its own."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds since 1970."""
        self._now = now
        self._heard: tuple[float, float] | None = None
        """When the peer sent its last heartbeat, and when it came."""
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)

    def beat(self, trouble: str = "") -> Heartbeat:
        sent_at, heard_at = self._heard or (None, None)
        return Heartbeat(
            sent_at=self._now(), heard_sent_at=sent_at, heard_at=heard_at, trouble=trouble
        )

    def hear(self, beat: Heartbeat) -> None:
        now = self._now()
        self._heard = (beat.sent_at, now)
        if beat.heard_sent_at is None or beat.heard_at is None:
            return
        there, back = beat.heard_at - beat.heard_sent_at, now - beat.sent_at
        if there + back >= 0:  # or a clock was set in between
            self._samples.append(Sample(there + back, (there - back) / 2))

    @property
    def best(self) -> Sample | None:
        """The sample with the shortest round trip of the last few; None before the first."""
        return min(self._samples.copy(), default=None)
