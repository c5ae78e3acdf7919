"""What is decided of a mesh that is one worker before any rank is there, and when one has ended."""

import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from smolcluster.algorithms.Mesh import group_worker
from smolcluster.algorithms.Mesh.group_worker import Group, mesh_for, spread
from smolcluster.algorithms.Mesh.watch import Failure
from smolcluster.configs.schema import MeshSizes, NodeConfig
from smolcluster.errors import DEVICE_FAILED, RANK_LOST, ConfigError, PeerLost
from smolcluster.utils.bugs import EXIT_CODE as BUG


@pytest.mark.parametrize(
    ("sizes", "batch_size", "at_once", "microbatches"),
    [
        (MeshSizes(dp=2), 32, None, 1),
        (MeshSizes(dp=2), 32, 5, 4),
        (MeshSizes(dp=2, pp=2), 32, None, 4),
        (MeshSizes(pp=4), 12, None, 12),
        (MeshSizes(pp=4), 4, None, 4),
        (MeshSizes(fsdp=2, tp=2), 2, 1, 1),
    ],
)
def test_a_batch_is_divided_among_ranks_and_into_microbatches(
    sizes: MeshSizes, batch_size: int, at_once: int | None, microbatches: int
) -> None:
    mesh = mesh_for(sizes, batch_size, at_once, "gpubox")
    assert (mesh.mesh, mesh.microbatches) == (sizes, microbatches)


@pytest.mark.parametrize(
    ("sizes", "batch_size", "multiple"),
    [(MeshSizes(dp=3), 32, 3), (MeshSizes(dp=2, pp=4), 6, 8)],
)
def test_a_batch_that_cannot_be_divided_is_refused(
    sizes: MeshSizes, batch_size: int, multiple: int
) -> None:
    with pytest.raises(ConfigError, match=rf"nodes.gpubox.ranks .* a multiple of {multiple}"):
        mesh_for(sizes, batch_size, None, "gpubox")


def test_a_pipeline_of_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run on a mesh: NCCL's messages have no tags."""
    monkeypatch.setattr(group_worker, "check_can_be_spread", Mock())
    monkeypatch.setattr(
        group_worker, "own_device", lambda _name, rank, _instead: torch.device("cuda", rank)
    )
    node = NodeConfig(ranks=MeshSizes(pp=2))
    with pytest.raises(ConfigError, match=r"set nodes\.gpubox\.ranks\.pp to 1"):
        spread(Mock(), Mock(), node=node, name="gpubox", workload=None, log=Mock())


@pytest.mark.parametrize(("is_within", "ended"), [(True, None), (False, (1, -9))])
def test_ranks_that_hear_nothing_are_ended_at_once(
    monkeypatch: pytest.MonkeyPatch, is_within: bool, ended: tuple[int, int] | None
) -> None:
    """Before their connections are, which may wait for a rank that is stopped."""
    calls = Mock(others=Mock(ended=Mock(return_value=ended)), dist=Mock())
    monkeypatch.setattr(group_worker, "dist", calls.dist)
    group: Any = SimpleNamespace(
        _is_closed=False, _is_within=is_within, _watch=Mock(), others=calls.others, _say=Mock()
    )
    Group.close(group)
    names = [name for name, *_ in calls.mock_calls if name != "others.ended"]
    assert names == ["others.end", "dist.is_initialized", "dist.destroy_process_group"]
    calls.others.end.assert_called_once_with()
    group._say.assert_not_called()


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (2, 2),
        (-signal.SIGKILL, RANK_LOST),
        (BUG, RANK_LOST),
        (DEVICE_FAILED, RANK_LOST),
        (PeerLost.exit_code, RANK_LOST),
        (None, RANK_LOST),
    ],
)
def test_a_rank_that_says_why_it_ends_is_not_started_again(
    code: int | None, exit_code: int
) -> None:
    group: Any = SimpleNamespace(others=SimpleNamespace(code_of=lambda _: code))
    loss = Group._loss(group, Failure(1, "gpubox", "it is gone"))
    assert "rank 1 on gpubox failed first: it is gone" in str(loss)
    assert loss.exit_code == exit_code
