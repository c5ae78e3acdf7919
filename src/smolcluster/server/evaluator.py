"""Evaluation in the background, on a copy of the weights, so that no push ever waits for it."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Self

from torch import Tensor, nn

from smolcluster.training.buffers import BufferValues, ModelBuffers
from smolcluster.training.build import TrainingContext
from smolcluster.training.evaluate import Evaluation
from smolcluster.utils.device import executor_beside
from smolcluster.wire.inbox import Call, Inbox, fail

Done = Callable[[int, int, Evaluation], None]
"""Hears of the weights of a version, in an epoch, what they were evaluated as."""


class Evaluator:
    """Evaluates one snapshot at a time, beside the deciding thread, which is told through the inbox.

    On a device for one thread only, `after_step` returns when the evaluation is over.
    """

    def __init__(
        self,
        training: TrainingContext,
        inbox: Inbox,
        on_done: Done,
        *,
        every: int,
        log: logging.Logger,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`every` so many steps the replica is evaluated on the validation split.

        The deciding thread calls `on_done`, or raises why the weights could not be evaluated. `check_stop`
        may raise, before each batch and in any thread.
        """
        self._training, self._on_done = training, on_done
        self._every = every
        self._log = log
        self._check_stop = check_stop
        has_any = training.workload.validation is not None
        self._model = training.new_copy() if has_any else nn.Module()
        self._buffers = ModelBuffers(self._model, training.replica.buffers.frozen)
        self._inbox = inbox
        self._executor = executor_beside(training.replica.device, "evaluator")
        self._running: Future[None] | None = None
        self._is_given_up = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Let the running evaluation end, unless nobody wants to know any more."""
        if error is not None:
            self._is_given_up.set()
        self._executor.shutdown()

    def is_due(self, version: int, num_steps: int = 1) -> bool:
        """Whether the last `num_steps` steps have come to one that is evaluated."""
        is_time = version % self._every < num_steps
        return is_time and self._training.workload.validation is not None

    def after_step(self, version: int, epoch: int, num_steps: int = 1) -> bool:
        """Evaluate the weights of now, if it is time and the last evaluation is over; returns whether.

        `num_steps`: so many steps were taken since it was asked last.
        """
        if not self.is_due(version, num_steps):
            return False
        if self._running is not None and not self._running.done():
            self._log.info("step %d is not evaluated: the last one still is", version)
            return False
        replica = self._training.replica
        state = replica.evaluated.clone(), replica.buffers.values()
        self._running = self._executor.submit(self._evaluate, version, epoch, *state)
        return True

    def _evaluate(self, version: int, epoch: int, weights: Tensor, buffers: BufferValues) -> None:
        try:
            self._training.replica.lend(weights, self._model)
            self._buffers.load(buffers)
            with self._buffers.kept():
                evaluation = self._training.evaluate(self._model, self._check_wanted)
        except CancelledError:
            return  # the run has ended before the evaluation did
        except Exception as error:
            self._inbox.put(Call(partial(fail, error)))
            return
        if evaluation is not None:
            self._inbox.put(Call(partial(self._on_done, version, epoch, evaluation)))

    def _check_wanted(self) -> None:
        self._check_stop()
        if self._is_given_up.is_set():
            raise CancelledError
