"""The version of smolcluster, which peers and reports name."""

__version__ = "0.1.0"
