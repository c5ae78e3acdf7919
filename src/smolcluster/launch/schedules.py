"""`mesh schedule`: a pipeline's schedule as a table, a picture, and in numbers."""

import sys
from pathlib import Path

from smolcluster.algorithms.scheduled import ALIASES
from smolcluster.runs.files import write_whole
from smolcluster.training.schedules.drawing import csv_of, picture_of
from smolcluster.training.schedules.instructions import generate, stage_ranks
from smolcluster.training.schedules.simulation import Costs, simulate
from smolcluster.training.schedules.validation import validate

FORWARD_S = 1.0
"""Of a microbatch through all layers of a rank; both halves of the backward take as long each."""


def schedule_command(
    name: str, num_ranks: int, num_microbatches: int, csv: Path | None, svg: Path | None
) -> int:
    """Print what a schedule costs where all ranks are alike, and write it to files; returns the exit code.

    Raises:
        ConfigError: there is no such schedule, or it cannot be made of these numbers.
    """
    schedule = generate(ALIASES.get(name, name), num_ranks, num_microbatches)
    held = validate(schedule, num_microbatches)
    num_stages = len(stage_ranks(schedule))
    share = FORWARD_S * num_ranks / num_stages
    timeline = simulate(schedule, [Costs(share, share, share)] * num_stages)
    if csv is not None:
        write_whole(csv, csv_of(timeline).encode())
    if svg is not None:
        write_whole(svg, picture_of({f"{name}, pp {num_ranks}": timeline}))
    stages = num_stages // num_ranks
    most = ", ".join(f"{each / stages:g}" for each in held)
    lines = [
        f"{name}: {num_ranks} ranks, {num_stages} stages, {num_microbatches} microbatches",
        f"efficiency {1 - timeline.bubble:.1%}, bubble {timeline.bubble:.1%}",
        "(forward and both halves of the backward take equally long, transfers no time)",
        f"microbatches held at most, by rank: {most}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
