"""DiLoCo's worker without a server: how it ends."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from smolcluster.algorithms.DiLoCo.exchange import FragmentArrived
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.errors import NonFiniteLoss, ProtocolError


def test_who_is_refused_twice_says_so_once() -> None:
    worker: Any = Worker.__new__(Worker)
    worker.is_fresh, worker.versions, worker.copy = True, [7], MagicMock(sent=())
    worker.hosts = Mock()
    worker.wait_until = lambda _: worker.was_refused()
    with pytest.raises(NonFiniteLoss) as caught:
        worker.take_part(None)
    assert str(caught.value).count("again") == 1


@pytest.mark.parametrize(("base_version", "version"), [(5, 7), (None, 7), (None, 6), (8, 9)])
def test_an_outer_step_that_is_not_newer_or_leaves_one_out_is_refused(
    base_version: int | None, version: int
) -> None:
    """Taken twice it would count twice."""
    worker: Any = Worker.__new__(Worker)
    worker.versions, worker.layout = [7], SimpleNamespace(fragments=[None])
    arrived = FragmentArrived(0, base_version, version, torch.zeros(1), {})
    with pytest.raises(ProtocolError, match="does not follow on version 7"):
        worker.take_fragment(arrived)
