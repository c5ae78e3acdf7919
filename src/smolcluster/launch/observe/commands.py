"""The commands `smolcluster observe up`, `down` and `status`."""

import os
import sys
import time
from pathlib import Path

from rich.table import Table

from smolcluster.errors import LaunchError
from smolcluster.launch.observe import stack
from smolcluster.launch.observe.stack import DOWN_S, GRAFANA, UP_S
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.utils.retry import Deadline

READY_S = 90.0
"""From the start of the containers to their services' first answer; Loki alone takes 20 s."""
POLL_S = 1.0
HOW_TO_RESET = (
    "`docker exec -i smolcluster-grafana-1 grafana cli admin reset-admin-password --password-from-stdin` "
    "sets the one that it reads"
)


def observe_up() -> int:
    """Start the stack and wait until it answers; returns the exit code.

    Raises:
        LaunchError: it cannot be started.
        TryAgain: Docker does not run.
    """
    folder = _folder()
    stack.run_compose(folder, ["up", "--detach"], UP_S)
    deadline = Deadline(READY_S)
    while not all(stack.answers(service) for service in stack.services()):
        if deadline.expired:
            return _report(folder)
        time.sleep(POLL_S)
    whose = stack.PASSWORD if os.environ.get(stack.PASSWORD) else str(stack.password_file())
    sys.stdout.write(f"Grafana: {GRAFANA}, user admin, password in {whose}\n")
    if not stack.takes_password():
        sys.stdout.write(
            f"Grafana was first started with another password, which it keeps: {HOW_TO_RESET}\n"
        )
    return 0


def observe_down() -> int:
    """Stop the stack and keep its data; returns the exit code.

    Raises:
        LaunchError: it cannot be stopped.
        TryAgain: Docker does not run.
    """
    stack.run_compose(_folder(), ["down"], DOWN_S)
    sys.stdout.write("stopped; logs, metrics and settings stay in Docker's volumes smolcluster-*\n")
    return 0


def observe_status() -> int:
    """Say how each of the three services is; returns 0 if all of them answer, else 1.

    Raises:
        LaunchError: not all answer, and there is no Docker.
        TryAgain: not all answer, and Docker does not run.
    """
    code = _report(_folder())
    if code:
        stack.check_docker()
    return code


def _report(folder: Path) -> int:
    states = stack.containers(folder)
    table = Table("service", "answers", "where", "container")
    code = 0
    for service in stack.services():
        is_well = stack.answers(service)
        code = code if is_well else 1
        state = states.get(service.name, "no container")
        table.add_row(service.name, "yes" if is_well else "no", service.url, state)
    SteadyConsole().print(table)
    return code


def _folder() -> Path:
    folder = stack.own_stack()
    if folder is None:
        raise LaunchError("Grafana's files are in a checkout of the project: clone it")
    return folder
