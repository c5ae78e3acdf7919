"""What a mesh refuses before any process has started."""

from typing import Any

import pytest

from smolcluster.algorithms.Mesh.config import (
    MeshConfig,
    check_optimizer,
    cut_equally,
    pick_backend,
    what_takes_less,
)
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import MeshSizes
from smolcluster.errors import ConfigError


def check(mesh: dict[str, int], **keys: Any) -> None:
    num_layers, num_samples = keys.pop("num_layers", 8), keys.pop("num_samples", 64)
    config = MeshConfig.model_validate({"mesh": mesh, **keys})
    config.check_division(num_samples=num_samples, num_layers=num_layers)
    assert config.sizes_for(8) == config.mesh


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        ({"tp": 2, "pp": 4}, {"microbatches": 8}),
        ({"dp": 2, "fsdp": 2, "tp": 2}, {}),
        ({"pp": 4, "dp": 2}, {"microbatches": 8, "schedule": "zbv"}),
        ({"fsdp": 8}, {"microbatches": 8, "num_layers": 1}),
    ],
)
def test_what_can_be_divided_is_taken(mesh: dict[str, int], keys: dict[str, Any]) -> None:
    check(mesh, **keys)


@pytest.mark.parametrize(
    ("mesh", "keys", "told"),
    [
        ({"tp": 2, "pp": 2}, {"microbatches": 2}, "4 processes, but there are 8"),
        ({"pp": 8}, {"microbatches": 8, "num_layers": 7}, "7 layers"),
        (
            {"pp": 8},
            {"microbatches": 8, "schedule": "zbv"},
            "16 stages.*schedule with one stage a rank",
        ),
        ({"pp": 8}, {"microbatches": 8, "num_layers": 7}, "lower mesh.pp, or take a deeper model"),
        ({"pp": 4, "dp": 2}, {"compile": True, "schedule": "zbv"}, "a compiled layer makes all"),
        ({"pp": 8}, {"microbatches": 4}, "microbatches is 4, fewer than the 8 stages"),
        ({"dp": 8}, {"microbatches": 3}, "multiple of 24"),
        ({"dp": 8}, {"schedule": "zbw"}, "schedule"),
        ({"pp": 8}, {"microbatches": 16, "schedule": "dualpipev"}, "16 stages"),
        ({"dp": 8, "sequence_parallel": True}, {}, "sequence_parallel is true, but mesh.tp is 1"),
        ({"dp": 8, "loss_parallel": True}, {}, "loss_parallel is true, but mesh.tp is 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    mesh: dict[str, int], keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check(mesh, **keys)


@pytest.mark.parametrize(
    ("keys", "num_samples", "advice"),
    [
        ({"microbatches": 2}, 12, "raise microbatches from 2 to 3 or set activation_checkpointing"),
        ({"microbatches": 12}, 12, "set activation_checkpointing to full or take more ranks"),
        ({"microbatches": 12, "activation_checkpointing": "full"}, 12, "take more ranks along"),
    ],
)
def test_what_takes_less_memory(keys: dict[str, Any], num_samples: int, advice: str) -> None:
    assert what_takes_less(MeshConfig.model_validate(keys), num_samples).startswith(advice)


def test_nccl_needs_cuda() -> None:
    assert pick_backend("auto", "cpu") == "gloo"
    assert pick_backend("auto", "cuda") == "nccl"
    with pytest.raises(ConfigError, match="backend is nccl"):
        pick_backend("nccl", "cpu")


def test_sequences_are_shared_equally() -> None:
    keys = ("mesh.sequence_parallel=true", "mesh.pp=1", "microbatches=1", "model.max_seq_len=15")
    settings = load_settings("mesh", "stdlib", None, keys, environ={})
    with pytest.raises(ConfigError, match=r"does not divide model\.max_seq_len, 15"):
        settings.of(MeshConfig).check(settings)


def test_layers_are_divided_equally() -> None:
    assert [(each.start, each.stop) for each in cut_equally(10, 4)] == [
        *((0, 3), (3, 6), (6, 8), (8, 10))
    ]


@pytest.mark.parametrize("sizes", [MeshSizes(fsdp=2), MeshSizes(tp=2, dp=2)])
def test_muon_is_refused_where_matrices_are_cut(sizes: MeshSizes) -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer is muon.*mesh\.fsdp is \d and mesh\.tp is \d"
    ):
        check_optimizer("muon", sizes)
    check_optimizer("adamw", sizes)
    check_optimizer("muon", MeshSizes(dp=2, pp=2))
