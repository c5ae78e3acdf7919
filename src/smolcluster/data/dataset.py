"""What a dataset is: two splits of tensors, and a fingerprint to compare two machines by."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from smolcluster.data.permutation import epoch_permutation
from smolcluster.errors import DataError
from smolcluster.utils.seed import derive_seed

NO_TERM = -100
"""The target that is no loss term; `cross_entropy` leaves it out unless told otherwise."""
_CPU = torch.device("cpu")
Measure = Literal["accuracy", "perplexity"]
Batch = Any
"""A tensor, or a dict, list or tuple of batches; anything else in it is passed on as it is."""


class Place(NamedTuple):
    """Where samples stand in a run: from `start` on in the order of `epoch`, under the run's `seed`."""

    seed: int
    epoch: int
    start: int

    def draw(self, place: int) -> int:
        """The seed of what is drawn at random as the sample `place` places further on is gathered."""
        return derive_seed(self.seed, "sample", self.epoch, self.start + place)


class Samples(Protocol):
    """One split of a dataset."""

    @property
    def num_samples(self) -> int:
        """Number of samples an epoch."""

    def batch(self, indices: Tensor, place: Place | None = None) -> Batch:
        """Gather samples by index, int32 or int64 (n,), on the CPU, each in 0 … num_samples - 1.

        Args:
            indices: as `order` gives them.
            place: where in the run they stand, for what is drawn at random or read in order; None: they are
                held out, and what is drawn is the same each time.

        Raises:
            DataError: an index lies outside the split.
        """

    def to_send(self, indices: Tensor, place: Place | None = None) -> Batch:
        """The same as it travels: `Elsewhere.received` makes the batch of it."""

    def order(self, epoch: int, seed: int) -> Tensor:
        """The indices of an epoch's samples in the order in which they are taken, int32 (num_samples,)."""

    def to(self, device: torch.device) -> Self:
        """The same samples, whose batches lie on `device`."""


class Permuted:
    """What most splits have in common.

    They have a seeded permutation an epoch, and batches that travel as they are and are moved one by one.
    """

    def order(self: Samples, epoch: int, seed: int) -> Tensor:
        return epoch_permutation(seed, epoch, self.num_samples)

    def to_send(self: Samples, indices: Tensor, place: Place | None = None) -> Batch:
        return self.batch(indices, place)

    def to(self, device: torch.device) -> Self:  # noqa: ARG002
        return self


def check_indices(indices: Tensor, num_samples: int) -> None:
    """Raise DataError if an index is none of the split's."""
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
class Elsewhere(Permuted):
    """Samples that this machine has not: somebody sends those that it computes."""

    num_samples: int

    def batch(self, indices: Tensor, place: Place | None = None) -> Batch:  # noqa: ARG002
        raise DataError(
            f"the {len(indices)} samples are not on this machine: the server sends them"
        )

    def received(self, sent: Batch) -> Batch:
        """The batch of what was sent.

        Raises:
            DataError: it is not what the model takes.
        """
        return sent

    def example(self, num_samples: int) -> Batch | None:  # noqa: ARG002
        """A batch as it may be sent; None: nobody knows one."""
        return None


@dataclass(frozen=True)
class ElsewhereText(Elsewhere):
    """Text of `length` tokens a sample, each sent with the token after it."""

    length: int
    vocab_size: int

    def received(self, sent: Batch) -> Batch:
        """Inputs and targets, int64 (n, length), of tokens (n, length + 1)."""
        is_text = isinstance(sent, Tensor) and sent.ndim == 2 and not sent.is_floating_point()
        rows = sent.to(torch.int64) if is_text else torch.empty(0, 0)
        fits = rows.shape[1] == self.length + 1 and len(rows)
        if not (fits and rows.min() >= 0 and rows.max() < self.vocab_size):
            raise DataError(f"not {self.length} of {self.vocab_size} tokens")
        return rows[:, :-1], rows[:, 1:]

    def example(self, num_samples: int) -> Batch:
        return torch.zeros(num_samples, self.length + 1, dtype=torch.int64)


@dataclass(frozen=True)
class Sent(Permuted):
    """Samples that somebody has sent as whole batches, of `batch_size` but for the last one."""

    num_samples: int
    batch_size: int
    batches: Sequence[Batch]

    def batch(self, indices: Tensor, place: Place | None = None) -> Batch:  # noqa: ARG002
        """The batch that begins with the first of these indices."""
        return self.batches[int(indices[0]) // self.batch_size]


@dataclass(frozen=True)
class Split(Permuted):
    """Samples of one label each that sit in memory.

    `inputs` are (num_samples, input_dim), float32 as the model takes them, or uint8: then a batch is
    `inputs * scale + shift`. `targets` are class indices, int64 (num_samples,).
    """

    inputs: Tensor
    targets: Tensor
    scale: float = 1.0
    shift: float = 0.0

    @property
    def num_samples(self) -> int:
        return len(self.targets)

    def batch(
        self,
        indices: Tensor,
        place: Place | None = None,  # noqa: ARG002 - nothing is drawn
    ) -> tuple[Tensor, Tensor]:
        """Inputs, float32 (n, input_dim), and targets, int64 (n,), on the split's device."""
        check_indices(indices, self.num_samples)
        indices = indices.to(self.inputs.device)
        inputs = self.inputs.index_select(0, indices)
        if inputs.dtype is torch.uint8:
            inputs = inputs.to(torch.float32).mul_(self.scale).add_(self.shift)
        return inputs, self.targets.index_select(0, indices)

    def to(self, device: torch.device) -> Self:
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


@dataclass(frozen=True)
class Dataset:
    """A dataset, cut into what is trained on and what is held out.

    Attributes:
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
        cls,
        name: str,
        *,
        num_samples: int,
        input_dim: int,
        num_classes: int,
        measure: Measure,
        fingerprint: str,
    ) -> Self:
        """Data that this machine has not, and what must be known of them."""
        train = Elsewhere(num_samples)
        if measure == "perplexity":
            train = ElsewhereText(num_samples, input_dim, num_classes)
        return cls(name, train, Elsewhere(0), input_dim, num_classes, fingerprint, measure)


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
