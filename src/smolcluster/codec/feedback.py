"""Error feedback: what a codec loses is added to the next push, so that nothing is lost for good.

After Error Feedback Fixes SignSGD (Karimireddy et al., arXiv:1901.09847) and 1-Bit Stochastic
Gradient Descent (Seide et al., Interspeech 2014). Two departures:

* A push may be weighed against others: what is applied of it is its share s of a sum. The residual r of
  a push of share s is owed to the next push, of share s', in the unit in which it was lost:

      x = g + r s / s'        q = decode(encode(x))        r' = x - q

  A push that is applied as it is has a share of 1 whatever its size, so that x = g + r. A share may be
  known only when the push has been applied: what an estimate has paid too much or too little is owed then.
* r' is provisional until `commit`, when the push has been applied. `rollback` forgets it: a dropped
  push pays nothing, as its samples will be computed again. When nobody knows whether a push has been
  applied, `forget` gives up all debts, so that none is paid twice.

With q the decoded pushes that were applied, sum(s q) + s r = sum(s g), up to roundings.
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

    def encode(self, bucket: slice, gradient: Tensor, out: Tensor, share: float = 1.0) -> None:
        """Encode a bucket of the open push, with what earlier pushes owe, into `out`.

        Args:
            bucket: The bucket's place in the flat gradient. Every push is cut in the same places.
            gradient: The bucket's gradient, (n,) of the codec's type; not changed.
            out: uint8 (m,), as for `Codec.encode`.
            share: What the push counts in the sum that is applied, above 0; the same for all of its buckets.

        Raises:
            NonFiniteValue: the gradient, or its sum with the residual, holds NaN or infinity. The
                bucket keeps the residual it had; `out` must not be sent.
        """
        if not share > 0:
            raise ValueError(f"a push has a share above 0, not {share}")
        self._open_parts.pop(bucket.start, None)
        owed = self._committed_parts.get(bucket.start)
        weight = owed.share / share if owed else 0.0
        error = self._open[bucket]
        torch.add(gradient, self._committed[bucket], alpha=weight, out=error)
        self._codec.encode_keeping_error(error, out)
        self._open_parts[bucket.start] = _Part(bucket, share)

    def commit(self, stop: int | None = None, share: float | None = None) -> None:
        """The open push was applied: its errors are owed now. Buckets it left out keep theirs.

        With `stop`, only its buckets before that element were applied, and the others were dropped.
        `share` is what the push has counted in fact, above 0; None: what it was encoded with.
        """
        if stop is not None:
            dropped = [start for start in self._open_parts if start >= stop]
            for start in dropped:
                del self._open_parts[start]
        if share is not None:
            for part in list(self._open_parts.values()):
                self._count_as(part, share)
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

    def forget(self) -> None:
        """Whether the open push was applied is not known: nothing is owed any more."""
        self._open_parts.clear()
        self._committed_parts.clear()
        self._committed.zero_()

    def _count_as(self, part: "_Part", share: float) -> None:
        """A part of the open push has counted `share`: it owes what it has paid too little of its debt."""
        owed = self._committed_parts.get(part.bucket.start)
        if owed is not None and share != part.share:
            unpaid = owed.share / share - owed.share / part.share
            self._open[part.bucket].add_(self._committed[part.bucket], alpha=unpaid)
        self._open_parts[part.bucket.start] = _Part(part.bucket, share)

    @property
    def committed(self) -> Tensor:
        """What applied pushes owe, (numel,): r, in the unit of each bucket's last push."""
        return self._committed

    def resume(self, buckets: Sequence[slice]) -> None:
        """`committed` has been filled with what a push that was applied as it was owed in all `buckets`."""
        self._committed_parts = {bucket.start: _Part(bucket, 1.0) for bucket in buckets}

    def residual(self) -> Tensor:
        """Return s r, a new tensor (numel,): what applied pushes still owe to the sum."""
        residual = self._committed.clone()
        for part in self._committed_parts.values():
            residual[part.bucket] *= part.share
        return residual


@dataclass(frozen=True)
class _Part:
    """A bucket that was encoded, and the share of its push: what its error counts for."""

    bucket: slice
    share: float
