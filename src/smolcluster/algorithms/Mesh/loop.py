"""A run on a mesh: rank 0 owns it, as the one process of `train` does, and tells the others what to do.

Rank 0 keeps the whole model and the optimizer's state in a replica of its own, and fills it from the mesh
when it is evaluated or saved. So a checkpoint is that of any other run, and a run goes on with any other
mesh.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.instruction_log import InstructionLog, logged
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.groups import Groups, lost_named
from smolcluster.algorithms.Mesh.profiling import StepProfiler
from smolcluster.algorithms.Mesh.trainer import WEIGHTS, MeshStep, MeshTrainer
from smolcluster.cluster.report import Report, StepTaken
from smolcluster.cluster.saver import CheckpointSource, Saver
from smolcluster.configs.schema import TrainConfig
from smolcluster.data.permutation import Range
from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.runs.summary import Summary
from smolcluster.training.optimizer import STEP_COUNT, FlatOptimizer
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload
from smolcluster.utils.stopping import Interrupted


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
    report = context.new_report()
    source = CheckpointSource(replica, dict, dict)
    context.resume(source, report)
    saver = context.new_saver(source, report, lambda: groups.note("saving the last checkpoint"))
    train = training.recipe.applied_to(context.run.train)
    with lost_named():
        groups.all_told(context.run.run_id)
        trainer = _trainer(training.workload, train, config, groups, context.run.seed)
        _share_state(trainer, replica)
    context.log.info(
        "training %s on %d ranks, %s: %d samples an epoch, %d epochs",
        *(type(replica.model).__name__, config.mesh.world_size, config.mesh),
        *(trainer.num_samples, context.run.train.num_epochs),
    )
    eval_steps = context.run.train.eval_steps
    profiler = _profiler(config, groups, context.folder, context.log)
    with (
        closing(training),
        logged(config.instruction_log, 0, groups["pp"], context.log.warning) as instructions,
        _others_told(groups),
        closing(profiler) if profiler is not None else nullcontext(),
        report.until_its_end(),
        saver,
    ):
        whole = _Whole(trainer, replica, saver, report)
        with whole.saved_only_if_newest():
            while not report.is_over:
                try:
                    context.check_stop()
                except Interrupted:
                    whole.gather()
                    raise
                applied = report.samples_applied
                _tell(groups, Order.STEP, applied)
                step = _step(trainer, applied, instructions, profiler)
                num = trainer.num_samples_at(applied)
                version = report.version + 1
                report.step_taken(_taken(step, version, applied, num, trainer.num_samples))
                is_evaluated = version % eval_steps == 0 and not report.is_over
                if is_evaluated or report.is_over or saver.is_due(version):
                    whole.gather()

                def before_batch() -> None:
                    context.check_stop()
                    groups.note("evaluating")

                evaluation = training.evaluate(before_batch=before_batch) if is_evaluated else None
                if evaluation is not None:
                    report.evaluated(version, applied // trainer.num_samples, evaluation)
                groups.note("recording the step")
                saver.after_step(is_evaluated=evaluation is not None)
                saver.tick()
                report.tick()
            return report.summary()


class _Whole:
    """Rank 0's whole model, which is that of the step at which it was gathered last."""

    def __init__(
        self, trainer: MeshTrainer, replica: Replica, saver: Saver, report: Report
    ) -> None:
        self._trainer, self._replica, self._saver, self._report = trainer, replica, saver, report
        self._version = report.version

    def gather(self) -> None:
        if self._version != self._report.version:
            self._saver.wait_for_copy()
            _gather(self._trainer, self._replica)
            self._version = self._report.version

    @contextmanager
    def saved_only_if_newest(self) -> Iterator[None]:
        """Let no end of the block be saved as a step that the model is older than."""
        try:
            yield
        finally:
            if self._version != self._report.version:
                self._saver.skip_end()


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
        trainer = _trainer(workload, workload.training.applied_to(train), config, groups, seed)
        _share_state(trainer, None)
        profiler = _profiler(config, groups, folder, log)
        while True:
            groups.note("waiting for rank 0's word", waits=True)
            order, applied = _hear(groups)
            if order == Order.STOP:
                if profiler is not None:
                    profiler.close()
                dist.barrier()
                groups.end_watch()
                return
            if order == Order.GATHER:
                for _ in trainer.gather():
                    pass
                continue
            with suppress(NonFiniteLoss):  # rank 0 says so, and then stop
                _step(trainer, applied, instructions, profiler)


def _step(
    trainer: MeshTrainer,
    applied: int,
    log: InstructionLog | None,
    profiler: StepProfiler | None,
) -> MeshStep:
    note = None
    if log is not None:
        log.tick()
        note = log.of_step(trainer.num_steps + 1)
    step = trainer.step(applied, note)
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


def _trainer(
    workload: Workload, train: TrainConfig, config: MeshConfig, groups: Groups, seed: int
) -> MeshTrainer:
    groups.check_agreed([("the dataset", workload.fingerprint)])
    if train.ema_decay is not None:
        raise ConfigError(
            f"ema_decay is {train.ema_decay:g}, but on a mesh nobody averages weights: set it to null"
        )
    return MeshTrainer(workload, train, config, groups, seed=seed)


def _taken(step: MeshStep, version: int, applied: int, num: int, num_samples: int) -> StepTaken:
    epoch, start = divmod(applied, num_samples)
    return StepTaken(
        version=version,
        samples=Range(epoch, start, start + num),
        loss=step.loss,
        learning_rate=step.learning_rate,
        grad_norm=step.grad_norm,
        layer_norms={},
        num_terms=step.num_terms,
        is_skipped=step.is_skipped,
    )


def _gather(trainer: MeshTrainer, replica: Replica) -> None:
    """Fill rank 0's replica from the mesh."""
    _tell(trainer.groups, Order.GATHER)
    places, state = dict(replica.layers), _state_of(replica)
    for whole in trainer.gather():
        target = replica.params if whole.moment == WEIGHTS else state[whole.moment]
        target[places[whole.name]].copy_(whole.tensor.reshape(-1))
    if STEP_COUNT in state:
        state[STEP_COUNT].fill_(trainer.num_steps)


def _share_state(trainer: MeshTrainer, replica: Replica | None) -> None:
    """Give all ranks the weights and moments that rank 0's replica has."""
    state = {} if replica is None else _state_of(replica)
    places = {} if replica is None else dict(replica.layers)

    def whole(name: str, moment: str) -> Tensor:
        if replica is None:
            raise RuntimeError("only rank 0 has the whole model")
        return (replica.params if moment == WEIGHTS else state[moment])[places[name]]

    counted = state.get(STEP_COUNT)
    trainer.scatter(whole, 0 if counted is None else int(counted))


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
        groups.end_watch()


def _tell(groups: Groups, order: Order, applied: int = 0) -> None:
    dist.broadcast(torch.tensor([order, applied], device=groups.device), src=0)


def _hear(groups: Groups) -> tuple[Order, int]:
    told = torch.zeros(2, dtype=torch.int64, device=groups.device)
    dist.broadcast(told, src=0)
    order, applied = told.tolist()
    return Order(order), applied
