"""A GPT-2 style decoder.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), the architecture
of GPT-2: learned positions, layer norm before each part of a block and after the last one, GELU in its
tanh approximation, the token embedding as output layer. Modules bear GPT-2's names, so that its weights
fit (see `gpt2_weights`). Where this departs from it: the width of the feed-forward layers is free, and
linear layers are `nn.Linear`, whose weights are (out, in).

Shapes in this file:

    B  sequences of a batch      D  model_dim, width of the residual stream
    T  tokens of a sequence      H  num_heads
    P  tokens kept in a cache    F  ff_dim
    V  words of the vocabulary
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from smolcluster.configs.schema import GPTConfig
from smolcluster.errors import DataError
from smolcluster.models.gpt2_weights import LAYER_NORM_EPS, read_for
from smolcluster.models.linear_loss import linear_cross_entropy

INITIAL_STD = 0.02


@dataclass
class Cache:
    """Keys and values that one layer's attention has computed so far, each (B, H, P, D/H)."""

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.size(2)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of T more tokens; return all of them, (B, H, P+T, D/H) each."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.model_dim, 3 * config.model_dim)
        self.c_proj = nn.Linear(config.model_dim, config.model_dim)

    def forward(self, inputs: Tensor, cache: Cache | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D). With a cache that is not empty, T is 1."""
        queries, keys, values = self._heads(self.c_attn(inputs))
        if cache is not None:
            keys, values = cache.extend(keys, values)
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=queries.size(2) > 1,  # a single token is the last one and sees all others
        )
        outputs: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return functional.dropout(outputs, self.dropout, self.training)

    def _heads(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut (B, T, 3D) into queries, keys and values, (B, H, T, D/H) each."""
        parts = joined.view(*joined.shape[:2], 3, self.num_heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        return queries, keys, values


class FeedForward(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.model_dim, config.ff_dim)
        self.c_proj = nn.Linear(config.ff_dim, config.model_dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        outputs: Tensor = self.c_proj(functional.gelu(self.c_fc(inputs), approximate="tanh"))
        return functional.dropout(outputs, self.dropout, self.training)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.model_dim, eps=LAYER_NORM_EPS)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.model_dim, eps=LAYER_NORM_EPS)
        self.mlp = FeedForward(config)

    def forward(self, stream: Tensor, cache: Cache | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        stream = stream + self.attn(self.ln_1(stream), cache)
        outputs: Tensor = stream + self.mlp(self.ln_2(stream))
        return outputs


class Embedding(nn.Module):
    """The sum of a token's embedding and that of its position."""

    def __init__(self, wte: nn.Embedding, wpe: nn.Embedding, config: GPTConfig) -> None:
        super().__init__()
        self.wte, self.wpe, self.config = wte, wpe, config

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Map tokens (B, T), int64, of which the first stands at `start`, to the stream (B, T, D).

        Raises:
            DataError: the last one stands beyond max_seq_len.
        """
        end = start + tokens.size(1)
        if end > self.config.max_seq_len:
            raise DataError(
                f"a sequence has {end} tokens, the model takes {self.config.max_seq_len}: "
                "shorten the sequences, or raise model.max_seq_len"
            )
        positions = torch.arange(start, end, device=tokens.device)
        stream = self.wte(tokens) + self.wpe(positions)
        return functional.dropout(stream, self.config.dropout, self.training)


class OutputLayer(nn.Module):
    """The logits of each word: how much the stream is like its embedding."""

    def __init__(self, wte: nn.Embedding) -> None:
        super().__init__()
        self.wte = wte

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, V)."""
        return functional.linear(stream, self.wte.weight)


class GPT(nn.Module):
    """A GPT-2 style language model: tokens to the logits of the token after each.

    Attributes:
        config: its sizes.
        wte: token embedding (V, D), which is the output layer as well.
        wpe: position embedding (max_seq_len, D).
        h: the blocks.
        ln_f: the norm before the output layer.
    """

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        """Make a model with fresh weights from PyTorch's global generator."""
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(vocab_size, config.model_dim)
        self.wpe = nn.Embedding(config.max_seq_len, config.model_dim)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.model_dim, eps=LAYER_NORM_EPS)
        self._initialise()

    @property
    def vocab_size(self) -> int:
        return self.wte.num_embeddings

    def new_caches(self) -> list[Cache]:
        return [Cache() for _ in self.h]

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T), int64, to logits (B, T, V).

        Raises:
            DataError: T is larger than max_seq_len.
        """
        return functional.linear(self.hidden_states(tokens), self.wte.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over all targets but -100, (). Never holds all logits at once.

        Args:
            tokens: (B, T), int64.
            targets: the token that follows each, (B, T), or -100 for what is no loss term.

        Raises:
            DataError: T is larger than max_seq_len.
        """
        hidden = self.hidden_states(tokens)
        return linear_cross_entropy(hidden.flatten(0, 1), self.wte.weight, targets.flatten())

    def hidden_states(self, tokens: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """Map tokens (B, T), int64, to what the output layer takes, (B, T, D).

        With `caches`, one a layer, the tokens come after those that the caches hold (then T must be
        1), and are added to them.

        Raises:
            DataError: the tokens are more than max_seq_len, those of the caches included.
        """
        start = caches[0].length if caches else 0
        stream = self.embedding()(tokens, start)
        for layer, block in enumerate(self.h):
            stream = block(stream, caches[layer] if caches else None)
        outputs: Tensor = self.ln_f(stream)
        return outputs

    def stages(self) -> list[nn.Module]:
        """The blocks, of which the first has the embedding before it and the last one the logits behind it.

        Each maps the stream (B, T, D), the first one tokens (B, T), and the last one to logits (B, T, V).
        """
        parts: list[nn.Module] = list(self.h)
        parts[0] = nn.Sequential(self.embedding(), parts[0])
        parts[-1] = nn.Sequential(parts[-1], self.ln_f, OutputLayer(self.wte))
        return parts

    def embedding(self) -> "Embedding":
        return Embedding(self.wte, self.wpe, self.config).train(self.training)

    def _initialise(self) -> None:
        """GPT-2's initial weights: projections onto the residual stream are scaled by its depth."""
        residual_std = INITIAL_STD / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith("c_proj") else INITIAL_STD
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


def build_gpt(config: GPTConfig, vocab_size: int) -> GPT:
    """A model with fresh weights, or with those of `config.pretrained`, on the CPU.

    Raises:
        CheckpointError: the folder's files are missing or damaged.
        ConfigError: they are of another size or vocabulary, or of no GPT-2.
    """
    model = GPT(config, vocab_size)
    if config.pretrained is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        model.load_state_dict(read_for(config.pretrained, config, shapes))
    return model
