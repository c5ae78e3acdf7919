"""Small random models as folders of Hugging Face's format, and adapters for them."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from smolcluster.training.finetune import lora_config
from smolcluster.utils.isolated_rng import forked_rng

LAYERS = 3
WORKLOAD = "smolcluster.training.finetune:workload"
WIDTHS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
NEW = {**WIDTHS, "num_hidden_layers": LAYERS, "vocab_size": 20}
OLD = {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "vocab_size": 20, "bos_token_id": 0}
SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt2": {**OLD, "eos_token_id": 0},  # a tied embedding, matrices the other way round
        "gpt_neox": {**NEW, "bos_token_id": 0, "eos_token_id": 0},  # other names in its files
        "gptj": {**OLD, "eos_token_id": 0, "rotary_dim": 4},  # buffers that follow from its sizes
        "llama": {**NEW, "num_key_value_heads": 1},
    }
)


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed")


def saved(
    folder: Path,
    architecture: str = "llama",
    dtype: torch.dtype = torch.float32,
    part_size: str = "5GB",
    **sizes: int,
) -> Path:
    """The folder of a random model; `part_size`: of each of its files; `sizes`: other ones."""
    config = transformers().AutoConfig.for_model(architecture, **{**SIZES[architecture], **sizes})
    with forked_rng():
        torch.manual_seed(1)
        model = transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=part_size)
    return folder


def adapters(*targets: str) -> Any:
    return lora_config(2, None, list(targets) or None, 0.0)


def text_arguments(folder: Path, **sizes: int) -> dict[str, Any]:
    """The arguments of `WORKLOAD` for a model with a tokenizer and a text, which are made in `folder`."""
    model = saved(folder / "model", "llama", torch.float32, "5GB", **sizes)
    vocabulary = {chr(97 + number): number for number in range(19)} | {"</s>": 19}
    (model / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (model / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "text.txt").write_text("abcdefghijklmno" * 40, encoding="utf-8")
    return {
        "folder": str(model),
        "text": str(folder / "text.txt"),
        "length": 8,
        "lora_rank": 2,
        "lora_targets": ["q_proj"],
    }
