"""What `smolcluster` says without a command: the three that fit what is here."""

import sys
from collections.abc import Sequence
from pathlib import Path

from smolcluster.launch.watch.listing import living
from smolcluster.runs.paths import all_runs, runs_in
from smolcluster.utils.words import as_typed

RUNNING = (
    ("status", "how the run stands"),
    ("top", "watch it: curves, processes, warnings"),
    ("stop", "save a checkpoint and end it"),
)
WITH_MACHINES = (
    ("doctor --config {file}", "examine the machines of {file}"),
    ("advise --config {file}", "how fast each algorithm would train on them"),
    ("launch {algorithm}", "train on them"),
)
FIRST_RUN = ("launch edp --local", "train on this machine: digits, a minute")
FINISHED_RUNS = ("report", "the newest run as a page")
NEXT = (
    ("init", "name your machines in a cluster file"),
    ("train --workload FILE.py:FUNCTION", "train a model of your own"),
)
CLUSTER_FILES = "cluster_config_*.yaml"


def show_first_commands() -> None:
    """Print them, each with what it does."""
    runs = all_runs()
    rows = first_commands(Path(), is_running=bool(living(runs)), has_runs=any(runs_in(runs)))
    typed = [(as_typed(*command.split()), what) for command, what in rows]
    width = max(len(command) for command, _ in typed)
    lines = [f"  {command:{width}}  {what}\n" for command, what in typed]
    sys.stdout.write("".join([*lines, f"\nAll commands: {as_typed('--help')}\n"]))


def first_commands(folder: Path, *, is_running: bool, has_runs: bool) -> Sequence[tuple[str, str]]:
    """What is typed behind `smolcluster`, and what it does, for a person who works in `folder`."""
    if is_running:
        return RUNNING
    file = min(folder.glob(CLUSTER_FILES), default=None)
    if file is None:
        return (FINISHED_RUNS if has_runs else FIRST_RUN, *NEXT)
    algorithm = file.stem.removeprefix(CLUSTER_FILES.partition("*")[0])
    return [
        (command.format(algorithm=algorithm, file=file.name), what.format(file=file.name))
        for command, what in WITH_MACHINES
    ]
