"""A step of a run as its stages took it, and the same step simulated, from the files of the run's folder.

Of each microbatch's forward and backward a process keeps the time (`utils/meter.py`), in the order of its
instruction list, so the list says which instruction each of them was. What is simulated has the same lists:
every instruction takes as long as is usual (the median) for its kind on that stage, links what the plan says
of them; what the measured step takes longer is waiting that neither computing nor the schedule explains.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smolcluster.algorithms.planning.plan_file import PLAN, PlanFile
from smolcluster.errors import ConfigError, DataError
from smolcluster.observability.spans import read_spans
from smolcluster.runs.files import write_whole
from smolcluster.runs.paths import RunPaths
from smolcluster.training.schedules.drawing import csv_of, picture_of
from smolcluster.training.schedules.instructions import (
    SCHEDULES,
    Op,
    Schedule,
)
from smolcluster.training.schedules.simulation import (
    Boundary,
    Span,
    Timeline,
    median_costs,
    simulate,
)
from smolcluster.utils.meter import PHASES, STEP

FORMS = ("svg", "png", "pdf", "csv")
FORWARD = PHASES.index("forward")
COMPUTING = (FORWARD, PHASES.index("backward"))
MICRO = 1e-6

SIMULATED = "simulated, each stage at its usual pace"
Stretch = tuple[float, float, int]
"""Start and end, in seconds since 1970, and the phase or `STEP`."""


@dataclass(frozen=True)
class StepView:
    """One step.

    Attributes:
        names: of the ranks, with their layers.
    """

    names: tuple[str, ...]
    measured: Timeline
    simulated: Timeline


def write_timeline(paths: RunPaths, out: Path) -> StepView:
    """Write the newest step that all stages have kept as a picture, or as a table where `out` ends in .csv.

    Raises:
        ConfigError: the file's name ends in none of `FORMS`.
        DataError: the run is no pipeline, or has left no whole step.
        SmolclusterError: the file cannot be written.
    """
    form = out.suffix.removeprefix(".").lower()
    if form not in FORMS:
        raise ConfigError(f"--timeline {out}: the name must end in .{', .'.join(FORMS)}")
    view = newest_step(paths)
    if form == "csv":
        write_whole(out, csv_of(view.measured).encode(), durable=False)
    else:
        panels = {"measured": view.measured, SIMULATED: view.simulated}
        write_whole(out, picture_of(panels, form, view.names), durable=False)
    return view


def newest_step(paths: RunPaths) -> StepView:
    """The newest step of which every stage has kept all instructions.

    Raises:
        DataError: there is none, or the run is no pipeline.
    """
    if not paths.plan.is_file():
        raise DataError(
            f"run {paths.run_id} has no plan of stages: --timeline draws a step of a pipeline; without it a "
            "trace is written"
        )
    plan = PLAN.read(paths.plan)
    names = list(dict.fromkeys(each.machine for each in plan.stages))
    links = [Boundary(each.forward_s, each.backward_s, each.latency_s) for each in plan.links]
    taken = _steps_taken(paths)
    if missing := [name for name in names if name not in taken]:
        raise DataError(_nothing(paths, f"of {', '.join(missing)}"))
    for first in reversed(taken[names[0]]):
        steps = [first, *(_beside(first, taken[name]) for name in names[1:])]
        whole = [each for each in steps if each is not None]
        if len(whole) == len(names) and (lists := _lists(plan, len(names), whole)):
            measured = _measured(lists, whole)
            return StepView(
                tuple(f"{name} {_layers(plan, name)}" for name in names),
                measured,
                simulate(lists, median_costs(measured), links),
            )
    raise DataError(_nothing(paths, "that all stages have kept whole"))


def _nothing(paths: RunPaths, what: str) -> str:
    return (
        f"{paths.root} has no step {what}; stages report the first steps of every ten seconds, about every "
        "second: try again in a moment"
    )


def _steps_taken(paths: RunPaths) -> dict[str, list[list[Stretch]]]:
    """What each machine of the plan has computed in each step, in order, by its name in the plan."""
    spans: dict[tuple[str, int], list[Stretch]] = defaultdict(list)
    for line in read_spans(paths.spans):
        if line.role == "worker" and line.rank is not None:
            spans[line.node, line.rank] += (
                (line.at + MICRO * start, line.at + MICRO * (start + length), what)
                for what, start, length in line.spans
            )
    found: dict[str, list[list[Stretch]]] = {}
    for (node, rank), own in sorted(spans.items(), key=lambda each: each[0][1]):
        name = f"{node} (worker {rank + 1})" if node in found else node
        found[name] = list(_by_step(own))
    return found


def _by_step(spans: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """What lies within each whole step that computed anything."""
    computed = sorted(each for each in spans if each[2] in COMPUTING)
    at = 0
    for began, ended, _ in sorted(each for each in spans if each[2] == STEP):
        while at < len(computed) and computed[at][0] < began - MICRO:
            at += 1
        first = at
        while at < len(computed) and computed[at][0] <= ended:
            at += 1
        if first < at:
            yield computed[first:at]


def _beside(first: Sequence[Stretch], others: Sequence[list[Stretch]]) -> list[Stretch] | None:
    """The step of another rank that began while the first rank was in this one."""
    began, ended = first[0][0], first[-1][1]
    return next((each for each in reversed(others) if began <= each[0][0] <= ended), None)


def _lists(plan: PlanFile, num_ranks: int, steps: Sequence[Sequence[Stretch]]) -> Schedule | None:
    """The step's instruction lists, which say as much as was computed; None: something is missing.

    An epoch's last step may have fewer microbatches.
    """
    kind = SCHEDULES[plan.schedule]
    for num_microbatches in range(plan.num_microbatches, 0, -1):
        lists = kind.generate(num_ranks, num_microbatches)
        # Phases, in this order, can have been those instructions.
        if all(
            [each.op is Op.FORWARD for each in own] == [what == FORWARD for _, _, what in step]
            for own, step in zip(lists, steps, strict=True)
        ):
            return lists
    return None


def _measured(lists: Schedule, steps: Sequence[Sequence[Stretch]]) -> Timeline:
    zero = min(start for step in steps for start, *_ in step)
    return Timeline(
        tuple(
            tuple(
                Span(each, start - zero, end - zero)
                for each, (start, end, _) in zip(own, step, strict=True)
            )
            for own, step in zip(lists, steps, strict=True)
        )
    )


def _layers(plan: PlanFile, name: str) -> str:
    """Which layers a machine has, in words."""
    own = [each for each in plan.stages if each.machine == name]
    return ", ".join(f"{each.start}-{each.end - 1}" for each in own)
