"""The stack beside a run that is launched: never a reason to fail, and nothing to wait for."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError, SmolclusterError, TryAgain
from smolcluster.launch.observe.stack import (
    GRAFANA,
    Service,
    answers,
    begin_up,
    bridge_address,
    check_docker,
    own_stack,
    runs,
    services,
)
from smolcluster.launch.observe.targets import (
    file_of,
    listens,
    remove_stale,
    targets_of,
    write_targets,
)
from smolcluster.observability.exporter import LOOPBACK, free_ports
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.utils.words import as_command

DOCKER_S, SERVICE_S = 3.0, 0.5
"""How long a launch waits for a word from Docker, and from Grafana."""

Say = Callable[[str], None]


def stack_for(asked: bool | None, cluster: ClusterConfig, say: Say) -> Path | None:
    """The folder of the stack that shows a run that is launched now; None: there is none.

    It is started only if the user asks for it, on the command line (`asked`) or in the cluster file; one that
    runs is used unless `asked` is False.
    """
    if asked is False:
        return None
    is_wanted = asked or cluster.observe
    stack, grafana = own_stack(), services()[0]
    if stack is None:
        if is_wanted:
            say("no Grafana beside the run: its files are in a checkout of the project: clone it")
        return None
    if answers(grafana, SERVICE_S) and runs(stack, grafana):
        say(f"Grafana shows the run: {GRAFANA}")
        return stack
    if is_wanted:
        return stack if _begins(stack, grafana, say) else None
    say("to see metrics and logs in Grafana: --observe")
    return None


def _begins(stack: Path, grafana: Service, say: Say) -> bool:
    """Start the stack without waiting for it, and say in one line whether it will come.

    It will not where there is no Docker, or another program has its port.
    """
    try:
        check_docker(DOCKER_S)
        if listens(urlsplit(grafana.url).netloc) and not runs(stack, grafana):
            say(
                "no Grafana beside the run: port 3000 is used by another program; nothing was started"
            )
            return False
        begin_up(stack)
    except (LaunchError, TryAgain) as error:
        say(f"no Grafana beside the run: {error}")
        return False
    say(f"Grafana is starting: {GRAFANA}; {as_command('observe', 'status')} tells how far")
    return True


def announce(
    stack: Path,
    run_id: str,
    processes: Sequence[LaunchedProcess],
    cluster: ClusterConfig,
    say: Say,
) -> None:
    """Tell Prometheus where the processes of a run are.

    Those of other machines are left out where `metrics_bind` opens them to nobody, which is said.
    """
    elsewhere = {process.node for process in processes if process.ssh is not None}
    if elsewhere and cluster.metrics_bind is None and cluster.metrics_port is not None:
        say(
            f"Prometheus does not see {', '.join(sorted(elsewhere))}: each machine serves its metrics on its "
            "own 127.0.0.1; `--override metrics_bind=0.0.0.0` opens them to the network"
        )
        processes = [process for process in processes if process.node not in elsewhere]
    remove_stale(stack)
    targets = targets_of(run_id, processes, cluster)
    if not targets:
        return
    try:
        write_targets(stack, run_id, targets)
    except SmolclusterError as error:
        say(f"{error}; Prometheus does not see the run")


def forget(run_id: str) -> None:
    """The run is over: Prometheus need not ask its processes any more."""
    stack = own_stack()
    if stack is not None:
        with suppress(OSError):
            file_of(stack, run_id).unlink(missing_ok=True)


def within_reach(cluster: ClusterConfig) -> tuple[str, ...]:
    """Overrides with which Prometheus' container reaches the `/metrics` of a run on this machine alone.

    On Linux they are on Docker's bridge, which other machines do not reach either. A stated `metrics_bind`
    stays.
    """
    if cluster.metrics_bind is not None or cluster.metrics_port is None:
        return ()
    address = bridge_address()
    return () if address is None else (f"metrics_bind={address}",)


def beside_others(cluster: ClusterConfig, say: Say) -> tuple[str, ...]:
    """Overrides that give a run on this machine alone ports for `/metrics` that no other run has.

    Prometheus is told of these; a process that finds its port taken since then takes the next free one.
    """
    stated = cluster.metrics_port
    if stated is None:
        return ()
    port = free_ports(cluster.metrics_bind or LOOPBACK, stated, 1 + len(cluster.workers))
    if port in (None, stated):
        return ()
    say(
        f"metrics for Prometheus are served from port {port} on ({stated} or one after it is taken)"
    )
    return (f"metrics_port={port}",)
