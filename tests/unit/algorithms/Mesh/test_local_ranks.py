"""The ranks of an orchestrator's `tensor_parallel`."""

import logging
import platform
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from own_workloads import normed
from smolcluster.algorithms.children import END_S
from smolcluster.algorithms.Mesh import local_ranks
from smolcluster.configs.resolve import load_settings


def test_each_is_looked_at_by_the_process_that_has_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = Mock(ranks=["rank 0", "rank 1"])
    started, together = Mock(return_value=others), Mock(return_value=nullcontext())
    monkeypatch.setattr(local_ranks, "ChildRanks", started)
    monkeypatch.setattr(local_ranks, "together", together)
    monkeypatch.setattr(local_ranks, "use_threads", lambda _: None)
    own = "device=cpu", "mesh.dp=2", "mesh.tp=1", "mesh.pp=1"
    make_settings: Any = partial(load_settings, "mesh", "digits", None, own, environ={})
    with local_ranks.local_ranks(make_settings, normed(), logging.getLogger()):
        pass
    [bodies] = started.call_args.args
    assert len(bodies) == 1
    assert together.call_args.args[:2] == ("rank 0", others.store)
    told = together.call_args.kwargs
    assert (told["look"], told["node"]) == (others.failed, platform.node())
    others.end.assert_called_once_with(END_S)
