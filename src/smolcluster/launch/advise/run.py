"""The command `advise`, `launch --auto`, which does what it says, and `servers: auto`: hosts by links."""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from smolcluster.algorithms.planning.costs import Job, Site, costs_of
from smolcluster.configs.schema import Settings
from smolcluster.launch.advise.command import (
    Found,
    can_follow,
    checked,
    find_advice,
    site_of,
    with_keys,
)
from smolcluster.launch.advise.show import advice_line, as_json, show
from smolcluster.launch.advise.speed import Speed
from smolcluster.launch.flow import LaunchOptions, launch
from smolcluster.launch.host import host_of
from smolcluster.launch.links import Say, Way, measure_all_ways
from smolcluster.launch.plan import Request
from smolcluster.launch.requests import check_model, cluster_line, settings_of, training_line
from smolcluster.observability.terminal import SteadyConsole, print_line

DO_NOT_DISTRIBUTE = 4
"""Exit code: one machine alone is about as fast, or faster."""
ANY_SIZE = Job(1_000_000)
ANY_SPEED = Speed(compute_s=(1.0,), update_s=0.0, batch_size=1, num_params=1, num_samples=1)
"""Which hosts are best does not depend on how large a model is, or how fast machines train it."""
KEYS = ("servers", "optimizer")


def advise_command(request: Request, *, local: bool, sync: bool, in_json: bool) -> int:
    """Measure, and print what to do; returns the exit code.

    Raises:
        SmolclusterError: nothing can be said.
    """
    say = partial(print_line, SteadyConsole(stderr=True))
    found = find_advice(request, say, local=local, sync=sync)
    if in_json:
        sys.stdout.write(f"{as_json(found)}\n")
    else:
        show(found, SteadyConsole())
    return _code(found)


def launch_as_stated(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Launch what the files say; with `servers: auto` where the links say; returns the exit code.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    say = partial(print_line, SteadyConsole())
    settings = checked(request, local=local)
    check_model(request, settings)
    if how.on == "ssh" or not how.dry_run:  # a file for a scheduler says it itself
        say(training_line(request, settings))
    if how.on == "ssh" and not local:
        say(cluster_line(request))
    return launch(with_stores_chosen(request, say, local=local), how, local=local)


def launch_advised(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Measure, say in one line what is done, and do it; returns the exit code.

    Nothing is launched where one machine alone is about as fast.

    Raises:
        SmolclusterError: nothing can be said, or the launch is prevented.
    """
    console = SteadyConsole()
    say = partial(print_line, console)
    say(training_line(request, settings_of(request, local)))
    if not local:
        say(cluster_line(request))
    found = find_advice(request, say, local=local, sync=how.sync)
    say(advice_line(found))
    if found.request is None:
        return _code(found)
    return launch(found.request, replace(how, prediction=found.prediction), local=local)


def _code(found: Found) -> int:
    return DO_NOT_DISTRIBUTE if found.advice.chosen is None else 0


def with_stores_chosen(request: Request, say: Say, *, local: bool) -> Request:
    """The request with the hosts that suit the links, if its cluster file leaves them open; says which.

    Raises:
        LaunchError: the server's links cannot be measured.
    """
    settings = settings_of(request, local=local)
    if settings.cluster.servers != "auto" or local or request.script is not None:
        return request
    cluster = settings.cluster
    server = host_of(cluster, cluster.server)
    hosts = [host_of(cluster, node) for node in cluster.workers]
    apart = [each for each in hosts if each.destination != server.destination]
    ways = measure_all_ways(server, apart, cluster.host_ip, cluster.port, say)
    site = site_of_links(settings, ways, {each.node for each in apart})
    keys = chosen_keys(request, settings, site)
    if "servers" not in keys:
        say(
            f"stores: all on {cluster.server}; other hosts would make it no faster on these links, or cannot "
            "hold parts of what is trained so"
        )
        return request
    shares = keys["servers"]
    total = sum(shares.values())
    say(f"stores: {', '.join(f'{node} {share / total:.0%}' for node, share in shares.items())}")
    return with_keys(request, keys)


def site_of_links(settings: Settings, ways: dict[str, Way], apart: set[str]) -> Site:
    """What connects the workers' machines; whose link could not be measured hosts nothing."""
    known = [node for node in settings.cluster.workers if node in ways or node not in apart]
    return site_of(settings, dict.fromkeys(known, ANY_SPEED), ways)


def chosen_keys(request: Request, settings: Settings, site: Site) -> dict[str, Any]:
    """What a run would be told about stores; nothing: others do not help, or the algorithm refuses them."""
    model = costs_of(request.algorithm)
    candidates = () if model is None else model.candidates(site, ANY_SIZE, settings)
    for keys, _ in can_follow(request, candidates, local=False):
        if "servers" in keys:
            return {name: keys[name] for name in KEYS if name in keys}
    return {}
