"""`smolcluster diagram`: the machines, layers and links of a plan, a cluster file or a run as a picture."""

import sys
from pathlib import Path

from smolcluster.algorithms.planning.plan_file import PLAN
from smolcluster.configs.load import find_config, is_of_run, read_config
from smolcluster.configs.resolve import checked_cluster
from smolcluster.launch.diagram import Diagram, Form, drawn, of_cluster, of_hetero, of_plan
from smolcluster.launch.find import find
from smolcluster.launch.hetero.file import is_hetero, read_hetero
from smolcluster.runs.files import write_whole


def diagram_command(source: str, form: Form, to: Path | None) -> int:
    """Draw, and write it to a file, or to the terminal; returns the exit code.

    Raises:
        SmolclusterError: there is nothing to draw, or no Graphviz.
    """
    content = drawn(diagram_of(source), form)
    if to is not None:
        write_whole(to, content)
    else:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    return 0


def diagram_of(source: str) -> Diagram:
    """Of a plan's JSON file, a cluster file, a `hetero_config.json`, or a run.

    A run that has no plan (yet) is shown as a server and its workers.

    Raises:
        ConfigError: it is none of these.
        DataError: the plan cannot be read.
    """
    path = Path(source)
    if path.suffix == ".json":
        if is_hetero(path):
            return of_hetero(read_hetero(path), path.stem)
        return of_plan(PLAN.read(path), path.stem)
    if path.suffix in (".yaml", ".yml"):
        return _of_configuration(find_config(source, "cluster"), path.stem)
    run = find(source)
    if (plan := run.plan).is_file():
        return of_plan(PLAN.read(plan), run.run_id)
    return _of_configuration(run.config, run.run_id)


def _of_configuration(file: Path, title: str) -> Diagram:
    """Of a cluster file, or of a run's `config.yaml`, in any shape in which it can be launched."""
    cluster, _ = checked_cluster(read_config(file, "cluster"), str(file))
    if cluster.get("shard_plan") == "auto" and is_of_run(file):
        cluster["shard_plan"] = None  # the default, which a run of any algorithm has
    return of_cluster(cluster, title)
