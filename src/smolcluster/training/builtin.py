"""The workloads that a training file names: a model of `models/` on a dataset of `data/`."""

import logging
import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from smolcluster.configs.schema import DatasetPlace, GPTConfig, SimpleNNConfig, TrainConfig
from smolcluster.data.dataset import NO_TERM, Batch, Dataset
from smolcluster.data.registry import load_dataset
from smolcluster.data.tokenizer import load_tokenizer
from smolcluster.errors import ConfigError
from smolcluster.models.gpt import GPT
from smolcluster.models.registry import build_model
from smolcluster.models.sampling import sample
from smolcluster.training.named import load_named
from smolcluster.training.workload import OfLoss, Terms, Workload
from smolcluster.wire.messages import DataSizes, ServedData

EVAL_SAMPLES, EVAL_TOKENS = 1024, 4096
"""Labelled samples, or tokens, that are evaluated at a time."""
LARGEST_EXPONENT = 700.0
"""Of e, that still fits a float."""
SAMPLE_TOKENS = 200
TEMPERATURE, TOP_K = 0.8, 40


def load_workload(
    train: TrainConfig, seed: int, place: DatasetPlace, log: logging.Logger | None = None
) -> Workload:
    """The workload that `train` names, with its data from this machine's `place`.

    Raises:
        ConfigError: unknown dataset or model, or sizes of the model that do not fit the data.
        DataError: the dataset is missing or damaged.
    """
    if train.workload is not None:
        return load_named(train.workload, train.workload_args, seed)
    train = train.model_copy(update={"dataset": train.dataset.at(place)})
    log = log or logging.getLogger("smolcluster")
    return builtin_workload(train, load_dataset(train.dataset, seed, train.model, log))


def builtin_workload(train: TrainConfig, data: Dataset) -> Workload:
    """The model that `train` names on `data`, once that is loaded.

    Raises:
        ConfigError: a model of this kind and these sizes cannot be trained on it.
    """
    check_fit(train, data)
    workload = partial(
        Workload,
        partial(build_model, train.model, data.input_dim, data.num_classes),
        cross_entropy,
        data.train,
        data.validation,
        name=data.name,
        fingerprint=data.fingerprint,
        sizes=DataSizes(
            input_dim=data.input_dim, num_classes=data.num_classes, measure=data.measure
        ),
    )
    if data.measure == "accuracy":
        return workload(metrics={"accuracy": accuracy}, eval_batch_size=EVAL_SAMPLES)
    return workload(
        metrics={"perplexity": OfLoss(perplexity)},
        tokens_per_sample=data.input_dim,
        vocab_size=data.num_classes,
        eval_batch_size=max(1, EVAL_TOKENS // data.input_dim),
        sample_text=partial(_sample_text, train),
    )


def served_workload(train: TrainConfig, data: ServedData, own: Workload | None) -> Workload:
    """What a worker trains with samples that are sent to it: its `own` workload, or the one of `train`.

    Raises:
        ConfigError: it has none, and the server's is none that a configuration can name.
    """
    if own is not None:
        return own.served(data)
    if data.sizes is None:
        raise ConfigError(
            f"the server trains the workload {data.name}, which this worker was not given: start it with "
            "the same --workload"
        )
    sizes = data.sizes
    return builtin_workload(
        train,
        Dataset.elsewhere(
            data.name,
            num_samples=data.num_samples,
            input_dim=sizes.input_dim,
            num_classes=sizes.num_classes,
            measure=sizes.measure,
            fingerprint=data.fingerprint,
        ),
    )


def cross_entropy(model: nn.Module, batch: Batch) -> Terms:
    """Cross-entropy over the targets but those of `NO_TERM`.

    Args:
        model: maps inputs to logits (batch, classes) or (batch, seq, classes). A `GPT` is asked for its own
            sum, for which it never holds all logits at once.
        batch: inputs (batch, …), and targets, class indices (batch,) or (batch, seq).
    """
    inputs, targets = batch
    if isinstance(model, GPT):
        return model.loss(inputs, targets), (targets != NO_TERM).sum()
    return cross_entropy_of(model(inputs), targets)


def cross_entropy_of(logits: Tensor, targets: Tensor) -> Terms:
    """The same of logits (…, classes) and targets (…)."""
    num_terms = (targets != NO_TERM).sum()
    logits = logits.flatten(0, -2)
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum"), num_terms


def accuracy(model: nn.Module, batch: Batch) -> Terms:
    """Targets that the largest logit hits."""
    inputs, targets = batch
    return (model(inputs).argmax(dim=-1) == targets).sum(), (targets != NO_TERM).sum()


def perplexity(loss: float) -> float:
    """e^loss: among how many equally likely tokens the model hesitates."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def _sample_text(train: TrainConfig, model: nn.Module, seed: int) -> str:
    """Text that the model writes when it is given nothing but the beginning of a document.

    Raises:
        DataError: the tokenizer cannot be had.
    """
    tokenizer = load_tokenizer(train.dataset.tokenizer, download=train.dataset.download)
    assert isinstance(model, GPT)  # noqa: S101 - as above
    tokens = sample(
        model,
        [tokenizer.end_of_text],
        SAMPLE_TOKENS,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        generator=torch.Generator().manual_seed(seed),
    )
    return tokenizer.decode(list(tokens))


def check_fit(train: TrainConfig, data: Dataset) -> None:
    """Raise ConfigError unless the model and the way that the data travel suit `data`."""
    model, is_text = train.model, data.measure == "perplexity"
    if is_text != isinstance(model, GPTConfig):
        kind, fitting = ("text", "GPT") if is_text else ("labelled samples", "SimpleNN")
        raise ConfigError(
            f"model.type is {model.type}, but dataset.name={data.name} is {kind}; set "
            f"model.type={fitting} and its sizes, or choose another dataset"
        )
    if isinstance(model, SimpleNNConfig):
        _check_sizes(model, data)


def _check_sizes(model: SimpleNNConfig, data: Dataset) -> None:
    if model.input_dim not in (None, data.input_dim):
        raise ConfigError(
            f"model.input_dim is {model.input_dim}, but dataset.name={data.name} has "
            f"{data.input_dim} features; set model.input_dim={data.input_dim} or null"
        )
    if model.out != data.num_classes:
        raise ConfigError(
            f"model.out is {model.out}, but dataset.name={data.name} has {data.num_classes} "
            f"classes; set model.out={data.num_classes}"
        )
