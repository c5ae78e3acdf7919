"""Evaluation in the background: a snapshot, one at a time, in nobody's way."""

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from computing import evaluated
from harness import local_settings
from peers import DEADLINE_S, logger, next_event, session_threads
from smolcluster.data.dataset import Samples
from smolcluster.errors import NonFiniteLoss
from smolcluster.server.evaluator import Evaluator
from smolcluster.training import build as room
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.evaluate import Evaluation, Totals, evaluate
from smolcluster.training.replica import Replica
from smolcluster.utils import device
from smolcluster.utils.retry import Deadline
from smolcluster.utils.stopping import Interrupted, StopRequest
from smolcluster.wire.inbox import Call, Inbox


@pytest.fixture(scope="module")
def shared_bench() -> TrainingContext:
    settings = local_settings()
    return build(settings.train, 42, settings.node.dataset, torch.device("cpu"))


@pytest.fixture
def training(shared_bench: TrainingContext) -> Iterator[TrainingContext]:
    weights = shared_bench.replica.snapshot()
    yield shared_bench
    shared_bench.replica.load(weights)


class Gate:
    """Holds every evaluation until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(room, "evaluate", self._evaluate)

    def _evaluate(
        self, model: nn.Module, samples: Samples, device: torch.device, **how: Any
    ) -> Totals:
        self.entered.set()
        assert self.opened.wait(DEADLINE_S)
        return evaluate(model, samples, device, **how)


class Steps:
    """An evaluator of a replica whose steps the test takes."""

    def __init__(self, training: TrainingContext, every: int = 1, **options: Any) -> None:
        self.inbox = Inbox()
        self.lines: list[str] = []
        self.told: list[tuple[int, int, Evaluation]] = []
        self.evaluator = Evaluator(
            *(training, self.inbox, lambda *done: self.told.append(done)),
            every=every,
            log=logger(self.lines),
            **options,
        )

    def take(self, version: int, epoch: int = 0) -> None:
        """Take a step as soon as the last evaluation has ended."""
        deadline = Deadline(DEADLINE_S)
        num_lines = len(self.lines)
        while True:
            self.evaluator.after_step(version, epoch)
            if len(self.lines) == num_lines:
                return
            del self.lines[num_lines:]
            assert not deadline.expired, "it is busy for ever"

    def next(self) -> tuple[int, int, Evaluation]:
        """What the deciding thread hears next of an evaluation."""
        next_event(self.inbox, Call).run()
        return self.told.pop()


def test_the_weights_of_the_moment_are_evaluated_whatever_becomes_of_them(
    training: TrainingContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    split = training.workload.validation
    assert split is not None
    expected = evaluated(training.replica.copy_model(), split)
    steps = Steps(training)
    with steps.evaluator:
        steps.take(50, epoch=1)
        training.replica.params.zero_()
        gate.opened.set()
        version, epoch, evaluation = steps.next()
    assert (version, epoch) == (50, 1)
    assert evaluation.loss == pytest.approx(expected.loss, rel=1e-6)
    assert evaluation.metrics == expected.metrics


def test_only_every_so_many_steps_the_weights_are_evaluated(training: TrainingContext) -> None:
    steps = Steps(training, every=4)
    with steps.evaluator:
        for version in range(1, 10):
            steps.take(version)
    assert [steps.next()[0] for _ in range(2)] == [4, 8]
    assert steps.inbox.get(0.0) is None


def test_while_one_evaluation_runs_no_other_is_begun_and_nobody_waits(
    training: TrainingContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, steps = Gate(monkeypatch), Steps(training)
    with steps.evaluator:
        steps.take(1)
        assert gate.entered.wait(DEADLINE_S)
        steps.evaluator.after_step(2, 0)
        assert len(steps.lines) == 1
        assert "step 2 is not evaluated" in steps.lines[0]
        gate.opened.set()
        assert steps.next()[0] == 1
        steps.take(3)
        assert steps.next()[0] == 3
    assert session_threads() == []


def test_the_running_evaluation_is_finished_before_the_evaluator_ends(
    training: TrainingContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, steps = Gate(monkeypatch), Steps(training)
    with steps.evaluator:
        steps.take(1)
        assert gate.entered.wait(DEADLINE_S)
        gate.opened.set()
    assert steps.next()[0] == 1


def test_diverged_weights_are_reported_and_the_next_ones_evaluated(
    training: TrainingContext,
) -> None:
    steps = Steps(training)
    with steps.evaluator:
        good = training.replica.snapshot()
        training.replica.params.fill_(float("nan"))
        steps.take(1)
        with pytest.raises(NonFiniteLoss):
            steps.next()
        training.replica.load(good)
        steps.take(2)
        assert steps.next()[0] == 2


def test_frozen_weights_are_not_mistaken_for_trained_ones(training: TrainingContext) -> None:
    split = training.workload.validation
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))
    model[0].requires_grad_(False)
    replica = Replica(model, "sgd")
    assert split is not None
    expected = evaluated(replica.copy_model(), split)
    steps = Steps(replace(training, replica=replica))
    with steps.evaluator:
        steps.take(1)
        assert steps.next()[2] == expected


def test_an_evaluation_that_nobody_wants_any_more_ends_with_the_run(
    training: TrainingContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    steps = Steps(training)
    with pytest.raises(KeyboardInterrupt), steps.evaluator:
        steps.take(1)
        assert gate.entered.wait(DEADLINE_S)
        threading.Timer(0.2, gate.opened.set).start()
        raise KeyboardInterrupt
    assert steps.inbox.get(0.0) is None


def test_on_a_device_for_one_thread_the_caller_evaluates_unless_it_is_told_to_stop(
    training: TrainingContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ONE_THREAD_ONLY", {"cpu"})
    stop = StopRequest()
    steps = Steps(training, check_stop=stop.check)
    with steps.evaluator as evaluator:
        assert evaluator.after_step(1, 0)
        assert steps.next()[0] == 1
        training.replica.params.fill_(float("nan"))
        assert evaluator.after_step(2, 0)
        with pytest.raises(NonFiniteLoss):
            steps.next()
        stop.note(signal.SIGTERM)
        with pytest.raises(Interrupted):
            evaluator.after_step(3, 0)
    assert session_threads() == []
