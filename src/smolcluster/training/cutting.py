"""Whether a loss depends on how a batch is cut, and how much a part of a batch weighs.

SyncPS cuts batches, as it gives each worker a part of a step, and so does `microbatch`. The mean of the
whole is that of the parts, weighted by their loss terms. A loss that couples samples (contrastive losses) is
another one for parts, and so is a mean over terms of which samples have unequally many. That is said once.
Of a Hugging Face model's own loss the number of terms is known: that of its labels which count.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smolcluster.data.dataset import NO_TERM, Batch
from smolcluster.training.batches import tensors_of
from smolcluster.training.workload import Terms

NUM_SAMPLES = 16
"""Of the first batch, which are computed whole and in two parts."""
TOLERANCE = 1e-3
"""Of what rounding may change."""
REMEDY = (
    "return (sum, number) of the loss's terms if samples have unequally many, or set batch: whole if the "
    "loss couples samples, so that one worker computes a step's batch at once"
)


@dataclass
class FirstLook:
    """Whether it has been looked at what cutting makes of a loss, and where it is said."""

    log: logging.Logger
    is_done: bool = False


def lacks_labels(batch: Batch) -> bool:
    """Whether a tensor of the batch says of each of its places that no loss term belongs to it (-100)."""
    return any(
        bool((each == NO_TERM).all())
        for each in tensors_of(batch)
        if each.numel() and each.dtype in (torch.int64, torch.int32, torch.int16)
    )


class LabelsSeen:
    """The losses that Hugging Face models in a model have returned, and how many labels each has."""

    def __init__(self, model: nn.Module) -> None:
        self._models = [each for each in model.modules() if is_from_transformers(each)]
        self._found: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what they are given and return while the block runs."""
        self._found.clear()
        hooks = [each.register_forward_hook(self._note, with_kwargs=True) for each in self._models]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def terms_of(self, result: object) -> Terms | None:
        """The sum of the terms of such a loss, and their number; None: `result` is not one."""
        for loss, count in self._found:
            if result is loss:
                number = count.to(loss.device)
                return torch.where(number > 0, loss * number, torch.zeros_like(loss)), number
        return None

    def _note(self, module: Any, _given: object, named: dict[str, Any], output: Any) -> None:
        labels, loss = named.get("labels"), getattr(output, "loss", None)
        if not (isinstance(labels, Tensor) and isinstance(loss, Tensor)):
            return
        if loss.numel() != 1 or labels.is_floating_point():
            return
        kind = f"{getattr(module, 'loss_type', None)} {type(module).__name__}"
        is_shifted = (
            "CausalLM" in kind or "LMHead" in kind
        )  # the first label is nobody's next token
        counted = labels[..., 1:] if is_shifted else labels
        self._found.append((loss, (counted != NO_TERM).sum()))


def is_from_transformers(module: nn.Module) -> bool:
    """Whether it is a model of the library's, or a subclass of one, that may compute its own loss."""
    return any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__)


def said_of_cutting(
    loss_of: Callable[[slice], tuple[float, float]], num_samples: int
) -> str | None:
    """What to say where the loss of samples depends on how they are cut; None: it does not, or who knows.

    `loss_of` gives the sum of the terms of samples of the first batch, and their number. It is called for all
    of them twice: a loss that is random differs from itself.
    """
    if num_samples < 2:
        return None
    cut = max(1, num_samples // 3)  # parts of unequal size show means of means as well
    whole, again = (_mean([loss_of(slice(0, num_samples))]) for _ in range(2))
    if not (math.isfinite(whole) and whole == again):
        return None
    parts = [loss_of(slice(0, cut)), loss_of(slice(cut, num_samples))]
    mean = _mean([each for each in parts if each[1]])
    if abs(mean - whole) <= TOLERANCE * max(abs(whole), TOLERANCE):
        return None
    return (
        f"the loss of {num_samples} samples at once is {whole:.4g}, of {cut} and {num_samples - cut} "
        f"{mean:.4g}: results depend on how a batch is cut; {REMEDY}"
    )


def _mean(parts: list[tuple[float, float]]) -> float:
    number = sum(count for _, count in parts)
    return sum(total for total, _ in parts) / number if number else math.nan


@contextmanager
def without_effect_on_chance(device: torch.device) -> Iterator[None]:
    """What is drawn at random after the block does not depend on what was drawn in it."""
    devices = [device] if device.type == "cuda" else []
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)
