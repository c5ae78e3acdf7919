"""Connections of browsers, which are cut when nothing moves on them.

uvicorn waits without end for the rest of a request, and for a client that does not read its answer.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 200
STALL_S = 10.0
"""After at most twice this, seconds, half a request or an answer that nobody reads is cut."""
Standing = tuple[Any, int]


class CutWhenStalled(H11Protocol):
    """HTTP on one connection; `uvicorn.Config(http=...)` takes it."""

    since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it, and look at it now and then."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            own = (each for each in self.connections if isinstance(each, CutWhenStalled))
            idle = [each for each in own if not each.is_answering]
            min(idle, key=lambda each: each.since).transport.abort()
        self._look(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        """Whether a request has come whole and its answer has not gone whole."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self, before: Standing | None) -> None:
        """Cut the connection if it stands as it did at the last look."""
        now = self._standing()
        if now is not None and now == before:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(STALL_S, self._look, now)

    def _standing(self) -> Standing | None:
        """What changes when something moves; None: an answer is being computed, which may take long."""
        unsent = self.transport.get_write_buffer_size()
        return None if self.is_answering and not unsent else (self.cycle, unsent)
