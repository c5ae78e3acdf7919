"""A step as its stages took it, found in a run's folder, beside the same step simulated."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from connection_pairs import telemetry
from smolcluster.algorithms.planning.plan_file import (
    PLAN,
    PlanFile,
    PlanLink,
    PlanStage,
)
from smolcluster.commands.timeline import newest_step, write_timeline
from smolcluster.errors import ConfigError, DataError
from smolcluster.observability.spans import SpanLog
from smolcluster.runs.paths import RunPaths
from smolcluster.training.schedules.instructions import Op, generate, stage_ranks
from smolcluster.training.schedules.simulation import Boundary, Costs, Span, Timeline, simulate
from smolcluster.utils.meter import PHASES, STEP

NODES = (("mini2", 0), ("pi5", 1), ("mini2", 2))
"""Of each rank of the plan its machine, and its worker's rank: two processes are on one machine."""
NAMES = ("mini2", "pi5", "mini2 (worker 3)")
COSTS = [Costs(0.010, 0.012, 0.008), Costs(0.020, 0.020, 0.020), Costs(0.005, 0.006, 0.004)]
WAY = Boundary(0.004, 0.003, 0.001)
COMMIT_S = 0.020
"""From the end of a step to the beginning of the next one."""


def planned(paths: RunPaths, schedule: str = "1f1b", num_microbatches: int = 4) -> None:
    ranks = stage_ranks(generate(schedule, 3, num_microbatches))
    stages = [
        PlanStage(machine=NAMES[rank], start=2 * at, end=2 * at + 2)
        for at, rank in enumerate(ranks)
    ]
    link = PlanLink(forward_s=0.004, backward_s=0.003, latency_s=0.001)
    plan = PlanFile(
        schedule=schedule,
        num_microbatches=num_microbatches,
        step_s=0.0,
        bubble=0.0,
        bottleneck="",
        stages=tuple(stages),
        links=(link,) * (len(stages) - 1),
    )
    PLAN.write(paths.root / "plan.json", plan)


def taken(paths: RunPaths, timeline: Timeline, num_steps: int, *, lost: Sequence[int] = ()) -> None:
    """The spans of so many steps of that kind; `lost`: ranks of which the last one is not known."""
    log = SpanLog(paths.spans, warn=pytest.fail)
    whole_s = timeline.makespan_s + COMMIT_S
    for (node, worker), spans in zip(NODES, timeline.ranks, strict=True):
        for number in range(num_steps):
            if number == num_steps - 1 and NODES.index((node, worker)) in lost:
                continue
            begun, done = number * whole_s - COMMIT_S, number * whole_s + spans[-1].end_s
            if number:  # from the end of its own part in the step before
                begun = (number - 1) * whole_s + spans[-1].end_s
            found = [(place(each), number * whole_s + each.start_s, length(each)) for each in spans]
            found.append((PHASES.index("wait"), begun, 0.001))
            found.append((STEP, begun, done - begun))
            told = [(what, round(1e6 * at), round(1e6 * seconds)) for what, at, seconds in found]
            ahead_s = 100.0 * worker
            report = telemetry(spans_at=5000.0 + ahead_s, spans=told)
            log.write("worker", report, ahead_s=ahead_s, node=node, rank=worker)
    log.close()


def place(span: Span) -> int:
    is_forward = span.instruction.op is Op.FORWARD
    return PHASES.index("forward" if is_forward else "backward")


def length(span: Span) -> float:
    return span.end_s - span.start_s


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def times(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [
        (str(each.instruction), round(each.start_s, 5), round(each.end_s, 5))
        for spans in timeline.ranks
        for each in spans
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe"])
def test_what_took_as_long_as_it_does_is_simulated_as_measured(
    paths: RunPaths, schedule: str
) -> None:
    step = simulate(generate(schedule, 3, 4), COSTS, [WAY] * 2)
    planned(paths, schedule)
    taken(paths, step, 3)
    view = newest_step(paths)
    assert view.names == ("mini2 0-1", "pi5 2-3", "mini2 (worker 3) 4-5")
    assert times(view.measured) == pytest.approx(times(step))
    assert times(view.simulated) == pytest.approx(times(step))
    assert view.simulated.links.keys() == step.links.keys()


def test_what_is_late_is_measured_and_not_simulated(paths: RunPaths) -> None:
    slow = simulate(generate("1f1b", 3, 4), COSTS, [Boundary(0.030, 0.030)] * 2)
    planned(paths)
    taken(paths, slow, 2)
    view = newest_step(paths)
    assert view.measured.makespan_s == pytest.approx(slow.makespan_s, abs=1e-4)
    fast = simulate(generate("1f1b", 3, 4), COSTS, [WAY] * 2)
    assert view.simulated.makespan_s == pytest.approx(fast.makespan_s, abs=1e-4)


def test_a_step_of_which_a_stage_has_kept_nothing_is_passed_over(paths: RunPaths) -> None:
    short = simulate(generate("1f1b", 3, 2), COSTS, [WAY] * 2)
    planned(paths)
    taken(paths, short, 3, lost=[1])
    assert newest_step(paths).measured.makespan_s == pytest.approx(short.makespan_s, abs=1e-4)


def test_a_run_without_a_whole_step_says_so(paths: RunPaths) -> None:
    planned(paths)
    taken(paths, simulate(generate("1f1b", 3, 4), COSTS), 1, lost=[1])
    with pytest.raises(DataError, match=r"has no step of pi5; .* try again in a moment"):
        newest_step(paths)


def test_stages_that_computed_something_else_are_no_step(paths: RunPaths) -> None:
    planned(paths, "zero-bubble")
    taken(paths, simulate(generate("gpipe", 3, 3), COSTS), 2)
    with pytest.raises(DataError, match="that all stages have kept whole"):
        newest_step(paths)


def test_a_run_that_is_no_pipeline_is_refused(paths: RunPaths) -> None:
    with pytest.raises(DataError, match="has no plan of stages"):
        newest_step(paths)


def test_a_picture_has_measured_and_simulated_and_a_table_what_was_measured(
    paths: RunPaths,
) -> None:
    planned(paths)
    taken(paths, simulate(generate("1f1b", 3, 4), COSTS, [WAY] * 2), 2)
    picture, table = paths.root / "step.svg", paths.root / "step.csv"
    write_timeline(paths, picture)
    drawn = picture.read_text()
    assert drawn.count("mini2 (worker 3) 4-5") == 2
    assert drawn.index("measured: ") < drawn.index("simulated, ")
    write_timeline(paths, table)
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == 3 * 4 * 2
    with pytest.raises(ConfigError, match=r"must end in \.svg, \.png, \.pdf, \.csv"):
        write_timeline(paths, paths.root / "step.jpg")
