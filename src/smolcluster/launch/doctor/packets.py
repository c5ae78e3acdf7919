"""Before a run: whether packets of full size pass between the workers and the server.

Where an MTU on the way is smaller than those of both ends, connections are made and large frames never
arrive: a run would begin, and train nothing.
"""

import secrets
from contextlib import ExitStack, suppress

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.checks_links import (
    LISTEN_S,
    REACH_S,
    link_script,
    listen_script,
    lost_packets,
)
from smolcluster.launch.doctor.findings import NodeChecks
from smolcluster.launch.host import Host
from smolcluster.launch.plan import PathsByNode
from smolcluster.launch.prepare import run_on_all
from smolcluster.launch.probing import ask, listening


def check_packets(cluster: ClusterConfig, places: PathsByNode) -> None:
    """See that large packets pass; what cannot be measured is left to the run to tell.

    Raises:
        LaunchError: they are lost on the way of at least one worker.
    """
    token = secrets.token_hex(8)

    def node_at(host: Host) -> NodeChecks:
        place = places[host.node]
        of_node = place.python.startswith("/")
        python = place.python if of_node else f"{place.project_dir}/{place.python}"
        return NodeChecks(host, cluster, python=python, token=token, listener=listener)

    def look(host: Host) -> None:
        node, told = node_at(host), {}
        with suppress(LaunchError):
            told = ask(host, link_script(node, "large"), REACH_S)
        if told.get("error") == "large":
            what, fix = lost_packets(told, node)
            raise LaunchError(f"{host.node}: {what}: {fix}")

    server, *others = (Host(node, places[node].ssh) for node in cluster.machines)
    listener = None
    with ExitStack() as stack:
        try:
            listen = listening(server, listen_script(node_at(server)), LISTEN_S)
            listener = stack.enter_context(listen)
        except LaunchError:
            return
        run_on_all(others, look)
