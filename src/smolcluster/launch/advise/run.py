"""The command `advise`, `launch --auto`, which does what it says, and `servers: auto`: hosts by links."""

from dataclasses import replace
from functools import partial
from typing import Any

from smolcluster.algorithms.planning.costs import Job, Site, costs_of
from smolcluster.configs.schema import Settings
from smolcluster.launch.advise.command import (
    Found,
    as_overrides,
    can_follow,
    find_advice,
    site_of,
)
from smolcluster.launch.advise.show import advice_line, as_document, show
from smolcluster.launch.advise.speed import Speed
from smolcluster.launch.flow import LaunchOptions, launch
from smolcluster.launch.host import host_of
from smolcluster.launch.links import Say, Way, measure_all_ways
from smolcluster.launch.plan import Request
from smolcluster.launch.requests import Resolved, cluster_line, resolved, training_line
from smolcluster.observability.terminal import SteadyConsole, print_line
from smolcluster.utils.words import write_json

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
    found = find_advice(resolved(request, local=local), say, sync=sync)
    if in_json:
        write_json(as_document(found))
    else:
        show(found, SteadyConsole())
    return _code(found)


def launch_as_stated(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Launch what the files say; with `servers: auto` where the links say; returns the exit code.

    Raises:
        SmolclusterError: what prevents it, in one line.
    """
    say = partial(print_line, SteadyConsole())
    asked = resolved(request, local=local).checked()
    if how.on == "ssh" or not how.dry_run:  # a file for a scheduler says it itself
        say(training_line(asked))
    if how.on == "ssh" and not local:
        say(cluster_line(asked))
    return launch(with_stores_chosen(asked, say), how)


def launch_advised(request: Request, how: LaunchOptions, *, local: bool) -> int:
    """Measure, say in one line what is done, and do it; returns the exit code.

    Nothing is launched where one machine alone is about as fast.

    Raises:
        SmolclusterError: nothing can be said, or the launch is prevented.
    """
    say = partial(print_line, SteadyConsole())
    asked = resolved(request, local=local)
    say(training_line(asked))
    if not local:
        say(cluster_line(asked))
    found = find_advice(asked, say, sync=how.sync)
    say(advice_line(found))
    if found.followed is None:
        return _code(found)
    return launch(found.followed, replace(how, prediction=found.prediction))


def _code(found: Found) -> int:
    return DO_NOT_DISTRIBUTE if found.advice.chosen is None else 0


def with_stores_chosen(asked: Resolved, say: Say) -> Resolved:
    """The request with the hosts that suit the links, if its cluster file leaves them open; says which.

    Raises:
        LaunchError: the server's links cannot be measured.
    """
    cluster = asked.settings.cluster
    if cluster.servers != "auto" or asked.local or asked.request.script is not None:
        return asked
    server = host_of(cluster, cluster.server)
    hosts = [host_of(cluster, node) for node in cluster.workers]
    apart = [each for each in hosts if each.destination != server.destination]
    ways = measure_all_ways(server, apart, cluster.host_ip, cluster.port, say)
    site = site_of_links(asked.settings, ways, {each.node for each in apart})
    keys = chosen_keys(asked, site)
    if "servers" not in keys:
        say(
            f"stores: all on {cluster.server}; other hosts would make it no faster on these links, or cannot "
            "hold parts of what is trained so"
        )
        return asked
    shares = keys["servers"]
    total = sum(shares.values())
    say(f"stores: {', '.join(f'{node} {share / total:.0%}' for node, share in shares.items())}")
    return asked.with_overrides(as_overrides(keys)).checked()


def site_of_links(settings: Settings, ways: dict[str, Way], apart: set[str]) -> Site:
    """What connects the workers' machines; whose link could not be measured hosts nothing."""
    known = [node for node in settings.cluster.workers if node in ways or node not in apart]
    return site_of(settings, dict.fromkeys(known, ANY_SPEED), ways)


def chosen_keys(asked: Resolved, site: Site) -> dict[str, Any]:
    """What a run would be told about stores; nothing: others do not help, or the algorithm refuses them."""
    model = costs_of(asked.request.algorithm)
    candidates = () if model is None else model.candidates(site, ANY_SIZE, asked.settings)
    for keys, _ in can_follow(asked, candidates):
        if "servers" in keys:
            return {name: keys[name] for name in KEYS if name in keys}
    return {}
