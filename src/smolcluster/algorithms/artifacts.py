"""What a run leaves for people besides its numbers: its report, its curves as a picture, of text a sample."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.tokenizer import load_tokenizer
from smolcluster.errors import CheckpointError, SmolclusterError
from smolcluster.models.gpt import GPT
from smolcluster.models.sampling import sample
from smolcluster.observability.curves import draw_curves
from smolcluster.observability.report.page import write_report
from smolcluster.runs.files import write_whole
from smolcluster.runs.paths import RunPaths
from smolcluster.training.build import TrainingContext

SAMPLE_TOKENS = 200
TEMPERATURE, TOP_K = 0.8, 40


def write_artifacts(
    paths: RunPaths, training: TrainingContext, dataset: DatasetConfig, log: logging.Logger
) -> None:
    """Draw the curves, write a sample and the report; what cannot be had is a warning: the run is over."""
    with _or_a_warning(log):
        draw_curves(paths)
    if isinstance(training.replica.model, GPT):
        with _or_a_warning(log):
            write_whole(paths.sample, sample_text(training, dataset) + "\n")
    with _or_a_warning(log):
        write_report(paths)


@contextmanager
def report_of_failure(paths: RunPaths, log: logging.Logger) -> Iterator[None]:
    """Write the run's report if the block is ended by an error, or because it was asked to.

    A run that does not go on, because the checkpoint is of another one, stays as it is.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        with _or_a_warning(log):
            write_report(paths, error)
        raise


@contextmanager
def _or_a_warning(log: logging.Logger) -> Iterator[None]:
    try:
        yield
    except SmolclusterError as error:
        log.warning("%s", error)
    except Exception as error:  # the run has ended, whatever becomes of this
        log.warning(
            "the run's report, picture or sample could not be made: %r", error, exc_info=error
        )


def sample_text(training: TrainingContext, dataset: DatasetConfig) -> str:
    """Text that the model writes when it is given nothing but the beginning of a document.

    Raises:
        DataError: the tokenizer cannot be had.
    """
    model = training.replica.model
    tokenizer = load_tokenizer(dataset.tokenizer, download=dataset.download)
    assert isinstance(model, GPT)  # noqa: S101 - the caller has looked
    tokens = sample(
        model,
        [tokenizer.end_of_text],
        SAMPLE_TOKENS,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        generator=torch.Generator().manual_seed(training.seed),
    )
    return tokenizer.decode(list(tokens))
