"""When a server saves where it stands, so that training never waits for the disk.

    step -> copy, by a thread of its own -> (evaluation of that step, if there is one) -> disk, by another

An evaluation that comes later, such as that of an attached loop, is added to the checkpoint.
The run's end goes to the disk before it is evaluated, so that no evaluation that fails can lose it.

On a device for one thread only the server copies itself, between two steps.
A copy takes about as long as reading the weights and the optimizer's state once, where they need not come
from other ranks first (`fill`), and goes on while the server waits for the next gradients; `wait_for_copy`
stands before whatever changes the weights.
"""

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from smolcluster.codec.base import absmax
from smolcluster.errors import ModelChanged, NonFiniteLoss, SmolclusterError
from smolcluster.runs.summary import Summary
from smolcluster.server.report import Report
from smolcluster.training.checkpoint import (
    CheckpointStore,
    CheckpointWriter,
    Progress,
    Snapshot,
    TrainingState,
)
from smolcluster.training.replica import Replica
from smolcluster.utils.device import executor_beside
from smolcluster.utils.stopping import Interrupted


@dataclass(frozen=True)
class CheckpointSource:
    """What is saved of a server."""

    replica: Replica
    progress: Callable[[], Progress]
    """Tells where its algorithm stands."""
    extra: Callable[[], Mapping[str, Tensor]]
    """Its algorithm's own tensors, by name; they change only with the weights."""
    fill: Callable[[], None] = lambda: None
    """Called by the thread that copies: returns when the replica has the step's weights and moments."""


class Saver:
    """Saves a server every so many steps, and at the end; without a store, never.

    Only the deciding thread calls it.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        every: int | None,
        source: CheckpointSource,
        report: Report,
        log: logging.Logger,
        *,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`every` so many steps, or only at the end where it is None; `on_progress`: as its writer's."""
        self._every = every
        self._source = source
        self._report = report
        self._log = log
        self._writer = None
        if store is not None:  # a checkpoint is not newer than what is known of its steps
            self._writer = CheckpointWriter(
                store,
                log,
                report.saved,
                report.flush,
                on_progress=on_progress,
                on_not_saved=report.not_saved,
            )
        self._copier = executor_beside(source.replica.device, "copier")
        self._copying: Future[Snapshot] | None = None
        self._copied: Snapshot | None = None
        self._submitted: TrainingState | None = None
        """What the newest one that was handed to the disk says."""
        self._is_evaluated = False
        self._newest_step = report.counts.version
        self._skips_end = False
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self._writer is not None:
            self._open.enter_context(self._writer)
        self._open.enter_context(self._copier)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Save the end as well, unless the weights are bad, or may stand between two steps."""
        if isinstance(error, Interrupted) and not error.is_orderly:
            self._copier.shutdown(wait=False)
            return  # at once; the writer's thread ends with the process
        with self._open:
            self.wait_for_copy()
            if self.saves_end(error):
                self._take()
            self.wait_for_copy()
            self._submit()

    def after_step(self, *, is_evaluated: bool, num_steps: int = 1) -> bool:
        """The server has taken steps; returns whether their end is saved.

        `is_evaluated`: a validation loss of its weights is to come.
        """
        is_saved = self.is_due(self._report.counts.version, num_steps)
        if is_saved:
            self._take()
            self._is_evaluated = is_evaluated or self._report.counts.is_over
        return is_saved

    def is_due(self, version: int, num_steps: int = 1) -> bool:
        """Whether the last `num_steps` steps have come to one that is saved."""
        if self._writer is None or self._every is None:
            return False
        return version % self._every < num_steps

    def saves_end(self, error: BaseException | None = None) -> bool:
        """Whether the end is saved if the run ends now, or so: it is not yet, and may be."""
        is_news = self._report.counts.version != self._newest_step
        is_wanted = is_news and not self._skips_end
        return self._writer is not None and is_wanted and _is_orderly(error)

    def summary(self) -> Summary:
        """Evaluate the run's end and sum the run up; before that, hand the end to the disk.

        Raises:
            Exception: as `Report.summary`; what was trained is saved nevertheless.
        """
        if self.saves_end():
            self._take()
        self.wait_for_copy()
        submitted = self._submit()
        try:
            summary = self._report.summary()
        except Exception:
            if submitted is not None:
                self._log.error(
                    "the weights of step %d are saved; only their evaluation failed", submitted.step
                )
            raise
        self._tell()
        return summary

    def skip_end(self) -> None:
        """What the replica holds now is nothing to go on from: do not save it at the end."""
        self._skips_end = True

    def wait_for_copy(self) -> None:
        """Return when the weights may change."""
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            self._copied = copying.result()
        except Exception as error:  # a run is worth more than its checkpoint
            self._log.warning("step %d is not saved: %r", self._newest_step, error)
            self._report.not_saved(self._newest_step, error)
            self._newest_step = 0

    def tick(self) -> None:
        """Hand a complete copy to the disk, together with its validation loss if there is to be one."""
        if self._copying is not None and self._copying.done():
            self.wait_for_copy()
        if self._copied is not None:
            is_known = self._report.evaluated_version == self._copied.state.step
            if is_known or not self._is_evaluated:
                self._submit()
        self._tell()

    def _tell(self) -> None:
        """Add the validation loss of the newest step that was handed to the disk, if it has come since."""
        if self._submitted is None or self._writer is None:
            return
        known = self._report.with_evaluation(self._submitted)
        if known.val_loss != self._submitted.val_loss:
            self._submitted = known
            self._writer.tell(known)

    def _take(self) -> None:
        """Begin to copy. What still waited for its evaluation goes to the disk without."""
        if self._writer is None:
            return
        self.wait_for_copy()
        self._submit()
        self._is_evaluated = False
        self._newest_step = self._report.counts.version
        state = self._report.training_state(self._source.progress())
        self._copying = self._copier.submit(
            _copy, self._source, state, self._source.extra(), self._writer.take_spare()
        )

    def _submit(self) -> TrainingState | None:
        """Hand the copy to the disk, if there is one; what is said of it."""
        copied, self._copied = self._copied, None
        if copied is None or self._writer is None:
            return None
        state = self._report.with_evaluation(copied.state)
        self._submitted = state
        self._writer.submit(replace(copied, state=state))
        return state


def _copy(
    source: CheckpointSource,
    state: TrainingState,
    extra: Mapping[str, Tensor],
    spare: Snapshot | None,
) -> Snapshot:
    """Take a snapshot.

    Raises:
        NonFiniteLoss: its weights hold NaN or infinity; nobody could go on from it.
    """
    source.fill()
    snapshot = Snapshot.of(source.replica, state, extra, spare)
    if not math.isfinite(absmax(snapshot.weights)):
        raise NonFiniteLoss("its weights hold NaN or infinity")
    return snapshot


def _is_orderly(error: BaseException | None) -> bool:
    """Whether a run that ended so left weights that it can go on from."""
    if isinstance(error, Interrupted):
        return error.is_orderly
    return error is None or (
        isinstance(error, SmolclusterError) and not isinstance(error, NonFiniteLoss | ModelChanged)
    )
