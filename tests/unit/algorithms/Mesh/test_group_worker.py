"""What is decided of a mesh that is one worker before any rank is there, and when one has ended."""

import signal
import subprocess
import sys

import pytest

from smolcluster.algorithms.Mesh.group_rank import is_of_another
from smolcluster.algorithms.Mesh.group_worker import (
    is_stopped,
    loss_of,
    mesh_for,
    patience_s,
)
from smolcluster.configs.schema import MeshSizes
from smolcluster.errors import RANK_LOST, ConfigError, UserCodeError
from smolcluster.utils.bugs import EXIT_CODE as BUG
from smolcluster.utils.user_code import user_code
from waiting import DEADLINE_S, eventually


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
    ("code", "words", "exit_code"),
    [
        (-signal.SIGKILL, "rank 1 of the 2 of this worker was ended by SIGKILL", RANK_LOST),
        (BUG, "ended with code 70", RANK_LOST),
        (2, "ended with code 2", 2),
    ],
)
def test_a_rank_that_says_why_it_ends_is_not_started_again(
    code: int, words: str, exit_code: int
) -> None:
    loss = loss_of(1, 2, code)
    assert words in str(loss)
    assert loss.exit_code == exit_code


def test_an_order_has_a_deadline_by_what_orders_took() -> None:
    assert patience_s(0.0) == 600
    assert patience_s(0.1) == 30
    assert patience_s(8.0) == 80


def test_a_stopped_rank_is_told_from_one_that_runs_or_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            assert not is_stopped(child.pid)
            child.send_signal(signal.SIGSTOP)
            eventually(lambda: is_stopped(child.pid))
        finally:
            child.kill()
            child.wait(DEADLINE_S)
    assert not is_stopped(child.pid)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("[…/gloo/transport/tcp/pair.cc:545] Read error", True), ("shapes do not fit", False)],
)
def test_what_a_backend_says_within_the_model_is_no_error_of_the_users_code(
    said: str, expected: bool
) -> None:
    with pytest.raises(UserCodeError) as caught, user_code("backward of the model"):
        raise RuntimeError(said)
    assert is_of_another(caught.value) is expected
    assert is_of_another(RuntimeError(said)) is expected
    assert is_of_another(BrokenPipeError())
