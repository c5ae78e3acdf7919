"""Which hosts hold how much of the weights: a linear programme over what their links carry.

Of a step each worker sends `sent` bytes, in pieces to the hosts that hold them, and gets `received` bytes
from these; what is between two processes of one machine takes no link. What a host that holds the share x
sends and receives is linear in x, and all links work at the same time. So the shares that make the slowest
link's time least are a linear programme; a host whose link is slow gets nothing.
Workers whose machines hold all shares alike move what a ring moves (Patarasuk and Yuan 2009).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, NamedTuple

from smolcluster.algorithms.planning.costs import Interface, Site, seconds_of
from smolcluster.configs.schema import Settings

LEAST_SHARE = 0.04
"""Who would hold less holds nothing: each host is one more that can be lost."""
LEAST_GAIN = 1.1
"""Several hosts must be so many times as fast as the server alone."""
ROUNDING = 1e-6
SPREAD = "stores"
"""The interface of a site in which all stores' links count as one."""


@dataclass(frozen=True)
class Host:
    """A machine that may hold a share, and what its link carries, bytes a second.

    Attributes:
        num_workers: that run on it.
        may_host: whether it may hold a share at all.
    """

    name: str
    up_bytes_s: float
    down_bytes_s: float
    num_workers: int
    is_server: bool = False
    may_host: bool = True


class Traffic(NamedTuple):
    """Bytes of a step: from each worker, to each worker, and to the server besides."""

    sent: float
    received: float
    to_server: float = 0.0


class Line(NamedTuple):
    """Bytes that pass a link, by the share x of its host: `fixed + slope * x`; it carries `bytes_s`."""

    slope: float
    fixed: float
    bytes_s: float

    def seconds(self, share: float) -> float:
        return seconds_of(max(0.0, self.fixed + self.slope * share), self.bytes_s)


def lines_of(hosts: Sequence[Host], traffic: Traffic) -> list[tuple[Line, Line]]:
    """What each host sends and receives in a step."""
    num_workers = sum(host.num_workers for host in hosts)
    lines = []
    for host in hosts:
        own, others = host.num_workers, num_workers - host.num_workers
        to_server = 0.0 if host.is_server else traffic.to_server
        up = others * traffic.received + to_server - own * traffic.sent
        down = others * traffic.sent - own * traffic.received
        from_stores = traffic.to_server if host.is_server else 0.0
        lines.append(
            (
                Line(up, own * traffic.sent, host.up_bytes_s),
                Line(down - from_stores, own * traffic.received + from_stores, host.down_bytes_s),
            )
        )
    return lines


def exchange_s(hosts: Sequence[Host], shares: Sequence[float], traffic: Traffic) -> float:
    """How long the slowest link takes for a step."""
    pairs = zip(lines_of(hosts, traffic), shares, strict=True)
    return max(line.seconds(share) for lines, share in pairs for line in lines)


def best_shares(hosts: Sequence[Host], traffic: Traffic) -> dict[str, float]:
    """The shares by name that make the slowest link's time least; the server first, the others by share.

    The server alone, if others do not make it `LEAST_GAIN` times as fast. It keeps its place without a share:
    who holds 0 of it gets one bucket.
    """
    [server] = (host for host in hosts if host.is_server)
    hosts = without_hopeless(hosts, traffic)
    candidates, shares = list(hosts), least_time(hosts, hosts, traffic)
    while shares is not None:
        others = {name: share for name, share in shares.items() if name != server.name}
        smallest = min(others, key=lambda name: others[name], default=None)
        if smallest is None or others[smallest] >= LEAST_SHARE:
            break
        candidates = [host for host in candidates if host.name != smallest]
        shares = least_time(hosts, candidates, traffic)
    alone = {server.name: 1.0}
    if shares is None:
        return alone
    spread_s, alone_s = (
        exchange_s(hosts, [each.get(host.name, 0.0) for host in hosts], traffic)
        for each in (shares, alone)
    )
    if alone_s < LEAST_GAIN * spread_s:
        return alone
    return dict(sorted(shares.items(), key=lambda each: (each[0] != server.name, -each[1])))


def without_hopeless(hosts: Sequence[Host], traffic: Traffic) -> list[Host]:
    """The hosts but for those whose own workers' bytes alone take longer than anything else does.

    Nothing makes these faster, and others must not be chosen as if that did not matter: their links carry
    nothing more, and have no limit.
    """
    hosts = list(hosts)
    while (shares := least_time(hosts, hosts, traffic)) is not None:
        slowest_s = exchange_s(hosts, [shares[host.name] for host in hosts], traffic)
        hopeless = [
            place
            for place, (host, lines) in enumerate(zip(hosts, lines_of(hosts, traffic), strict=True))
            if not host.is_server
            and shares[host.name] < LEAST_SHARE
            and max(line.seconds(0.0) for line in lines) >= slowest_s * (1 - ROUNDING)
        ]
        if not hopeless:
            break
        for place in hopeless:
            hosts[place] = replace(hosts[place], up_bytes_s=inf, down_bytes_s=inf, may_host=False)
    return hosts


def least_time(
    hosts: Sequence[Host], candidates: Sequence[Host], traffic: Traffic
) -> dict[str, float] | None:
    """The linear programme: minimize T, such that each link has done within T and the shares add up to 1.

    `hosts` that are no `candidates` have none. None: no link limits anything.
    """
    column = {host.name: number for number, host in enumerate(candidates)}
    rows, limits = list[list[float]](), list[float]()
    for host, lines in zip(hosts, lines_of(hosts, traffic), strict=True):
        for line in lines:
            if not isfinite(line.bytes_s):
                continue
            row = [0.0] * (len(candidates) + 1)
            if host.name in column:
                row[column[host.name]] = line.slope / max(line.bytes_s, 1.0)
            row[-1] = -1.0
            rows.append(row)
            limits.append(-line.fixed / max(line.bytes_s, 1.0))
    if not rows:
        return None
    from scipy.optimize import linprog  # noqa: PLC0415 - it takes a second, and few need it

    found = linprog(
        [0.0] * len(candidates) + [1.0],
        A_ub=rows,
        b_ub=limits,
        A_eq=[[1.0] * len(candidates) + [0.0]],
        b_eq=[1.0],
        bounds=[(0, 1 if host.may_host else 0) for host in candidates] + [(0, None)],
        method="highs",
    )
    if not found.success:
        return None
    return {host.name: float(found.x[column[host.name]]) for host in candidates}


# --- of a site


def hosts_of(site: Site, server: str) -> list[Host]:
    """The server's machine and those of the workers, as far as their links to it tell."""
    remote = [worker for worker in site.workers if worker.via]
    vias = dict.fromkeys(worker.via for worker in remote)
    known = [site.interfaces.get(via, Interface()) for via in vias]
    ends = [
        (
            min(each.out_bytes_s, max(w.down_bytes_s for w in remote if w.via == via)),
            min(each.in_bytes_s, max(w.up_bytes_s for w in remote if w.via == via)),
        )
        if not isfinite(each.in_bytes_s)
        else (each.out_bytes_s, each.in_bytes_s)
        for via, each in zip(vias, known, strict=True)
    ]
    up = sum(out for out, _ in ends) if ends else inf
    down = sum(into for _, into in ends) if ends else inf
    here = len(site.workers) - len(remote)
    return [
        Host(server, up, down, here, is_server=True),
        *(Host(each.name, each.up_bytes_s, each.down_bytes_s, 1) for each in remote),
    ]


def chosen_stores(site: Site, settings: Settings, traffic: Traffic) -> dict[str, Any]:
    """Keys of the cluster file that spread the weights as is best here; nothing: the server alone is."""
    shares = best_shares(hosts_of(site, settings.cluster.server), traffic)
    if len(shares) < 2:
        return {}
    rounded = [max(0.01, round(share, 2)) for share in shares.values()]
    return {"servers": dict(zip(shares, rounded, strict=True))}


def with_stores(
    site: Site, settings: Settings, choices: Iterator[Mapping[str, Any]], traffic: Traffic
) -> Iterator[dict[str, Any]]:
    """First the stores that are best here, then each choice without and with them."""
    stores = chosen_stores(site, settings, traffic)
    if stores:
        yield stores
    for choice in choices:
        yield dict(choice)
        if stores:
            yield {**choice, **stores}


def as_spread(site: Site, settings: Settings, traffic: Traffic) -> Site:
    """The site as its workers see it with the stores that the settings name.

    All stores together are one server, whose link carries what they do.
    """
    nodes = settings.cluster.store_nodes
    hosts = hosts_of(site, settings.cluster.server)
    known = {host.name for host in hosts}
    if len(nodes) < 2 or not known.issuperset(nodes):
        return site
    shares = dict(zip(nodes, settings.cluster.store_shares or [1.0] * len(nodes), strict=True))
    total = sum(shares.values())
    seconds = exchange_s(hosts, [shares.get(host.name, 0.0) / total for host in hosts], traffic)
    num_workers = len(site.workers)
    if not 0 < seconds < inf:
        return site
    link = Interface(num_workers * traffic.sent / seconds, num_workers * traffic.received / seconds)
    workers = tuple(
        replace(
            each,
            via=SPREAD,
            up_bytes_s=min(each.up_bytes_s, link.in_bytes_s),
            down_bytes_s=min(each.down_bytes_s, link.out_bytes_s),
        )
        for each in site.workers
    )
    return replace(site, workers=workers, interfaces={SPREAD: link})
