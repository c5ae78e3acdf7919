"""SyncPS's arithmetic, as pure functions.

Each step trains one global batch of N samples. It is cut into parts; the mean gradient g_i of a part of n_i
samples counts n_i / N, so that the sum

    g = sum over i of (n_i / N) g_i

is the mean over the whole batch, whatever the parts are (synchronous data parallelism with backup workers:
Chen et al., 1604.00981). Every replica then takes the same optimizer step with c g, where c clips the global
norm. Replicas that drifted apart are drawn together again:

    w <- β w_server + (1 - β) w_worker        (Polyak averaging between replicas, β = polyak_alpha)
"""

from collections.abc import Iterator

from torch import Tensor

from smolcluster.data.permutation import Range


def global_batches(
    num_samples: int, num_epochs: int, batch_size: int, first: int = 0
) -> Iterator[Range]:
    """The batch of every step, in order, after the `first` samples; an epoch's last one has what is left."""
    begin, offset = divmod(first, num_samples)
    for epoch in range(begin, num_epochs):
        for start in range(offset if epoch == begin else 0, num_samples, batch_size):
            yield Range(epoch, start, min(start + batch_size, num_samples))


def weight(part_samples: int, batch_samples: int) -> float:
    """n_i / N: what a part's mean gradient counts."""
    return part_samples / batch_samples


def blend(own: Tensor, server: Tensor, beta: float) -> None:
    """Draw `own` weights (n,) towards the `server`'s (n,), in place; a β of 1 copies them."""
    own.lerp_(server, beta) if beta < 1 else own.copy_(server)
