"""Training steps on a mesh, equal to those of one process with the same batches."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smolcluster.algorithms.Mesh.compute import adding_up, stage_compute
from smolcluster.algorithms.Mesh.config import SPLIT, MeshConfig, cut_equally, what_takes_less
from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.algorithms.Mesh.layers_watch import LayersWatch
from smolcluster.algorithms.Mesh.links import MeshLinks
from smolcluster.algorithms.Mesh.optimizer import MeshOptimizer, TiedWeights, sum_replicas
from smolcluster.algorithms.Mesh.parallel import Slot, plan_of, seed_parts, spread
from smolcluster.configs.schema import TrainConfig
from smolcluster.data.dataset import Place
from smolcluster.data.permutation import EpochOrders, Range
from smolcluster.errors import NonFiniteLoss, OutOfMemory, UserCodeError
from smolcluster.training.buffers import plain_name
from smolcluster.training.compute import Microbatch
from smolcluster.training.cutting import CutCheck
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.loop import StepTaken
from smolcluster.training.modes import begin_training
from smolcluster.training.muon import choose
from smolcluster.training.optimizer import MUON
from smolcluster.training.recipe import OptimizerSpec
from smolcluster.training.replica import DIVERGENCE_REMEDY
from smolcluster.training.scaler import LEAST_SCALE, LossScaler
from smolcluster.training.schedule import learning_rate
from smolcluster.training.schedules.instructions import stage_ranks
from smolcluster.training.schedules.simulation import Span
from smolcluster.training.stages.build import build_stage, num_layers, outline
from smolcluster.training.stages.compute import StageCompute
from smolcluster.training.stages.execution import execute
from smolcluster.training.workload import Workload
from smolcluster.utils.device_errors import first_line, is_out_of_memory
from smolcluster.utils.meter import Meter
from smolcluster.utils.user_code import user_code

WEIGHTS = ""
"""Names a parameter itself among its moments."""


@dataclass(frozen=True)
class Computed:
    """Loss and gradient of some samples, the same on all ranks but for `gradients`, of the rank's own parts.

    Attributes:
        loss: mean over the loss terms.
        grad_norm: L2 norm of the whole gradient.
        gradients: of each slot's local part; a step uses them up.
    """

    loss: float
    num_terms: float
    grad_norm: float
    gradients: list[Tensor]


class MeshTrainer:
    """This rank's part of the training.

    Attributes:
        slots: the parameters of this rank's stages.
        optimizer: steps this rank's parts of them.
        num_samples: of an epoch.
        dtype: of the weights, those of other ranks included.
        num_samples_here: that this rank has computed of the newest step.
        scaler: of a float16 run, in which all ranks' follow the same steps.
    """

    def __init__(
        self,
        workload: Workload,
        train: TrainConfig,
        config: MeshConfig,
        groups: Groups,
        *,
        seed: int,
        meter: Meter | None = None,
    ) -> None:
        """Build this rank's stages; all ranks must do so at once. `meter` counts where its time goes.

        Raises:
            ConfigError: the sizes do not fit the model or the batch.
        """
        is_uncut = groups.sizes.pp == 1
        layers = num_layers(workload, may_be_one=is_uncut)
        config.check_division(
            num_samples=train.samples_per_step,
            num_layers=layers,
        )
        self.workload, self.groups = workload, groups
        self._meter, self.num_samples_here = meter or Meter(), 0
        self.num_samples = workload.train.num_samples
        self._train = workload.training.applied_to(train)
        workload.bring_losses(groups.device)
        self._seed, self._config, self._num_parts = seed, config, config.microbatches
        part = groups["tp"] if groups.sizes.sequence_parallel else 0
        seeds = LayerSeeds(seed, groups.device, part=part)
        self._orders = EpochOrders(lambda epoch: workload.train.order(epoch, seed))
        schedule = config.instructions()
        ranks = stage_ranks(schedule)
        cuts = config.cut(layers, len(ranks))
        plan = plan_of(config.plan, is_ours=workload.sizes is not None)
        self.slots: list[Slot] = []
        self._stages: dict[int, StageCompute] = {}
        tied: set[str] = set()
        for number, (rank, cut) in enumerate(zip(ranks, cuts, strict=True)):
            if rank != groups["pp"]:
                continue
            stage = build_stage(
                workload, cut.start, cut.stop, seed, groups.device, may_be_one=is_uncut
            )
            begin_training(stage)
            slots = spread(stage, plan, groups, splits=config.schedule_name in SPLIT)
            if part:
                seed_parts(stage, seeds)
            self._stages[number] = stage_compute(
                stage, workload, seeds, config, self._train.precision
            )
            tied |= set(stage.tied)
            self.slots += slots
        self._instructions, self._num_stages = schedule[groups["pp"]], len(ranks)
        self._links = MeshLinks(groups, ranks, self._num_parts)
        computed = [each.stage for each in self._stages.values()]
        self._watches = [
            LayersWatch(stage, list(dict.fromkeys(stage.own_layers()))) for stage in computed
        ]
        self._tied = TiedWeights(self.slots, tied, groups)
        self.optimizer = MeshOptimizer(
            self.slots,
            _spec_of(workload, self._train),
            self._train.weight_decay,
            groups,
        )
        self.scaler = LossScaler() if self._train.precision == "fp16" else None
        own = str(self.slots[0].parameter.dtype).partition(".")[2] if self.slots else ""
        dtype = next((each for each in groups.all_told(own) if each), "float32")
        self.dtype: torch.dtype = getattr(torch, dtype)

    def check_cutting(self, log: logging.Logger) -> None:
        """Say once if the loss depends on how a batch is cut, where this rank can tell by itself.

        So it is said that samples in float64 are cast.
        """
        for each in self._stages.values():
            each.doubles.log = log
        sizes = self.groups.sizes
        if sizes.num_shares * self._num_parts == 1 or sizes.tp > 1 or self.groups.share:
            return
        check = CutCheck(log)
        for each in self._stages.values():
            each.cut_check = check

    def step(
        self, samples_applied: int, version: int, note: Callable[[Span], None] | None = None
    ) -> StepTaken:
        """Take the step after so many samples, which makes the weights of `version`; every rank must.

        Raises:
            NonFiniteLoss: on all ranks alike; the weights are as before.
        """
        train, total = self._train, self._train.total_samples(self.num_samples)
        epoch, start = divmod(samples_applied, self.num_samples)
        indices = self._orders[epoch][start : start + train.samples_per_step]
        scale = 1.0 if self.scaler is None else self.scaler.scale
        computed = self.compute(indices, epoch, start, scale, note)
        rate = learning_rate(train, samples_applied, total, self.workload.training.schedule)
        skipped = self._overflows(computed.loss, computed.grad_norm, scale)
        if not skipped:
            with self._meter("apply"):
                clipping = train.gradient_clipping
                self.optimizer.step(computed.gradients, computed.grad_norm, clipping, rate)
        return StepTaken(
            version=version,
            samples=Range(epoch, start, start + len(indices)),
            loss=computed.loss,
            learning_rate=rate,
            grad_norm=computed.grad_norm,
            layer_norms={},
            num_terms=computed.num_terms,
            is_skipped=skipped,
        )

    def compute(
        self,
        indices: Tensor,
        epoch: int,
        start: int,
        scale: float = 1.0,
        note: Callable[[Span], None] | None = None,
    ) -> Computed:
        """Loss and gradient of the samples `indices` (n,), from `start` on in an epoch; every rank must.

        The loss is multiplied by `scale` for the backward alone.
        """
        self.groups.note(f"loading samples {start} to {start + len(indices)} of epoch {epoch}")
        with self._meter("data"):
            parts = list(self._parts(indices, epoch, start))
        self.num_samples_here = sum(part.num_samples for part in parts)
        with self._memory_named(), ExitStack() as looking:
            for watch in self._watches:
                looking.enter_context(watch.looking(epoch))
            self._execute(parts, scale, note)
            if self.groups.device.type == "cuda":
                with self._meter("backward"):  # which has only been begun
                    torch.cuda.synchronize(self.groups.device)
        self.groups.note("summing gradients", waits=True)
        with self._meter("wait"):
            gradients = sum_replicas(self.slots, self.groups)
            self._tied.exchange(gradients)
            losses = [each.end_step() for each in self._stages.values()]
            counted = losses if self.groups["tp"] == 0 else []  # ranks along tp have the same
            loss, terms = self.groups.total(
                sum(each.total for each in counted), sum(each.num_terms for each in counted)
            )
        with self._meter("apply"):
            for gradient in gradients:
                gradient.div_((terms or 1.0) * scale)
            norm = self.optimizer.norm(gradients)
        return Computed(loss / (terms or 1.0), terms, norm, gradients)

    @contextmanager
    def _memory_named(self) -> Iterator[None]:
        """Say of a device that is full which rank's it is, and what would take less.

        Raises:
            OutOfMemory: it is.
        """
        try:
            yield
        except (RuntimeError, MemoryError, UserCodeError) as error:
            raised = error.__cause__ if isinstance(error, UserCodeError) else error
            if raised is None or not is_out_of_memory(raised):
                raise
            share = self._train.samples_per_step // self.groups.sizes.num_shares
            raise OutOfMemory(
                f"{self.groups.device} of rank {self.groups.rank} is out of memory: "
                f"{first_line(raised).partition('. ')[0]}; {what_takes_less(self._config, share)}"
            ) from error

    def _execute(
        self, parts: Sequence[Microbatch], scale: float, note: Callable[[Span], None] | None
    ) -> None:
        self._links.begin_step(parts)
        with ExitStack() as adding:
            for stage in self._stages.values():
                stage.loss_scale = scale
                adding.enter_context(adding_up(stage.stage))
            execute(
                self._instructions,
                parts,
                stages=self._stages,
                num_stages=self._num_stages,
                transport=self._links,
                meter=self._meter,
                note=note or (lambda _: None),
            )
            with self._meter("send"):
                self._links.finish()

    def _overflows(self, loss: float, norm: float, scale: float) -> bool:
        if math.isfinite(loss) and math.isfinite(norm):
            if self.scaler is not None:
                self.scaler.stepped()
            return False
        if self.scaler is not None and math.isfinite(loss) and scale > LEAST_SCALE:
            self.scaler.overflowed(scale)
            return True
        what = f"loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        raise NonFiniteLoss(f"{what}; {DIVERGENCE_REMEDY}")

    def _parts(self, indices: Tensor, epoch: int, start: int) -> Iterator[Microbatch]:
        """This rank's microbatches of a step."""
        pieces = cut_equally(len(indices), self.groups.sizes.num_shares * self._num_parts)
        takes_samples = any(each.needs_batch for each in self._stages.values())
        for piece in pieces[self.groups.share * self._num_parts :][: self._num_parts]:
            # an empty piece computes the step's first sample, and counts nothing
            taken = piece or range(1)
            place, batch = Place(self._seed, epoch, start + taken.start), None
            if takes_samples:
                with user_code("data"):
                    batch = self.workload.train.batch(indices[taken.start : taken.stop], place)
            yield Microbatch.of(batch, len(piece), place)


def _spec_of(workload: Workload, train: TrainConfig) -> OptimizerSpec:
    """The optimizer that is meant; muon's with how the whole model's parameters are divided."""
    spec = workload.training.optimizer_for(train)
    if spec.kind != MUON:
        return spec
    model = outline(workload)
    trainable = [
        (plain_name(name), each) for name, each in model.named_parameters() if each.requires_grad
    ]
    return replace(spec, split=choose(model, trainable, spec.arguments))
