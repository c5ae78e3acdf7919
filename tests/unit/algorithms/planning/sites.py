"""Machines on paper, with links to one interface of the server."""

from typing import Any

from smolcluster.algorithms.planning.costs import Interface, Site, Worker

FAST_BYTES_S = 50e6 / 8 * 1448 / 1514
"""A link of 50 Mbit/s, without the headers of its packets."""


def site(*links: float, limit: float = FAST_BYTES_S, **changes: Any) -> Site:
    """A worker for each link, of so many bytes a second both ways."""
    given: dict[str, Any] = {"compute_s": 1.0, "via": "eth0"} | changes
    workers = tuple(
        Worker(f"w{place}", up_bytes_s=each, down_bytes_s=each, **given)
        for place, each in enumerate(links)
    )
    return Site(workers, {"eth0": Interface(limit, limit)})
