"""The labels of a batch that count, which are not -100: of these a Hugging Face model's loss is the mean."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.data.dataset import NO_TERM, Batch
from smolcluster.data.pytree import tensors_in
from smolcluster.training.workload import LossFunction, Terms, count_terms

STANDS_FOR_ONE = "stands_for_a_model_of_transformers"
"""An attribute of what returns the losses of such a model, which is elsewhere."""


def lacks_labels(batch: Batch) -> bool:
    """Whether a tensor of the batch says of each of its places that no loss term belongs to it (-100)."""
    return any(
        bool((each == NO_TERM).all())
        for each in tensors_in(batch)
        if each.numel() and each.dtype in (torch.int64, torch.int32, torch.int16)
    )


class LabelsSeen:
    """The losses that Hugging Face models in a model have returned, and how many labels each has."""

    def __init__(self, model: nn.Module) -> None:
        self._models = [
            each
            for each in model.modules()
            if is_from_transformers(each) or getattr(each, STANDS_FOR_ONE, False)
        ]
        self._found: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what they are given and return while the block runs."""
        self._found.clear()
        with ExitStack() as hooks:
            for each in self._models:
                hooks.enter_context(each.register_forward_hook(self._note, with_kwargs=True))
            yield

    def count(
        self, result: Any, num_samples: int, *, of: LossFunction, what: str = "loss"
    ) -> Terms:
        """The sum of the terms of a loss of so many samples, (), and their number, as `count_terms`.

        Of a loss that such a model has returned they are its labels that count.
        """
        return count_terms(self.counted(result), num_samples, of=of, what=what)

    def counted(self, result: Any) -> Any:
        """The sum over labels, (), and their number, if that is such a model's loss; else the result."""
        for loss, labelled in self._found:
            if result is loss:
                number = labelled.to(loss.device)
                return torch.where(number > 0, loss * number, torch.zeros_like(loss)), number
        return result

    def _note(self, module: Any, _given: object, named: dict[str, Any], output: Any) -> None:
        labels, loss = named.get("labels"), getattr(output, "loss", None)
        if not (isinstance(labels, Tensor) and isinstance(loss, Tensor)):
            return
        if loss.numel() != 1 or labels.is_floating_point():
            return
        kind = f"{getattr(module, 'loss_type', None)} {type(module).__name__}"
        is_shifted = "CausalLM" in kind or "LMHead" in kind
        counted = labels[..., 1:] if is_shifted else labels  # the first is nobody's next token
        self._found.append((loss, (counted != NO_TERM).sum()))


def is_from_transformers(module: nn.Module) -> bool:
    """Whether it is a model of the library's, or a subclass of one, that may compute its own loss."""
    return is_kind(module, "transformers.modeling_utils.PreTrainedModel")


def is_kind(thing: object, name: str) -> bool:
    """Whether it is of the class of this full name, whose package need not be installed."""
    return any(f"{kind.__module__}.{kind.__name__}" == name for kind in type(thing).__mro__)
