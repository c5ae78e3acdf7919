"""What a dataset is: two splits of tensors, and a fingerprint to compare two machines by."""

import hashlib
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from smolcluster.errors import DataError


@dataclass(frozen=True)
class Split:
    """Samples that sit in memory.

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
        self._check(indices)
        indices = indices.to(self.inputs.device)
        inputs = self.inputs.index_select(0, indices)
        if inputs.dtype is torch.uint8:
            inputs = inputs.to(torch.float32).mul_(self.scale).add_(self.shift)
        return inputs, self.targets.index_select(0, indices)

    def _check(self, indices: Tensor) -> None:
        if not len(indices):
            return
        lowest, highest = (int(bound) for bound in torch.aminmax(indices))
        if lowest < 0 or highest >= self.num_samples:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"sample {wrong} does not exist, the split has 0 to {self.num_samples - 1}; "
                "check that server and worker hold the same dataset"
            )

    def to(self, device: torch.device) -> Self:
        """Return the split with its tensors on `device`."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


@dataclass(frozen=True)
class Dataset:
    """A dataset of one label a sample, cut into what is trained on and what is held out.

    Attributes:
        name: its registered name.
        train: the samples that are trained on.
        validation: the samples held out.
        input_dim: features a sample.
        num_classes: number of classes; targets lie in 0 … num_classes - 1.
        fingerprint: SHA-256 over name, shapes, types and bytes of both splits, in hex.
    """

    name: str
    train: Split
    validation: Split
    input_dim: int
    num_classes: int
    fingerprint: str

    @classmethod
    def of(cls, name: str, *, train: Split, validation: Split, num_classes: int) -> Self:
        """Put two splits on the CPU together and take their fingerprint.

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
