"""A cluster file as text, with the comments that the shipped ones have."""

import json
from collections.abc import Mapping, Sequence
from datetime import date

from smolcluster.configs.load import find_config, parse_yaml
from smolcluster.configs.resolve import checked_cluster

_COMMENT_COLUMN = 28
"""As in the shipped files."""


def cluster_text(
    name: str,
    today: date,
    *,
    algorithm: str,
    server: str,
    workers: Sequence[str],
    port: int,
    host_ip: Mapping[str, str],
    remarks: Mapping[str, str],
    nodes: Mapping[str, Mapping[str, str]],
) -> str:
    """A cluster file as YAML.

    Args:
        name: what the file will be called.
        today: when it was written.
        algorithm: whose shipped file it is like.
        server: the server's node.
        workers: the workers' nodes.
        port: the server's.
        host_ip: the address at which each node reaches the server.
        remarks: what is said behind an address, by node.
        nodes: settings of single machines: keys and text values, by node.

    Raises:
        ConfigError: it would not be a right cluster file.
    """
    title, shared = _shipped(algorithm)
    addresses = "".join(
        f"{_commented(f'  {_word(node)}: {_quoted(address)}', remarks.get(node, ''))}\n"
        for node, address in host_ip.items()
    )
    names = f"workers: [{', '.join(map(_word, workers))}]"
    text = f"""{title}
# Written by `smolcluster init` on {today.isoformat()}; to check changes by hand:
# smolcluster config check --config {name}
# Any key can also be set for one run: --override port=6000 host_ip.{workers[0]}=…
# or by the environment: SMOLCLUSTER_PORT=6000

# The address at which each machine reaches the server (the server's own entry included).
# Behind it what was measured from there, and what the server's other addresses would give.
host_ip:
{addresses}
port: {port}
{_commented(f"num_workers: {len(workers)}", "Must equal the number of names in workers")}
{_commented(names, "Names from host_ip")}
{_commented(f"server: {_word(server)}", "Name from host_ip")}
{shared}{_nodes(nodes)}"""
    checked_cluster(parse_yaml(text), name)
    return text


def _nodes(nodes: Mapping[str, Mapping[str, str]]) -> str:
    if not nodes:
        return ""
    text = """
# What belongs to single machines; also device, threads, microbatch, dataset, env and more:
# smolcluster config schema cluster
nodes:
"""
    for node, settings in nodes.items():
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
