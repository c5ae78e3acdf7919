"""What `smolcluster` says without a command: the three that fit what is here."""

import sys
from collections.abc import Sequence
from pathlib import Path

from smolcluster.launch.find import all_runs
from smolcluster.launch.watch.listing import living

RUNNING = (
    ("smolcluster status", "how the run stands"),
    ("smolcluster top", "watch it: curves, processes, warnings"),
    ("smolcluster stop", "save a checkpoint and end it"),
)
WITH_MACHINES = (
    ("smolcluster doctor", "examine the machines of {file}"),
    ("smolcluster advise", "how fast each algorithm would train on them"),
    ("smolcluster launch {algorithm}", "train on them"),
)
NOTHING_YET = (
    ("smolcluster launch edp --local", "train on this machine: digits, a minute"),
    ("smolcluster init", "name your machines in a cluster file"),
    ("smolcluster train --workload FILE.py:FUNCTION", "train a model of your own"),
)
CLUSTER_FILES = "cluster_config_*.yaml"


def show_first_commands() -> None:
    """Print them, each with what it does."""
    rows = first_commands(Path(), is_running=bool(living(all_runs())))
    width = max(len(command) for command, _ in rows)
    lines = [f"  {command:{width}}  {what}\n" for command, what in rows]
    sys.stdout.write("".join([*lines, "\nAll commands: smolcluster --help\n"]))


def first_commands(folder: Path, *, is_running: bool) -> Sequence[tuple[str, str]]:
    """Commands and what they do, for a person who works in `folder`."""
    if is_running:
        return RUNNING
    file = min(folder.glob(CLUSTER_FILES), default=None)
    if file is None:
        return NOTHING_YET
    algorithm = file.stem.removeprefix(CLUSTER_FILES.partition("*")[0])
    return [
        (command.format(algorithm=algorithm), what.format(file=file.name))
        for command, what in WITH_MACHINES
    ]
