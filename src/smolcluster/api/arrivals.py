"""Workers that come before the run begins: each proves itself, and is asked to come again in a moment."""

import logging
import threading
import time

from smolcluster.configs.schema import Settings
from smolcluster.errors import ClusterEmpty
from smolcluster.server.listening import listening_addresses
from smolcluster.utils.retry import Deadline
from smolcluster.utils.units import format_count, format_duration
from smolcluster.wire.handshake import introduce
from smolcluster.wire.inbox import Handled
from smolcluster.wire.membership import Refused
from smolcluster.wire.messages import Hello, sets_of
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret

COME_AGAIN_S = 0.5
GONE_S = 10.0
"""A worker that has not come again for so long waits no more."""
POLL_S = 0.05


class Arrivals:
    """Listens where the run will, until closed; counts the workers that wait."""

    def __init__(
        self, settings: Settings, algorithm: str, secret: Secret, log: logging.Logger
    ) -> None:
        """Listen.

        Raises:
            PortBusy: another process listens there.
            ConfigError: an address to listen on is not this machine's.
        """
        self._log = log
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, float]] = {}
        """The process that has a name, and when it came last; in order of arrival."""
        cluster, addresses = settings.cluster, listening_addresses(settings.cluster)
        node = Node(
            hello=introduce(cluster.server), secret=secret, log=log, encryption=cluster.encryption
        )
        self._acceptor = node.listen(
            addresses,
            cluster.port,
            sets=sets_of(algorithm),
            inbox=Handled(lambda _: None),
            admit=self._answer,
            max_queued=0,
        )
        log.info("listening on %s, port %d", ", ".join(addresses), cluster.port)
        self._acceptor.open()

    def close(self) -> None:
        self._acceptor.close()

    @property
    def names(self) -> list[str]:
        """Of the workers that wait, in order of arrival."""
        earliest = time.monotonic() - GONE_S
        with self._lock:
            return [name for name, (_, seen_at) in self._seen.items() if seen_at >= earliest]

    def wait_for(self, num_workers: int, timeout_s: float) -> int:
        """Wait until so many workers are there; returns how many.

        Raises:
            ClusterEmpty: too few came in time.
        """
        deadline = Deadline(timeout_s)
        while (count := len(self.names)) < num_workers:
            if deadline.expired:
                here = f" ({', '.join(self.names)})" if count else ""
                expected = format_count(num_workers, "worker")
                raise ClusterEmpty(
                    f"{count} of {expected} came within {format_duration(timeout_s)}{here}: start "
                    "the others, with this address, port and secret, or lower num_workers"
                )
            time.sleep(min(POLL_S, deadline.remaining()))
        return count

    def _answer(self, _session_id: int, hello: Hello) -> Refused:
        name, now = hello.node, time.monotonic()
        with self._lock:
            instance, seen_at = self._seen.get(name, ("", -GONE_S))
            is_new = instance != hello.instance
            if is_new and now - seen_at < GONE_S:
                return Refused(
                    "busy",
                    f"the name {name} is taken by another worker that waits; choose another name or gpu_id",
                    retry_after_s=COME_AGAIN_S,
                )
            self._seen[name] = (hello.instance, now)
        if is_new:
            self._log.info("worker %s is here", name)
        return Refused("busy", "the run has not begun yet", retry_after_s=COME_AGAIN_S)
