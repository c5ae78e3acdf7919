"""A small language model, the same for the orchestrator and its workers, and toy data for it."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SEQUENCE_LENGTH = 16


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
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        outputs: Tensor = self.logits(self.blocks(hidden, mask=mask, is_causal=True))
        return outputs


def toy_loader(num_batches: int, batch_size: int, vocab_size: int, seed: int) -> DataLoader:
    """Batches of tokens and of labels: each label is the token after, counted up by a fixed stride."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, vocab_size, (num_batches * batch_size, 1), generator=generator)
    tokens = (first + 3 * torch.arange(SEQUENCE_LENGTH + 1)) % vocab_size
    return DataLoader(
        TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch_size, shuffle=True
    )
