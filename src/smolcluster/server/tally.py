"""What a run counts: steps, samples and losses by epoch, pushes by outcome, each worker's part; pure."""

import math
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from smolcluster.configs.schema import TrainConfig
from smolcluster.data.permutation import Range
from smolcluster.runs.status import STALENESS_EDGES
from smolcluster.runs.summary import Pushes, WorkerShare
from smolcluster.training.checkpoint import TrainingState, parse_progress
from smolcluster.utils.units import format_count

COUNTS = "counts"
"""Where a checkpoint's progress has the tally."""
Dropped = Literal["stale", "late", "duplicate", "non_finite"]


@dataclass
class WorkerTally:
    """One worker's part in a run."""

    rank: int
    node: str
    samples: int = 0
    pushes: int = 0
    staleness_sum: int = 0
    staleness_counts: list[int] = field(default_factory=lambda: [0] * (len(STALENESS_EDGES) + 1))
    """Applied pushes by τ, see `STALENESS_EDGES`."""

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.pushes if self.pushes else 0.0


class Tally(BaseModel):
    """Counts of a run, as its checkpoints keep them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    wall_s: float
    """Of the starts before this one, as are `traffic`'s bytes sent and received."""
    traffic: tuple[int, int]
    epoch_samples: Counter[int]
    """Of the newest epoch, and of those before it that are not complete, as is what follows."""
    epoch_loss: defaultdict[int, float]
    """Sums of loss terms."""
    epoch_terms: defaultdict[int, float] = Field(default_factory=lambda: defaultdict(float))
    """How many there were; empty in a checkpoint whose samples have one each."""
    pushes: Counter[str]
    """By outcome: the names of `Pushes`."""
    leases_returned: int
    workers: dict[int, WorkerTally]
    steps_undone: float = 0.0
    """Of slices whose stores were lost, each step times the slice's share of the weights."""
    lowest_val_loss: float | None = None
    num_worse: int = 0
    """Evaluations in a row that did not lower it."""

    @classmethod
    def empty(cls) -> Self:
        return cls(
            wall_s=0.0,
            traffic=(0, 0),
            epoch_samples=Counter(),
            epoch_loss=defaultdict(float),
            pushes=Counter(),
            leases_returned=0,
            workers={},
        )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        Pushes(**self.pushes)  # it knows all outcomes, or refuses
        if not self.epoch_terms:
            told = {each: float(self.epoch_samples[each]) for each in self.epoch_loss}
            self.epoch_terms = defaultdict(float, told)
        return self

    def forget_complete(self, epoch_size: int) -> None:
        """Forget the epochs that are complete but the newest: a run may have a million of them."""
        counted, newest = self.epoch_samples, max(self.epoch_samples)
        for epoch in [each for each in counted if each < newest and counted[each] == epoch_size]:
            del counted[epoch]
            self.epoch_loss.pop(epoch, None)
            self.epoch_terms.pop(epoch, None)

    def worker(self, worker_id: int, node: str) -> WorkerTally:
        """The tally of a worker id; the node is that of its last process."""
        tally = self.workers.setdefault(worker_id, WorkerTally(worker_id - 1, node))
        tally.node = node
        return tally

    def applied(self, worker_id: int, node: str, num_samples: int, staleness: int) -> None:
        self.pushes["applied"] += 1
        worker = self.worker(worker_id, node)
        worker.samples += num_samples
        worker.pushes += 1
        worker.staleness_sum += staleness
        worker.staleness_counts[bisect_left(STALENESS_EDGES, staleness)] += 1


class Counts:
    """How far a run has come, and whether it is over."""

    def __init__(self, train: TrainConfig, epoch_size: int) -> None:
        """`epoch_size`: the training samples of an epoch."""
        self._train = train
        self.epoch_size = epoch_size
        self.total_samples = train.total_samples(epoch_size)
        self.tally = Tally.empty()
        self.version = self.samples_applied = self.epoch = 0

    def resume(self, state: TrainingState) -> None:
        """Count on from where a checkpoint stood.

        Raises:
            CheckpointError: it does not say what was counted.
        """
        self.tally = parse_progress(Tally, state.progress.get(COUNTS), state.step)
        self.version, self.samples_applied = state.step, state.samples_applied
        self.epoch = state.epoch

    def step_taken(self, version: int, samples: Range, loss: float, num_terms: float) -> bool:
        """Count a step, of mean loss `loss`; returns whether its epoch is complete with it."""
        self.version, self.epoch = version, samples.epoch
        self.samples_applied += samples.num_samples
        tally, epoch = self.tally, samples.epoch
        tally.epoch_samples[epoch] += samples.num_samples
        if not math.isnan(loss):
            tally.epoch_terms[epoch] += num_terms
            total, most = tally.epoch_loss[epoch] + loss * num_terms, sys.float_info.max
            tally.epoch_loss[epoch] = max(-most, min(total, most))  # JSON has no infinity
        in_epoch = min(self.epoch_size, self.total_samples - epoch * self.epoch_size)
        is_complete = tally.epoch_samples[epoch] == in_epoch
        tally.forget_complete(self.epoch_size)
        return is_complete

    def evaluated(self, loss: float) -> None:
        """Count an evaluation for `patience`, unless that has ended the run already."""
        tally = self.tally
        if self.has_given_up:
            return
        if tally.lowest_val_loss is None or loss < tally.lowest_val_loss:
            tally.lowest_val_loss, tally.num_worse = loss, 0
        else:
            tally.num_worse += 1

    @property
    def is_complete(self) -> bool:
        return self.samples_applied == self.total_samples

    @property
    def has_given_up(self) -> bool:
        """Whether the run has not got better for too long."""
        patience = self._train.patience
        return patience is not None and self.tally.num_worse >= patience and not self.is_complete

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.has_given_up

    @property
    def ending(self) -> str:
        """Why it is over."""
        if self._train.num_steps is not None and self.is_complete:
            taken = "has" if self._train.num_steps == 1 else "have"
            return f"{format_count(self._train.num_steps, 'step')} {taken} been taken"
        if not self.has_given_up:
            return "every sample of every epoch has been applied"
        times = f"{self.tally.num_worse} evaluations in a row have"
        if self.tally.num_worse == 1:
            times = "an evaluation has"
        return f"{times} not lowered the validation loss"

    @property
    def steps_left(self) -> int:
        """Steps to come; one more or less where a resumed run of EDP had begun two epochs."""
        epochs, samples = divmod(self.total_samples - self.samples_applied, self.epoch_size)
        size = self._train.samples_per_step
        return epochs * math.ceil(self.epoch_size / size) + math.ceil(samples / size)

    @property
    def train_loss(self) -> float | None:
        """Mean loss of the newest epoch so far; None before the first step that tells one."""
        last = max(self.tally.epoch_samples, default=0)
        if last not in self.tally.epoch_loss:
            return None
        return self.tally.epoch_loss[last] / (self.tally.epoch_terms[last] or 1.0)

    def shares(self) -> list[WorkerShare]:
        """What each worker did, by its number."""
        return [
            WorkerShare(
                rank=worker.rank,
                node=worker.node,
                samples=worker.samples,
                mean_staleness=worker.mean_staleness,
                share=worker.samples / max(self.samples_applied, 1),
            )
            for _, worker in sorted(self.tally.workers.items())
        ]
