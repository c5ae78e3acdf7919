"""What a run leaves for people besides its numbers: its report, its curves as a picture, of text a sample."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from smolcluster.errors import CheckpointError, SmolclusterError
from smolcluster.observability.curves import draw_curves
from smolcluster.observability.report.page import write_report
from smolcluster.runs.files import write_whole
from smolcluster.runs.paths import RunPaths
from smolcluster.training.build import TrainingContext


def write_artifacts(paths: RunPaths, training: TrainingContext, log: logging.Logger) -> None:
    """Draw the curves, write a sample and the report; what cannot be had is a warning: the run is over."""
    with _or_a_warning(log):
        draw_curves(paths)
    sample_text, model = training.workload.sample_text, training.replica.model
    if sample_text is not None and training.replica.device.type != "meta":
        with _or_a_warning(log):
            write_whole(paths.sample, sample_text(model, training.seed) + "\n")
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
