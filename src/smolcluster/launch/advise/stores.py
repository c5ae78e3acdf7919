"""`stores: auto` of a cluster file: the links are measured, and hosts for the weights chosen by them."""

from dataclasses import replace
from typing import Any

from smolcluster.algorithms.planning.costs import Job, Site, Worker, costs_of
from smolcluster.configs.resolve import Settings
from smolcluster.launch.advise.command import as_overrides, interfaces_of, with_way
from smolcluster.launch.advise.measuring import Say, Way, measure_ways
from smolcluster.launch.host import host_of
from smolcluster.launch.plan import Request
from smolcluster.launch.requests import settings_of

ANY_SIZE = Job(1_000_000)
"""Which hosts are best does not depend on how large a model is."""
KEYS = ("stores", "servers", "store_shares")


def with_stores_chosen(request: Request, say: Say, *, local: bool) -> Request:
    """The request with the hosts that suit the links, if its cluster file leaves them open; says which.

    Raises:
        LaunchError: the server's links cannot be measured.
    """
    settings = settings_of(request, local=local)
    if settings.cluster.stores is None or local:
        return request
    cluster = settings.cluster
    server = host_of(cluster, cluster.server)
    hosts = [host_of(cluster, node) for node in cluster.workers]
    apart = [each for each in hosts if each.destination != server.destination]
    ways = measure_ways(server, apart, cluster.host_ip, cluster.port, say)
    site = site_of_links(settings, ways, {each.node for each in apart})
    keys = chosen_keys(request, settings, site)
    if "servers" not in keys:
        say(f"stores: all on {cluster.server}; other hosts would make it no faster on these links")
        return request
    total = sum(keys["store_shares"])
    told = zip(keys["servers"], keys["store_shares"], strict=True)
    say(f"stores: {', '.join(f'{node} {share / total:.0%}' for node, share in told)}")
    return replace(request, overrides=(*request.overrides, *as_overrides(keys)))


def site_of_links(settings: Settings, ways: dict[str, Way], apart: set[str]) -> Site:
    """What connects the workers' machines; whose link could not be measured hosts nothing."""
    known = [node for node in settings.cluster.workers if node in ways or node not in apart]
    workers = tuple(with_way(Worker(node, 1.0), ways.get(node)) for node in known)
    return Site(workers, interfaces_of(ways))


def chosen_keys(request: Request, settings: Settings, site: Site) -> dict[str, Any]:
    """What the algorithm would write into the cluster file about stores; nothing: it needs no others."""
    model = costs_of(request.algorithm)
    candidates = () if model is None else model.candidates(site, ANY_SIZE, settings)
    first = next(iter(candidates), {})
    return {name: first[name] for name in KEYS if name in first} if "servers" in first else {}
