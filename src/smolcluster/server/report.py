"""What the server tells the world: metrics, events, counts, its status, and the summary at the end."""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from smolcluster.configs.schema import MeshSizes, RunConfig, config_of
from smolcluster.configs.spec import algorithms
from smolcluster.data.permutation import Range
from smolcluster.errors import SmolclusterError
from smolcluster.observability.metrics import MetricRecord, Metrics
from smolcluster.observability.spans import SpanLog
from smolcluster.runs.asked import why_asked
from smolcluster.runs.events import (
    BeginningEnded,
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    EventLog,
    LayersMoved,
    LeaseReturned,
    PushDropped,
    RunEnded,
    RunResumed,
    RunStarted,
    StepOverdue,
    StepsUndone,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerParked,
    WorkerStalled,
)
from smolcluster.runs.status import (
    STOPPED,
    RankStatus,
    RunState,
    RunStatus,
    StatusFile,
    failed,
    instant,
    no_space_on,
    unbegun,
)
from smolcluster.runs.summary import Final, Pushes, Summary, Traffic, WorkerShare
from smolcluster.server.board import StatusBoard, SteadyRate
from smolcluster.server.process_stats import Gauge, ProcessStats
from smolcluster.server.tally import Dropped, Tally
from smolcluster.server.worker import Worker
from smolcluster.training import hooks
from smolcluster.training.build import TrainingContext
from smolcluster.training.checkpoint import Progress, TrainingState, parse_progress
from smolcluster.training.evaluate import Evaluation
from smolcluster.utils.cadence import Cadence
from smolcluster.utils.units import format_duration
from smolcluster.wire.messages import LeaseKey, Telemetry

WINDOW_S = 1.0
VITALS_EVERY_S = 1.0
NUM_LAYERED_FIRST, LAYERED_EVERY_S = 1000, 60.0
"""Of so many steps the norms of all layers are kept, later those of one step in so many seconds."""
DISK_S = 5.0
"""How long the end of a run waits for a disk that hangs."""
HOOKS_S = 5.0
"""How long the end of a run that failed waits for hooks."""
COUNTS = "counts"
"""Where a checkpoint's progress has them."""
DROP_REASONS: Mapping[Dropped, str] = MappingProxyType(
    {
        "stale": "its weights were older than staleness.bound allows",
        "late": "its lease had been taken back",
        "duplicate": "its samples had been applied already",
        "non_finite": "it held NaN or infinity",
    }
)
_CHANGES: Mapping[type[WorkerEvent], Literal["joined", "left", "lost"]] = MappingProxyType(
    {WorkerJoined: "joined", WorkerLeft: "left", WorkerLost: "lost"}
)


@dataclass(frozen=True)
class StepTaken:
    """One optimizer step of the server, which made the weights of `version`."""

    version: int
    samples: Range
    loss: float
    """Their mean, over `num_terms` loss terms; NaN where nobody has told it."""
    learning_rate: float
    """With EDP's staleness factor."""
    grad_norm: float
    """L2, before clipping."""
    layer_norms: Mapping[str, float]
    """The same by parameter, where that is tracked."""
    num_terms: float
    worker: Worker | None = None
    """Whose push it was; None: everybody's."""
    staleness: int | None = None
    """τ; None where nothing is stale."""
    outer_step: int | None = None
    """DiLoCo: the number of the outer step that has applied it."""
    drift: float | None = None
    """DiLoCo: how far the worker's change went that it came with, as a share of the weights' norm."""
    is_skipped: bool = False
    """Whether a gradient overflowed in float16: the samples count, the weights are as before."""


class Report:
    """Writes down what the deciding thread tells it."""

    def __init__(
        self,
        *,
        run: RunConfig,
        server_node: str,
        num_workers: int,
        codec: str,
        incarnation: str,
        training: TrainingContext,
        metrics: Metrics,
        events: EventLog,
        log: logging.Logger,
        bytes_moved: Callable[[], tuple[int, int]],
        status: StatusFile | None = None,
        spans: SpanLog | None = None,
        check_stop: Callable[[], None] = lambda: None,
        mesh: MeshSizes | None = None,
        folder: Path | None = None,
    ) -> None:
        """`status`: where it is kept up to date how the run stands; `spans`: where those of all processes go;
        `check_stop`: raises when a signal has asked this process to stop; `mesh`: of which this process is
        rank 0; `folder`: the run's.
        """
        self._own_kind: Literal["rank", "server"] = "server" if mesh is None else "rank"
        self._own_rank = None if mesh is None else 0
        self.tally = Tally.empty()
        self.board = StatusBoard(self.tally)
        self.is_waiting = False
        """Whether nobody trains, for lack of workers."""
        self.meter = training.replica.meter
        self._server_node = server_node
        self._process_stats, self._gauge = ProcessStats(self.meter), Gauge()
        self._rank_gauges: dict[int, Gauge] = {}
        self._ranks: dict[int, RankStatus] = {}
        """What each rank of a mesh has reported last."""
        self._looked_at = -math.inf
        self._layers = Cadence(NUM_LAYERED_FIRST, LAYERED_EVERY_S)
        self._status_file = status
        self._spans = spans
        self._check_stop = check_stop
        self._folder = folder
        self._unsaved = ""
        self._begun_at = instant(time.time())
        self._newest: StepTaken | None = None
        self._run = run
        spec = algorithms().get(run.algorithm)
        self._own_fields = run.of(config_of(spec)).status_fields if spec else {}
        self._codec = codec
        self._training = training
        self._metrics = metrics
        self._hooks = hooks.HookCalls(training.workload.training.hooks, log, check_stop)
        self._events = events
        self._log = log
        self._bytes_moved = bytes_moved
        self._epoch_size = training.num_samples
        self.samples_applied = 0
        self._incarnation = incarnation
        self.version = 0
        self.evaluated_version = 0
        self._evaluation: Evaluation | None = None
        """Of the weights of `evaluated_version`."""
        self._evaluator_id: int | None = None
        """The worker whose loop evaluates."""
        self._epoch = 0
        self.started()
        events.write(
            RunStarted(
                run_id=run.run_id,
                algorithm=run.algorithm,
                node=server_node,
                num_workers=num_workers,
                num_epochs=run.train.num_epochs,
                train_samples=self._epoch_size,
                batch_size=run.train.samples_per_step,
                codec=codec,
                dataset=training.workload.name,
                model=type(training.replica.model).__name__,
                source=training.workload.source,
                samples=list(map(list, training.workload.sample_marks)),
                order=training.workload.order_mark(training.seed),
                num_params=training.replica.num_params,
                mesh=None if mesh is None else str(mesh),
                num_ranks=None if mesh is None else mesh.world_size,
                tokens_per_sample=training.workload.tokens_per_sample,
            )
        )

    def started(self) -> None:
        """Training begins now: rates and times count from here."""
        self._total_steps = self.version + self.steps_left
        self._started = time.monotonic()
        self._samples_rate = SteadyRate(lambda: self.samples_applied, window_s=WINDOW_S)
        self._samples_pace = SteadyRate(lambda: self.samples_applied)
        self._bytes_rate = SteadyRate(lambda: sum(self._bytes_moved()), window_s=WINDOW_S)

    def contributed(
        self, worker: Worker, num_samples: int, loss: float, staleness: int = 0
    ) -> None:
        """A push of this worker, of mean `loss`, has been applied, or will be with the step it belongs to."""
        self.tally.applied(worker.member.worker_id, worker.member.node, num_samples, staleness)
        self.board.contributed(worker, self.version + 1, loss)

    def step_taken(self, step: StepTaken) -> None:
        self.version, self._newest = step.version, step
        num_samples = step.samples.num_samples
        self.samples_applied += num_samples
        epoch = self._epoch = step.samples.epoch
        tally = self.tally
        tally.epoch_samples[epoch] += num_samples
        if not math.isnan(step.loss):
            tally.epoch_terms[epoch] += step.num_terms
            tally.epoch_loss[epoch] = _finite(tally.epoch_loss[epoch] + step.loss * step.num_terms)
        worker = step.worker
        self._metrics.log(
            MetricRecord(
                "step",
                step.version,
                epoch,
                self._values(step),
                rank=worker.rank if worker else None,
                node=worker.member.node if worker else None,
            )
        )
        if tally.epoch_samples[epoch] == self._epoch_size:
            self._events.write(
                EpochFinished(epoch=epoch, step=step.version, samples_applied=self.samples_applied)
            )
        if step.is_skipped:
            now = "" if self._scale is None else f"; the loss scale is {self._scale:g} now"
            self._log.info(
                "step %d is skipped: a gradient overflowed in float16%s", step.version, now
            )
        self.meter.step_done(num_samples)
        self._hooks.step(
            hooks.StepDone(
                step=step.version,
                epoch=epoch,
                num_samples=num_samples,
                samples_applied=self.samples_applied,
                total_samples=self._run.train.num_epochs * self._epoch_size,
                loss=step.loss,
                num_terms=step.num_terms,
                learning_rate=step.learning_rate,
                grad_norm=step.grad_norm,
                rank=worker.rank if worker else None,
                node=worker.member.node if worker else None,
                staleness=step.staleness,
            )
        )

    def layer_norms(self, gradient: Tensor | None = None) -> dict[str, float]:
        """L2 norms of a gradient as `Replica` measures them; empty where untracked, or not due or whole."""
        replica = self._training.replica
        is_whole = gradient is None or gradient.numel() == replica.num_params
        if not (self._run.train.track_gradients and self._layers.is_due and is_whole):
            return {}
        return replica.layer_norms(gradient)

    def heard(self, worker: Worker, telemetry: Telemetry) -> None:
        kept = self.board.heard(worker, telemetry)
        if kept is not None:
            self._metrics.log(MetricRecord("worker", self.version, self._epoch, kept, **worker.who))
        best = worker.live_session.clocks.best
        if self._spans and best:
            self._spans.write("worker", telemetry, ahead_s=best.offset_s, **worker.who)

    def rank_heard(self, rank: int, node: str, telemetry: Telemetry) -> None:
        """A rank of a mesh, other than the run's owner, has told what it has done."""
        gauge = self._rank_gauges.setdefault(rank, Gauge())
        kept = gauge.take(telemetry)
        self._note_rank(rank, node, gauge)
        if kept is not None:
            self._metrics.log(
                MetricRecord("rank", self.version, self._epoch, kept, rank=rank, node=node)
            )

    def _note_rank(self, rank: int, node: str, gauge: Gauge) -> None:
        self._ranks[rank] = RankStatus(
            rank=rank, node=node, process_stats=gauge.values, last_seen=instant(time.time())
        )

    def _look_at_oneself(self) -> None:
        if time.monotonic() - self._looked_at < VITALS_EVERY_S:
            return
        self._looked_at = time.monotonic()
        report = self._process_stats.report()
        kept = self._gauge.take(report)
        if self._own_rank is not None:
            self._note_rank(self._own_rank, self._server_node, self._gauge)
        rank, node = self._own_rank, self._server_node
        if kept is not None:
            self._metrics.log(
                MetricRecord(self._own_kind, self.version, self._epoch, kept, rank=rank, node=node)
            )
        if self._spans:
            self._spans.write(self._own_kind, report, rank=rank, node=node)

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint of this step is on the disk, in `folder`. Any thread."""
        self._unsaved = ""
        self._events.write(CheckpointSaved(step=step))
        self._hooks.checkpoint(hooks.CheckpointSaved(step, folder))

    def has_no_space(self, step: int) -> None:
        """The disk was too full for the checkpoint of this step. Any thread."""
        self._unsaved = (
            f"step {step} is not saved: no space is left on the disk of {self._server_node}"
        )

    @property
    def trouble(self) -> str:
        """What cannot be saved for lack of space; empty: nothing. Any thread."""
        if self._status_file is not None and self._status_file.has_full_disk:
            return no_space_on(self._server_node)
        return self._unsaved

    def worker_changed(self, event: WorkerJoined | WorkerLeft | WorkerLost) -> None:
        """A worker joined, left, or was lost."""
        self._events.write(event)
        change, reason = _CHANGES[type(event)], getattr(event, "reason", "")
        self._hooks.worker(hooks.WorkerChanged(event.rank, event.node, change, reason))

    def dropped(
        self,
        worker: Worker,
        lease: LeaseKey,
        outcome: Dropped,
        staleness: int | None,
        reason: str = "",
    ) -> None:
        """A push was not applied, or not sent at all; an empty `reason` stands for the usual one."""
        self.tally.pushes[outcome] += 1
        reason = reason or DROP_REASONS[outcome]
        level = logging.WARNING if outcome == "non_finite" else logging.INFO
        name = outcome.replace("_", "-")
        self._log.log(level, "%s: a push was dropped as %s: %s", worker.name, name, reason)
        self._events.write(
            PushDropped(
                **worker.who,
                outcome=outcome,
                epoch=lease.epoch,
                start=lease.start,
                stop=lease.stop,
                staleness=staleness,
                reason=reason,
            )
        )

    def lost_push(self, whose: str, reason: str) -> None:
        """A push came to nothing because its session had ended."""
        self.tally.pushes["lost"] += 1
        self._log.info("%s: a push was lost: %s", whose, reason)

    def lease_returned(self, worker: Worker, samples: Range, reason: str) -> None:
        """Samples that were handed out to `worker` will be handed out again."""
        self.tally.leases_returned += 1
        self._events.write(
            LeaseReturned(
                **worker.who,
                epoch=samples.epoch,
                start=samples.start,
                stop=samples.stop,
                reason=reason,
            )
        )

    def overdue(self, worker: Worker, step: int, reason: str) -> None:
        """A worker has had a part of the open `step` for far longer than expected."""
        self._events.write(StepOverdue(**worker.who, step=step, reason=reason))

    def parked(self, worker: Worker, step: int, reason: str) -> None:
        """A worker does not keep up, and hears of no step after `step` for a while."""
        self._events.write(WorkerParked(**worker.who, step=step, reason=reason))

    def stalled(self, worker: Worker, silent_s: float, reason: str) -> None:
        self._log.warning(
            "%s has not answered for %s: %s", worker.name, format_duration(silent_s), reason
        )
        self._events.write(WorkerStalled(**worker.who, silent_s=silent_s, reason=reason))

    def layers_moved(self, reason: str) -> None:
        """The layers of a pipeline are dealt out again, though none of its stages was lost."""
        self._log.info("the layers are dealt out again: %s", reason)
        self._events.write(LayersMoved(step=self.version, reason=reason))

    def beginning_ended(self, reason: str) -> None:
        """A run's synchronous beginning is over; `reason` says how far it went, and why."""
        self._log.info("the synchronous beginning is over: %s", reason)
        self._events.write(BeginningEnded(step=self.version, reason=reason))

    def steps_undone(self, node: str, num_steps: int, share: float) -> None:
        """The store on `node` is lost; its slice is `share` of the weights, 0 to 1."""
        self.tally.steps_undone += num_steps * share
        self._events.write(StepsUndone(node=node, num_steps=num_steps, share=share))

    def evaluate(self) -> None:
        """Evaluate the weights of now, if anything is held out, and tell of it.

        Raises:
            Interrupted: a signal asked this process to stop meanwhile.
            NonFiniteLoss, UserCodeError: see `TrainingContext.evaluate`.
        """
        evaluation = self._training.evaluate(before_batch=self._check_stop)
        if evaluation is not None:
            self.evaluated(self.version, self._epoch, evaluation)

    def evaluated(self, version: int, epoch: int, evaluation: Evaluation) -> None:
        tally = self.tally
        if not self._has_given_up:
            if tally.lowest_val_loss is None or evaluation.loss < tally.lowest_val_loss:
                tally.lowest_val_loss, tally.num_worse = evaluation.loss, 0
            else:
                tally.num_worse += 1
        self.evaluated_version, self._evaluation = version, evaluation
        self._metrics.log(MetricRecord("eval", version, epoch, evaluation.values))
        self._events.write(Evaluated(epoch=epoch, step=version, **evaluation.values))
        self._log.info("epoch %d, step %d: %s", epoch + 1, version, evaluation)
        metrics = dict(evaluation.metrics)
        self._hooks.evaluation(hooks.EvaluationDone(version, epoch, evaluation.loss, metrics))

    def logged(self, worker: Worker, values: Mapping[str, float]) -> None:
        """What a user's own loop has measured; with a `val_loss` it is an evaluation of these weights.

        Those of one worker are the run's, so that patience counts each once; another's are kept as its own.
        """
        measured = dict(values)
        if "val_loss" in measured and self._is_evaluator(worker):
            loss = measured.pop("val_loss")
            metrics = {name.removeprefix("val_"): measured[name] for name in measured}
            self.evaluated(self.version, self._epoch, Evaluation(loss, metrics))
        else:
            self._metrics.log(
                MetricRecord("worker", self.version, self._epoch, measured, **worker.who)
            )

    def _is_evaluator(self, worker: Worker) -> bool:
        """Whether this worker's evaluations are the run's: the first that makes one, while it is there."""
        if self._evaluator_id is None or not self.board.is_present(self._evaluator_id):
            self._evaluator_id = worker.member.worker_id
        return worker.member.worker_id == self._evaluator_id

    @property
    def is_over(self) -> bool:
        """Whether the run ends here: all is applied, or it has not got better for too long."""
        return self.is_complete or self._has_given_up

    @property
    def ending(self) -> str:
        if not self._has_given_up:
            return "every sample of every epoch has been applied"
        times = f"{self.tally.num_worse} evaluations in a row have"
        if self.tally.num_worse == 1:
            times = "an evaluation has"
        return f"{times} not lowered the validation loss"

    @property
    def _has_given_up(self) -> bool:
        patience = self._run.train.patience
        return patience is not None and self.tally.num_worse >= patience and not self.is_complete

    @property
    def _num_overflows(self) -> int | None:
        """Steps that were skipped because a gradient overflowed; None: none could."""
        scaler = self._training.replica.scaler
        if scaler is None or (self._scale is None and not scaler.num_overflows):
            return None
        return scaler.num_overflows

    @property
    def _scale(self) -> float | None:
        """The run's loss scale; None: it has none."""
        replica = self._training.replica
        return replica.run_scale if replica.precision == "fp16" else None

    def status(self, state: RunState, reason: str | None = None) -> RunStatus:
        """How the run stands, for whoever looks; `reason`: why it is over."""
        values = self._evaluation.values if self._evaluation else {}
        newest = self._newest
        measured: dict[str, Any] = {
            **dict.fromkeys(("val_loss", "val_accuracy", "val_perplexity")),
            **values,
        }
        return RunStatus(
            run_id=self._run.run_id,
            algorithm=self._run.algorithm,
            incarnation=self._incarnation,
            state=state,
            reason=reason,
            updated_at=instant(time.time()),
            started_at=self._begun_at,
            wall_s=self._wall_s,
            step=self.version,
            total_steps=self._total_steps,
            epoch=self._epoch,
            num_epochs=self._run.train.num_epochs,
            samples_applied=self.samples_applied,
            total_samples=self._run.train.num_epochs * self._epoch_size,
            loss=newest.loss if newest and not math.isnan(newest.loss) else None,
            learning_rate=newest.learning_rate if newest else None,
            grad_norm=newest.grad_norm if newest else None,
            overflows=self._num_overflows,
            pushes=dict(self.tally.pushes),
            leases_returned=self.tally.leases_returned,
            process_stats=self._gauge.values,
            **measured,
            samples_per_s=self._samples_pace(),
            trouble=self.trouble or None,
            workers=self.board.workers(),
            ranks=[self._ranks[rank] for rank in sorted(self._ranks)],
            **self._own_fields,
        )

    def flush(self) -> None:
        self._metrics.flush()
        self._events.flush()

    def tick(self) -> None:
        """Say what is due; others write it.

        Raises:
            UserCodeError: a hook of the user's raised an exception, or hangs.
        """
        self._hooks.check()
        self._look_at_oneself()
        if self._status_file:
            self._status_file.ask(lambda: self.status("waiting" if self.is_waiting else "training"))

    def summary(self) -> Summary:
        """Evaluate the final weights, if they are not yet, and sum up the run.

        Raises:
            Interrupted: a signal asked this process to stop meanwhile.
            UserCodeError: a metric or a hook of the user's raised an exception.
        """
        if self._has_given_up:
            self._log.info("the run ends early: %s", self.ending)
        if self._evaluation is None or self.evaluated_version != self.version:
            self.evaluate()
        final = self._evaluation  # with nothing held out, the last that a user's loop has told
        self._hooks.finish()
        sent, received = self._traffic
        return Summary(
            algorithm=self._run.algorithm,
            run_id=self._run.run_id,
            wall_s=self._wall_s,
            epochs=self._epoch + 1 if self._has_given_up else self._run.train.num_epochs,
            num_bad_evals=self.tally.num_worse if self._has_given_up else None,
            steps=self.version,
            train_samples=self._epoch_size,
            samples_applied=self.samples_applied,
            tokens_per_sample=self._training.workload.tokens_per_sample,
            codec=self._codec,
            pushes=Pushes(**self.tally.pushes),
            leases_returned=self.tally.leases_returned,
            steps_undone=self.tally.steps_undone,
            final=Final(train_loss=self._train_loss, **(final.values if final else {})),
            lowest_val_loss=self.tally.lowest_val_loss,
            bytes=Traffic(sent=sent, received=received),
            workers=[
                WorkerShare(
                    rank=worker.rank,
                    node=worker.node,
                    samples=worker.samples,
                    mean_staleness=worker.mean_staleness,
                    share=worker.samples / max(self.samples_applied, 1),
                )
                for _, worker in sorted(self.tally.workers.items())
            ],
        )

    @contextmanager
    def until_its_end(self) -> Iterator[None]:
        """Write down how the run ends, which it does with this block."""
        try:
            yield
        except BaseException as error:
            self.ended(error)
            raise
        self.ended()

    def ended(self, error: BaseException | None = None) -> None:
        """The run is over; `error`: what has ended it before its time."""
        self._finish_hooks(patience_s=HOOKS_S if error else hooks.PATIENCE_S)
        reason = self.ending if error is None else why_ended(error, self._folder)
        self._events.write(
            RunEnded(
                ok=error is None,
                reason=reason,
                wall_s=self._wall_s,
                steps=self.version,
                samples_applied=self.samples_applied,
            )
        )
        is_failure = error is not None and reason != STOPPED
        status = self.status("failed" if is_failure else "ended", reason)

        def write() -> None:
            self.flush()  # who reads that the run is over finds all of it
            if self._status_file:
                self._status_file.write(status)

        writing = threading.Thread(target=write, name="end", daemon=True)
        writing.start()
        writing.join(DISK_S)

    def _finish_hooks(self, patience_s: float) -> None:
        """Let the hooks hear of the end, too; the run's own end does not depend on them any more."""
        try:
            self._hooks.finish(patience_s)
        except SmolclusterError as error:
            self._log.log(logging.ERROR, "%s", error, exc_info=error)

    def training_state(self, progress: Progress) -> TrainingState:
        """Where the run stands, for a checkpoint; `progress` is what the algorithm adds."""
        counts = self.tally.model_copy(update={"wall_s": self._wall_s, "traffic": self._traffic})
        return TrainingState(
            run_id=self._run.run_id,
            algorithm=self._run.algorithm,
            incarnation=self._incarnation,
            step=self.version,
            samples_applied=self.samples_applied,
            epoch=self._epoch,
            dataset_fingerprint=self._training.workload.fingerprint,
            seed=self._run.seed,
            codec=self._codec,
            train_loss=self._train_loss,
            progress={**progress, COUNTS: counts.model_dump(mode="json")},
        )

    def with_evaluation(self, state: TrainingState) -> TrainingState:
        """The same state, with what has become known of its weights since, if anything has."""
        if self._evaluation is None or self.evaluated_version != state.step:
            return state
        counts = state.progress[COUNTS]
        assert isinstance(counts, dict)  # noqa: S101 - `training_state` has put it there
        counts = counts | {
            "lowest_val_loss": self.tally.lowest_val_loss,
            "num_worse": self.tally.num_worse,
        }
        known = {"val_loss": self._evaluation.loss, "progress": state.progress | {COUNTS: counts}}
        return state.model_copy(update=known)

    @property
    def is_complete(self) -> bool:
        return self.samples_applied == self._run.train.num_epochs * self._epoch_size

    def resume(self, state: TrainingState) -> None:
        """Count on from where a checkpoint stood; workers that are there stay.

        Raises:
            CheckpointError: it does not say what was counted.
        """
        self.tally = parse_progress(Tally, state.progress.get(COUNTS), state.step)
        self.board.count_on(self.tally)
        self.version, self.samples_applied = state.step, state.samples_applied
        self._epoch = state.epoch
        self.started()
        self._events.write(RunResumed(step=self.version, samples_applied=self.samples_applied))

    @property
    def steps_left(self) -> int:
        """Steps to come; one more or less where a resumed run of EDP had begun two epochs."""
        left = self._run.train.num_epochs * self._epoch_size - self.samples_applied
        epochs, samples = divmod(left, self._epoch_size)
        size = self._run.train.samples_per_step
        return epochs * math.ceil(self._epoch_size / size) + math.ceil(samples / size)

    @property
    def _wall_s(self) -> float:
        return self.tally.wall_s + time.monotonic() - self._started

    @property
    def _traffic(self) -> tuple[int, int]:
        sent, received = self._bytes_moved()
        before_sent, before_received = self.tally.traffic
        return before_sent + sent, before_received + received

    @property
    def _train_loss(self) -> float | None:
        """Mean loss of the newest epoch so far; None before the first step that tells one."""
        last = max(self.tally.epoch_samples, default=0)
        if last not in self.tally.epoch_loss:
            return None
        return self.tally.epoch_loss[last] / (self.tally.epoch_terms[last] or 1.0)

    def _values(self, step: StepTaken) -> dict[str, float]:
        values = {} if math.isnan(step.loss) else {"loss": step.loss}
        values |= {
            "lr": step.learning_rate,
            "samples_applied": self.samples_applied,
            "total_samples": self._run.train.num_epochs * self._epoch_size,
            "total_steps": self._total_steps,
            "samples_per_s": self._samples_rate(),
            "mb_per_s": self._bytes_rate() / 1e6,
            "grad_norm": step.grad_norm,
            "start": step.samples.start,
            "stop": step.samples.stop,
        }
        if tokens := self._training.workload.tokens_per_sample:
            values["tokens_per_s"] = values["samples_per_s"] * tokens
        if (num_overflows := self._num_overflows) is not None:
            values["overflows"] = num_overflows
        if self._scale is not None:
            values["loss_scale"] = self._scale
        own = {"staleness": step.staleness, "outer_step": step.outer_step, "drift": step.drift}
        values |= {name: value for name, value in own.items() if value is not None}
        if step.layer_norms and self._layers.take():
            values |= {f"grad_norm/{name}": norm for name, norm in step.layer_norms.items()}
        return values


def never_begun(run: RunConfig, error: BaseException, folder: Path) -> RunStatus:
    reason = why_ended(error, folder)
    state: RunState = "ended" if reason == STOPPED else "failed"
    return unbegun(run.run_id, run.algorithm, state, reason, run.train.num_epochs)


def why_ended(error: BaseException, folder: Path | None = None) -> str:
    """Why a run was ended before its time; `folder`: the run's, in which its launcher may have said so."""
    if not isinstance(error, Exception):
        why = None if folder is None else why_asked(folder)
        return STOPPED if why is None else failed(why)
    kind = "" if isinstance(error, SmolclusterError) else f"{type(error).__name__}: "
    reason = failed(f"{kind}{error}")
    return reason.encode(errors="backslashreplace").decode()  # it may name any file


def _finite(total: float) -> float:
    """JSON has no infinity, which a sum of finite losses may reach."""
    return max(-sys.float_info.max, min(total, sys.float_info.max))
