"""`smolcluster config schema|show|check`: what a configuration may be, what it is, whether it is right."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.json_schema import json_schema
from smolcluster.configs.load import NODE_SECTION, SECTIONS, Kind
from smolcluster.configs.meant import cluster_source, training_source
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings, TrainConfig
from smolcluster.configs.spec import algorithms
from smolcluster.errors import ConfigError
from smolcluster.utils.units import format_count


def schema(kind: str) -> int:
    """Print the JSON schema of cluster files or of training files; returns the exit code.

    Raises:
        ConfigError: there is no such kind.
    """
    kinds: dict[str, Kind] = {name: name for name in SECTIONS}
    if kind not in kinds:
        raise ConfigError(f"{kind!r} is no kind of configuration file (known: {', '.join(kinds)})")
    _write(json.dumps(json_schema(kinds[kind]), indent=2, ensure_ascii=False) + "\n")
    return 0


def show(
    config: str | None,
    train_config: str | None,
    node: str | None,
    overrides: Sequence[str],
    *,
    local: bool,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Print the resolved configuration, a section at a time; returns the exit code.

    It is what a run saves, besides the names of environment variables, whose values are not shown.

    `node` is the machine whose settings are shown; None: the server.

    Raises:
        ConfigError: one line with what is wrong.
    """
    cluster_file = cluster_source(config)
    files = (cluster_file, training_source(train_config, cluster_file))
    settings = load_settings(*files, node, overrides, environ, local=local)
    if local and settings.node.threads is None:  # as a launch has it
        with_threads = [*overrides, "threads=1"]
        settings = load_settings(*files, node, with_threads, environ, local=True)
    _write(commented(settings, node or settings.cluster.server))
    return 0


def check(
    config: str | None,
    train_config: str | None,
    overrides: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Check both files, what they say about every machine, and the names in them; returns the exit code.

    Raises:
        ConfigError: one line with what is wrong.
    """
    cluster_file = cluster_source(config)
    files = (cluster_file, training_source(train_config, cluster_file))
    settings = load_settings(*files, None, overrides, environ)  # with the settings of every node
    _check_names(settings.train)
    _write(f"ok: {summary(settings)}\n")
    return 0


def _check_names(train: TrainConfig) -> None:
    """Refuse a dataset or an optimizer that is known only where it is made."""
    from smolcluster.data.registry import check_name  # noqa: PLC0415 - PyTorch takes time
    from smolcluster.training.torch_optimizer import check_optimizer  # noqa: PLC0415 - as above

    if train.workload is None:
        check_name(train.dataset.name, train.model)
    check_optimizer(train.optimizer, train.optimizer_args)


def commented(settings: Settings, node: str) -> str:
    """The resolved configuration as YAML, each section behind a line that says what it is."""
    comments = {
        SECTIONS["cluster"]: "The machines and how they work together",
        SECTIONS["training"]: "What is trained",
        NODE_SECTION: f"What belongs to the machine {node}",
    }
    text = settings.to_yaml(env_names=True)
    for section, comment in comments.items():
        text = re.sub(rf"^(?={section}:)", f"# {comment}\n", text, flags=re.MULTILINE)
    return text


def summary(settings: Settings) -> str:
    """The cluster, what it trains, and which algorithms can, in one line.

    Raises:
        ConfigError: none can.
    """
    cluster, train = settings.cluster, settings.train
    refusals: dict[str, str] = {}
    for name in algorithms():
        try:
            check_algorithm(settings, name)
        except ConfigError as error:
            refusals[name] = str(error)
    if len(refusals) == len(algorithms()):
        raise ConfigError("; ".join(f"{name}: {said}" for name, said in refusals.items()))
    fitting = ", ".join(name for name in algorithms() if name not in refusals)
    workers = format_count(cluster.num_workers, "worker")
    what = train.workload or f"{train.model.type} on {train.dataset.name}"
    return (
        f"server {cluster.server}, {workers} ({', '.join(cluster.workers)}), port {cluster.port}; "
        f"{what}, {format_count(train.num_epochs, 'epoch')} of batches of "
        f"{train.samples_per_push}; for {fitting}"
    )


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
