"""A launch with `--invite`: whether its run can be joined late, and the process that invites machines."""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.launch.plan import MODULE, Request
from smolcluster.launch.run import Run
from smolcluster.launch.tmux import session_name
from smolcluster.runs.launched import INVITER, Launched, LaunchedProcess
from smolcluster.server.listening import own_addresses
from smolcluster.utils.addresses import is_loopback_name

CODE = "INVITATION_CODE"
"""The variable in which a launch tells the code, so that it stands in no command line."""
TOGETHER = "all machines of a {} begin together, so none can join later"


def check_invitable(request: Request, cluster: ClusterConfig, *, local: bool) -> None:
    """Refuse to invite machines into a run that they could not join.

    Raises:
        ConfigError: why they could not.
    """
    why, algorithm = None, request.algorithm
    if algorithm.is_group:
        why = TOGETHER.format(algorithm.name)
    elif request.script is not None:
        why = "its workers are a script of yours, which other machines lack: start that there"
    elif not cluster.elastic:
        why = "elastic is false, so the server takes no machine that its cluster file does not list"
    elif cluster.encryption == "off":
        why = "encryption is off, and the cluster's secret admits: set encryption to auto or on"
    elif local and "stages" in algorithm.messages:
        why = "with --local its stages hear this machine alone: launch it with a cluster file"
    elif local and len(cluster.store_nodes) > 1:
        why = "with --local its stores hear this machine alone: set servers to null"
    elif local and not own_addresses():
        why = "this machine has no address in a network"
    elif not local and is_loopback_name(cluster.host_ip[cluster.server]):
        why = f"host_ip.{cluster.server} is {cluster.host_ip[cluster.server]}, which others do not reach"
    if why is not None:
        raise ConfigError(f"--invite: {why}")


def begin_inviting(run: Run, launched: Launched, root: Path, environ: Mapping[str, str]) -> None:
    """Invite machines into the run in this folder, which has been started, and say the code.

    What invites is a process of its own.
    """
    from smolcluster.wire.invitation import new_code  # noqa: PLC0415 - few launches invite

    code = new_code()
    inviter = LaunchedProcess(
        node=platform.node(),
        role=INVITER,
        run_dir=str(root),
        session=session_name(launched.run_id, INVITER, None) if launched.has_sessions else "",
        project_dir=str(Path.cwd()),
        argv=(sys.executable, *MODULE, "smolcluster.cli", "invite", str(root)),
    )
    try:
        run.add_inviter(inviter, {**environ, CODE: code})
    except SmolclusterError as error:
        run.say(f"no machine is invited: {error}", "yellow")
        return
    if launched.has_sessions:  # a child says it itself
        run.say(invited(code))


def invited(code: str) -> str:
    return f"on another machine: `smolcluster join`, with the code {code}, within 10 minutes"
