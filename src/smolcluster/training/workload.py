"""What is trained, as Python objects: a model, its loss, its data, and its metrics."""

import copy
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from smolcluster.data.dataset import Batch, Elsewhere
from smolcluster.data.loading import Collate, Data, MapSamples, StreamSamples, samples_of
from smolcluster.data.marks import Mark, chosen, marks_of
from smolcluster.errors import ConfigError
from smolcluster.training.copying import copied
from smolcluster.training.criterion import WatchedLoss, bring_modules, check_untrained
from smolcluster.training.recipe import Training
from smolcluster.utils.user_code import user_code, wrong_result
from smolcluster.wire.messages import DataSizes, ServedData

UNNAMED = "workload"
"""What a workload without a name is called, and the usual name of the function that makes one."""
NUM_ORDERED = 1000
"""So many places of an epoch's order are compared."""
Terms = tuple[Tensor, float | Tensor]
"""A sum over a batch, (), and over how many terms it is."""
LossFunction = Callable[[nn.Module, Batch], Terms | Tensor]
OutputLoss = Callable[[Any, Batch], Terms | Tensor]
"""(the model's output, batch) to what a loss returns."""


@dataclass(frozen=True)
class OfLoss:
    """A metric that follows from the mean validation loss alone, such as perplexity."""

    value: Callable[[float], float]


Metric = Callable[[nn.Module, Batch], Terms] | OfLoss


class Workload:
    """A model to train, unchanged; its attributes are what it was made of, the data as `Samples`."""

    def __init__(
        self,
        model: Callable[[], nn.Module] | nn.Module,
        loss: LossFunction,
        train: Data,
        validation: Data | None = None,
        *,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        name: str | None = None,
        collate: Collate | None = None,
        fingerprint: str | None = None,
        tokens_per_sample: int | None = None,
        vocab_size: int | None = None,
        eval_batch_size: int | None = None,
        sizes: DataSizes | None = None,
        sample_text: Callable[[nn.Module, int], str] | None = None,
        training: Training = Training(),  # noqa: B008 - it is frozen
        samples_per_epoch: int | None = None,
        stages: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        output_loss: OutputLoss | None = None,
    ) -> None:
        """Describe what is trained.

        Args:
            model: makes the model, on every process under the run's seed; or a module, which is copied.
                Pipelines take none, because each of their processes makes only its own layers.
                Parameters without `requires_grad` are neither trained nor sent.
            loss: `(model, batch)` to the sum of the batch's loss terms, (), and their number. A plain mean,
                (), counts as one term a sample.
            train: a map-style dataset; an iterable one, which one process of the run reads and sends to the
                others; or a DataLoader around either, whose batch size is then the run's, and whose sampler
                gives the order. All else is permuted anew each epoch.
            validation: the same, of what is held out; None: nothing is evaluated.
            metrics: what is said of the model besides its validation loss, by name: a sum and a number of
                terms as `loss` gives them, or an `OfLoss`.
            name: what the run calls it; None: as the function that makes it, or that one's file.
            collate: makes a batch, which is a tensor or a dict, list or tuple of batches, from a list of
                samples; None: PyTorch's `default_collate`.
            fingerprint: of the data's content, to compare two machines by; None: of names and sizes alone. Of
                what is no single word of at most 128 characters of ASCII, the SHA-256 is taken.
            tokens_per_sample, vocab_size: of text; None of anything else.
            sizes: what the model is made for, where a configuration names model and data.
            eval_batch_size: samples evaluated at a time; None: as many as are trained on at a time.
            samples_per_epoch: of an iterable dataset without a length; None: it is counted once.
            sample_text: text that a trained model writes for people to read, given the run's seed; None: it
                writes none.
            training: how it is trained, where that is not for the configuration to say.
            stages: the model to its layers in order, each of which maps what the one before returned; None:
                its own `stages()`, or a Sequential's children. Pipelines cut between layers.
            output_loss: `(output, batch)` as `loss`, for a pipeline's last stage; None: `loss`, whose model
                then is one that returns the output.

        Raises:
            ConfigError: a metric has the loss's name, or the loss is a module with parameters to train.
        """
        for taken in {"", "loss"}.intersection(metrics):
            raise ConfigError(
                f"a metric is named {taken!r}, which is the loss: choose another name"
            )
        check_untrained("loss", loss)
        check_untrained("output_loss", output_loss)
        self.maker = model
        self.loss = loss
        self.train = samples_of(train, collate, samples_per_epoch)
        self.validation = None if validation is None else samples_of(validation, collate)
        self.metrics = metrics
        self.name = name or UNNAMED
        self.is_named = name is not None
        self._fingerprint = fingerprint
        if fingerprint is not None and not re.fullmatch(r"[!-~]{1,128}", fingerprint):
            self._fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()
        self.tokens_per_sample = tokens_per_sample
        self.vocab_size = vocab_size
        self.eval_batch_size = eval_batch_size or getattr(self.validation, "batch_size", None)
        self.sizes = sizes
        self.sample_text = sample_text
        self.training = training
        self.stages = stages
        self.output_loss = output_loss
        self.source: str | None = None
        """SHA-256 of the code that made it, in hex, where a function was named; the same on all machines."""
        self.files: Mapping[str, str] = {}
        """The files of that code on this machine, by their absolute paths, and the SHA-256 of each."""
        self.is_scaled_elsewhere = False
        """Whether who computes scales the loss himself, so that a gradient may overflow in any precision."""

    @property
    def fingerprint(self) -> str:
        """Of the data; where nobody has said one, of names and sizes alone."""
        if self._fingerprint is None:
            held_out = 0 if self.validation is None else self.validation.num_samples
            sizes = f"{self.name}|{self.train.num_samples}|{held_out}"
            self._fingerprint = hashlib.sha256(sizes.encode()).hexdigest()
        return self._fingerprint

    @property
    def marked_samples(self) -> list[int]:
        """The samples that `sample_marks` are of."""
        return chosen(len(self.train.dataset)) if isinstance(self.train, MapSamples) else []

    @cached_property
    def sample_marks(self) -> tuple[Mark, ...]:
        """What the first, middle and last training sample are known by; empty where others compare all.

        Ours have a fingerprint of their whole content, and streams and what is sent are read by one process.
        """
        if not isinstance(self.train, MapSamples):
            return ()
        return marks_of(self.train.dataset, self.marked_samples)

    def order_mark(self, seed: int) -> str | None:
        """XXH3-64 of how the first epoch begins where the data's own sampler says so; None: it does not."""
        if not isinstance(self.train, MapSamples) or not self.train.has_own_order:
            return None
        first = self.train.order(0, seed)[:NUM_ORDERED]
        return xxh3_64_hexdigest(first.numpy().tobytes())

    @property
    def is_built(self) -> bool:
        """Whether the model is a module already, and not what makes one."""
        return isinstance(self.maker, nn.Module)

    @property
    def batch_size(self) -> int | None:
        """Samples a batch, where the training data are a DataLoader that says so."""
        return getattr(self.train, "batch_size", None)

    @property
    def num_idle_processes(self) -> int:
        """Processes that a DataLoader of the validation data asks for, which nobody starts."""
        loader = getattr(self.validation, "loader", None)
        return getattr(loader, "num_workers", 0)

    @property
    def is_stream(self) -> bool:
        """Whether only one process of a run can read the training data, and sends them to the others."""
        return isinstance(self.train, StreamSamples)

    def served(self, data: ServedData) -> Self:
        """The same with training data that somebody else has, and sends."""
        there = copy.copy(self)
        there.train, there.validation = Elsewhere(data.num_samples), None
        there._fingerprint = data.fingerprint
        return there

    def new_model(self) -> nn.Module:
        """A model of one's own, with initial weights from PyTorch's global generator.

        Raises:
            UserCodeError: the function that makes it raised an exception, or made no module, or it is a
                module that cannot be copied.
        """
        if isinstance(self.maker, nn.Module):
            return copied(self.maker)
        with user_code("model"):
            model: object = self.maker()
        if not isinstance(model, nn.Module):
            told = described(model)
            raise wrong_result("model", self.maker, f"returned {told}, must be a torch.nn.Module")
        return model

    def to(self, device: torch.device) -> Self:
        """The same, with data that lie in memory on `device`."""
        moved = copy.copy(self)
        moved.train = self.train.to(device)
        moved.validation = None if self.validation is None else self.validation.to(device)
        return moved

    def bring_losses(self, device: torch.device) -> None:
        """Have what loss and metrics refer to, such as weights of classes, on the device that computes."""
        bring_modules([self.loss, *self.metrics.values()], device, but=self.maker)

    def watched(self) -> Self:
        """The same with a loss that is refused where it depends on parameters that are not the model's."""
        watching = copy.copy(self)
        watching.loss = WatchedLoss(self.loss)
        return watching


def count_terms(result: Any, num_samples: int, *, of: LossFunction, what: str = "loss") -> Terms:
    """What `of` returned for a batch of so many samples, as the sum of its terms, (), and their number.

    Raises:
        UserCodeError: it is neither that nor a mean, ().
    """
    match result:
        case Tensor() if result.numel() == 1:
            return result.reshape(()) * num_samples, num_samples
        case (Tensor() as total, Real() | Tensor() as count) if _is_one(total) and _is_one(count):
            return total.reshape(()), count if isinstance(count, Tensor) else float(count)
    raise wrong_result(
        what,
        of,
        f"returned {described(result)}, must be a scalar tensor, the batch's mean, or the sum of its "
        "terms (a scalar tensor) and their number",
    )


def real_count(count: float | Tensor, *, of: LossFunction, what: str = "loss") -> float:
    """A number of terms that `of` returned, on the CPU: fractional where terms have weights.

    Raises:
        UserCodeError: it is NaN, infinite or negative.
    """
    number = float(count)
    if not (math.isfinite(number) and number >= 0):
        raise wrong_result(what, of, f"returned {number} as the number of terms, must be 0 or more")
    return number


def _is_one(value: Real | Tensor) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, tuple):
        return f"({', '.join(map(described, result))})"
    return repr(result) if result is None else f"a {type(result).__name__}"
