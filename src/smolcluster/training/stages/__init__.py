"""Stages of a pipeline: a part of a model, its forward and backward."""
