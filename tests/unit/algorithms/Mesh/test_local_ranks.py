"""The ranks of an orchestrator's `tensor_parallel`."""

import logging
import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from own_workloads import normed
from smolcluster.algorithms.Mesh import local_ranks
from smolcluster.algorithms.Mesh.meeting import own_addresses
from smolcluster.algorithms.Mesh.ranks import Ranks
from smolcluster.configs.resolve import load_settings
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.wire.security import GROUP_SECRET


def test_they_meet_on_the_loopback_by_a_secret_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[Ranks, str]] = []

    def started(body: Any, *_: object, **__: object) -> Mock:
        told.append(body.args[:2])
        return Mock()

    def together(ranks: Ranks, *_: object, **__: object) -> Any:
        told.append((ranks, os.environ[GROUP_SECRET]))
        return nullcontext()

    monkeypatch.setenv(GROUP_SECRET, "")  # put back at the end
    monkeypatch.setattr(local_ranks, "spawned", started)
    monkeypatch.setattr(local_ranks, "together", together)
    monkeypatch.setattr(local_ranks, "use_threads", lambda _: None)
    make_settings = partial(load_settings, "mesh", "digits", None, ("device=cpu",), environ={})
    with local_ranks.local_ranks(make_settings, normed(), logging.getLogger()):
        pass
    [secret] = {secret for _, secret in told}
    [address] = {ranks.address for ranks, _ in told}
    assert len(told) > 1
    assert len(secret) >= 32
    assert is_loopback_name(address)
    assert own_addresses(address) == [address]
