"""A rank of a mesh that is one worker."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from own_workloads import normed
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.group_rank import Setup, join_group
from smolcluster.configs.schema import MeshSizes


class Connecting(Exception):
    """What is connected next is the backend."""


def connecting(*_: object, **__: object) -> None:
    raise Connecting


def test_ranks_of_one_machine_speak_on_its_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for variable in variables:
        monkeypatch.setenv(variable, "")  # put back at the end
        monkeypatch.delenv(variable)
    monkeypatch.setattr(dist, "init_process_group", connecting)
    mesh = MeshConfig(mesh=MeshSizes(dp=2))
    told: dict[str, Any] = {"device": "cpu", "rank": 0, "store": str(tmp_path / "store")}
    setup = Setup.model_construct(mesh=mesh, **told)
    with pytest.raises(Connecting):
        join_group(setup, normed(), logging.getLogger())
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    assert [os.environ[each].lstrip("=") for each in variables] == [loopback] * 2
