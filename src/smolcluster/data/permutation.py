"""The order in which an epoch visits the training samples.

The order must be the same on every machine, platform and version, because leases, resumed runs and
the single-process baseline all refer to positions in it. It is therefore the stable sort of raw
Philox words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): NumPy promises
never to change the words of a bit generator, but not the results of `Generator.permutation`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from smolcluster.utils.seed import derive_seed
from smolcluster.wire.messages import LeaseKey


def seeded_order(key: int, num_items: int) -> Tensor:
    """Return the order of `0 … num_items - 1` that `key` draws, int32 (num_items,)."""
    words = np.random.Philox(key=key).random_raw(num_items)
    return torch.from_numpy(np.argsort(words, kind="stable").astype(np.int32))


def epoch_permutation(seed: int, epoch: int, num_samples: int) -> Tensor:
    """Return the order of the samples in `epoch` (from 0), int32 (num_samples,)."""
    return seeded_order(derive_seed(seed, "permutation", epoch), num_samples)


@dataclass(frozen=True, order=True)
class Range:
    """Positions `start` up to but excluding `stop` of an epoch's permutation."""

    epoch: int
    start: int
    stop: int

    @classmethod
    def of(cls, key: LeaseKey) -> Self:
        """The samples that a lease is about."""
        return cls(key.epoch, key.start, key.stop)

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def global_batches(
    num_samples: int, total_samples: int, batch_size: int, first: int = 0
) -> Iterator[Range]:
    """The batch of every step, in order, after the `first` of `total_samples` samples.

    The last batch of an epoch, and of the run, has what is left.
    """
    while first < total_samples:
        epoch, start = divmod(first, num_samples)
        left = min(num_samples - start, total_samples - first)
        yield Range(epoch, start, start + min(batch_size, left))
        first += min(batch_size, left)


class EpochOrders:
    """The orders of a run's epochs, as `draw` gives them.

    The last two asked for are kept: near an epoch's end, samples of the next one are wanted ahead.
    """

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self._order = lru_cache(maxsize=2)(draw)

    def __getitem__(self, epoch: int) -> Tensor:
        return self._order(epoch)
