"""Which machine gets which layers of a pipeline, in which order: from measured layers, machines and links.

The objective is `Σ t + (m - 1) · max t` over stages and links, m microbatches; the best few cuts by it are
simulated with the schedule, and the simulation decides. A link is a stage of its own: its transfers overlap
with computing, but not with each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np

from smolcluster.algorithms.planning.layer_search import Cut, Floats, Tables, search
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import SCHEDULES, generate
from smolcluster.training.schedules.simulation import Boundary, Costs, Timeline, simulate
from smolcluster.training.schedules.validation import held_by_stage
from smolcluster.utils.units import format_count

NUM_SIMULATED = 12
"""Cuts, the best by the objective, among which the simulation decides."""
WORTH_MOVING = 0.9
"""A new cut must take less than this share of the old one's step to be worth moving layers for."""


@dataclass(frozen=True)
class Layer:
    """One layer in bytes; the first one has the embedding with it, the last one head and loss.

    Attributes:
        fixed_bytes: held through the run: weights, their gradients, the optimizer's state.
        activation_bytes: held of a microbatch from its forward to its backward.
        output_bytes: sent to the next layer for a microbatch, as encoded; its gradient is as large.
        input_bytes: of what is held of a microbatch, what the layer takes.
    """

    fixed_bytes: int
    activation_bytes: int = 0
    output_bytes: int = 0
    input_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """A machine that takes one stage.

    Attributes:
        costs: seconds of a microbatch at each layer, embedding, head and loss with the outer ones.
        memory_bytes: free for training.
    """

    name: str
    costs: tuple[Costs, ...]
    memory_bytes: float = inf


@dataclass(frozen=True)
class Link:
    """From one machine to another, as measured; by default both are one machine."""

    bytes_s: float = inf
    latency_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return nbytes / self.bytes_s if nbytes else 0.0


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Attributes:
        links: by (sender, receiver); a pair that is missing is the other way round, or takes no time.
        schedule: one with a stage a machine.
        recompute: all stages but the last keep a microbatch's input alone, and compute it twice.
    """

    layers: tuple[Layer, ...]
    machines: tuple[Machine, ...]
    links: Mapping[tuple[str, str], Link]
    num_microbatches: int
    schedule: str = "1f1b"
    recompute: bool = False

    def link(self, sender: str, receiver: str) -> Link:
        backwards = self.links.get((receiver, sender), Link())
        return self.links.get((sender, receiver), backwards)

    def machine(self, name: str) -> Machine:
        return next(each for each in self.machines if each.name == name)


@dataclass(frozen=True)
class PlannedStage:
    """The layers `[start, end)` on a machine.

    Attributes:
        costs: seconds of a microbatch.
        memory_bytes: the most that is held at once.
    """

    machine: str
    start: int
    end: int
    costs: Costs
    memory_bytes: float


@dataclass(frozen=True)
class LayerPlan:
    """A cut and what it will be like.

    Attributes:
        stages: in the order of the layers.
        boundaries: between each stage and the next.
        timeline: one step, simulated.
        bottleneck: the stage or link that is busy for longest, in words.
    """

    stages: tuple[PlannedStage, ...]
    boundaries: tuple[Boundary, ...]
    schedule: str
    num_microbatches: int
    timeline: Timeline
    bottleneck: str

    @property
    def step_s(self) -> float:
        """Forward and backward of all microbatches; the optimizer's step is not counted."""
        return self.timeline.makespan_s

    @property
    def bubble(self) -> float:
        return self.timeline.bubble


# --- planned


def plan_layers(problem: Problem) -> LayerPlan:
    """The fastest cut over some or all of the machines, within their memory.

    Raises:
        ConfigError: the schedule takes several stages a machine, or nothing fits; says what would.
    """
    kind = SCHEDULES.get(problem.schedule)
    if kind is not None and kind.num_stages > 1:
        raise ConfigError(
            f"schedule {problem.schedule} has several stages a machine, which are not planned: "
            "write shard_plan by hand, or take schedule zero-bubble"
        )
    cuts = [cut for tables in _tables(problem) for cut in search(tables, problem.num_microbatches)]
    if not cuts:
        raise ConfigError(_why_nothing_fits(problem))
    distinct = {(cut.machines, cut.starts): cut for cut in cuts}.values()
    best = sorted(distinct, key=lambda cut: cut.objective(problem.num_microbatches))
    plans = [predict(problem, _ranges(problem, cut)) for cut in best[:NUM_SIMULATED]]
    return min(plans, key=lambda plan: plan.step_s)


def predict(problem: Problem, ranges: Sequence[tuple[str, int, int]]) -> LayerPlan:
    """What stages `(machine, start, end)`, in the order of the layers, will be like.

    Raises:
        ConfigError: the schedule cannot be made of so many stages or microbatches.
    """
    num = len(ranges)
    schedule = generate(problem.schedule, num, problem.num_microbatches)
    held = held_by_stage(schedule)
    stages = tuple(_stage(problem, *each, nums) for each, nums in zip(ranges, held, strict=True))
    boundaries = tuple(_boundary(problem, one, other) for one, other in pairwise(stages))
    timeline = simulate(schedule, [each.costs for each in stages], boundaries)
    return LayerPlan(
        stages,
        boundaries,
        problem.schedule,
        problem.num_microbatches,
        timeline,
        _bottleneck(stages, boundaries),
    )


def with_twin(problem: Problem, name: str) -> Problem:
    """With one more machine like that one, which reaches the others as it does."""
    twin, links = f"{name} (another)", dict(problem.links)
    for (sender, receiver), link in problem.links.items():
        if name in (sender, receiver):
            links[tuple(twin if end == name else end for end in (sender, receiver))] = link  # type: ignore[index]
    own = [link for pair, link in problem.links.items() if name in pair]
    if own:
        links[name, twin] = links[twin, name] = min(own, key=lambda link: link.seconds(1e6))
    machine = replace(problem.machine(name), name=twin)
    return replace(problem, machines=(*problem.machines, machine), links=links)


def one_more(problem: Problem, plan: LayerPlan) -> tuple[str, LayerPlan]:
    """The plan with one more machine like the fastest one of the cluster, and its name."""
    fastest = min(problem.machines, key=lambda each: sum(cost.total_s for cost in each.costs))
    more = plan_layers(with_twin(problem, fastest.name))
    return fastest.name, min(more, plan, key=lambda each: each.step_s)


def plan_again(
    problem: Problem, plan: LayerPlan, slowness: Mapping[str, float]
) -> tuple[Problem, LayerPlan | None]:
    """The problem as it turned out, and a better plan for it; None: the old one is nearly the best.

    `slowness`: by machine, the seconds its layers take for each second in `problem`; others are as they were.
    """
    machines = tuple(_slowed(each, slowness.get(each.name, 1.0)) for each in problem.machines)
    turned_out = replace(problem, machines=machines)
    old = predict(turned_out, [(each.machine, each.start, each.end) for each in plan.stages])
    new = plan_layers(turned_out)
    return turned_out, new if new.step_s < WORTH_MOVING * old.step_s else None


def _slowed(machine: Machine, factor: float) -> Machine:
    costs = tuple(
        Costs(factor * each.forward_s, factor * each.input_s, factor * each.weight_s)
        for each in machine.costs
    )
    return replace(machine, costs=costs)


# --- stages and links of a cut


def _ranges(problem: Problem, cut: Cut) -> list[tuple[str, int, int]]:
    ends = (*cut.starts[1:], len(problem.layers))
    names = [problem.machines[each].name for each in cut.machines]
    return list(zip(names, cut.starts, ends, strict=True))


def memory_of(problem: Problem, start: int, end: int, held: tuple[int, int]) -> float:
    """The most bytes that layers `[start, end)` take at once; `held` as `held_by_stage` has it."""
    layers, (num_held, num_graphs) = problem.layers[start:end], held
    activation_bytes = sum(each.activation_bytes for each in layers)
    held_bytes = num_held * activation_bytes
    if _computes_again(problem, end):
        held_bytes = num_held * layers[0].input_bytes + num_graphs * activation_bytes
    return sum(each.fixed_bytes for each in layers) + held_bytes


def _computes_again(problem: Problem, end: int) -> bool:
    return problem.recompute and end < len(problem.layers)


def _stage(
    problem: Problem, name: str, start: int, end: int, held: tuple[int, int]
) -> PlannedStage:
    costs = problem.machine(name).costs[start:end]
    forward_s = sum(each.forward_s for each in costs)
    again_s = forward_s if _computes_again(problem, end) else 0.0
    return PlannedStage(
        name,
        start,
        end,
        Costs(
            forward_s,
            sum(each.input_s for each in costs) + again_s,
            sum(each.weight_s for each in costs),
        ),
        memory_of(problem, start, end, held),
    )


def _boundary(problem: Problem, one: PlannedStage, other: PlannedStage) -> Boundary:
    nbytes = problem.layers[other.start - 1].output_bytes
    there = problem.link(one.machine, other.machine)
    back = problem.link(other.machine, one.machine)
    latency = (there.latency_s + back.latency_s) / 2
    return Boundary(there.seconds(nbytes), back.seconds(nbytes), latency)


def _bottleneck(stages: Sequence[PlannedStage], boundaries: Sequence[Boundary]) -> str:
    busy = {
        f"{stage.machine}, layers {stage.start} to {stage.end - 1}": stage.costs.total_s
        for stage in stages
    }
    for (one, other), way in zip(pairwise(stages), boundaries, strict=True):
        seconds = max(way.forward_s, way.backward_s)
        busy[f"the link between {one.machine} and {other.machine}"] = seconds
    return max(busy, key=lambda each: busy[each])


# --- what the search reads


def _tables(problem: Problem) -> Iterator[Tables]:
    """One where what a stage holds depends only on the stages after it, else one a number of stages."""
    num = min(len(problem.machines), len(problem.layers))
    schedules = {
        size: generate(problem.schedule, size, problem.num_microbatches)
        for size in range(1, num + 1)
    }
    held = {size: held_by_stage(schedule)[::-1] for size, schedule in schedules.items()}
    tables = _table(problem, held[num], frozenset(held))
    is_alike = all(held[size] == held[num][:size] for size in held)
    if is_alike or not _is_memory_short(tables):
        yield tables
        return
    for size, each in held.items():
        yield replace(tables, held=each, sizes=frozenset((size,)))


def _is_memory_short(tables: Tables) -> bool:
    """Whether some machine could not hold all layers with the most microbatches."""
    most = max(sum(each) for each in tables.held)
    needed = tables.fixed_bytes[0, -1] + most * tables.held_bytes[0, -1]
    return bool(needed > tables.memory_bytes.min())


def _table(problem: Problem, held: tuple[tuple[int, int], ...], sizes: frozenset[int]) -> Tables:
    layers, machines = problem.layers, problem.machines
    num, outputs = len(layers), [each.output_bytes for each in layers]
    path = np.zeros((len(machines), len(machines), num + 1))
    pace = np.zeros_like(path)
    sizes_at = np.array([0.0, *outputs])
    for j, one in enumerate(machines):
        for k, other in enumerate(machines):
            there, back = problem.link(one.name, other.name), problem.link(other.name, one.name)
            path[j, k] = sizes_at / there.bytes_s + sizes_at / back.bytes_s
            path[j, k] += there.latency_s + back.latency_s
            pace[j, k] = np.maximum(sizes_at / there.bytes_s, sizes_at / back.bytes_s)
    seconds = np.array([[cost.total_s for cost in each.costs] for each in machines])
    later = np.triu(np.ones((num, num + 1), bool), 1)
    stage_s = np.stack([_of_ranges(each) for each in seconds])
    activations = _of_ranges(np.array([each.activation_bytes for each in layers], float))
    held_bytes, graph_bytes = activations, np.zeros_like(activations)
    if problem.recompute:  # of all stages but those that end with the last layer
        held_bytes, graph_bytes = activations.copy(), activations.copy()
        held_bytes[:, :-1] = np.array([each.input_bytes for each in layers], float)[:, None]
        graph_bytes[:, -1] = 0.0
        forward = np.array([[cost.forward_s for cost in each.costs] for each in machines])
        stage_s[:, :, :-1] += np.stack([_of_ranges(each) for each in forward])[:, :, :-1]
    return Tables(
        stage_s=np.where(later, stage_s, inf),
        fixed_bytes=_of_ranges(np.array([each.fixed_bytes for each in layers], float)),
        held_bytes=held_bytes,
        graph_bytes=graph_bytes,
        memory_bytes=np.array([each.memory_bytes for each in machines], float),
        link_path_s=path,
        link_pace_s=pace,
        held=held,
        sizes=sizes,
    )


def _of_ranges(values: Floats) -> Floats:
    """`(a, i)`: the sum of the values from a up to i."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    differences: Floats = sums[None, :] - sums[:-1, None]
    return differences


# --- refusals


def _why_nothing_fits(problem: Problem) -> str:
    """Which layer fits nowhere, or how much all machines lack together, and what to do."""
    roomiest = max(problem.machines, key=lambda each: each.memory_bytes)
    for index, layer in enumerate(problem.layers):
        alone = layer.fixed_bytes + layer.activation_bytes
        if alone > roomiest.memory_bytes:
            return (
                f"layer {index} alone needs {gigabytes(alone)} and {roomiest.name}, which has most, "
                f"{gigabytes(roomiest.memory_bytes)}: raise microbatches, or add a machine with more memory"
            )
    holds_all = problem.schedule == "gpipe" and not problem.recompute
    held = problem.num_microbatches if holds_all else 1
    needed = sum(each.fixed_bytes + held * each.activation_bytes for each in problem.layers)
    total = sum(each.memory_bytes for each in problem.machines)
    if needed > total:
        return (
            f"{len(problem.layers)} layers need {gigabytes(needed)} or more and the machines have "
            f"{gigabytes(total)} together: {gigabytes(needed - total)} more would fit"
        )
    biggest = max(each.fixed_bytes + each.activation_bytes for each in problem.layers)
    return (
        f"no cut of {len(problem.layers)} layers fits: they need {gigabytes(needed)} or more, the machines "
        f"have {gigabytes(total)} together, but in pieces that layers of {gigabytes(biggest)} do not fill: "
        "raise microbatches, take schedule 1f1b, or add a machine"
    )


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def in_words(plan: LayerPlan) -> str:
    """How long a step will take, and why, in one line."""
    microbatches = format_count(plan.num_microbatches, "microbatch")
    return (
        f"step {milliseconds(plan.step_s)} with {microbatches} and schedule "
        f"{plan.schedule}, bubble {plan.bubble:.0%}, bottleneck: {plan.bottleneck}"
    )
