"""Fine-tunes a tiny Llama with LoRA (Hu et al., 2106.09685): only the adapters are trained and sent.

Its base has random weights, made here from a seed, so that nothing is downloaded. For a model of the hub
write `AutoModelForCausalLM.from_pretrained(NAME)` instead. It needs peft: `uv pip install peft`.

bash launch_syncps.sh --local --workload examples/llama_lora/train.py:workload
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from smolcluster import Workload

VOCAB_SIZE = 256
"""The tokens are bytes."""


def base() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # every machine makes the same base
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def model(rank: int) -> nn.Module:
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
    return get_peft_model(base(), adapters)


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy of each next byte of rows (batch, length), as a sum and the number of bytes."""
    logits, targets = model(input_ids=batch[:, :-1]).logits, batch[:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def rows(length: int) -> list[Tensor]:
    """The source of a module of Python's own library, in rows of `length` bytes and the one after them."""
    import argparse  # noqa: PLC0415 - a text that every machine has

    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    num_rows = (len(text) - 1) // length
    return [text[i * length : (i + 1) * length + 1].long() for i in range(num_rows)]


def workload(rank: int = 4, length: int = 64) -> Workload:
    data = rows(length)
    return Workload(lambda: model(rank), loss, data[:-100], data[-100:])
