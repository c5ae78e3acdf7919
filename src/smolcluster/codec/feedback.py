"""Error feedback: what a codec loses is added to the next push, so that nothing is lost for good.

After Error Feedback Fixes SignSGD (Karimireddy et al., arXiv:1901.09847) and 1-Bit Stochastic Gradient Descent
(Seide et al., Interspeech 2014). Two departures, for pushes of unequal size that may be dropped:

* The residual r is kept in units of the weighted sum. A push of n samples carries n times a mean gradient g, so
  it encodes x = g + r / n and leaves r' = n (x - decode(encode(x))).
* r' is provisional until `commit`, when the push has been applied. `rollback` forgets it: a dropped push gives
  its mass back, as its samples will be computed again.

With q the decoded pushes that were applied, sum(n q) + r = sum(n g), up to the roundings of float32.
"""

import torch
from torch import Tensor

from smolcluster.codec.base import Codec


class ErrorFeedback:
    """The residual of one sender, for a flat gradient of `numel` values. One push is open at a time.

    Keeps two float32 buffers of `numel` values, the residual and the provisional one, so that neither commit
    nor rollback copies anything; and no scratch.
    """

    def __init__(self, codec: Codec, numel: int) -> None:
        self._codec = codec
        self._residual = torch.zeros(numel)
        self._provisional = torch.zeros(numel)
        self._encoded: dict[int, slice] = {}

    @property
    def residual(self) -> Tensor:
        """What the committed pushes still owe, float32 (numel,), in units of the weighted sum; read only."""
        return self._residual

    def encode(self, bucket: slice, gradient: Tensor, num_samples: int, out: Tensor) -> None:
        """Encode a bucket of the open push, with what earlier pushes owe, into `out`.

        Args:
            bucket: The bucket's place in the flat gradient; buckets are the same, disjoint ones in every push.
            gradient: The bucket's mean gradient over the push's samples, float32 (n,); it is not changed.
            num_samples: Samples in the push, 1 or more, the same for all of its buckets.
            out: uint8 (m,), as for `Codec.encode`.

        Raises:
            NonFiniteValue: the gradient, or its sum with the residual, holds NaN or infinity. The bucket then
                keeps the residual it had; `out` must not be sent.
        """
        if num_samples < 1:
            raise ValueError(f"a push holds at least 1 sample, not {num_samples}")
        self._encoded.pop(bucket.start, None)
        error = self._provisional[bucket]
        torch.add(gradient, self._residual[bucket], alpha=1 / num_samples, out=error)
        self._codec.encode_keeping_error(error, out)
        error.mul_(num_samples)
        self._encoded[bucket.start] = bucket

    def commit(self) -> None:
        """The open push was applied: its errors become the residual. Buckets it left out keep theirs."""
        if sum(bucket.stop - bucket.start for bucket in self._encoded.values()) == self._residual.numel():
            self._residual, self._provisional = self._provisional, self._residual
        else:
            for bucket in self._encoded.values():
                self._residual[bucket] = self._provisional[bucket]
        self._encoded.clear()

    def rollback(self) -> None:
        """The open push was dropped: everything is as it was before its first bucket."""
        self._encoded.clear()
