"""GPT-2 as transformers has it: the reference that our GPT is compared with."""

from typing import TYPE_CHECKING

import torch

from smolcluster.configs.schema import GPTConfig
from smolcluster.models.gpt import GPT

if TYPE_CHECKING:  # it takes seconds
    from transformers import GPT2LMHeadModel


def tiny_config(**changes: object) -> GPTConfig:
    sizes = {"model_dim": 16, "num_layers": 2, "num_heads": 2, "ff_dim": 40, "max_seq_len": 12}
    return GPTConfig.model_validate(sizes | {"dropout": 0.0} | changes)


def reference_for(config: GPTConfig, vocab_size: int) -> "GPT2LMHeadModel":
    """One of the same sizes with weights of its own, biases and norms included, in evaluation mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(  # type: ignore[no-untyped-call]
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=config.max_seq_len,
            n_embd=config.model_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ff_dim,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.eval()  # type: ignore[no-untyped-call]
    return theirs


def twin_of(theirs: "GPT2LMHeadModel", config: GPTConfig) -> GPT:
    """Our model with their weights, in evaluation mode."""
    ours = GPT(config, theirs.config.vocab_size)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(in_our_shape(name, theirs.get_parameter(f"transformer.{name}")))
    return ours.eval()


def in_our_shape(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T if ".c_" in name and tensor.ndim == 2 else tensor
