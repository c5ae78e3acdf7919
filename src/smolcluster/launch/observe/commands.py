"""The commands `smolcluster observe up`, `down` and `status`."""

import os
import sys
import time
from pathlib import Path

from rich.table import Table

from smolcluster.errors import LaunchError
from smolcluster.launch.observe import stack
from smolcluster.launch.observe.stack import GRAFANA, Health
from smolcluster.observability.terminal import SteadyConsole, steady
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
    stack.up(folder)
    deadline = Deadline(READY_S)
    while not all(stack.answers(service) for service in stack.services()):
        if deadline.expired:
            return _report(stack.health(folder))
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
    stack.down(_folder())
    sys.stdout.write("stopped; logs, metrics and settings stay in Docker's volumes smolcluster-*\n")
    return 0


def observe_status() -> int:
    """Say how each of the three services is; returns 0 if all of them answer, else 1.

    Raises:
        LaunchError: not all answer, and there is no Docker.
        TryAgain: not all answer, and Docker does not run.
    """
    code = _report(stack.health(_folder()))
    if code:
        stack.check_docker()
    return code


def _report(found: list[Health]) -> int:
    table = Table("service", "answers", "where", "container")
    for each in found:
        answer = "yes" if each.answers else "no"
        table.add_row(each.service.name, answer, each.service.url, each.container)
    console = SteadyConsole()
    with steady(console):
        console.print(table)
    return int(not all(each.answers for each in found))


def _folder() -> Path:
    folder = stack.own_stack()
    if folder is None:
        raise LaunchError("Grafana's files are in a checkout of the project: clone it")
    return folder
