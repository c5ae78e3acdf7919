"""The version of smolcluster, which peers, reports and checkpoints name."""

__version__ = "0.1.0"
