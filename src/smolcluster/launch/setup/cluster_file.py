"""A cluster file as text, with the comments that the shipped ones have."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from smolcluster.configs.load import find_config, parse_yaml
from smolcluster.configs.resolve import checked_cluster

_COMMENT_COLUMN = 28
"""As in the shipped files."""


@dataclass(frozen=True)
class ClusterFile:
    """What shall stand in a cluster file.

    Attributes:
        host_ip: the address at which each node reaches the server.
        remarks: what is said behind an address, by node.
        nodes: settings of single machines: keys and text values, by node.
    """

    algorithm: str
    server: str
    workers: Sequence[str]
    port: int
    host_ip: Mapping[str, str]
    remarks: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def text(self, name: str, today: date) -> str:
        """The file as YAML; `name` is what it will be called.

        Raises:
            ConfigError: it would not be a right cluster file.
        """
        title, shared = _shipped(self.algorithm)
        workers = f"workers: [{', '.join(map(_word, self.workers))}]"
        text = f"""{title}
# Written by `smolcluster init` on {today.isoformat()}; to check changes by hand:
# smolcluster config check --config {name}
# Any key can also be set for one run: --override port=6000 host_ip.{self.workers[0]}=…
# or by the environment: SMOLCLUSTER_PORT=6000

# The address at which each machine reaches the server (the server's own entry included).
# Behind it what was measured from there, and what the server's other addresses would give.
host_ip:
{self._addresses()}
port: {self.port}
{_commented(f"num_workers: {len(self.workers)}", "Must equal the number of names in workers")}
{_commented(workers, "Names from host_ip")}
{_commented(f"server: {_word(self.server)}", "Name from host_ip")}
{shared}{self._nodes()}"""
        checked_cluster(parse_yaml(text), name)
        return text

    def _addresses(self) -> str:
        return "".join(
            f"{_commented(f'  {_word(node)}: {_quoted(address)}', self.remarks.get(node, ''))}\n"
            for node, address in self.host_ip.items()
        )

    def _nodes(self) -> str:
        if not self.nodes:
            return ""
        text = """
# What belongs to single machines; also device, threads, microbatch, dataset, env and more:
# smolcluster config schema cluster
nodes:
"""
        for node, settings in self.nodes.items():
            text += f"  {_word(node)}:\n"
            for key, value in settings.items():
                remark = "Where `ssh` finds it" if key == "ssh" and value != "local" else ""
                text += f"{_commented(f'    {key}: {_quoted(value)}', remark)}\n"
        return text


def _shipped(algorithm: str) -> tuple[str, str]:
    """The title of the algorithm's shipped cluster file, and what follows the machines in it."""
    text = find_config(algorithm, "cluster").read_text(encoding="utf-8")
    _, _, after = text.partition("\nserver:")
    return text.partition("\n")[0], after.partition("\n")[2]


def _commented(line: str, remark: str) -> str:
    return f"{line:<{_COMMENT_COLUMN}}  # {remark}" if remark else line


def _word(name: str) -> str:
    """A node's name, in quotes where YAML would take it for something else, such as a number."""
    try:
        is_text = parse_yaml(name) == name
    except ValueError:
        is_text = False
    return name if is_text else _quoted(name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
