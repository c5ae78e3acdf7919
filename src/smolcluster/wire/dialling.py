"""Where a peer listens, and how long to wait before it is dialled again."""

import time
from dataclasses import dataclass

from smolcluster.utils.retry import backoff_delays
from smolcluster.utils.units import format_address

LONGEST_DELAY_S = 0.5
SETTLED_S = 4.0
"""A session that lasted so long lets the delays between reconnects begin anew."""


@dataclass(frozen=True)
class Address:
    """Where a peer listens, as this machine reaches it, and the peer's name; None: it is not known."""

    host: str
    port: int
    node: str | None = None

    def __str__(self) -> str:
        return format_address(self.host, self.port)


class Pauses:
    """The delays between sessions with one peer: longer after each one that did not last."""

    def __init__(self) -> None:
        self._delays = backoff_delays(cap_s=LONGEST_DELAY_S)
        self._began_at = time.monotonic()

    def session_begins(self) -> None:
        self._began_at = time.monotonic()

    def next_s(self) -> float:
        """Seconds to wait, now that it has ended."""
        if time.monotonic() - self._began_at > SETTLED_S:
            self._delays = backoff_delays(cap_s=LONGEST_DELAY_S)
        return next(self._delays)
