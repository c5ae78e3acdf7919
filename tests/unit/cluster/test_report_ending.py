"""Why a run ends, and how far it has come."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import local_settings
from peers import Parts, server_parts
from smolcluster.cluster.report import Report, StepTaken
from smolcluster.data.permutation import Range
from smolcluster.training.evaluate import Evaluation


@pytest.fixture
def parts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Parts]:
    with server_parts(local_settings(*request.param), tmp_path) as parts:
        yield parts


def take(report: Report, version: int, samples: Range) -> None:
    report.step_taken(StepTaken(version, samples, 0.5, 1e-3, 1.0, {}, 1))


@pytest.mark.parametrize("parts", [("patience=2", "num_epochs=1")], indirect=True)
def test_patience_that_ends_with_the_last_sample_has_not_ended_the_run(parts: Parts) -> None:
    report = parts.context.new_report()
    num_samples = parts.context.training.num_samples
    report.evaluated(0, 0, Evaluation(1.0, {"accuracy": 0.5}))
    report.evaluated(1, 0, Evaluation(2.0, {"accuracy": 0.5}))
    take(report, 1, Range(0, 0, num_samples))
    report.evaluated(2, 0, Evaluation(2.0, {"accuracy": 0.5}))
    assert report.is_over
    assert report.ending == "every sample of every epoch has been applied"
    summary = report.summary()
    assert (summary.epochs, summary.num_bad_evals) == (1, None)


@pytest.mark.parametrize("parts", [("num_epochs=2", "batch_size=32")], indirect=True)
def test_each_step_says_how_many_there_are(parts: Parts) -> None:
    report = parts.context.new_report()
    num_samples = parts.context.training.num_samples
    take(report, 1, Range(0, 0, 32))
    assert parts.metrics.steps[0].values["total_steps"] == 2 * -(-num_samples // 32)
