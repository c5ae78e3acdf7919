"""`smolcluster doctor`: what would go wrong on the machines of a cluster, and what mends it.

    first contact -> the machine's facts -> its project -> a listener on the server -> the workers connect

All machines at once, some checks of a machine at once, and each check has its time limit; so the whole takes
as long as the slowest machine. Only the workers' measurements of their links take turns.
"""

import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from smolcluster.configs.function_name import known_here
from smolcluster.configs.load import find_config
from smolcluster.configs.meant import cluster_source, training_source
from smolcluster.configs.overrides import workload_overrides
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.check_report import as_json_text, exit_code, show
from smolcluster.launch.doctor.checks import find_twins, judge_system
from smolcluster.launch.doctor.findings import NodeChecks, ok, skipped
from smolcluster.launch.doctor.table import (
    CONTACT,
    CONTACT_S,
    FACTS,
    HOST_KEY,
    IDENTITY,
    SSH,
    SYSTEM,
    ask_facts,
    not_reached,
    refused,
    run_table,
)
from smolcluster.launch.host import Done, Unreachable
from smolcluster.launch.links import Listener, read_listener
from smolcluster.launch.node_facts import Facts, read_facts
from smolcluster.launch.places import machine_of, nodes_as_written, project_root
from smolcluster.launch.project import read_project
from smolcluster.launch.workload_code import check_source, packages_of
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.runs.paths import all_runs
from smolcluster.utils.at_once import at_once
from smolcluster.utils.units import format_count

PLAIN_WIDTH = 100
"""Columns where the output is no terminal."""


def doctor(
    config: str | None, overrides: list[str], as_json: bool, workload: str | None = None
) -> int:
    """Look at the machines of a cluster file and print what was found; 1 if something fails.

    `workload`: a function whose imports are looked for there.

    Raises:
        ConfigError: the cluster file, an override or the workload is wrong.
    """
    source = cluster_source(config)
    stated = [*overrides, *workload_overrides(workload)]
    trained = training_source(None, source, workload=workload)
    settings = load_settings(source, trained, None, stated)
    cluster = settings.cluster
    nodes = nodes_of(cluster, nodes_as_written(find_config(source, "cluster"), overrides))
    if settings.train.workload is not None:
        name = known_here(settings.train.workload)
        check_source(name, settings.train.workload_args)
        for node in nodes:
            node.packages = tuple(packages_of(name))
    console = SteadyConsole(stderr=True)
    waiting = f"looking at {format_count(len(nodes), 'machine')} …"
    with console.status(waiting) if console.is_terminal else nullcontext():
        examine(nodes)
    if as_json:
        sys.stdout.write(as_json_text(nodes) + "\n")
    else:
        show(nodes, SteadyConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    return exit_code(nodes)


def nodes_of(cluster: ClusterConfig, raw: Mapping[str, Mapping[str, Any]]) -> list[NodeChecks]:
    """What is known of each node beforehand, the server first; `raw`: as `nodes_as_written`."""
    project = read_project(project_root())
    token = secrets.token_hex(8)
    nodes = []
    for node in cluster.machines:
        config, stated = cluster.nodes.get(node, NodeConfig()), raw.get(node) or {}
        machine = machine_of(node, config, stated, here=all_runs(), project=project)
        nodes.append(NodeChecks(machine, cluster, sums=project.sums, token=token))
    return nodes


def examine(nodes: Sequence[NodeChecks]) -> None:
    """Look at the nodes of a cluster, and put down with each what was found."""
    at_once(examine_machine, nodes)
    for node, twin in find_twins(nodes).items():
        next(each for each in nodes if each.name == node).findings[IDENTITY] = twin
    server = next(node for node in nodes if node.is_server)
    cluster = server.cluster
    workers = [node for node in nodes if node.name in (*cluster.workers, *cluster.store_nodes[1:])]
    with listening(server) as listener:
        for worker in workers:
            worker.listener = listener
        at_once(lambda worker: run_table(worker, "worker"), workers)


def examine_machine(node: NodeChecks) -> None:
    make_contact(node)
    why = not_reached(node)
    node.findings[IDENTITY] = skipped(why) if why else ok("one name")
    run_table(node, "machine")


def make_contact(node: NodeChecks) -> None:
    findings, is_here = node.findings, node.machine.is_here
    try:
        answer = ask_facts(node, "contact", CONTACT, alone=True)
        contact = node.facts = read_facts(answer)
        system = judge_system(answer, node)
        if system.state == "ok":
            # opens the connection that later commands share; several at once would each open their own
            told = read_facts(ask_facts(node, "facts", FACTS)).told
            node.facts = Facts({**contact.told, **told})
    except LaunchError as error:
        wrong = refused(error, node, CONTACT_S)
        if isinstance(error, Unreachable) and error.cause.startswith("host_key"):
            findings |= {SSH: skipped("needs its key"), HOST_KEY: wrong}
        else:
            findings |= {SSH: wrong, HOST_KEY: skipped("needs SSH")}
        return
    findings[SSH] = ok("this machine" if is_here else f"{answer.took_s:.1f} s")
    findings[HOST_KEY] = skipped("this machine") if is_here else ok("known")
    findings[SYSTEM] = system


@contextmanager
def listening(server: NodeChecks) -> Iterator[Listener | None]:
    """Look at the server's port; the listener is there as long as the block lasts."""
    answers = list[Done]()
    with ExitStack() as stack:

        def hold(script: str, **how: Any) -> Done:
            answers.append(stack.enter_context(server.host.holding(script, **how)))
            return answers[0]

        run_table(server, "server", hold)
        yield read_listener(answers[0]) if answers else None
