"""SyncPS's arithmetic, as pure functions.

Each step trains one global batch of T loss terms. It is cut into parts; the mean gradient g_i of a part of
t_i terms counts t_i / T, so that the sum

    g = sum over i of (t_i / T) g_i

is the mean over all terms of the batch, whatever the parts are (synchronous data parallelism with backup
workers: Chen et al., 1604.00981). How many terms samples have is known when they have been computed. So parts
are added up with t_i / E, where E is T as the part that came first lets expect, and the sum is multiplied by
E / T, which is 1 where all samples have equally many terms. Every replica then takes the same optimizer step
with c g, where c clips the global norm. Replicas that drifted apart are drawn together again:

    w <- β w_server + (1 - β) w_worker        (Polyak averaging between replicas, β = polyak_alpha)
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpectedTerms:
    """E: the loss terms of a batch of so many samples, if all were like those of one part.

    A fraction, so that the weights of equal samples are exactly those of their numbers.
    """

    part_terms: float
    part_samples: int
    batch_samples: int

    def weight(self, num_terms: float) -> float:
        """t_i / E: what the mean gradient of a part of so many terms counts."""
        return num_terms * self.part_samples / self._scaled

    def correction(self, num_terms: float) -> float:
        """E / T, of a batch that has turned out to have so many terms."""
        return self._scaled / (self.part_samples * (num_terms or 1.0))

    @property
    def _scaled(self) -> float:
        return (self.part_terms or 1.0) * self.batch_samples


def blend(own: Tensor, server: Tensor, beta: float) -> None:
    """Draw `own` weights (n,) towards the `server`'s (n,), in place; a β of 1 copies them."""
    own.lerp_(server, beta) if beta < 1 else own.copy_(server)
