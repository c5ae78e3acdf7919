"""Error feedback: what a codec loses is added to the next push, so that nothing is lost for good.

After Error Feedback Fixes SignSGD (Karimireddy et al., arXiv:1901.09847) and 1-Bit Stochastic
Gradient Descent (Seide et al., Interspeech 2014). Two departures, for pushes of unequal size that
may be dropped:

* The residual r is kept in units of the weighted sum. A push of n loss terms carries n times their
  mean gradient g, so it encodes x = g + r / n and leaves r' = n (x - decode(encode(x))). What is stored
  is r' / n, and n: that saves a pass over the memory.
* r' is provisional until `commit`, when the push has been applied. `rollback` forgets it: a dropped
  push gives its mass back, as its samples will be computed again.

With q the decoded pushes that were applied, sum(n q) + r = sum(n g), up to roundings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.codec.base import Codec


class ErrorFeedback:
    """The residual of one sender, for a flat gradient of `numel` values.

    One push is open at a time. Keeps two buffers of `numel` values, the residual and the
    provisional one, of the codec's type, so that neither commit nor rollback of a whole push
    copies; no scratch.
    """

    def __init__(self, codec: Codec, numel: int) -> None:
        self._codec = codec
        self._committed = torch.zeros(numel, dtype=codec.dtype)
        self._open = torch.zeros(numel, dtype=codec.dtype)
        self._committed_parts: dict[int, _Part] = {}
        self._open_parts: dict[int, _Part] = {}

    def encode(self, bucket: slice, gradient: Tensor, num_terms: int, out: Tensor) -> None:
        """Encode a bucket of the open push, with what earlier pushes owe, into `out`.

        Args:
            bucket: The bucket's place in the flat gradient. Every push is cut in the same places.
            gradient: The bucket's mean gradient over the push's terms, (n,) of the codec's type;
                not changed.
            num_terms: Loss terms of the push, 1 or more, the same for all of its buckets.
            out: uint8 (m,), as for `Codec.encode`.

        Raises:
            NonFiniteValue: the gradient, or its sum with the residual, holds NaN or infinity. The
                bucket keeps the residual it had; `out` must not be sent.
        """
        if num_terms < 1:
            raise ValueError(f"a push holds at least 1 loss term, not {num_terms}")
        self._open_parts.pop(bucket.start, None)
        owed = self._committed_parts.get(bucket.start)
        weight = owed.num_terms / num_terms if owed else 0.0
        error = self._open[bucket]
        torch.add(gradient, self._committed[bucket], alpha=weight, out=error)
        self._codec.encode_keeping_error(error, out)
        self._open_parts[bucket.start] = _Part(bucket, num_terms)

    def commit(self, stop: int | None = None) -> None:
        """The open push was applied: its errors are owed now. Buckets it left out keep theirs.

        With `stop`, only its buckets before that element were applied, and the others were dropped.
        """
        if stop is not None:
            dropped = [start for start in self._open_parts if start >= stop]
            for start in dropped:
                del self._open_parts[start]
        numel = sum(part.bucket.stop - part.bucket.start for part in self._open_parts.values())
        if numel == self._committed.numel():
            self._committed, self._open = self._open, self._committed
        else:
            for part in self._open_parts.values():
                self._committed[part.bucket] = self._open[part.bucket]
        self._committed_parts |= self._open_parts
        self._open_parts.clear()

    def rollback(self) -> None:
        """The open push was dropped: everything is as it was before its first bucket."""
        self._open_parts.clear()

    @property
    def committed(self) -> Tensor:
        """What applied pushes owe, (numel,): r / n, with n the terms of each bucket's last push."""
        return self._committed

    @property
    def owed(self) -> tuple[Tensor, int]:
        """`committed`, and the loss terms of the last push that was applied, whole; 0: there was none."""
        terms = {part.num_terms for part in self._committed_parts.values()}
        if len(terms) > 1:
            raise ValueError("of its last pushes only parts were applied")
        return self._committed, next(iter(terms), 0)

    def resume(self, buckets: Sequence[slice], num_terms: int) -> None:
        """`committed` has been filled with what a push of so many loss terms in all `buckets` owed."""
        self._committed_parts = {bucket.start: _Part(bucket, num_terms) for bucket in buckets}

    def residual(self) -> Tensor:
        """Return r, a new tensor (numel,): what applied pushes still owe to the weighted sum."""
        residual = self._committed.clone()
        for part in self._committed_parts.values():
            residual[part.bucket] *= part.num_terms
        return residual


@dataclass(frozen=True)
class _Part:
    """A bucket that was encoded, and the loss terms of its push: what its error counts for."""

    bucket: slice
    num_terms: int
