"""Datasets that a training file can name."""
