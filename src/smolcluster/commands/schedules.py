"""`mesh schedule` and `mesh trace`: what a pipeline will compute, and has: a table, a picture, numbers."""

import sys
from pathlib import Path

from smolcluster.algorithms.instruction_log import read_step
from smolcluster.algorithms.scheduled import mesh_schedule
from smolcluster.runs.files import write_whole
from smolcluster.training.schedules.drawing import csv_of, picture_of
from smolcluster.training.schedules.instructions import Instruction, stage_ranks
from smolcluster.training.schedules.simulation import Costs, median_costs, simulate
from smolcluster.training.schedules.validation import most_held
from smolcluster.utils.units import format_count

FORWARD_S = 1.0
"""Of a microbatch through all layers of a rank; both halves of the backward take as long each."""


def trace_command(folder: Path, step: int | None, csv: Path | None, svg: Path | None) -> int:
    """Print what the ranks of a mesh computed in a step, beside the same instructions simulated.

    Stages are simulated with what their instructions took in the middle. Returns the exit code.

    Raises:
        DataError: the step is not in the folder.
    """
    number, measured = read_step(folder, step)
    schedule = tuple(tuple(span.instruction for span in spans) for spans in measured.ranks)
    simulated = simulate(schedule, median_costs(measured))
    if csv is not None:
        write_whole(csv, csv_of(measured).encode())
    if svg is not None:
        write_whole(svg, picture_of({f"step {number}": measured, "simulated": simulated}))
    rows = [
        f"rank {rank}: {' '.join(_shown(each) for each in one)}"
        for rank, one in enumerate(schedule)
    ]
    lines = [
        f"step {number}: {1e3 * measured.makespan_s:.4g} ms, simulated {1e3 * simulated.makespan_s:.4g} ms",
        f"efficiency {1 - measured.bubble:.1%}, simulated {1 - simulated.bubble:.1%}",
        *rows,
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _shown(instruction: Instruction) -> str:
    return f"{instruction.op}{instruction.microbatch}"


def schedule_command(
    name: str, num_ranks: int, num_microbatches: int, csv: Path | None, svg: Path | None
) -> int:
    """Print what a schedule costs where all ranks are alike, and write it to files; returns the exit code.

    Raises:
        ConfigError: there is no such schedule, or it cannot be made of these numbers.
    """
    schedule = mesh_schedule(name, num_ranks, num_microbatches)
    num_stages = len(stage_ranks(schedule))
    share = FORWARD_S * num_ranks / num_stages
    timeline = simulate(schedule, [Costs(share, share, share)] * num_stages)
    if csv is not None:
        write_whole(csv, csv_of(timeline).encode())
    if svg is not None:
        write_whole(svg, picture_of({f"{name}, pp {num_ranks}": timeline}))
    stages = num_stages // num_ranks
    most = ", ".join(f"{most_held(each)[0] / stages:g}" for each in schedule)
    lines = [
        f"{name}: {format_count(num_ranks, 'rank')}, {format_count(num_stages, 'stage')}, "
        f"{format_count(num_microbatches, 'microbatch')}",
        f"efficiency {1 - timeline.bubble:.1%}, bubble {timeline.bubble:.1%}",
        "(forward and both halves of the backward take equally long, transfers no time)",
        f"microbatches held at most, by rank: {most}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
