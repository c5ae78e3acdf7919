"""A run on a mesh: rank 0 owns it, as the one process of `train` does, and tells the others what to do.

Rank 0 keeps the whole model and the optimizer's state in a replica of its own, and fills it from the mesh
when it is evaluated or saved; a save is filled while the next steps are taken. So a checkpoint is that of any
other run, and a run goes on with any other mesh.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from enum import IntEnum
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.instruction_log import InstructionLog, logged
from smolcluster.algorithms.Mesh.config import MeshConfig, check_no_average
from smolcluster.algorithms.Mesh.gathering import StateGathering
from smolcluster.algorithms.Mesh.groups import Groups, lost_named
from smolcluster.algorithms.Mesh.profiling import StepProfiler
from smolcluster.algorithms.Mesh.shards import Shards
from smolcluster.algorithms.Mesh.trainer import WEIGHTS, MeshTrainer
from smolcluster.configs.schema import TrainConfig
from smolcluster.errors import ConfigError, NonFiniteLoss, PeerLost
from smolcluster.runs.summary import Summary
from smolcluster.server.process_stats import ProcessStats
from smolcluster.server.report import Report
from smolcluster.server.saver import CheckpointSource, Saver
from smolcluster.training.loop import StepTaken
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer
from smolcluster.training.replica import LOSS_SCALE, Replica
from smolcluster.training.workload import Workload
from smolcluster.utils.gpu import watched
from smolcluster.utils.meter import Meter
from smolcluster.utils.peak_memory import PeakMemory
from smolcluster.utils.stopping import Interrupted
from smolcluster.wire.messages import Telemetry

MOST_SHARED = 4 << 20
"""Elements of the weights that rank 0 tells the others at a time."""


class Order(IntEnum):
    """What rank 0 tells all ranks to do."""

    STOP = 0
    STEP = 1
    GATHER = 2


def train(context: ServerContext, config: MeshConfig, groups: Groups) -> Summary:
    """Rank 0: train until the run is over.

    Raises:
        NonFiniteLoss: the weights are those before the step.
        PeerLost: another rank has ended.
        Interrupted: a signal asked this process to stop.
    """
    training, replica = context.training, context.training.replica

    def check_stop() -> None:
        context.check_stop()
        groups.note("evaluating")

    report = context.new_report(check_stop=check_stop, mesh=config.mesh)
    source = CheckpointSource(replica, dict, dict)
    context.resume(source, report)
    train = training.recipe.applied_to(context.run.train)
    with _stopped_first(context), lost_named():
        groups.all_told(context.run.run_id)
        meter = _measuring(replica.meter, train, groups)
        trainer = _trainer(
            training.workload, train, config, groups, seed=context.run.seed, meter=meter
        )
        trainer.check_cutting(context.log)
        trainer.scaler = replica.scaler  # whose state is saved, and shown
        shards = Shards(trainer, replica.layers)
        share_state(trainer, shards, {WEIGHTS: replica.params, **_state_of(replica)})
        whole = _Whole(trainer, shards, replica, report)
    source = replace(source, extra=whole.loss_scale, fill=whole.wait)
    saver = context.new_saver(source, report, lambda: groups.note("saving the last checkpoint"))
    context.log.info(
        "training %s on %d ranks, %s: %d samples an epoch, %d epochs",
        type(replica.model).__name__,
        config.mesh.world_size,
        config.mesh,
        trainer.num_samples,
        context.run.train.num_epochs,
    )
    eval_steps = context.run.train.eval_steps
    profiler = _profiler(config, groups, context.records.folder, context.log)
    with (
        closing(training),
        logged(config.instruction_log, 0, groups["pp"], context.log.warning) as instructions,
        _others_told(groups),
        closing(profiler) if profiler is not None else nullcontext(),
        report.until_its_end(),
        saver,
        whole.saved_only_if_newest(saver),
    ):
        while not report.counts.is_over:
            try:
                context.check_stop()
            except Interrupted as stopped:
                if stopped.is_orderly:
                    whole.gather(saver)
                raise
            applied, version = report.counts.samples_applied, report.counts.version + 1
            _tell(groups, Order.STEP, applied, version)
            step = _step(trainer, applied, version, instructions, profiler)
            report.step_taken(step)
            for rank, beat in groups.watch.take_newest():
                with suppress(ValidationError):
                    telemetry = Telemetry.model_validate(beat.counted)
                    report.process_heard(rank, beat.host, telemetry)
            is_evaluated = version % eval_steps == 0 and not report.counts.is_over
            if is_evaluated or report.counts.is_over:
                whole.gather(saver)
            elif saver.is_due(version):
                whole.begin(saver)
            saver.after_step(is_evaluated=is_evaluated)  # first: an evaluation may fail
            if is_evaluated:
                saver.wait_for_copy()  # the evaluation is of the same buffers
                report.evaluate()
            groups.note("recording the step")
            saver.tick()
            report.tick()
        return saver.summary()


@contextmanager
def _stopped_first(context: ServerContext) -> Iterator[None]:
    """Before the first step: ranks that have yet to load end at once where all are asked to stop.

    Raises:
        Interrupted: this one is.
    """
    try:
        yield
    except PeerLost:
        context.check_stop()
        raise


class _Whole:
    """Rank 0's whole model: that of the step at which its gathering was begun last, once that is over."""

    def __init__(
        self, trainer: MeshTrainer, shards: Shards, replica: Replica, report: Report
    ) -> None:
        self._trainer, self._replica, self._report = trainer, replica, report
        self._gathering = StateGathering(trainer, shards)
        self._version = report.counts.version

    def begin(self, saver: Saver) -> None:
        """Let all ranks send the newest step, if it is not here or on its way."""
        if self._version == self._report.counts.version:
            return
        self._wait_noted()
        saver.wait_for_copy()
        _tell(self._trainer.groups, Order.GATHER)
        state = _state_of(self._replica)
        if STEP_COUNT in state:
            state[STEP_COUNT].fill_(self._trainer.optimizer.num_steps)
        self._gathering.begin({WEIGHTS: self._replica.params, **state})
        self._version = self._report.counts.version

    def wait(self) -> None:
        """Return when it is here."""
        self._gathering.wait()

    def loss_scale(self) -> dict[str, Tensor]:
        """That of now, for a checkpoint that is filled while steps go on."""
        scaler = self._replica.scaler
        return {} if scaler is None else {LOSS_SCALE: scaler.state.clone()}

    def gather(self, saver: Saver) -> None:
        """Have the newest step here."""
        self.begin(saver)
        self._wait_noted()

    @contextmanager
    def saved_only_if_newest(self, saver: Saver) -> Iterator[None]:
        """Let no end of the block be saved as a step that the model is older than."""
        try:
            yield
        except NonFiniteLoss:  # the others are there, and send what was begun
            self._wait_noted()
            raise
        except Interrupted as stopped:
            if not stopped.is_orderly:
                self._gathering.abandon()
            raise
        finally:
            if self._version != self._report.counts.version or self._gathering.has_failed:
                saver.skip_end()

    def _wait_noted(self) -> None:
        note = self._trainer.groups.note
        self._gathering.wait(partial(note, "gathering weights and moments", waits=True))


def follow(
    workload: Workload,
    train: TrainConfig,
    config: MeshConfig,
    groups: Groups,
    *,
    seed: int,
    begin: Callable[[str], Path],
    log: logging.Logger,
) -> None:
    """Any other rank: do what rank 0 says until it is over.

    Args:
        begin: is told the run's id, and returns the run's folder on this machine.

    Raises:
        PeerLost: another rank has ended.
    """
    noted = logged(config.instruction_log, groups.rank, groups["pp"], log.warning)
    with lost_named(), noted as instructions:
        folder = begin(groups.all_told("")[0])
        train = workload.training.applied_to(train)
        meter = _measuring(Meter(), train, groups)
        trainer = _trainer(workload, train, config, groups, seed=seed, meter=meter)
        trainer.check_cutting(log)
        stats = ProcessStats(meter)
        groups.watch.tell(lambda: stats.report(with_spans=False).model_dump())
        shards = Shards(trainer, ())
        share_state(trainer, shards)
        gathering = StateGathering(trainer, shards)
        profiler = _profiler(config, groups, folder, log)
        while True:
            groups.note("waiting for rank 0's word", waits=True)
            with meter("wait"):
                order, applied, version = _hear(groups)
            if order == Order.STOP:
                if profiler is not None:
                    profiler.close()
                gathering.wait()
                dist.barrier()
                groups.watch.close()
                return
            if order == Order.GATHER:
                gathering.begin()
                continue
            with suppress(NonFiniteLoss):  # rank 0 says so, and then stop
                _step(trainer, applied, version, instructions, profiler)
            meter.step_done(trainer.num_samples_here)


def _step(
    trainer: MeshTrainer,
    applied: int,
    version: int,
    log: InstructionLog | None,
    profiler: StepProfiler | None,
) -> StepTaken:
    note = None
    if log is not None:
        log.tick()
        note = log.of_step(version)
    step = trainer.step(applied, version, note)
    if profiler is not None:
        profiler.stepped()
    return step


def _profiler(
    config: MeshConfig, groups: Groups, folder: Path | None, log: logging.Logger
) -> StepProfiler | None:
    if config.profile is None:
        return None
    assert folder is not None  # noqa: S101 - a run on a mesh has one
    return StepProfiler(config.profile, groups, folder, log)


def _measuring(meter: Meter, train: TrainConfig, groups: Groups) -> Meter:
    """Let it measure what this rank computes on, which the replica of rank 0 is not on."""
    meter.gpu = watched(groups.device)
    meter.memory = PeakMemory(groups.device) if train.memory_profiling else None
    return meter


def _trainer(
    workload: Workload,
    train: TrainConfig,
    config: MeshConfig,
    groups: Groups,
    *,
    seed: int,
    meter: Meter,
) -> MeshTrainer:
    groups.check_data(workload, seed)
    check_no_average(train)
    return MeshTrainer(workload, train, config, groups, seed=seed, meter=meter)


def share_state(
    trainer: MeshTrainer, shards: Shards, whole: Mapping[str, Tensor] | None = None
) -> None:
    """Give all ranks what rank 0 has: `whole` weights and moments, flat, by name, and the loss scale."""
    groups, optimizer = trainer.groups, trainer.optimizer
    counted = None if whole is None else whole.get(STEP_COUNT)
    num_steps, *_ = groups.all_told(0 if counted is None else int(counted))
    weights = {number: slot.local for number, slot in enumerate(trainer.slots)}
    own, everything = {WEIGHTS: weights}, [slice(0, shards.num_elements)]
    for name in optimizer.moment_names if num_steps else ():
        own[name] = {number: torch.zeros_like(each) for number, each in weights.items()}
    for name, locals_ in own.items():
        values = None if whole is None else [whole[name]]
        for place, told in shards.shared(everything, values, MOST_SHARED):
            shards.put(place, told, locals_)
    if num_steps:
        moments = [
            {name: own[name][number] for name in optimizer.moment_names} for number in weights
        ]
        optimizer.resume(moments, num_steps)
    if trainer.scaler is not None:
        scale, *_ = groups.all_told(trainer.scaler.state.tolist())
        trainer.scaler.state.copy_(torch.tensor(scale, dtype=torch.float64))


def _state_of(replica: Replica) -> dict[str, Tensor]:
    optimizer = replica.optimizer
    if not isinstance(optimizer, FlatOptimizer):
        raise ConfigError("the optimizer of a mesh must be one of adam, adamw, sgd")
    return optimizer.state


@contextmanager
def _others_told(groups: Groups) -> Iterator[None]:
    """Tell the others when rank 0 ends between two steps.

    Raises:
        PeerLost: one of them has ended before.
    """
    try:
        with lost_named():
            yield
    except (Interrupted, NonFiniteLoss) as end:  # between two steps, or on all ranks alike
        if not isinstance(end, Interrupted) or end.is_orderly:
            _stop(groups)
        raise
    _stop(groups)


def _stop(groups: Groups) -> None:
    """Tell the others that it is over; within a step none would listen, and the process's end tells them."""
    with suppress(RuntimeError):
        _tell(groups, Order.STOP)
        dist.barrier()
        groups.watch.close()


def _tell(groups: Groups, order: Order, applied: int = 0, version: int = 0) -> None:
    dist.broadcast(torch.tensor([order, applied, version], device=groups.device), src=0)


def _hear(groups: Groups) -> tuple[Order, int, int]:
    told = torch.zeros(3, dtype=torch.int64, device=groups.device)
    dist.broadcast(told, src=0)
    order, applied, version = told.tolist()
    return Order(order), applied, version
