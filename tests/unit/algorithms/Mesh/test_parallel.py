"""Which layers a plan cuts, without any process group."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from smolcluster.algorithms.Mesh import parallel
from smolcluster.configs.schema import GPTConfig, MeshSizes
from smolcluster.errors import ConfigError
from smolcluster.models.gpt import GPT
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.huggingface import HuggingFaceStage


@pytest.fixture
def stage() -> HuggingFaceStage:
    import transformers

    config = transformers.OPTConfig(
        vocab_size=24,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
    )
    assert not getattr(config, "base_model_tp_plan", None)
    return HuggingFaceStage(transformers.OPTForCausalLM(config), 0, 2)  # type: ignore[no-untyped-call]


def cut(
    stage: Stage, plan: dict[str, parallel.Style], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int, str]]:
    """Inputs and outputs of the layers that are cut, and how each is."""
    made: list[tuple[int, int, str]] = []

    def note(module: nn.Linear, _: Any, style: Any) -> None:
        made.append((module.in_features, module.out_features, type(style).__name__))

    monkeypatch.setattr(parallel, "parallelize_module", note)
    groups: Any = SimpleNamespace(mesh={"tp": None}, sizes=MeshSizes(tp=2))
    parallel._cut_layers(stage, parallel.plan_of(plan, is_ours=False), groups)
    return made


def test_a_sharding_file_names_the_layers_of_a_model_without_a_plan(
    stage: HuggingFaceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cut(stage, {"*.fc1": "column", "*.fc2": "row"}, monkeypatch)
    assert made == [(16, 32, "ColwiseParallel"), (32, 16, "RowwiseParallel")] * 2


def test_a_model_without_a_plan_needs_a_sharding_file(
    stage: HuggingFaceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="OPTConfig has no base_model_tp_plan: name the linear"):
        cut(stage, {}, monkeypatch)


def test_attention_of_a_model_without_a_plan_is_not_cut(
    stage: HuggingFaceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"names .*q_proj, .* MLPs alone"):
        cut(stage, {"*.q_proj": "column", "*.fc1": "column", "*.fc2": "row"}, monkeypatch)


def test_of_a_gpt_in_another_model_heads_are_cut_as_they_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = GPTConfig(model_dim=8, num_layers=1, num_heads=4, ff_dim=16, max_seq_len=4, dropout=0)
    model = nn.ModuleDict({"inner": GPT(config, 24)})
    made = cut(Stage(model, [model], 0, 1), {"*.c_fc": "column"}, monkeypatch)
    assert made[:2] == [(8, 24, "ColwiseParallel"), (8, 8, "RowwiseParallel")]


def test_attention_that_is_called_as_a_gpts_but_is_none_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = nn.ModuleDict({"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8)})
    mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 16), "c_proj": nn.Linear(16, 8)})
    block = nn.ModuleDict({"attn": attention, "mlp": mlp})
    model = nn.ModuleDict({"h": nn.ModuleList([block])})
    made = cut(Stage(model, [model], 0, 1), {}, monkeypatch)
    assert made == [(8, 16, "ColwiseParallel"), (16, 8, "RowwiseParallel")]


def test_what_a_sharding_file_says_of_a_layer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"fc1": nn.Linear(8, 4), "fc2": nn.Linear(4, 16), "fc3": nn.Linear(16, 2)}
    model = nn.ModuleDict(layers)
    made = cut(Stage(model, [model], 0, 1), {"fc2": "column", "fc3": "row"}, monkeypatch)
    assert made == [(4, 16, "ColwiseParallel"), (16, 2, "RowwiseParallel")]


def transposed() -> nn.Linear:
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(torch.randn(3, 4).t())
    return layer


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), transposed()]
)
def test_weights_lie_as_in_a_replica(layer: nn.Module) -> None:
    """Gloo refuses gradients in channels_last, and optimizers flatten weights in place."""
    model = nn.Sequential(layer)
    groups: Any = SimpleNamespace(sizes=MeshSizes(dp=2))
    before = model.get_parameter("0.weight").detach().clone()
    slots = parallel.spread(Stage(model, list(model), 0, 1), {}, groups, splits=False)
    [weight] = [slot.local for slot in slots if slot.name == "0.weight"]
    assert weight.is_contiguous() and torch.equal(weight, before)
