"""What a worker sends in a run's synchronous beginning: the mean gradient of its steps."""

from collections.abc import Collection

import torch
from torch import Tensor

from smolcluster.algorithms.DiLoCo.exchange import Layout


class GradientSums:
    """Gradients of a worker's steps, weighed by their loss terms, by fragment."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums: dict[int, tuple[float, Tensor]] = {}
        """By fragment: loss terms, and the sum of their gradients (numel,)."""

    def add(self, gradient: Tensor, num_terms: float, fragments: Collection[int]) -> None:
        """Add the mean gradient (num_params,) of so many loss terms to the sums of these fragments."""
        for number in fragments:
            added = self._layout.gather(number, gradient).mul_(num_terms)
            total, sum_ = self._sums.get(number, (0.0, None))
            self._sums[number] = total + num_terms, added if sum_ is None else sum_.add_(added)

    def take(self, number: int) -> Tensor:
        """A fragment's mean gradient since it was taken last, (numel,) on the CPU; 0 if nothing counts."""
        total, sum_ = self._sums.pop(number, (0.0, None))
        if sum_ is None or not total:
            return torch.zeros(self._layout.fragments[number].numel, dtype=self._layout.dtype)
        return sum_.div_(total).cpu()

    def clear(self) -> None:
        """Forget all that was added."""
        self._sums.clear()
