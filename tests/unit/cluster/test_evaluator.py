"""Evaluation in the background: a snapshot, one at a time, in nobody's way."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from harness import local_settings
from peers import DEADLINE_S, next_event, session_threads
from smolcluster.cluster import evaluator as room
from smolcluster.cluster.evaluator import EvaluationDone, EvaluationFailed, Evaluator
from smolcluster.cluster.inbox import Inbox
from smolcluster.data.dataset import Split
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.build import Workbench, build
from smolcluster.training.evaluate import Evaluation, evaluate
from smolcluster.training.replica import Replica
from smolcluster.utils.retry import Deadline


@pytest.fixture(scope="module")
def shared_bench() -> Workbench:
    settings = local_settings()
    return build(settings.train, 42, settings.node.dataset, torch.device("cpu"))


@pytest.fixture
def bench(shared_bench: Workbench) -> Iterator[Workbench]:
    weights = shared_bench.replica.snapshot()
    yield shared_bench
    shared_bench.replica.load(weights)


class Gate:
    """Holds every evaluation until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(room, "evaluate", self._evaluate)

    def _evaluate(self, model: nn.Module, split: Split, device: torch.device) -> Evaluation:
        self.entered.set()
        assert self.opened.wait(DEADLINE_S)
        return evaluate(model, split, device)


LINES: list[str] = []


def test_the_weights_of_the_moment_are_evaluated_whatever_becomes_of_them(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, gate = Inbox(), Gate(monkeypatch)
    split = bench.dataset.validation
    expected = evaluate(bench.replica.copy_model(), split, torch.device("cpu"))
    with Evaluator(bench.replica, split, inbox) as evaluator:
        assert evaluator.submit(50, 1, bench.replica)
        bench.replica.params.zero_()
        gate.opened.set()
        done = next_event(inbox, EvaluationDone)
    assert (done.version, done.epoch) == (50, 1)
    assert done.evaluation.loss == pytest.approx(expected.loss, rel=1e-6)
    assert done.evaluation.accuracy == expected.accuracy


def test_while_one_evaluation_runs_no_other_is_taken_and_nobody_waits(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, gate = Inbox(), Gate(monkeypatch)
    with Evaluator(bench.replica, bench.dataset.validation, inbox) as evaluator:
        assert evaluator.submit(1, 0, bench.replica)
        assert gate.entered.wait(DEADLINE_S)
        assert not evaluator.submit(2, 0, bench.replica)
        gate.opened.set()
        assert next_event(inbox, EvaluationDone).version == 1
        submit(evaluator, 3, bench)
        assert next_event(inbox, EvaluationDone).version == 3
    assert session_threads() == []


def test_the_running_evaluation_is_finished_before_the_evaluator_ends(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, gate = Inbox(), Gate(monkeypatch)
    with Evaluator(bench.replica, bench.dataset.validation, inbox) as evaluator:
        assert evaluator.submit(1, 0, bench.replica)
        assert gate.entered.wait(DEADLINE_S)
        gate.opened.set()
    event = inbox.get(0.0)
    assert isinstance(event, EvaluationDone)


def test_diverged_weights_are_reported_and_the_next_ones_evaluated(bench: Workbench) -> None:
    inbox = Inbox()
    with Evaluator(bench.replica, bench.dataset.validation, inbox) as evaluator:
        good = bench.replica.snapshot()
        bench.replica.params.fill_(float("nan"))
        assert evaluator.submit(1, 0, bench.replica)
        failed = next_event(inbox, EvaluationFailed)
        assert failed.version == 1
        assert isinstance(failed.error, NonFiniteLoss)
        bench.replica.load(good)
        submit(evaluator, 2, bench)
        assert next_event(inbox, EvaluationDone).version == 2


def test_frozen_weights_are_not_mistaken_for_trained_ones(bench: Workbench) -> None:
    split = bench.dataset.validation
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(bench.dataset.input_dim, 10), nn.ReLU(), nn.Linear(10, 10))
    model[0].requires_grad_(False)
    replica, inbox = Replica(model, "sgd"), Inbox()
    expected = evaluate(replica.copy_model(), split, torch.device("cpu"))
    with Evaluator(replica, split, inbox) as evaluator:
        assert evaluator.submit(1, 0, replica)
        assert next_event(inbox, EvaluationDone).evaluation == expected
