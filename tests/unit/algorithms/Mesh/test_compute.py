"""Microbatches of a stage of a mesh, in one process."""

from inspect import currentframe
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from smolcluster.algorithms.Mesh.compute import (
    adding_up,
    compile_layers,
    compiler_named,
    stage_compute,
)
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.parallel import seed_parts
from smolcluster.configs.schema import GPTConfig
from smolcluster.data.dataset import Place
from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.models.gpt import GPT
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.stages.cut import Stage
from smolcluster.training.workload import Workload
from smolcluster.utils.user_code import user_code

SEED = 5
SIZES = GPTConfig(model_dim=8, num_heads=2, num_layers=2, ff_dim=16, max_seq_len=8, dropout=0.5)


def gradients(recompute: str) -> Tensor:
    """Of the first of two stages that have parts of sequences: both forwards, then both backwards."""
    torch.manual_seed(SEED)
    gpt = GPT(SIZES, 11)
    stage = Stage(gpt, gpt.stages(), 0, 1).train()
    seeds = LayerSeeds(SEED, torch.device("cpu"), part=1)
    seed_parts(stage, seeds)
    workload = Workload(lambda: gpt, cross_entropy, [(torch.zeros(8), 0)])
    config = MeshConfig.model_validate({"activation_checkpointing": recompute})
    compute = stage_compute(stage, workload, seeds, config, "fp32")
    batch = torch.arange(8).view(1, 8), torch.zeros(1, 8).long()
    with adding_up(stage):
        outputs = [compute.forward(each, Place(SEED, 0, each), None, batch) for each in (0, 1)]
        for number, output in enumerate(outputs):
            assert not torch.equal(output, outputs[1 - number])
            compute.backward(number, [torch.ones_like(output)])
    return torch.cat([each.grad.flatten() for each in stage.parameters() if each.grad is not None])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_computed_again_has_the_dropout_of_its_own_microbatch(recompute: str) -> None:
    assert torch.equal(gradients(recompute), gradients("none"))


class Counted(nn.Linear):
    num_computed = 0

    def forward(self, value: Tensor) -> Tensor:
        self.num_computed += 1
        return super().forward(value)


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [("none", [1, 1, 1, 1]), ("full", [2, 2, 2, 2]), ("selective", [2, 1, 2, 1])],
)
def test_all_or_every_second_layer_is_computed_again_in_the_backward(
    recompute: str, expected: list[int]
) -> None:
    layers = [Counted(4, 4) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(4, 3))
    stage = Stage(model, list(model), 0, 4).train()
    workload = Workload(lambda: model, cross_entropy, [(torch.zeros(4), 0)])
    seeds = LayerSeeds(SEED, torch.device("cpu"))
    config = MeshConfig.model_validate({"activation_checkpointing": recompute})
    compute = stage_compute(stage, workload, seeds, config, "fp32")
    batch = torch.ones(2, 4), torch.zeros(2).long()
    compute.backward(0, [torch.ones_like(compute.forward(0, Place(SEED, 0, 0), None, batch))])
    assert [each.num_computed for each in layers] == expected


def test_without_a_compiler_the_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/no/compiler",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU())
    stage = Stage(model, [model], 0, 1)
    compile_layers(stage)
    with pytest.raises(ConfigError, match="compile is true, but") as raised, compiler_named():
        stage(torch.ones(2, 3))
    assert "set compile to false" in str(raised.value) and "\n" not in str(raised.value)


def test_a_mistake_in_a_layer_is_not_blamed_on_the_compiler() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 4))
    stage = Stage(model, [model], 0, 1)
    compile_layers(stage)
    with (
        pytest.raises(UserCodeError, match="TorchRuntimeError"),
        user_code("model"),
        compiler_named(),
    ):
        stage(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("is_cached", "says", "is_removed"),
    [
        (True, "file too short", True),
        (True, "invalid ELF header", True),
        (True, "undefined symbol: omp_get_thread_num", False),
        (False, "file too short", False),
    ],
)
def test_half_a_library_in_the_cache_is_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cached: bool,
    says: str,
    is_removed: bool,
) -> None:
    from torch._inductor.exc import InductorError

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    library = tmp_path / ("cache" if is_cached else "elsewhere") / "i5" / "layer.main.so"
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.raises(ConfigError) as raised, compiler_named():
        raise InductorError(ImportError(f"{library}: {says}"), currentframe())
    assert library.exists() != is_removed
    assert ("start again" in str(raised.value)) == is_removed
