"""Text as samples: blocks of token ids, each of which predicts the one after it."""

import hashlib
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.dataset import NO_TERM, Dataset, Permuted, Place, check_indices
from smolcluster.data.token_cache import ROLES, Stream, TextSource, Tokens, open_tokens
from smolcluster.data.tokenizer import load_tokenizer, tokenizer_identity
from smolcluster.errors import DataError

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class TokenBlocks(Permuted):
    """A stream of token ids (num_tokens,), seen as samples of `length` inputs and the ids that follow each.

    Sample i has the inputs tokens[i * length : (i + 1) * length], and as targets the same, one further on.
    With `is_whole` the last sample may be a short one, filled up with targets that are no loss terms; else
    what fills no sample is left out.
    """

    tokens: Stream
    length: int
    is_whole: bool = False
    device: torch.device = _CPU

    @property
    def num_samples(self) -> int:
        return self._num_full + (self._tail is not None)

    def rows(self, indices: Tensor) -> NDArray[Any]:
        """Inputs and the target after the last one: ids (n, length + 1) of the stream's type.

        A short sample is filled up with 0.

        Raises:
            DataError: an index lies outside the split.
        """
        check_indices(indices, self.num_samples)
        wanted = indices.numpy()
        if self._tail is None:
            rows: NDArray[Any] = self._windows[wanted]
            return rows
        is_last = wanted == self._num_full
        rows = np.empty((len(wanted), self.length + 1), self.tokens.dtype)
        rows[~is_last] = self._windows[wanted[~is_last]]
        rows[is_last] = self._tail
        return rows

    def to_send(self, indices: Tensor, place: Place | None = None) -> Tensor:  # noqa: ARG002
        """Each token once: what `rows` gives, as a tensor."""
        return torch.from_numpy(np.ascontiguousarray(self.rows(indices)))

    def batch(
        self,
        indices: Tensor,
        place: Place | None = None,  # noqa: ARG002 - nothing is drawn
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 (n, length), on the split's device; -100 for no loss term."""
        rows = self.rows(indices)
        inputs, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if self._tail is not None:
            num_last_terms = (len(self.tokens) - 1) % self.length
            targets[indices.numpy() == self._num_full, num_last_terms:] = NO_TERM
        return torch.from_numpy(inputs).to(self.device), torch.from_numpy(targets).to(self.device)

    def to(self, device: torch.device) -> Self:
        return replace(self, device=device)

    @cached_property
    def _num_full(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    @cached_property
    def _windows(self) -> NDArray[Any]:
        """All full samples, (num_full, length + 1), as a view of the stream."""
        if not self._num_full:
            return np.empty((0, self.length + 1), self.tokens.dtype)
        return sliding_window_view(self.tokens, self.length + 1)[:: self.length]

    @cached_property
    def _tail(self) -> NDArray[Any] | None:
        """The short last sample (length + 1,), filled up; None where there is none."""
        rest = self.tokens[self._num_full * self.length :]
        if not self.is_whole or len(rest) < 2:
            return None
        return np.pad(rest, (0, self.length + 1 - len(rest)))


def load_text(
    config: DatasetConfig, source: TextSource, length: int, log: logging.Logger
) -> Dataset:
    """Tokenize `source`, or open what was tokenized before, as samples of `length` tokens.

    Raises:
        DataError: the tokenizer, the text or the cache cannot be used, or a split fills no sample.
    """
    identity = tokenizer_identity(config.tokenizer)
    tokens = open_tokens(
        source,
        identity,
        lambda: load_tokenizer(config.tokenizer, download=config.download),
        config.cache,
        log,
    )
    _check_lengths(source.name, tokens, length)
    parts = f"{source.name}|{length}|{tokens.content}"
    return Dataset(
        name=source.name,
        train=TokenBlocks(tokens.train, length),
        validation=TokenBlocks(tokens.validation, length, is_whole=True),
        input_dim=length,
        num_classes=tokens.vocab_size,
        fingerprint=hashlib.sha256(parts.encode()).hexdigest(),
        measure="perplexity",
    )


def _check_lengths(name: str, tokens: Tokens, length: int) -> None:
    for role, stream in zip(ROLES, (tokens.train, tokens.validation), strict=True):
        if len(stream) <= length:
            most = min(len(tokens.train), len(tokens.validation)) - 1
            remedy = f"set model.max_seq_len to at most {most}, or add text" if most else "add text"
            raise DataError(
                f"the {role} split of dataset {name} has {len(stream)} tokens, too few for one sample of "
                f"model.max_seq_len = {length} and the token after it; {remedy}"
            )
