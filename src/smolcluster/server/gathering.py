"""When a server needs the weights of all hosts: at a run's end, and now and then before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from smolcluster.errors import NonFiniteLoss
from smolcluster.server.plausible import Norms
from smolcluster.server.saver import Saver
from smolcluster.server.store_links import StoreLinks


class Gathering:
    """Brings the weights of all hosts together in the replica."""

    def __init__(
        self,
        stores: StoreLinks[Any],
        saver: Saver,
        version: Callable[[], int],
        check_stop: Callable[[], None],
    ) -> None:
        """`version`: of the weights, the steps that were taken; `check_stop`: may raise, see `gather`."""
        self._stores, self._saver = stores, saver
        self._version, self._check_stop = version, check_stop

    def gather(self) -> bool:
        """Bring them together; False: a store is missing. Raises what `check_stop` raises."""
        return self._gather(self._check_stop)

    def gather_if_due(self, now: float, *, is_at_work: bool) -> None:
        """Keep a copy for when a store is lost; while workers are at work also to see that all stores answer.

        `now`: of the monotonic clock, in seconds.
        """
        self._stores.check_patience(now)
        if self._stores.is_copy_due(now) or (is_at_work and self._stores.are_silent(now)):
            self.gather()

    @contextmanager
    def at_the_end(self, norms: Norms) -> Iterator[None]:
        """Let what is saved when the block fails be of one version, or let nothing be saved.

        Raises:
            NonFiniteLoss: that of the block, with the push that may have ruined the weights.
        """
        try:
            yield
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"{error}{norms.suspect}") from error
        except BaseException as error:
            if self._saver.saves_end(error) and not self._gather():
                self._saver.skip_end()
            raise

    def _gather(self, check_stop: Callable[[], None] = lambda: None) -> bool:
        self._saver.wait_for_copy()
        return self._stores.gather(self._version(), check_stop)
