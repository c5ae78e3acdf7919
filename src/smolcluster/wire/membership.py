"""Who may join, and whether there are enough: pure functions from values to a decision and its reason."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from smolcluster.configs.schema import ClusterConfig
from smolcluster.utils.units import format_duration

BUSY_RETRY_AFTER_S = 2.0


@dataclass(frozen=True)
class Member:
    """A worker that has been let in. `session_id` is unique to a session, `instance` to a worker process."""

    session_id: int
    worker_id: int
    node: str
    instance: str


@dataclass(frozen=True)
class Admitted:
    """The worker may come in; `fences` is the session id of its own older session, which ends.

    Who asked for a number has `worker_id`, and comes in under it later.
    """

    fences: int | None = None
    worker_id: int | None = None


@dataclass(frozen=True)
class Refused:
    """The worker may not come in: `sentence` says what differs and where to mend it."""

    code: Literal["node", "worker-id", "busy", "over", "failed", "no-model", "version", "neighbour"]
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
    if cluster.node_of(node) not in cluster.host_ip and not cluster.elastic:
        return Refused(
            "node",
            f"node {node!r} is not in host_ip of the server's cluster file "
            f"(known: {', '.join(cluster.host_ip)}); add it there, use a listed name, or set elastic: true "
            "there",
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
        return Admitted(fences=present.session_id)
    return Refused(
        "busy",
        f"worker id {worker_id} is in use by a live process on node {present.node}; "
        "stop that one or choose another id",
        retry_after_s=BUSY_RETRY_AFTER_S,
    )


def assign(
    members: Sequence[Member], node: str, taken: Mapping[int, str], cluster: ClusterConfig
) -> Admitted | Refused:
    """A worker id for a node that has none.

    Args:
        members: the workers that have been let in.
        node: its name.
        taken: who had which worker id last, or was given it, in this run.
        cluster: the server's.
    """
    own = cluster.node_of(node)
    present = next((member for member in members if cluster.node_of(member.node) == own), None)
    if present is not None:
        return Refused(
            "busy",
            f"the name {node} is taken by a live worker, worker {present.worker_id}; stop that one or choose "
            "another name",
            retry_after_s=BUSY_RETRY_AFTER_S,
        )
    if own not in cluster.workers and cluster.stages_with(node) is not None:
        return Refused(
            "node",
            f"{node} is a stage of a worker: bring it back where the run was launched, with `smolcluster "
            f"join RUN --name {node}`, or start stage.py there",
        )
    worker_id = free_worker_id(node, taken, [member.worker_id for member in members], cluster)
    decision = admit(members, worker_id, node, "", cluster)
    return replace(decision, worker_id=worker_id) if isinstance(decision, Admitted) else decision


def free_worker_id(
    node: str, taken: Mapping[int, str], present: Collection[int], cluster: ClusterConfig
) -> int:
    """The number that the node had, else that of its place in `workers`, else one that nobody ever had.

    Args:
        node: the machine's name.
        taken: who had which number last in this run.
        present: numbers that take part now.
        cluster: the run's; numbers of its other workers stay theirs.
    """
    own = cluster.node_of(node)
    had = [
        number
        for number, owner in taken.items()
        if cluster.node_of(owner) == own and number not in present
    ]
    place = [number for number, name in enumerate(cluster.workers, 1) if name == own]
    listed = [number for number in place if number not in present and number not in taken]
    used = {*taken, *present}
    new = next(number for number in count(cluster.num_workers + 1) if number not in used)
    return [*had, *listed, new][0]


def longest_wait(cluster: ClusterConfig, *, started: bool) -> tuple[float, str]:
    """How long those who are missing are waited for, seconds, and which key says so."""
    if started:
        return cluster.empty_cluster_timeout_s, "empty_cluster_timeout_s"
    return cluster.start_timeout_s, "start_timeout_s"


def quorum(
    num_ready: int,
    cluster: ClusterConfig,
    *,
    started: bool,
    waited_s: float,
    role: str = "worker",
) -> Quorum:
    """Decide whether to go on.

    `waited_s` counts from the server's start or, once training has started, from the last worker's going.
    `role`: what workers are to people.
    """
    if started and num_ready:
        return Quorum("go", f"{num_ready} {role}s")
    if not started and num_ready >= cluster.min_workers:
        return Quorum("go", f"{num_ready} of {cluster.num_workers} {role}s have joined")
    limit_s, key = longest_wait(cluster, started=started)
    if waited_s < limit_s:
        needed = f"{cluster.min_workers} of {cluster.num_workers} {role}s (min_workers)"
        return Quorum("wait", f"waiting until {needed} have joined; {num_ready} so far")
    lack = (
        f"all {role}s have gone, and none came back"
        if started
        else f"only {num_ready} of {cluster.min_workers} needed {role}s came"
    )
    again = f"start {role}s, then {'the server' if role == 'worker' else 'their worker'} again"
    return Quorum("give up", f"{lack} within {format_duration(limit_s)} ({key}); {again}")
