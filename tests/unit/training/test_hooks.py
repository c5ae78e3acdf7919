"""A user's hooks are called in order, beside training, and an exception in one is named."""

import logging
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers import logger
from smolcluster.errors import SmolclusterError, UserCodeError
from smolcluster.training import hooks
from smolcluster.training.hooks import (
    CheckpointSaved,
    EvaluationDone,
    HookCalls,
    Hooks,
    StepDone,
    WorkerChanged,
)
from smolcluster.utils.stopping import Interrupted

SAVED = CheckpointSaved(10, Path("step-00000010"))
LOST = WorkerChanged(0, "pi5", "lost", "it fell silent")
EVALUATED = EvaluationDone(10, 0, 0.5, {"hits": 0.75})


def step(number: int) -> StepDone:
    return StepDone(number, 0, 4, 4 * number, 100, 0.5, 4, 1e-3, 2.5)


def calls_of(wanted: Hooks) -> tuple[HookCalls, list[str]]:
    lines: list[str] = []
    return HookCalls(wanted, logger(lines)), lines


def test_each_hears_of_its_own_facts_in_the_order_in_which_they_happened() -> None:
    heard: list[Any] = []
    add = heard.append
    calls, _ = calls_of(Hooks(on_step=add, on_evaluation=add, on_checkpoint=add, on_worker=add))
    calls.tell(step(9))
    calls.tell(step(10))
    calls.tell(EVALUATED)
    calls.tell(SAVED)
    calls.tell(LOST)
    calls.finish()
    assert heard == [step(9), step(10), EVALUATED, SAVED, LOST]


def test_training_does_not_wait_for_a_hook() -> None:
    may_go_on, names = threading.Event(), list[str]()

    def slow(_: StepDone) -> None:
        names.append(threading.current_thread().name)
        may_go_on.wait(60)

    calls, lines = calls_of(Hooks(on_step=slow))
    for number in range(3):
        calls.tell(step(number))
    calls.finish(patience_s=0.01)
    assert "left behind" in lines[-1]
    may_go_on.set()
    calls.finish()
    assert names == ["hooks"] * 3


def test_without_hooks_there_is_no_thread() -> None:
    before = threading.active_count()
    calls, _ = calls_of(Hooks())
    calls.tell(step(1))
    calls.finish()
    assert threading.active_count() == before


def test_an_exception_is_raised_once_and_names_the_hook_and_the_line() -> None:
    heard: list[int] = []

    def log_loss(done: StepDone) -> None:
        heard.append(done.step)
        raise KeyError("loss")

    calls, _ = calls_of(Hooks(on_step=log_loss))
    calls.tell(step(1))
    calls.tell(step(2))
    line = log_loss.__code__.co_firstlineno + 2
    expected = rf"^on_step, in log_loss \(test_hooks.py:{line}\): KeyError: 'loss'$"
    with pytest.raises(UserCodeError, match=expected):
        calls.finish()
    calls.tell(step(3))
    calls.finish()
    assert heard == [1], "who has failed is not called again"


def test_a_hook_that_would_end_its_thread_ends_the_run() -> None:
    def leave(_: StepDone) -> None:
        raise SystemExit(3)

    calls, _ = calls_of(Hooks(on_step=leave))
    calls.tell(step(1))
    with pytest.raises(SmolclusterError, match=r"on_step, in leave .*: SystemExit: 3"):
        calls.finish()


def full(
    monkeypatch: pytest.MonkeyPatch, may_go_on: threading.Event, check_stop: Callable[[], None]
) -> HookCalls:
    """Calls of a hook that hangs; no more of them can wait."""
    for name, value in {"MAX_BEHIND": 1, "HANG_S": 0.03, "_WARN_S": 0.01}.items():
        monkeypatch.setattr(hooks, name, value)
    is_called = threading.Event()

    def hang(_: StepDone) -> None:
        is_called.set()
        may_go_on.wait(60)

    calls = HookCalls(Hooks(on_step=hang), logging.Logger("test"), check_stop)
    calls.tell(step(1))
    assert is_called.wait(60)
    calls.tell(step(2))
    return calls


def test_training_does_not_wait_for_ever_for_a_hook_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()
    calls = full(monkeypatch, may_go_on, lambda: None)
    calls.tell(step(3))
    with pytest.raises(UserCodeError, match=r"^on_step: a call has not returned for"):
        calls.check()
    calls.finish()  # and nobody waits for it any more
    may_go_on.set()


def test_who_is_asked_to_stop_does_not_wait_for_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise Interrupted(signal.SIGTERM)

    may_go_on = threading.Event()
    calls = full(monkeypatch, may_go_on, stop)
    monkeypatch.setattr(hooks, "HANG_S", math.inf)
    calls.tell(step(3))
    calls.check()
    may_go_on.set()


def test_the_end_waits_for_hooks_once() -> None:
    may_go_on = threading.Event()
    calls, lines = calls_of(Hooks(on_step=lambda _: may_go_on.wait(60)))
    calls.tell(step(1))
    for _ in range(2):
        calls.finish(patience_s=0.01)
    assert sum("left behind" in line for line in lines) == 1
    may_go_on.set()
