"""smolcluster: train PyTorch models on the machines you already own, over plain TCP."""

__version__ = "0.1.0"
