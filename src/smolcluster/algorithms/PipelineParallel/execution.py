"""The stages of one process: a step by its instruction list, tied gradients, and evaluations.

At the end of a step first and last stage add up the gradients of what both hold, such as a tied embedding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from smolcluster.algorithms.PipelineParallel.links import Links
from smolcluster.data.dataset import Batch, Samples
from smolcluster.data.loading import every_index
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import Microbatch
from smolcluster.training.evaluate import Totals, evaluate
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.modes import evaluating
from smolcluster.training.replica import Replica
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.training.schedules.simulation import Span
from smolcluster.training.stages.build import Answer
from smolcluster.training.stages.compute import StageCompute, StageLoss
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.execution import execute
from smolcluster.training.workload import LossFunction, Terms, Workload
from smolcluster.utils.meter import Meter

AHEAD = 2
"""Batches of an evaluation that are on their way to each stage."""


@dataclass(frozen=True)
class OwnStage:
    """A stage of this process: its weights, and what computes with them."""

    replica: Replica
    compute: StageCompute

    @classmethod
    def of(
        cls, replica: Replica, workload: Workload, seed: int, *, recompute: bool = False
    ) -> Self:
        """The stage that `replica.model` is."""
        assert isinstance(replica.model, Stage)  # noqa: S101 - `stage_replica` has made it
        seeds = LayerSeeds(seed, replica.device)
        precision = replica.precision
        compute = StageCompute(
            replica.model, workload, seeds, precision=precision, recompute=recompute
        )
        return cls(replica, compute)

    @property
    def module(self) -> Stage:
        return self.compute.stage


class StepOutcome(NamedTuple):
    """What a process has come to in a step.

    Attributes:
        loss: of the last stage; elsewhere nothing.
        squared_norm: of the gradients of the sum of the loss terms, tied ones counted once; may be NaN.
        spans: when each instruction was computed (`time.perf_counter`).
    """

    loss: StageLoss
    squared_norm: float
    spans: list[Span]

    @property
    def seconds(self) -> dict[str, float]:
        """What was computed, by operation."""
        seconds = defaultdict[str, float](float)
        for each in self.spans:
            seconds[each.instruction.op] += each.end_s - each.start_s
        return seconds


class Execution:
    """The stages of one process, by their numbers, and its links, between two plans."""

    def __init__(
        self, stages: Mapping[int, OwnStage], ranks: Sequence[int], links: Links, meter: Meter
    ) -> None:
        """`ranks`: whose each stage of all is."""
        self.stages, self._ranks = stages, ranks
        self.links, self._meter = links, meter

    def run(
        self, turn: int, instructions: Sequence[Instruction], parts: Sequence[Microbatch]
    ) -> StepOutcome:
        """Compute a step's loss and gradients, which are left in the replicas.

        `turn` counts what the stages do together, steps and evaluations alike.

        Raises:
            PeerLost: a neighbour is lost. How far it had come is unknown; nothing has been stepped.
            UserCodeError: model or loss raised an exception.
        """
        self.links.begin_step(turn, is_counted=True)
        for each in self.stages.values():
            each.replica.grads.zero_()
            each.replica.watch.begin(parts[0].place.epoch if parts else 0)
        spans: list[Span] = []
        execute(
            instructions,
            parts,
            stages={number: each.compute for number, each in self.stages.items()},
            num_stages=len(self._ranks),
            transport=self.links,
            meter=self._meter,
            note=spans.append,
        )
        for each in self.stages.values():
            each.replica.watch.gather()
            each.replica.watch.end()
        losses = [each.compute.end_step() for each in self.stages.values()]
        self._add_tied()
        return StepOutcome(
            StageLoss(sum(each.total for each in losses), sum(each.num_terms for each in losses)),
            sum(self._squared_norm(each) for each in self.stages.values()),
            spans,
        )

    def evaluate(self, number: int, samples: Samples, indices: torch.Tensor) -> Any:
        """The model's output for these samples, batch `number` of a turn, where the last stage is; else None.

        A stage is at most `AHEAD` batches per stage before the last one, which answers each.
        """
        window, output = AHEAD * len(self._ranks), None
        for stage in sorted(self.stages):
            compute = self.stages[stage].compute
            is_first, is_last = compute.stage.is_first, compute.stage.is_last
            if not is_last and number >= window:
                self._receive(Instruction(Op.BACKWARD, number - window, stage))
            value = None if is_first else self._receive(Instruction(Op.FORWARD, number, stage))
            output = compute.evaluate(value, samples.batch(indices) if is_first else None)
            if not is_last:
                self.links.send(Instruction(Op.FORWARD, number, stage), output)
            if not is_first:
                self.links.send(Instruction(Op.BACKWARD, number, stage), None)
        return output if stage == len(self._ranks) - 1 else None

    @property
    def is_last(self) -> bool:
        return len(self._ranks) - 1 in self.stages

    def _receive(self, instruction: Instruction) -> Any:
        with self._meter("wait"):
            return self.links.receive(instruction)

    def _add_tied(self) -> None:
        """Let first and last stage have the sum of their gradients of the parameters that both hold."""
        ends = {0, len(self._ranks) - 1}
        own = [_tied(self.stages[number]) for number in sorted(ends & self.stages.keys())]
        if len(ends) == 1 or not own or not own[0]:
            return
        if len(own) == 1:
            [other] = ends - self.stages.keys()
            mine = {name: grad.clone() for name, grad in own[0].items()}
            with self._meter("wait"):
                theirs = self.links.exchange(self._ranks[other], mine)
        else:
            theirs = own[1]
        for name, grad in own[0].items():
            grad.add_(theirs[name].to(grad.device))
            for each in own[1:]:
                each[name].copy_(grad)

    def _squared_norm(self, stage: OwnStage) -> float:
        """Of a stage's gradients; what is tied counts on the first stage."""
        total = stage.replica.grad_norm() ** 2
        if stage.module.is_first or not stage.module.tied:
            return total
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.float64).item()
            for each in _tied(stage).values()
        ]
        return max(total - math.fsum(each * each for each in norms), 0.0)  # NaN stays NaN


def _tied(stage: OwnStage) -> dict[str, torch.Tensor]:
    """The gradients of what another stage has as well, by name."""
    parameters = stage.replica.parameters
    found = {name: parameters[name].grad for name in stage.module.tied}
    return {name: grad for name, grad in found.items() if grad is not None}


def evaluate_stages(
    execution: Execution, training: TrainingContext, turn: int, held_out: Samples, batch_size: int
) -> Totals:
    """Compute samples that are held out with the other stages; what came of them, at the last one.

    `batch_size`: of them at once, the same on all stages.

    Raises:
        PeerLost: a neighbour is lost.
    """
    batches = torch.split(every_index(held_out), batch_size)
    execution.links.begin_step(turn)
    outputs = (execution.evaluate(number, held_out, each) for number, each in enumerate(batches))
    if not execution.is_last:
        for _ in outputs:
            pass
        return {}
    workload, own, output = training.workload, execution.stages[max(execution.stages)], None

    def compute_next() -> None:
        nonlocal output
        output = None  # or its memory would be held while the next one is computed
        output = next(outputs)

    answer = Answer(lambda: output)
    answer.add_module("stage", own.module)
    with evaluating(answer):
        return evaluate(
            answer,
            held_out,
            own.replica.device,
            loss=_evaluated_loss(workload, lambda: output),
            metrics=workload.metrics,
            precision=own.replica.precision,
            batch_size=batch_size,
            before_batch=compute_next,
            dtype=own.module.dtype,
            doubles=own.compute.doubles,
        )


def _evaluated_loss(workload: Workload, output: Callable[[], Any]) -> LossFunction:
    """The workload's loss, or what it has for an output of the model, which is at hand."""
    own = workload.output_loss
    if own is None:
        return workload.loss

    @wraps(own, updated=())
    def loss(_model: nn.Module, batch: Batch) -> Terms | Tensor:
        return own(output(), batch)

    return loss
