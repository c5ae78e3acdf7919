"""A small language model, the same for the orchestrator and its workers, and toy data for it."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SEQUENCE_LENGTH = 16


class Embedding(nn.Module):
    """Tokens (batch, seq) and where they stand, as vectors (batch, seq, width)."""

    def __init__(self, tokens: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.places = tokens, places

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.tokens(tokens) + self.places(places)
        return hidden


class CausalBlock(nn.Module):
    """A layer in which nothing is seen of what comes later."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=hidden.device)
        output: Tensor = self.layer(hidden, src_mask=mask, is_causal=True)
        return output


class TinyToyModel(nn.Module):
    """A causal transformer from tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, vocab_size: int, d_model: int, n_layers: int = 2, n_heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.places = nn.Embedding(SEQUENCE_LENGTH, d_model)
        layer = nn.TransformerEncoderLayer(
            d_model, n_heads, 4 * d_model, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.logits = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict at each place the token that follows."""
        value = tokens
        for stage in self.stages():
            value = stage(value)
        return value

    def stages(self) -> list[nn.Module]:
        """What a pipeline cuts between."""
        blocks = [CausalBlock(layer) for layer in self.blocks.layers]
        return [Embedding(self.tokens, self.places), *blocks, self.logits]


def toy_loader(num_batches: int, batch_size: int, vocab_size: int, seed: int) -> DataLoader:
    """Batches of tokens and of labels: each label is the token after, counted up by a fixed stride."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, vocab_size, (num_batches * batch_size, 1), generator=generator)
    tokens = (first + 3 * torch.arange(SEQUENCE_LENGTH + 1)) % vocab_size
    return DataLoader(
        TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch_size, shuffle=True
    )
