"""Who may join, and whether there are enough: pure functions from values to a decision and its reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from smolcluster.configs.schema import ClusterConfig
from smolcluster.utils.units import format_duration

BUSY_RETRY_AFTER_S = 2.0


@dataclass(frozen=True)
class Member:
    """A worker that has been let in. `seat` is unique to a session, `instance` to a worker process."""

    seat: int
    worker_id: int
    node: str
    instance: str


@dataclass(frozen=True)
class Admitted:
    """The worker may come in; `fences` is the seat of its own older session, which ends."""

    fences: int | None = None


@dataclass(frozen=True)
class Refused:
    """The worker may not come in: `sentence` says what differs and where to mend it."""

    code: Literal["node", "worker-id", "busy", "over", "failed"]
    sentence: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Quorum:
    """Whether training may go on with the present members, and why."""

    verdict: Literal["go", "wait", "give up"]
    reason: str


def admit(
    members: Sequence[Member], worker_id: int, node: str, instance: str, cluster: ClusterConfig
) -> Admitted | Refused:
    """Decide on a worker that has proved that it knows the secret."""
    if node not in cluster.host_ip:
        return Refused(
            "node",
            f"node {node!r} is not in host_ip of the server's cluster file "
            f"(known: {', '.join(cluster.host_ip)}); add it there or use a listed name",
        )
    if worker_id > cluster.num_workers and not cluster.elastic:
        return Refused(
            "worker-id",
            f"worker id {worker_id} is above num_workers = {cluster.num_workers}; "
            "use a lower id, or set elastic: true in the server's cluster file",
        )
    present = next((member for member in members if member.worker_id == worker_id), None)
    if present is None:
        return Admitted()
    if present.instance == instance:
        return Admitted(fences=present.seat)
    return Refused(
        "busy",
        f"worker id {worker_id} is in use by a live process on node {present.node}; "
        "stop that one or choose another id",
        retry_after_s=BUSY_RETRY_AFTER_S,
    )


def quorum(num_ready: int, cluster: ClusterConfig, *, started: bool, waited_s: float) -> Quorum:
    """Decide whether to go on.

    `waited_s` counts from the server's start or, once training has started, from the last worker's going.
    """
    if started and num_ready:
        return Quorum("go", f"{num_ready} workers")
    if not started and num_ready >= cluster.min_workers:
        return Quorum("go", f"{num_ready} of {cluster.num_workers} workers have joined")
    limit_s = cluster.empty_cluster_timeout_s if started else cluster.start_timeout_s
    if waited_s < limit_s:
        return Quorum("wait", f"{num_ready} of {cluster.min_workers} needed workers are here")
    key = "empty_cluster_timeout_s" if started else "start_timeout_s"
    lack = (
        "all workers have gone, and none came back"
        if started
        else f"only {num_ready} of {cluster.min_workers} needed workers came"
    )
    return Quorum(
        "give up",
        f"{lack} within {format_duration(limit_s)} ({key}); start workers, then the server again",
    )
