"""The ranks of one machine that one process has started, itself being rank 0.

So are those of an orchestrator with `tensor_parallel`, and those of a mesh that is one worker. They meet on
the loopback, by a secret of their own.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from smolcluster.algorithms.children import END_S, Children, how_ended
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.algorithms.Mesh.store import GroupStore, Host
from smolcluster.algorithms.Mesh.watch import Failure
from smolcluster.wire.security import new_secret, secret_of_text

LOOPBACK = "127.0.0.1"
NEEDS = (
    "the model, its loss and its data must be of a module's own classes and functions, for each rank of "
    "tensor_parallel is a process"
)


class ChildRanks(Children):
    """All ranks but rank 0, which this process is.

    Attributes:
        ranks: what rank 0 and each of them is.
        store: rank 0's, in which they meet.
    """

    def __init__(
        self,
        bodies: Sequence[Callable[[Ranks, str], None]],
        *,
        node: str,
        timeout_s: float,
        log: logging.Logger,
    ) -> None:
        """Start a rank for each of `bodies`, which is called with what the rank is and the group's secret.

        `node`: this machine's name; `timeout_s`: how long ranks may wait for each other.

        Raises:
            ConfigError: what a body needs cannot be given to another process.
        """
        secret, size = new_secret(), 1 + len(bodies)
        host = Host([LOOPBACK], 0, secret_of_text(secret), log)
        self.store, self._node = GroupStore(host, timeout_s), node
        self.ranks = [
            Ranks(range(rank, rank + 1), size, True, LOOPBACK, host.port) for rank in range(size)
        ]
        super().__init__(NEEDS)
        try:
            for ranks, body in zip(self.ranks[1:], bodies, strict=True):
                self.start(ranks.here.start, partial(body, ranks, secret))
        except BaseException:
            self.end()
            raise

    def ended(self) -> tuple[int, int] | None:
        """The first rank that has ended and its exit code, minus a signal's number; None: none has."""
        codes = self.codes.items()
        return next(((rank, code) for rank, code in codes if code is not None), None)

    def failed(self) -> Failure | None:
        """What is told of the first rank that has ended, if one has: none may before rank 0 says so."""
        if (ended := self.ended()) is None:
            return None
        rank, code = ended
        return Failure(rank, self._node, how_ended(code))

    def code_of(self, rank: int) -> int | None:
        """With which exit code a rank ends, minus a signal's number; None: it does not within `END_S`."""
        process = self._processes[rank]
        process.join(END_S)
        return process.exitcode

    def end(self, patience_s: float = 0.0) -> None:
        super().end(patience_s)
        self.store.close()
