"""Evaluation in the background, on a copy of the weights, so that no push ever waits for it."""

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from smolcluster.cluster.inbox import Event, Inbox
from smolcluster.training.build import Workbench
from smolcluster.training.evaluate import Evaluation


@dataclass(frozen=True)
class EvaluationDone(Event):
    """The weights of `version` have been evaluated."""

    version: int
    epoch: int
    evaluation: Evaluation


@dataclass(frozen=True)
class EvaluationFailed(Event):
    """The weights of `version` could not be evaluated."""

    version: int
    error: Exception


class _GivenUp(Exception):
    """The run has ended before the evaluation did."""


class Evaluator:
    """Evaluates one snapshot at a time in a thread of its own and reports to the inbox."""

    def __init__(self, bench: Workbench, inbox: Inbox, *, every: int, log: logging.Logger) -> None:
        """`every` so many steps the replica is evaluated on the validation split."""
        self._bench = bench
        self._every = every
        self._log = log
        self._model = bench.replica.copy_model()
        self._inbox = inbox
        self._work: queue.Queue[tuple[int, int, Tensor] | None] = queue.Queue(maxsize=1)
        self._busy = threading.Event()
        self._is_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluator", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Let the running evaluation end, unless nobody wants to know any more; then end the thread."""
        if error is not None:
            self._is_given_up.set()
        self._work.put(None)
        self._thread.join()

    def after_step(self, version: int, epoch: int) -> bool:
        """Evaluate the weights of now, if it is time and the last evaluation is over; returns whether."""
        if version % self._every:
            return False
        if self._busy.is_set():
            self._log.info("step %d is not evaluated: the last one still is", version)
            return False
        self._busy.set()
        self._work.put((version, epoch, self._bench.replica.params.clone()))
        return True

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (work := self._work.get()) is not None:
            version, epoch, weights = work
            try:
                self._bench.replica.lend(weights, self._model)
                evaluation = self._bench.evaluate(self._model, self._check_wanted)
                self._inbox.put(EvaluationDone(version, epoch, evaluation))
            except _GivenUp:
                pass
            except Exception as error:
                self._inbox.put(EvaluationFailed(version, error))
            finally:
                self._busy.clear()

    def _check_wanted(self) -> None:
        if self._is_given_up.is_set():
            raise _GivenUp
