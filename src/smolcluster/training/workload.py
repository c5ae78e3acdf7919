"""What is trained, as Python objects: a model, its loss, its data, and its metrics."""

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from smolcluster.data.dataset import Batch, Samples, check_indices

Terms = tuple[Tensor, int | Tensor]
"""A sum over a batch, (), and over how many terms it is."""
LossFunction = Callable[[nn.Module, Batch], Terms | Tensor]
Collate = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class OfLoss:
    """A metric that follows from the mean validation loss alone, such as perplexity."""

    value: Callable[[float], float]


Metric = Callable[[nn.Module, Batch], Terms] | OfLoss


@runtime_checkable
class MapDataset(Protocol):
    """A map-style dataset, as `torch.utils.data.Dataset` means it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class MapSamples:
    """A map-style dataset, whose samples `collate` makes a batch of; None: PyTorch's `default_collate`."""

    dataset: MapDataset
    collate: Collate | None = None

    @property
    def num_samples(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> Batch:
        """Gather samples by index, (n,), and collate them."""
        check_indices(indices, self.num_samples)
        samples = [self.dataset[index] for index in indices.tolist()]
        if self.collate is not None:
            return self.collate(samples)
        from torch.utils.data import default_collate  # noqa: PLC0415 - only where it is needed

        return default_collate(samples)

    def to(self, device: torch.device) -> Self:  # noqa: ARG002 - batches are moved one by one
        return self


class Workload:
    """A model to train, unchanged.

    Attributes:
        train: the samples that are trained on.
        validation: the samples held out; None: nothing is evaluated.
        loss: see `__init__`.
        metrics: see `__init__`.
        name: see `__init__`.
        fingerprint: tells two machines' data apart.
        tokens_per_sample, vocab_size: of text; None of anything else.
        eval_batch_size: samples evaluated at a time; None: as many as are trained on at a time.
        sample_text: text that a trained model writes for people to read, given the run's seed; None: it
            writes none.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] | nn.Module,
        loss: LossFunction,
        train: MapDataset | Samples,
        validation: MapDataset | Samples | None = None,
        *,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        name: str = "workload",
        collate: Collate | None = None,
        fingerprint: str | None = None,
        tokens_per_sample: int | None = None,
        vocab_size: int | None = None,
        eval_batch_size: int | None = None,
        sample_text: Callable[[nn.Module, int], str] | None = None,
    ) -> None:
        """Describe what is trained.

        Args:
            model: makes the model, on every process under the run's seed; or a module, which is copied.
                Parameters without `requires_grad` are neither trained nor sent.
            loss: `(model, batch)` to the sum of the batch's loss terms, (), and their number. A plain mean,
                (), counts as one term a sample.
            train: a map-style dataset.
            validation: the same, of what is held out.
            metrics: what is said of the model besides its validation loss, by name: a sum and a number of
                terms as `loss` gives them, or an `OfLoss`.
            name: what the run calls it.
            collate: makes a batch, which is a tensor or a dict, list or tuple of batches, from a list of
                samples; None: PyTorch's `default_collate`.
            fingerprint: of the data's content; None: names and sizes alone are compared.
            tokens_per_sample, vocab_size, eval_batch_size, sample_text: as the attributes of these names.
        """
        self._model = model
        self.loss = loss
        self.train = _samples(train, collate)
        self.validation = None if validation is None else _samples(validation, collate)
        self.metrics = metrics
        self.name = name
        self.fingerprint = fingerprint or self._sizes()
        self.tokens_per_sample = tokens_per_sample
        self.vocab_size = vocab_size
        self.eval_batch_size = eval_batch_size
        self.sample_text = sample_text

    def new_model(self) -> nn.Module:
        """A model of one's own, with initial weights from PyTorch's global generator."""
        if isinstance(self._model, nn.Module):
            return copy.deepcopy(self._model)
        return self._model()

    def to(self, device: torch.device) -> Self:
        """The same, with data that lie in memory on `device`."""
        moved = copy.copy(self)
        moved.train = self.train.to(device)
        moved.validation = None if self.validation is None else self.validation.to(device)
        return moved

    def _sizes(self) -> str:
        held_out = 0 if self.validation is None else self.validation.num_samples
        sizes = f"{self.name}|{self.train.num_samples}|{held_out}"
        return hashlib.sha256(sizes.encode()).hexdigest()


def _samples(data: MapDataset | Samples, collate: Collate | None) -> Samples:
    return data if isinstance(data, Samples) else MapSamples(data, collate)


def count_terms(result: Terms | Tensor, num_samples: int) -> Terms:
    """A loss of a batch of so many samples as the sum of its terms, (), and their number."""
    if isinstance(result, Tensor):
        return result * num_samples, num_samples
    return result
