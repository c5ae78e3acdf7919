"""Norms of gradients, and clipping by the norm of the whole (Pascanu et al., 1211.5063)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from smolcluster.configs.schema import GradientClipping


def bucket_norms(flat: Tensor, buckets: Sequence[slice]) -> list[float]:
    """The L2 norm of each bucket of a flat tensor. Combine them with `math.hypot`, which is in float64.

    A sum of millions of squares in float32 would lose the small ones.
    """
    norms = torch.stack([torch.linalg.vector_norm(flat[bucket]) for bucket in buckets]).tolist()
    for number, norm in enumerate(norms):
        if math.isinf(norm):  # a sum of squares may overflow where the elements do not
            values = flat[buckets[number]].to("cpu")
            norms[number] = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norms


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that clips a gradient of this L2 norm: that of `torch.nn.utils.clip_grad_norm_`."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_factor(norm: float, clipping: GradientClipping) -> float:
    """The same as configured: 1 where clipping is not enabled."""
    return clip_coefficient(norm, clipping.max_norm) if clipping.enabled else 1.0
