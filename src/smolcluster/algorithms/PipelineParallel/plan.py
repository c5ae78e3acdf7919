"""Which layers are whose, and what each process is told of it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.planning.layers import LayerPlan, Link, Problem
from smolcluster.algorithms.planning.plan_file import PlanFile, PlanLink, PlanStage
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import SCHEDULES, Schedule, stage_ranks


@dataclass(frozen=True)
class StageMap:
    """A cut: stage s has layers `cuts[s]` to `cuts[s + 1]` - 1, and is on rank `ranks[s]`.

    `nodes`: the machine of each rank.
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    def layers(self, stage: int) -> range:
        return range(self.cuts[stage], self.cuts[stage + 1])

    def neighbours(self, rank: int) -> set[int]:
        """The ranks that this one exchanges anything with; first and last share what is tied."""
        pairs = [*pairwise(self.ranks), (self.ranks[-1], self.ranks[0])]
        both = {*pairs, *((b, a) for a, b in pairs)}
        return {b for a, b in both if a == rank and b != rank}

    def layers_of(self, rank: int) -> str:
        """In words."""
        return ", ".join(
            f"{self.cuts[stage]} to {self.cuts[stage + 1] - 1}"
            for stage, each in enumerate(self.ranks)
            if each == rank
        )

    def relieved(self, rank: int) -> str:
        """A cut in which this rank has half of its layers, as `shard_plan` has it; empty: there is none.

        The rest goes to the stage next to it that has fewer.
        """
        if self.num_stages != len(self.nodes) or self.num_stages == 1:
            return ""
        start, end = self.cuts[rank], self.cuts[rank + 1]
        if end - start < 2:
            return ""
        others = [each for each in (rank - 1, rank + 1) if 0 <= each < self.num_stages]
        target, cuts = min(others, key=lambda each: len(self.layers(each))), list(self.cuts)
        if target < rank:
            cuts[rank] = end - (end - start) // 2
        else:
            cuts[rank + 1] = start + (end - start) // 2
        pairs = zip(self.nodes, pairwise(cuts), strict=True)
        return f"{{{', '.join(f'{node}: [{one}, {other}]' for node, (one, other) in pairs)}}}"

    def __str__(self) -> str:
        return ", ".join(
            f"{self.nodes[rank]} {self.cuts[stage]} to {self.cuts[stage + 1] - 1}"
            for stage, rank in enumerate(self.ranks)
        )


@dataclass(frozen=True)
class Cut:
    """Which layers are whose, and what that will be like as far as it is known.

    Attributes:
        words: the step that is predicted, in one line; empty: nothing was measured.
        problem, plan: from which the cut was made; None: nothing was measured.
    """

    map: StageMap
    document: PlanFile
    words: str = ""
    problem: Problem | None = None
    plan: LayerPlan | None = None

    @property
    def links(self) -> Mapping[tuple[str, str], Link]:
        """What was measured between workers, by the names of sender and receiver."""
        return self.problem.links if self.problem else {}


def schedule_of(config: PipelineConfig, num_ranks: int, num_microbatches: int) -> Schedule:
    """The instruction lists of a step of so many microbatches, of which an epoch's last step may have few."""
    return SCHEDULES[config.schedule].generate(num_ranks, num_microbatches)


def even_cut(num_layers: int, nodes: Sequence[str], config: PipelineConfig) -> StageMap:
    """As many layers for each stage, as far as that goes.

    Raises:
        ConfigError: there are more stages than layers.
    """
    ranks = stage_ranks(schedule_of(config, len(nodes), config.microbatches))
    if len(ranks) > num_layers:
        raise ConfigError(
            f"the model has {num_layers} layers, which cannot be {len(ranks)} stages of schedule "
            f"{config.schedule} on {len(nodes)} machines: use fewer workers"
        )
    cuts = tuple(round(stage * num_layers / len(ranks)) for stage in range(len(ranks) + 1))
    return StageMap(cuts, ranks, tuple(nodes))


def written_cut(
    num_layers: int, ranges: Mapping[str, Sequence[tuple[int, int]]], config: PipelineConfig
) -> StageMap:
    """The cut that `shard_plan` says.

    Raises:
        ConfigError: it does not have every layer once, or cannot be that of the schedule.
    """
    stages = sorted((start, end, node) for node, each in ranges.items() for start, end in each)
    if not stages:
        raise ConfigError("shard_plan names no machine: give each its layers, or set it to auto")
    reached = 0
    for start, end, node in stages:
        if end <= start:
            raise ConfigError(f"shard_plan: {node} has [{start}, {end}], which is no layer")
        if start != reached:
            what = "leaves out" if start > reached else "has twice"
            first, last = sorted((start, reached))
            raise ConfigError(f"shard_plan {what} layers {first} to {last - 1}, at {node}")
        reached = end
    if reached != num_layers:
        raise ConfigError(
            f"shard_plan ends with layer {reached - 1}, the model's layers are 0 to {num_layers - 1}"
        )
    nodes = list(dict.fromkeys(node for _, _, node in stages))
    ranks = tuple(nodes.index(node) for _, _, node in stages)
    wanted = stage_ranks(schedule_of(config, len(nodes), config.microbatches))
    if ranks != wanted:
        raise ConfigError(
            f"shard_plan gives stages to machines {list(ranks)}, schedule {config.schedule} on {len(nodes)} "
            f"machines has them on {list(wanted)}"
        )
    return StageMap((0, *(end for _, end, _ in stages)), ranks, tuple(nodes))


def unmeasured(stages: StageMap, config: PipelineConfig) -> Cut:
    """A cut of which nothing more is known."""
    document = PlanFile(
        schedule=config.schedule,
        num_microbatches=config.microbatches,
        step_s=0.0,
        bubble=0.0,
        bottleneck="",
        stages=tuple(
            PlanStage(machine=stages.nodes[rank], start=stages.cuts[at], end=stages.cuts[at + 1])
            for at, rank in enumerate(stages.ranks)
        ),
        links=tuple(PlanLink() for _ in stages.ranks[1:]),
    )
    return Cut(stages, document)
