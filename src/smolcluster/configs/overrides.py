"""Single values from flags and variables, and what of them is for whom."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from smolcluster.configs.function_name import known_here
from smolcluster.configs.keys import KeyPath, find_shape, fixed_paths
from smolcluster.configs.load import parse_yaml
from smolcluster.configs.machines import rename_in_path, rename_in_value
from smolcluster.configs.problems import SettingError
from smolcluster.configs.schema import ENV, NodeConfig, own_keys
from smolcluster.configs.sections import A_SECTION, flat_path, flat_values, is_other_section, locate
from smolcluster.configs.spec import algorithms, spec_of
from smolcluster.errors import ConfigError
from smolcluster.utils.words import as_command, nearest, one_line

ENVIRONMENT_PREFIX = "SMOLCLUSTER_"
NAME_VARIABLE, ATTACH_VARIABLE = "SMOLCLUSTER_NAME", "SMOLCLUSTER_ATTACH"
"""What a process that attaches is called, and what its launcher tells it, as JSON: no keys of a file."""
OWN_VARIABLES = frozenset({NAME_VARIABLE, ATTACH_VARIABLE})
OVERRIDE_FLAG = "--override"
WORKLOAD = "workload"
"""The key that names a function, and the shipped training file for those that give it by a flag."""

_WORKER_CLUSTER_KEYS = (
    "server",
    "host_ip",
    "port",
    "encryption",
    "start_timeout_s",
    "metrics_port",
    "metrics_bind",
    "nodes",
)


@dataclass(frozen=True)
class OverrideValue:
    """One value from a flag or a variable.

    Attributes:
        written: the path in the words of who set it, for messages.
        origin: the flag or variable, for messages.
        folded: the key was written in capitals, so free names in it match whatever their case.
    """

    path: KeyPath
    written: KeyPath
    value: Any
    origin: str
    folded: bool = False

    def names(self, known: str, part: str) -> bool:
        """Whether `part` of the path means the free name `known`."""
        return part == known or (self.folded and part.lower() == known.lower())

    def of_nodes(self, local_names: Mapping[str, str]) -> "OverrideValue":
        """The same with the names for which those of the cluster file stand, see `ClusterConfig.node_of`."""

        def rename(name: str) -> str:
            return next((new for old, new in local_names.items() if self.names(old, name)), name)

        path = rename_in_path(self.path, rename)
        return replace(self, path=path, value=rename_in_value(path, self.value, rename))

    def seen_by(self, node_name: str) -> "OverrideValue":
        """`nodes.<node_name>.key` as that node sees it: `key`."""
        if self.path[0] == "nodes" and len(self.path) > 2 and self.names(node_name, self.path[1]):
            return replace(self, path=self.path[2:])
        return self


def from_overrides(overrides: Iterable[str]) -> list[OverrideValue]:
    """The values of `key=value` flags.

    Raises:
        ConfigError: no `=`, an empty or unknown key, or a value that is no YAML.
    """
    assignments = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals:
            raise ConfigError(
                one_line(
                    f"{OVERRIDE_FLAG}: {text!r} has no '=', must be key=value, such as port=6000"
                )
            )
        assignments += _assign(key.strip(), raw, OVERRIDE_FLAG, folded=False)
    return assignments


def from_environment(environ: Mapping[str, str]) -> list[OverrideValue]:
    """The values of all variables called `SMOLCLUSTER_A__B`, whole sections before their keys.

    Raises:
        ConfigError: an unknown key, or a value that is no YAML.
    """
    assignments = []
    for name, raw in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in OWN_VARIABLES:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            assignments += _assign(key, raw, f"environment variable {name}", folded=True)
    return assignments


def _assign(key: str, raw: str, origin: str, *, folded: bool) -> list[OverrideValue]:
    """The values that `raw` gives to `key`, of either shape: several where it is a mapping."""
    written = tuple(part.strip() for part in key.split("."))
    if not all(written):
        raise ConfigError(
            one_line(f"{origin}: the key {key!r} is empty or has an empty part, must be like a.b")
        )
    is_section = len(written) == 1 and is_other_section(written[0])
    is_text = not is_section and locate(flat_path(written), origin, written)[1].is_text
    value: Any = raw.strip()
    if not (is_text and _is_plain_text(value)):
        try:
            value = parse_yaml(value)
        except ValueError as error:
            problem = f"which cannot be read: {str(error).lstrip(', :')}"
            raise SettingError(written, raw, problem, source=origin) from None
    if is_section and not (isinstance(value, dict) and value):
        raise SettingError(written, value, allowed=A_SECTION, source=origin)
    return [
        assignment
        for path, words, item in flat_values(written, value)
        for assignment in _spread(OverrideValue(path, words, item, origin, folded))
    ]


def _is_plain_text(raw: str) -> bool:
    """Whether text on a command line means itself: no YAML null and no quotes around it."""
    return raw not in ("", "~", "null", "Null", "NULL") and raw[0] not in "\"'"


def _spread(assignment: OverrideValue) -> Iterator[OverrideValue]:
    """A mapping's values one by one; anything else as it is."""
    path, shape = locate(assignment.path, assignment.origin, assignment.written)
    assignment = replace(assignment, path=path)
    if shape.is_value or not isinstance(assignment.value, dict):
        yield assignment
        return
    if not assignment.value:
        problem = "name the keys to set"
        raise SettingError(assignment.written, {}, problem, source=assignment.origin)
    for name, value in assignment.value.items():
        below = replace(
            assignment, path=(*path, name), written=(*assignment.written, name), value=value
        )
        yield from _spread(below)


def node_overrides(overrides: Iterable[str]) -> list[str]:
    """Those of `overrides` that may be handed to a worker, see `check_node_overrides`.

    Raises:
        ConfigError: an override that is malformed or names no setting.
    """
    return [text for text in overrides if all(map(_is_for_worker, from_overrides([text])))]


def public_overrides(overrides: Iterable[str]) -> list[str]:
    """What of `overrides` others may see, in an order that means the same.

    Of one that sets more than environment variables, such as `nodes.pi5={env: {A: b}, threads: 2}`, the
    rest is kept.

    Raises:
        ConfigError: an override is malformed or names no setting.
    """
    public = []
    for text in overrides:
        assignments = from_overrides([text])
        if not any(map(_is_secret, assignments)):
            public.append(text)
            continue
        for assignment in assignments:
            if not _is_secret(assignment):
                public.append(_as_override(assignment))
    return public


def public_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment whose settings others may see.

    Raises:
        ConfigError: an unknown key, or a value that is no YAML.
    """
    return {
        name: text
        for name, text in environ.items()
        if not any(map(_is_secret, from_environment({name: text})))
    }


def workload_overrides(stated: str | None) -> list[str]:
    """What `--workload` stands for.

    Raises:
        ConfigError: it is no name of a function, or its file is not here.
    """
    return [] if stated is None else [f"{WORKLOAD}={known_here(stated).text}"]


def server_overrides(stated: str | None, node: str) -> list[str]:
    """What `--server HOST:PORT` stands for.

    Raises:
        ConfigError: it is malformed.
    """
    if stated is None:
        return []
    host, colon, port = stated.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ConfigError(f"--server is {stated!r}, must be HOST:PORT such as 10.10.0.1:65432")
    return [f"host_ip.{node}={host.strip('[]')}", f"port={port}"]


def without_workload(overrides: Iterable[str]) -> list[str]:
    """Those of `overrides` that do more than to name the workload, which each process is told by a flag."""
    return [
        text
        for text in overrides
        if any(each.path[0] != WORKLOAD for each in from_overrides([text]))
    ]


def unused_overrides(overrides: Iterable[str], algorithm: str) -> list[str]:
    """A sentence about each key of `overrides` that other algorithms read and this one does not.

    Raises:
        ConfigError: an override is malformed or names no setting.
    """
    said = []
    for key in dict.fromkeys(assignment.path[0] for assignment in from_overrides(overrides)):
        readers = [spec for spec in algorithms().values() if key in own_keys(spec.name)]
        if readers and algorithm not in [spec.name for spec in readers]:
            titles = " and ".join(spec.title for spec in readers)
            said.append(
                f"{OVERRIDE_FLAG} {key} has no effect: it is read by {titles}, not by "
                f"{spec_of(algorithm).title}"
            )
    return said


def _is_secret(assignment: OverrideValue) -> bool:
    path = assignment.path
    return path[0] == ENV or (path[0] == "nodes" and path[2:3] == (ENV,))


def _as_override(assignment: OverrideValue) -> str:
    """The text of an override that makes the same assignment, whatever its names consist of."""
    first, *below = assignment.path
    value = assignment.value
    for part in reversed(below):
        value = {part: value}
    return f"{first}={json.dumps(value, default=str, ensure_ascii=False)}"


def check_node_overrides(overrides: Iterable[str]) -> None:
    """Refuse overrides in which a worker has no say: the server owns the run.

    A worker decides what belongs to its machine, and how it gets to the server.

    Raises:
        ConfigError: an override that is malformed, names no setting, or is the server's.
    """
    for assignment in from_overrides(overrides):
        if not _is_for_worker(assignment):
            own_keys = [".".join(path) for path in fixed_paths(NodeConfig)]
            key = ".".join(assignment.path)
            listed = as_command("config", "show", "--node", "NODE")
            raise SettingError(
                assignment.path,
                assignment.value,
                "which is not a worker's to set; give it to the server. A worker sets the keys that "
                f"{listed} lists under node, and {', '.join(_WORKER_CLUSTER_KEYS)}",
                nearest=nearest(key, [*own_keys, *_WORKER_CLUSTER_KEYS]),
                source=OVERRIDE_FLAG,
            )


def _is_for_worker(assignment: OverrideValue) -> bool:
    is_node_key = find_shape(NodeConfig, assignment.path) is not None
    return is_node_key or assignment.path[0] in _WORKER_CLUSTER_KEYS
