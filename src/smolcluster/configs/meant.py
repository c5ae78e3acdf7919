"""Which files are meant where none is named: a user's own before those that are shipped.

The same by hand and launched: a cluster file in this folder; a training file beside the cluster file, or a
shipped one that somebody has edited.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from smolcluster.configs.load import find_config, read_config, shipped_names
from smolcluster.configs.overrides import WORKLOAD
from smolcluster.configs.spec import default_algorithm

DEFAULT_TRAINING = "digits"
"""What is trained where nothing is named: it needs no download."""
SMALL_GPT = "stdlib"
"""A GPT that needs no download."""
SMALLER: Mapping[str, str] = MappingProxyType({DEFAULT_TRAINING: "nn", SMALL_GPT: "gpt"})
"""Defaults that need no download, and the shipped file that each stands for until somebody edits that."""
AS_SHIPPED: Mapping[str, str] = MappingProxyType(
    {
        "nn": "9ff575414ad8c314c41fe958b461e76e27426a5e66f1f2b9ac8e294af0649e7b",
        "gpt": "a2526cde2dac42026ae159ca69f47c522d75165aaac83f6f6e4d64cd1fccb7fe",
    }
)
"""What `content_digest` says of files that nobody has edited."""


def cluster_source(stated: str | None, algorithm: str | None = None) -> str:
    """The cluster file that is meant: the named one, else the one in this folder, else the shipped one.

    `algorithm`: whose it is; None: the default one's.
    """
    algorithm = algorithm or default_algorithm().name
    return stated or written_here(algorithm) or algorithm


def written_here(algorithm: str) -> str | None:
    file = Path(f"cluster_config_{algorithm}.yaml")
    return str(file) if file.is_file() else None


def training_source(
    stated: str | None,
    cluster: str | None = None,
    *,
    default: str = DEFAULT_TRAINING,
    workload: str | None = None,
) -> str:
    """The training file that is meant, a path or a shipped name.

    The named one; else one beside the cluster file that is called as a shipped one is, such as
    `nn_config.yaml`; else the shipped one of that name if somebody has edited it; else `default`.

    Args:
        stated: path or shipped name; None: none is named.
        cluster: the cluster file, as `cluster_source` says; a shipped one has no folder, this one counts.
        default: a shipped name; with a workload the file for those.
        workload: the function of `--workload`.

    Raises:
        ConfigError: an edited file is no YAML.
    """
    if stated is not None:
        return stated
    if workload is not None and default == DEFAULT_TRAINING:
        default = WORKLOAD
    names = [SMALLER[default], default] if default in SMALLER else [default]
    shipped = {name: find_config(name, "training") for name in names}
    has_folder = cluster is not None and cluster not in shipped_names("cluster")
    folder = find_config(cluster or "", "cluster").parent if has_folder else Path()
    for file in (folder / each.name for each in shipped.values()):
        if file.is_file() and file.resolve() not in map(Path.resolve, shipped.values()):
            return str(file)
    edited = (
        name
        for name in names
        if name in AS_SHIPPED and content_digest(shipped[name]) != AS_SHIPPED[name]
    )
    return next(edited, default)


def content_digest(path: Path) -> str:
    """SHA-256 of what a training file says; comments and the ends of lines say nothing.

    Raises:
        ConfigError: it is no YAML.
    """
    content = json.dumps(read_config(path, "training"), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
