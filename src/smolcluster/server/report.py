"""What the server tells the world: metrics, events, log lines, hooks, its status, and the summary at the end.

What is counted is in `tally.py`, what is timed in `rates.py`, how each worker does in `board.py`.
"""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from smolcluster.configs.schema import MeshSizes, RunConfig, config_of
from smolcluster.configs.spec import spec_of
from smolcluster.data.permutation import Range
from smolcluster.errors import SmolclusterError
from smolcluster.observability.metrics import MetricKind, MetricRecord
from smolcluster.runs.asked import why_asked
from smolcluster.runs.events import (
    CheckpointSaved,
    EpochFinished,
    Evaluated,
    Event,
    LeaseReturned,
    PushDropped,
    RunEnded,
    RunResumed,
    RunStarted,
    StepsUndone,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from smolcluster.runs.series import RESERVED
from smolcluster.runs.status import (
    STOPPED,
    Presence,
    RankStatus,
    RunState,
    RunStatus,
    failed,
    instant,
    no_space_on,
    unbegun,
)
from smolcluster.runs.summary import Final, Pushes, Summary, Traffic
from smolcluster.server.board import StatusBoard, link_stats
from smolcluster.server.process_stats import Gauge, ProcessStats
from smolcluster.server.rates import Rates
from smolcluster.server.records import Records
from smolcluster.server.tally import COUNTS, Counts, Dropped
from smolcluster.server.worker import Listener, Worker
from smolcluster.training import hooks
from smolcluster.training.build import TrainingContext
from smolcluster.training.checkpoint import Progress, TrainingState, is_out_of_space
from smolcluster.training.evaluate import Evaluation
from smolcluster.training.loop import StepTaken
from smolcluster.utils.cadence import Cadence
from smolcluster.utils.stopping import as_raised
from smolcluster.utils.words import one_line
from smolcluster.wire.messages import MAX_SENTENCE_CHARS, LeaseKey, Logged, Telemetry

OWN_STATS_EVERY_S = 1.0
NUM_LAYERED_FIRST, LAYERED_EVERY_S = 1000, 60.0
"""Of so many steps the norms of all layers are kept, later those of one step in so many seconds."""
DISK_S = 5.0
"""How long the end of a run waits for a disk that hangs."""
HOOKS_S = 5.0
"""How long the end of a run that failed waits for hooks."""
DROP_REASONS: Mapping[Dropped, str] = MappingProxyType(
    {
        "stale": "its weights were older than staleness.bound allows",
        "late": "its lease had been taken back",
        "duplicate": "its samples had been applied already",
        "non_finite": "it held NaN or infinity",
    }
)
_CHANGES: Mapping[type[Event], Presence] = MappingProxyType(
    {WorkerJoined: "joined", WorkerLeft: "left", WorkerLost: "lost"}
)


class Report(Listener):
    """Tells what the deciding thread says to everybody who wants to know."""

    def __init__(
        self,
        *,
        run: RunConfig,
        node: str,
        num_workers: int,
        codec: str,
        training: TrainingContext,
        records: Records,
        log: logging.Logger,
        bytes_moved: Callable[[], tuple[int, int]],
        check_stop: Callable[[], None] = lambda: None,
        mesh: MeshSizes | None = None,
    ) -> None:
        """Begin with a run that has not taken a step.

        Args:
            node: this machine's name.
            bytes_moved: counts bytes sent and received.
            check_stop: raises when a signal has asked this process to stop.
            mesh: the mesh of which this process is rank 0; None: it is on none.
        """
        super().__init__(training.replica.meter)
        self._run = run
        self._node = node
        self._codec = codec
        self._training = training
        self._records = records
        self._log = log
        self._check_stop = check_stop
        self._rank = None if mesh is None else 0
        self.counts = Counts(run.train, training.num_samples)
        self.rates = Rates(self.counts, bytes_moved)
        self.board = StatusBoard(self.counts.tally)
        self._process_stats = ProcessStats(self.meter)
        self._own_stats_due = Cadence(0, OWN_STATS_EVERY_S)
        self._gauges = defaultdict[int | None, Gauge](Gauge)
        """Of the run's owner and of the other ranks of a mesh, by rank."""
        self._ranks: dict[int, RankStatus] = {}
        self._layers = Cadence(NUM_LAYERED_FIRST, LAYERED_EVERY_S)
        self._unsaved = ""
        self._begun_at = instant(time.time())
        self._newest: StepTaken | None = None
        self._hooks = hooks.HookCalls(training.workload.training.hooks, log, check_stop)
        self.evaluated_version = 0
        self._evaluation: Evaluation | None = None
        """Of the weights of `evaluated_version`."""
        records.events.write(
            RunStarted(
                run_id=run.run_id,
                algorithm=run.algorithm,
                node=node,
                num_workers=num_workers,
                num_epochs=run.train.num_epochs,
                train_samples=training.num_samples,
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

    def contributed(
        self, worker: Worker, num_samples: int, loss: float, staleness: int = 0
    ) -> None:
        """A push of this worker, of mean `loss`, has been applied, or will be with the step it belongs to."""
        worker_id, node = worker.member.worker_id, worker.member.node
        self.counts.tally.applied(worker_id, node, num_samples, staleness)
        self.board.contributed(worker, self.counts.version + 1, loss)

    def step_taken(self, step: StepTaken) -> None:
        self._newest = step
        num_samples = step.samples.num_samples
        is_last = self.counts.step_taken(step.version, step.samples, step.loss, step.num_terms)
        self._measured("step", self._values(step), step.rank, step.node)
        if is_last:
            self._records.events.write(
                EpochFinished(
                    epoch=step.samples.epoch,
                    step=step.version,
                    samples_applied=self.counts.samples_applied,
                )
            )
        if step.is_skipped:
            now = "" if self._scale is None else f"; the loss scale is {self._scale:g} now"
            self._log.info(
                "step %d is skipped: a gradient overflowed in float16%s", step.version, now
            )
        self.meter.step_done(num_samples)
        self._hooks.tell(
            hooks.StepDone(
                step=step.version,
                epoch=step.samples.epoch,
                num_samples=num_samples,
                samples_applied=self.counts.samples_applied,
                total_samples=self.counts.total_samples,
                loss=step.loss,
                num_terms=step.num_terms,
                learning_rate=step.learning_rate,
                grad_norm=step.grad_norm,
                rank=step.rank,
                node=step.node,
                staleness=step.staleness,
            )
        )

    def _measured(
        self, kind: MetricKind, values: Mapping[str, float], rank: int | None, node: str | None
    ) -> None:
        """Report values that were measured at the newest step."""
        counts = self.counts
        self._records.metrics.log(
            MetricRecord(kind, counts.version, counts.epoch, values, rank=rank, node=node)
        )

    def layer_norms(self, gradient: Tensor | None = None) -> dict[str, float]:
        """L2 norms of a gradient as `Replica` measures them; empty where untracked, or not due or whole."""
        replica = self._training.replica
        is_whole = gradient is None or gradient.numel() == replica.num_params
        if not (self._run.train.track_gradients and self._layers.is_due and is_whole):
            return {}
        return replica.layer_norms(gradient)

    def heard(self, worker: Worker, message: Telemetry | Logged) -> None:
        if isinstance(message, Logged):
            self._logged(worker, message.values)
            return
        kept = worker.gauge.take(message)
        if kept is not None:
            self._measured("worker", kept | link_stats(worker), **worker.who)
        best = worker.live_session.clocks.best
        if self._records.spans and best:
            self._records.spans.write("worker", message, ahead_s=best.offset_s, **worker.who)

    def process_heard(self, rank: int | None, node: str, telemetry: Telemetry) -> None:
        """A rank of a mesh has told what it has done; None: the run's owner, which is on no mesh."""
        kind: Literal["rank", "server"] = "server" if rank is None else "rank"
        gauge = self._gauges[rank]
        kept = gauge.take(telemetry)
        if rank is not None:
            self._ranks[rank] = RankStatus(
                rank=rank,
                node=node,
                process_stats=gauge.values,
                last_seen=instant(time.time()),
            )
        if kept is not None:
            self._measured(kind, kept, rank, node)
        if self._records.spans:
            self._records.spans.write(kind, telemetry, rank=rank, node=node)

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint of this step is on the disk, in `folder`. Any thread."""
        self._unsaved = ""
        self._records.events.write(CheckpointSaved(step=step))
        self._hooks.tell(hooks.CheckpointSaved(step, folder))

    def not_saved(self, step: int, error: Exception) -> None:
        """There is no checkpoint of this step, because of an error. Any thread."""
        if is_out_of_space(error):
            why = f"no space is left on the disk of {self._node}"
        else:
            why = str(error) if isinstance(error, SmolclusterError) else repr(error)
        self._unsaved = one_line(f"step {step} is not saved: {why}")[:MAX_SENTENCE_CHARS]

    @property
    def trouble(self) -> str:
        """What cannot be saved, and why; empty: nothing. Any thread."""
        status = self._records.status
        if status is not None and status.has_full_disk:
            return no_space_on(self._node)
        return self._unsaved

    @property
    def ending(self) -> str:
        return self.counts.ending

    @property
    def known_nodes(self) -> Mapping[int, str]:
        return {number: each.node for number, each in self.counts.tally.workers.items()}

    def begun(self) -> None:
        self.rates.begin()

    def happened(self, event: Event, worker: Worker | None = None) -> None:
        """Write an event down; `worker`: whom it concerns, if it joins or goes."""
        change = _CHANGES.get(type(event))
        if worker is not None and isinstance(event, WorkerJoined):
            self.counts.tally.worker(worker.member.worker_id, worker.member.node)
            self.board.joined(worker, event.device)
        elif worker is not None and change is not None:
            self.board.departed(worker, change)
        self._records.events.write(event)
        if worker is not None and change is not None:
            reason = getattr(event, "reason", "")
            self._hooks.tell(hooks.WorkerChanged(**worker.who, change=change, reason=reason))

    def dropped(
        self,
        worker: Worker,
        lease: LeaseKey,
        outcome: Dropped,
        staleness: int | None,
        reason: str = "",
    ) -> None:
        """A push was not applied, or not sent at all; an empty `reason` stands for the usual one."""
        self.counts.tally.pushes[outcome] += 1
        reason = reason or DROP_REASONS[outcome]
        level = logging.WARNING if outcome == "non_finite" else logging.INFO
        name = outcome.replace("_", "-")
        self._log.log(level, "%s: a push was dropped as %s: %s", worker.name, name, reason)
        self._records.events.write(
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
        self.counts.tally.pushes["lost"] += 1
        self._log.info("%s: a push was lost: %s", whose, reason)

    def lease_returned(self, worker: Worker, samples: Range, reason: str) -> None:
        """Samples that were handed out to `worker` will be handed out again."""
        self.counts.tally.leases_returned += 1
        self._records.events.write(
            LeaseReturned(
                **worker.who,
                epoch=samples.epoch,
                start=samples.start,
                stop=samples.stop,
                reason=reason,
            )
        )

    def steps_undone(self, node: str, num_steps: int, share: float) -> None:
        """The store on `node` is lost; its slice is `share` of the weights, 0 to 1."""
        self.counts.tally.steps_undone += num_steps * share
        self._records.events.write(StepsUndone(node=node, num_steps=num_steps, share=share))

    def evaluate(self) -> None:
        """Evaluate the weights of now, if anything is held out, and tell of it.

        Raises:
            Interrupted: a signal asked this process to stop meanwhile.
            NonFiniteLoss, UserCodeError: see `TrainingContext.evaluate`.
        """
        evaluation = self._training.evaluate(before_batch=self._check_stop)
        if evaluation is not None:
            self.evaluated(self.counts.version, self.counts.epoch, evaluation)

    def evaluated(self, version: int, epoch: int, evaluation: Evaluation) -> None:
        self.counts.evaluated(evaluation.loss)
        self.evaluated_version, self._evaluation = version, evaluation
        self._records.metrics.log(MetricRecord("eval", version, epoch, evaluation.values))
        self._records.events.write(Evaluated(epoch=epoch, step=version, **evaluation.values))
        self._log.info("epoch %d, step %d: %s", epoch + 1, version, evaluation)
        metrics = dict(evaluation.metrics)
        self._hooks.tell(hooks.EvaluationDone(version, epoch, evaluation.loss, metrics))

    def _logged(self, worker: Worker, values: Mapping[str, float]) -> None:
        """What a user's own loop has measured; with a `val_loss` it is an evaluation of these weights.

        Those of one worker are the run's, so that patience counts each once; another's are kept as its own.
        Values under a name of a record's own field are left out: the run counts its steps and epochs itself.
        """
        measured = {name: values[name] for name in values if name not in RESERVED}
        if "val_loss" in measured and self.board.is_evaluator(worker):
            loss = measured.pop("val_loss")
            metrics = {name.removeprefix("val_"): measured[name] for name in measured}
            self.evaluated(self.counts.version, self.counts.epoch, Evaluation(loss, metrics))
        elif measured:
            self._measured("worker", measured, **worker.who)

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
        counts, newest = self.counts, self._newest
        values = self._evaluation.values if self._evaluation else {}
        measured: dict[str, Any] = {
            **dict.fromkeys(("val_loss", "val_accuracy", "val_perplexity")),
            **values,
        }
        own = self._run.of(config_of(spec_of(self._run.algorithm)))
        return RunStatus(
            run_id=self._run.run_id,
            algorithm=self._run.algorithm,
            incarnation=self._records.incarnation,
            state=state,
            reason=reason,
            updated_at=instant(time.time()),
            started_at=self._begun_at,
            wall_s=self.rates.wall_s,
            step=counts.version,
            total_steps=self.rates.total_steps,
            epoch=counts.epoch,
            num_epochs=self._run.train.num_epochs,
            samples_applied=counts.samples_applied,
            total_samples=counts.total_samples,
            loss=newest.loss if newest and not math.isnan(newest.loss) else None,
            learning_rate=newest.learning_rate if newest else None,
            grad_norm=newest.grad_norm if newest else None,
            overflows=self._num_overflows,
            pushes=dict(counts.tally.pushes),
            leases_returned=counts.tally.leases_returned,
            process_stats=self._gauges[self._rank].values,
            **measured,
            samples_per_s=self.rates.samples(),
            trouble=self.trouble or None,
            workers=self.board.workers(),
            ranks=[self._ranks[rank] for rank in sorted(self._ranks)],
            **own.status_fields,
        )

    def flush(self) -> None:
        self._records.metrics.flush()
        self._records.events.flush()

    def tick(self) -> None:
        """Say what is due; others write it.

        Raises:
            UserCodeError: a hook of the user's raised an exception, or hangs.
        """
        self._hooks.check()
        if self._own_stats_due.take():
            self.process_heard(self._rank, self._node, self._process_stats.report())
        if self._records.status:
            state: RunState = "waiting" if self.is_waiting else "training"
            self._records.status.ask(lambda: self.status(state))

    def summary(self) -> Summary:
        """Evaluate the final weights, if they are not yet, and sum up the run.

        Raises:
            Interrupted: a signal asked this process to stop meanwhile.
            UserCodeError: a metric or a hook of the user's raised an exception.
        """
        counts, tally = self.counts, self.counts.tally
        if counts.has_given_up:
            self._log.info("the run ends early: %s", counts.ending)
        if self._evaluation is None or self.evaluated_version != counts.version:
            self.evaluate()
        final = self._evaluation  # with nothing held out, the last that a user's loop has told
        self._hooks.finish()
        sent, received = self.rates.traffic
        return Summary(
            algorithm=self._run.algorithm,
            run_id=self._run.run_id,
            wall_s=self.rates.wall_s,
            epochs=counts.epoch + 1 if counts.has_given_up else self._run.train.num_epochs,
            num_bad_evals=tally.num_worse if counts.has_given_up else None,
            steps=counts.version,
            train_samples=counts.epoch_size,
            samples_applied=counts.samples_applied,
            tokens_per_sample=self._training.workload.tokens_per_sample,
            codec=self._codec,
            pushes=Pushes(**tally.pushes),
            leases_returned=tally.leases_returned,
            steps_undone=tally.steps_undone,
            final=Final(train_loss=counts.train_loss, **(final.values if final else {})),
            lowest_val_loss=tally.lowest_val_loss,
            bytes=Traffic(sent=sent, received=received),
            workers=counts.shares(),
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
        try:  # they hear of the end, too, which does not depend on them any more
            self._hooks.finish(HOOKS_S if error else hooks.PATIENCE_S)
        except SmolclusterError as failure:
            self._log.log(logging.ERROR, "%s", failure, exc_info=failure)
        records = self._records
        reason = self.counts.ending if error is None else why_ended(error, records.folder)
        records.events.write(
            RunEnded(
                ok=error is None,
                reason=reason,
                wall_s=self.rates.wall_s,
                steps=self.counts.version,
                samples_applied=self.counts.samples_applied,
            )
        )
        is_failure = error is not None and reason != STOPPED
        status = self.status("failed" if is_failure else "ended", reason)

        def write() -> None:
            self.flush()  # who reads that the run is over finds all of it
            if records.status:
                records.status.write(status)

        writing = threading.Thread(target=write, name="end", daemon=True)
        writing.start()
        writing.join(DISK_S)

    def training_state(self, progress: Progress) -> TrainingState:
        """Where the run stands, for a checkpoint; `progress` is what the algorithm adds."""
        counts, rates = self.counts, self.rates
        tally = counts.tally.model_copy(update={"wall_s": rates.wall_s, "traffic": rates.traffic})
        return TrainingState(
            run_id=self._run.run_id,
            algorithm=self._run.algorithm,
            incarnation=self._records.incarnation,
            step=counts.version,
            samples_applied=counts.samples_applied,
            epoch=counts.epoch,
            dataset_fingerprint=self._training.workload.fingerprint,
            seed=self._run.seed,
            codec=self._codec,
            train_loss=counts.train_loss,
            progress={**progress, COUNTS: tally.model_dump(mode="json")},
        )

    def with_evaluation(self, state: TrainingState) -> TrainingState:
        """The same state, with what has become known of its weights since, if anything has."""
        if self._evaluation is None or self.evaluated_version != state.step:
            return state
        counts = state.progress[COUNTS]
        assert isinstance(counts, dict)  # noqa: S101 - `training_state` has put it there
        counts = counts | {
            "lowest_val_loss": self.counts.tally.lowest_val_loss,
            "num_worse": self.counts.tally.num_worse,
        }
        known = {"val_loss": self._evaluation.loss, "progress": state.progress | {COUNTS: counts}}
        return state.model_copy(update=known)

    def resume(self, state: TrainingState) -> None:
        """Count on from where a checkpoint stood; workers that are there stay.

        Raises:
            CheckpointError: it does not say what was counted.
        """
        before = self.counts.tally.traffic
        self.counts.resume(state)
        if state.incarnation == self._records.incarnation:  # it has what this process has moved
            self.counts.tally.traffic = before
        self.board.count_on(self.counts.tally)
        self.rates.begin()
        self._records.events.write(
            RunResumed(step=state.step, samples_applied=state.samples_applied)
        )

    def _values(self, step: StepTaken) -> dict[str, float]:
        values = {} if math.isnan(step.loss) else {"loss": step.loss}
        values |= {
            "lr": step.learning_rate,
            "samples_applied": self.counts.samples_applied,
            "total_samples": self.counts.total_samples,
            "total_steps": self.rates.total_steps,
            "samples_per_s": self.rates.samples_of_step(),
            "mb_per_s": self.rates.bytes_of_step() / 1e6,
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
    if not isinstance(as_raised(error), Exception):
        why = None if folder is None else why_asked(folder)
        return STOPPED if why is None else failed(why)
    kind = "" if isinstance(error, SmolclusterError) else f"{type(error).__name__}: "
    reason = failed(f"{kind}{error}")
    return reason.encode(errors="backslashreplace").decode()  # it may name any file
