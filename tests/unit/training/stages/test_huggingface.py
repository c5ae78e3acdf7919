"""Causal language models of transformers in stages: the same losses, gradients and initial weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipelines import SEED, assert_are_the_model, whole
from pretrained_models import transformers
from smolcluster.data.loading import samples_of
from smolcluster.errors import ConfigError
from smolcluster.training.evaluate import LOSS, evaluate
from smolcluster.training.stages import huggingface
from smolcluster.training.stages.build import (
    Answer,
    build_stage,
    model_input,
    num_layers,
    output_loss,
)
from smolcluster.training.stages.huggingface import language_model
from smolcluster.training.workload import Workload

WIDTHS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = MappingProxyType({**WIDTHS, "num_hidden_layers": 3, "vocab_size": 20, "pad_token_id": 0})
GROUPED = MappingProxyType({**SIZES, "num_key_value_heads": 1, "head_dim": 8})
OLD = MappingProxyType({"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 20})
NO_DROPOUT = MappingProxyType({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bloom": {"hidden_size": 16, "n_layer": 3, "n_head": 2, "vocab_size": 20},
        "cohere": {**GROUPED, "logit_scale": 0.5},
        "falcon": {**SIZES, "alibi": True},
        "gemma": GROUPED,
        "gemma2": {**GROUPED, "final_logit_softcapping": 2.0},
        "gpt2": {**OLD, **NO_DROPOUT},
        "gpt_neox": SIZES,
        "gptj": {**OLD, **NO_DROPOUT, "rotary_dim": 4},
        "granite": {**GROUPED, "embedding_multiplier": 3.0},
        "llama": GROUPED,
        "mistral": GROUPED,
        "mpt": {"d_model": 16, "n_layers": 3, "n_heads": 2, "vocab_size": 20},
        "opt": {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0},
        "phi": SIZES,
        "qwen2": GROUPED,
        "qwen3": GROUPED,
    }
)
AS_LLAMA = ("gemma", "mistral", "phi", "qwen2", "qwen3")


def of(architecture: str) -> Workload:
    config = transformers().AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = model(**batch).loss
        return result

    return Workload(lambda: transformers().AutoModelForCausalLM.from_config(config), loss, [0])


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]},
        {"model_type": "convnext", "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ],
)
def test_a_model_that_says_no_number_of_blocks_is_no_language_model(config: dict[str, Any]) -> None:
    kind = config.pop("model_type")
    made = transformers().AutoConfig.for_model(kind, **config)
    assert language_model(transformers().AutoModel.from_config(made)) is None


def test_a_configuration_may_raise_anything() -> None:
    class Several(transformers().LlamaConfig):  # type: ignore[misc]
        def get_text_config(self, **_: Any) -> Any:
            raise ValueError("two text configurations")

    model = transformers().LlamaForCausalLM(transformers().LlamaConfig(**GROUPED))
    model.config = Several(**GROUPED)
    assert language_model(model) is None
    model.config = {"num_hidden_layers": 3}
    assert language_model(model) is None


def test_a_method_of_a_users_model_is_not_taken_for_that_of_peft() -> None:
    class Own(nn.Linear):
        def get_base_model(self, name: str) -> str:
            return name

    assert language_model(Own(1, 1)) is None


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(10).view(2, 5) % 17 + 1
    mask = torch.ones_like(tokens)
    mask[1, 3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@pytest.mark.parametrize(
    "architecture",
    [
        # llama and gemma2 go the same way
        pytest.param(name, marks=pytest.mark.nightly if name in AS_LLAMA else ())
        for name in ARCHITECTURES
    ],
)
def test_three_stages_are_the_model(architecture: str) -> None:
    trained = of(architecture)
    assert num_layers(trained) == 3
    cuts = ((0, 1), (1, 2), (2, 3))
    stages = [build_stage(trained, *cut, SEED, torch.device("cpu")) for cut in cuts]
    assert_are_the_model(trained, stages, batch())


def test_the_labels_of_stages_count_as_those_of_the_model() -> None:
    """In training, and where the last stage evaluates."""
    trained, given = of("llama"), batch()
    given["labels"] = given["labels"].where(given["attention_mask"] > 0, -100)
    device = torch.device("cpu")
    value = model_input(trained, given)
    for cut in ((0, 1), (1, 3)):
        value = build_stage(trained, *cut, SEED, device)(value)
    stand_in = Answer(lambda: value)
    model = whole(trained).eval()
    mean, num_labels = model(**given).loss.item(), 6
    total, number = output_loss(trained)(value, given)
    assert (total.item(), number) == (pytest.approx(mean * num_labels), num_labels)
    samples = samples_of([{name: each[row] for name, each in given.items()} for row in range(2)])
    sums = evaluate(stand_in, samples, device, loss=trained.loss, dtype=torch.float32)
    assert sums[LOSS] == pytest.approx((mean * num_labels, num_labels))


def test_no_stage_has_what_another_one_has_but_a_tied_embedding() -> None:
    first, middle, last = (
        build_stage(of("gpt2"), *cut, SEED, torch.device("cpu")) for cut in ((0, 1), (1, 2), (2, 3))
    )
    names = [set(dict(stage.named_parameters())) for stage in (first, middle, last)]
    assert names[0] & names[2] == {"transformer.wte.weight"}
    assert first.tied == last.tied == ("transformer.wte.weight",)
    assert middle.tied == ()
    assert not names[1] & (names[0] | names[2])


def test_an_architecture_that_scales_what_it_is_given_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface, "_SCALES", ())
    with pytest.raises(ConfigError, match="GraniteForCausalLM cannot be cut"):
        build_stage(of("granite"), 0, 1, SEED, torch.device("cpu"))


def test_the_check_of_a_wide_model_is_of_a_narrow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = {"hidden_size": 2048, "num_attention_heads": 64, "intermediate_size": 8192}
    sizes = {**SIZES, **widths, "num_key_value_heads": 16, "num_hidden_layers": 48}
    config = transformers().AutoConfig.for_model("llama", **sizes)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(config)
    twins: list[Any] = []
    observed = huggingface._observed

    def noting(twin: Any) -> huggingface.Traits:
        twins.append(twin)
        return observed(twin)

    monkeypatch.setattr(huggingface, "_observed", noting)
    huggingface.checked_traits(model)
    [twin] = twins
    assert sum(each.numel() for each in twin.parameters()) < 1e6
    assert twin.config.num_key_value_heads < twin.config.num_attention_heads
