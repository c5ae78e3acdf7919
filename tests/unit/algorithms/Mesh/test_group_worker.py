"""What is decided of a mesh that is one worker before any rank is there, and when one has ended."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from smolcluster.algorithms.Mesh.group_worker import Group, mesh_for
from smolcluster.algorithms.Mesh.watch import Failure
from smolcluster.configs.schema import MeshSizes
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
