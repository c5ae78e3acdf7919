"""Clipping of the gradient's global norm as configured: the same for every algorithm and the baseline."""

from smolcluster.configs.schema import GradientClipping
from smolcluster.training.replica import Replica


def clip_gradient(replica: Replica, clipping: GradientClipping) -> float:
    """Clip the gradient if that is enabled; return its L2 norm before (Pascanu et al., 1211.5063)."""
    return replica.clip(clipping.max_norm) if clipping.enabled else replica.grad_norm()
