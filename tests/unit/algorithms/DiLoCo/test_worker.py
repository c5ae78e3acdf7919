"""DiLoCo's worker without a server: how it ends."""

from typing import Any

import pytest

from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.errors import NonFiniteLoss


def test_who_is_refused_twice_says_so_once() -> None:
    worker: Any = Worker.__new__(Worker)
    worker.is_fresh, worker.versions, worker.sent = True, [7], {}
    worker.wait_until = lambda _: worker.was_refused()
    with pytest.raises(NonFiniteLoss) as caught:
        worker.take_part(None)
    assert str(caught.value).count("again") == 1
