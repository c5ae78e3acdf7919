"""What a dataset is: two splits of tensors, and a fingerprint to compare two machines by."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from smolcluster.errors import DataError

NO_TERM = -100
"""The target that is no loss term; `cross_entropy` leaves it out unless told otherwise."""
_CPU = torch.device("cpu")
Measure = Literal["accuracy", "perplexity"]
Batch = Any
"""A tensor, or a dict, list or tuple of batches; anything else in it is passed on as it is."""


@runtime_checkable
class Samples(Protocol):
    """One split of a dataset."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    def batch(self, indices: Tensor) -> Batch:
        """Gather samples by index.

        Args:
            indices: int32 or int64 (n,), on the CPU, each in 0 … num_samples - 1.

        Raises:
            DataError: an index lies outside the split.
        """

    def to(self, device: torch.device) -> Self:
        """The same samples, whose batches lie on `device`."""


def check_indices(indices: Tensor, num_samples: int) -> None:
    """Look for indices that are none of the split's.

    Raises:
        DataError: there is one.
    """
    if not len(indices):
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(indices))
    if lowest < 0 or highest >= num_samples:
        wrong = lowest if lowest < 0 else highest
        raise DataError(
            f"sample {wrong} does not exist, the split has 0 to {num_samples - 1}; "
            "check that server and worker hold the same dataset"
        )


@dataclass(frozen=True)
class Elsewhere:
    """Text that this machine has not: somebody sends the samples that it is to compute.

    Attributes:
        num_samples: so many there are.
        length: tokens a sample.
        vocab_size: how many tokens there are to choose from.
    """

    num_samples: int
    length: int
    vocab_size: int
    device: torch.device = _CPU

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """There is none.

        Raises:
            DataError: always.
        """
        raise DataError(
            f"the {len(indices)} samples are not on this machine: the server sends them"
        )

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (n, length) of samples with the token after them, int64 (n, length + 1)."""
        rows = rows.to(self.device)
        return rows[:, :-1], rows[:, 1:]

    def check(self, rows: Tensor) -> None:
        """Look at samples that were sent.

        Raises:
            DataError: they are not of this length, or out of another vocabulary.
        """
        fits = rows.shape[1] == self.length + 1
        if not (fits and rows.min() >= 0 and rows.max() < self.vocab_size):
            raise DataError(f"not {self.length} of {self.vocab_size} tokens")

    def example(self, num_samples: int) -> Tensor:
        """Samples as they may be sent."""
        return torch.zeros(num_samples, self.length + 1, dtype=torch.int64)

    def to(self, device: torch.device) -> Self:
        """The same samples, whose batches lie on `device`."""
        return replace(self, device=device)


@dataclass(frozen=True)
class Split:
    """Samples of one label each that sit in memory.

    Attributes:
        inputs: (num_samples, input_dim); float32 as the model takes them, or uint8, then a batch is
            `inputs * scale + shift`.
        targets: class indices, int64 (num_samples,).
        scale: factor for uint8 inputs.
        shift: summand for uint8 inputs.
    """

    inputs: Tensor
    targets: Tensor
    scale: float = 1.0
    shift: float = 0.0

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.targets)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gather samples by index.

        Args:
            indices: int32 or int64 (n,), on the CPU, each in 0 … num_samples - 1.

        Returns:
            Inputs, float32 (n, input_dim), and targets, int64 (n,), on the split's device.

        Raises:
            DataError: an index lies outside the split.
        """
        check_indices(indices, self.num_samples)
        indices = indices.to(self.inputs.device)
        inputs = self.inputs.index_select(0, indices)
        if inputs.dtype is torch.uint8:
            inputs = inputs.to(torch.float32).mul_(self.scale).add_(self.shift)
        return inputs, self.targets.index_select(0, indices)

    def to(self, device: torch.device) -> Self:
        """Return the split with its tensors on `device`."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


@dataclass(frozen=True)
class Dataset:
    """A dataset, cut into what is trained on and what is held out.

    Attributes:
        name: its registered name.
        train: the samples that are trained on.
        validation: the samples held out.
        input_dim: features a sample; of text, tokens a sample.
        num_classes: number of classes; targets lie in 0 … num_classes - 1. Of text, the vocabulary.
        fingerprint: SHA-256 over name, shapes, types and bytes of both splits, in hex.
        measure: what is said of a model besides its loss.
    """

    name: str
    train: Samples
    validation: Samples
    input_dim: int
    num_classes: int
    fingerprint: str
    measure: Measure = "accuracy"

    @classmethod
    def of(cls, name: str, *, train: Split, validation: Split, num_classes: int) -> Self:
        """Put two splits of labelled samples on the CPU together and take their fingerprint.

        Raises:
            DataError: a split is empty, or its shapes or labels do not agree.
        """
        for role, split in (("training", train), ("validation", validation)):
            _check_split(f"dataset {name}, {role} split", split, num_classes)
        if train.inputs.shape[1] != validation.inputs.shape[1]:
            raise DataError(
                f"dataset {name}: training samples have {train.inputs.shape[1]} features, "
                f"validation samples {validation.inputs.shape[1]}"
            )
        return cls(
            name=name,
            train=train,
            validation=validation,
            input_dim=train.inputs.shape[1],
            num_classes=num_classes,
            fingerprint=_fingerprint(name, train, validation),
        )

    @classmethod
    def elsewhere(
        cls, name: str, *, num_samples: int, length: int, vocab_size: int, fingerprint: str
    ) -> Self:
        """Text that this machine has not, and what must be known of it."""
        return cls(
            name=name,
            train=Elsewhere(num_samples, length, vocab_size),
            validation=Elsewhere(0, length, vocab_size),
            input_dim=length,
            num_classes=vocab_size,
            fingerprint=fingerprint,
            measure="perplexity",
        )

    def to(self, device: torch.device) -> Self:
        """Return the dataset with both splits on `device`."""
        return replace(self, train=self.train.to(device), validation=self.validation.to(device))


def _check_split(label: str, split: Split, num_classes: int) -> None:
    if split.inputs.ndim != 2 or len(split.inputs) != len(split.targets):
        raise DataError(
            f"{label}: inputs of shape {tuple(split.inputs.shape)} do not belong to "
            f"{len(split.targets)} labels; the files are damaged, fetch them again"
        )
    if not split.num_samples:
        raise DataError(f"{label} is empty; fetch the files again")
    lowest, highest = (int(bound) for bound in torch.aminmax(split.targets))
    if lowest < 0 or highest >= num_classes:
        raise DataError(
            f"{label}: labels run from {lowest} to {highest}, expected 0 to {num_classes - 1}; "
            "the files are damaged, fetch them again"
        )


def _fingerprint(name: str, *splits: Split) -> str:
    digest = hashlib.sha256(name.encode())
    for split in splits:
        for tensor in (split.inputs, split.targets):
            digest.update(f"|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.contiguous().numpy().data)
        digest.update(f"|{split.scale!r}|{split.shift!r}".encode())
    return digest.hexdigest()
