"""A user's own functions that hear how a run goes on, in the process that owns it.

They are called one after another in a thread of their own, in the order in which things happened, and are
given facts and no objects of the run. An exception in one ends the run with a sentence that names it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from smolcluster.errors import SmolclusterError, UserCodeError
from smolcluster.utils.units import format_duration
from smolcluster.utils.user_code import user_code

MAX_BEHIND = 10_000
"""Calls that may wait for their turn; then the run waits."""
PATIENCE_S = 60.0
"""How long the end of a run waits for hooks, in all."""
HANG_S = 300.0
"""How long training waits for one call."""
_WARN_S = 10.0


@dataclass(frozen=True)
class StepDone:
    """One optimizer step of the run. Epochs and ranks count from 0.

    Attributes:
        loss: mean over the step's `num_terms` loss terms, before it.
        learning_rate: that of the step, with EDP's staleness factor.
        grad_norm: L2 norm before clipping.
        rank, node: whose push it was; None: all workers', or there are none.
        staleness: τ, steps; None where nothing is stale.
    """

    step: int
    epoch: int
    num_samples: int
    samples_applied: int
    total_samples: int
    loss: float
    num_terms: float
    learning_rate: float
    grad_norm: float
    rank: int | None = None
    node: str | None = None
    staleness: int | None = None


@dataclass(frozen=True)
class EvaluationDone:
    """The validation split was evaluated on the weights of `step`; `metrics` are the workload's, by name."""

    step: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointSaved:
    """The weights of `step` are on the disk, in `folder`."""

    step: int
    folder: Path


@dataclass(frozen=True)
class WorkerChanged:
    """A worker joined, left on purpose, or was lost; `reason` is empty of one that joined."""

    rank: int
    node: str
    change: Literal["joined", "left", "lost"]
    reason: str = ""


@dataclass(frozen=True)
class Hooks:
    """Functions that are called when something happened; None: none.

    They run beside training and must not touch its model or its device.
    """

    on_step: Callable[[StepDone], object] | None = None
    on_evaluation: Callable[[EvaluationDone], object] | None = None
    on_checkpoint: Callable[[CheckpointSaved], object] | None = None
    on_worker: Callable[[WorkerChanged], object] | None = None


NO_HOOKS = Hooks()
Fact = StepDone | EvaluationDone | CheckpointSaved | WorkerChanged
_HOOK_OF: Mapping[type[Fact], str] = MappingProxyType(
    {
        StepDone: "on_step",
        EvaluationDone: "on_evaluation",
        CheckpointSaved: "on_checkpoint",
        WorkerChanged: "on_worker",
    }
)


class HookCalls:
    """Calls the hooks; any thread may say what happened."""

    def __init__(
        self, hooks: Hooks, log: logging.Logger, check_stop: Callable[[], None] = lambda: None
    ) -> None:
        """`check_stop` raises when a signal has asked this process to stop."""
        self._hooks = hooks
        self._log = log
        self._check_stop = check_stop
        self._calls = queue.Queue[tuple[str, Callable[[Any], object], Any] | threading.Event](
            MAX_BEHIND
        )
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: SmolclusterError | None = None
        self._is_told = False
        self._running = ""
        """The hook that is being called, or was called last."""
        self._waited_s = 0.0
        """How long `finish` has waited in vain."""

    def tell(self, fact: Fact) -> None:
        """Have the hook of such a fact called, if there is one."""
        name = _HOOK_OF[type(fact)]
        function: Callable[[Any], object] | None = getattr(self._hooks, name)
        if function is None or self._error is not None:
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hooks", daemon=True)
                self._thread.start()
        waited_s = 0.0
        while not self._put((name, function, fact), _WARN_S):
            waited_s += _WARN_S
            if self._is_stopping():
                return  # the run ends: whoever decides finds that out next
            if waited_s >= HANG_S:
                self._error = UserCodeError(
                    f"{self._running}: a call has not returned for {format_duration(waited_s)}, with "
                    f"{MAX_BEHIND} more waiting"
                )
                return
            self._log.warning(
                "training waits for the hook %s: %d calls behind", self._running, MAX_BEHIND
            )

    def check(self) -> None:
        """Raise the error of a hook, once.

        Raises:
            UserCodeError: a hook raised an exception, or hangs; no hook is called any more.
        """
        if self._error is not None and not self._is_told:
            self._is_told = True
            raise self._error

    def finish(self, patience_s: float = PATIENCE_S) -> None:
        """Return when all calls so far are over; what takes longer is left behind, with a warning.

        Raises:
            UserCodeError: see `check`.
        """
        patience_s -= self._waited_s
        if self._thread is not None and self._error is None and patience_s > 0:
            reached, end = threading.Event(), time.monotonic() + patience_s
            self._put(reached, patience_s)
            if not reached.wait(max(0.0, end - time.monotonic())):
                self._waited_s += patience_s
                self._log.warning(
                    "hooks are not over after %s, and are left behind", format_duration(patience_s)
                )
        self.check()

    def _is_stopping(self) -> bool:
        try:
            self._check_stop()
        except KeyboardInterrupt:
            return True
        return False

    def _put(
        self, item: tuple[str, Callable[[Any], object], Any] | threading.Event, timeout_s: float
    ) -> bool:
        try:
            self._calls.put(item, timeout=timeout_s)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while True:
            item = self._calls.get()
            if isinstance(item, threading.Event):
                item.set()
            elif self._error is None:
                self._do(*item)

    def _do(self, name: str, function: Callable[[Any], object], fact: object) -> None:
        self._running = name
        try:
            with user_code(name):
                function(fact)
        except SmolclusterError as error:
            self._error = error
        except (
            BaseException
        ) as error:  # such as KeyboardInterrupt, which would end this thread unheard
            self._error = SmolclusterError(f"{name}: {error!r}")
