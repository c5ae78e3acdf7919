"""Lazy modules, whose shapes are known after a first forward: `nn.LazyLinear` and its like."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from smolcluster.data.dataset import Elsewhere, Place
from smolcluster.errors import ConfigError
from smolcluster.training.batches import placed
from smolcluster.training.compute import trained_dtype
from smolcluster.training.modes import evaluating
from smolcluster.training.workload import Workload
from smolcluster.utils.user_code import user_code

EXAMPLES = 2
"""Samples of the first forward: of one alone a batch norm, or a loss of pairs, may be none."""


def without_shape(model: nn.Module) -> str | None:
    """The name of a parameter or buffer that has no shape yet; None: all have one."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)


def check_shapes(model: nn.Module) -> None:
    """See that a model has all of its parameters.

    Raises:
        ConfigError: one has no shape yet.
    """
    if (name := without_shape(model)) is not None:
        raise ConfigError(
            f"model: {name} has no shape before a first forward (a lazy module), and nothing is computed "
            "here before the model is laid out: call the model once on an example where it is made"
        )


def give_shapes(model: nn.Module, workload: Workload, seed: int) -> None:
    """Put the first samples through a model that has lazy modules, so that all have shapes and weights.

    The weights are drawn from PyTorch's global generator then. Nothing is trained, and the model is in
    evaluation mode meanwhile. A model without lazy modules is left alone.

    Raises:
        ConfigError: the samples are elsewhere, or a lazy module was not called.
        UserCodeError: data, model or loss raised an exception.
    """
    samples = workload.train
    if without_shape(model) is None:
        return
    if isinstance(samples, Elsewhere):
        check_shapes(model)
    indices = samples.order(0, seed)[:EXAMPLES]
    with user_code("data"):
        batch = samples.batch(indices, Place(seed, 0, 0))
    batch = placed(batch, torch.device("cpu"), trained_dtype(model))
    with evaluating(model), torch.no_grad(), user_code("loss"):
        workload.loss(model, batch)
    check_shapes(model)
