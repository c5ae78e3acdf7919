"""Before a run: whether packets of full size pass between the workers and the server.

Where an MTU on the way is smaller than those of both ends, connections are made and large frames never
arrive: a run would begin, and train nothing.
"""

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError
from smolcluster.launch.doctor.checks_links import (
    LISTEN_S,
    REACH_S,
    link_script,
    listen_script,
    lost_packets,
    probe_source,
    read_listener,
    stop_script,
)
from smolcluster.launch.doctor.findings import Context
from smolcluster.launch.host import Host
from smolcluster.launch.plan import NodePaths
from smolcluster.launch.prepare import run_on_all


def check_packets(cluster: ClusterConfig, places: Mapping[str, NodePaths]) -> None:
    """See that large packets pass; what cannot be measured is left to the run to tell.

    Raises:
        LaunchError: they are lost on the way of at least one worker.
    """
    token = secrets.token_hex(8)
    server = Host(cluster.server, places[cluster.server].ssh)
    ways = [Host(node, places[node].ssh) for node in cluster.workers if node != cluster.server]

    def context(host: Host) -> Context:
        place = places[host.node]
        python = (
            place.python if place.python.startswith("/") else f"{place.project_dir}/{place.python}"
        )
        return Context(host.node, cluster, host.destination, python=python, token=token)

    try:
        script = listen_script(context(server))
        listener = read_listener(server.run(script, stdin=probe_source(), timeout_s=LISTEN_S))
    except LaunchError:
        listener = None
    if listener is None:
        return

    def look(host: Host) -> None:
        there = replace(context(host), listener=listener)
        told = {}
        with suppress(LaunchError, ValueError, IndexError):
            script = link_script(there, "large")
            done = host.run(script, stdin=probe_source(), timeout_s=REACH_S)
            told = json.loads(done.stdout.splitlines()[-1])
        if told.get("error") == "large":
            what, fix = lost_packets(told, there)
            raise LaunchError(f"{host.node}: {what}: {fix}")

    try:
        run_on_all(ways, look)
    finally:
        with suppress(LaunchError):  # then it ends by itself
            server.run(stop_script(listener))
