"""Machines that announce themselves by mDNS are found; the test announces them, on the loopback."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import zeroconf
from zeroconf import ServiceInfo, Zeroconf

from smolcluster.errors import LaunchError
from smolcluster.launch.setup import discover as discovering
from smolcluster.launch.setup.discover import ANSWERS_S, Neighbour, discover, machines
from smolcluster.utils.retry import Deadline

LOOPBACK = ["127.0.0.1"]
OWN = f"smol-{os.getpid()}"
"""No other machine, and no other run of this test, has this name."""


def service(kind: str, name: str, host: str, *addresses: str, port: int = 22) -> ServiceInfo:
    return ServiceInfo(
        f"{kind}._tcp.local.",
        f"{name}.{kind}._tcp.local.",
        port=port,
        server=f"{host}.local.",
        parsed_addresses=list(addresses),
    )


@pytest.fixture
def announced() -> Iterator[None]:
    """Two machines, one of which announces two services."""
    responder = Zeroconf(LOOPBACK)
    for info in (
        service("_ssh", f"{OWN} a", f"{OWN}-a", "127.0.0.21"),
        service("_sftp-ssh", f"{OWN} a", f"{OWN}-a", "127.0.0.21"),
        service("_workstation", f"{OWN}-b [b8:27:eb:00:00:01]", f"{OWN}-b", "127.0.0.22", port=9),
    ):
        responder.register_service(info, cooperating_responders=True)
    yield
    responder.close()


@pytest.mark.usefixtures("announced")
def test_machines_with_ssh_are_found() -> None:
    found = [each for each in discover(interfaces=LOOPBACK) if each.name.startswith(OWN)]
    assert found == [Neighbour(f"{OWN}-a", "127.0.0.21"), Neighbour(f"{OWN}-b", "127.0.0.22")]


def test_names_that_are_none_of_a_host_are_left_out() -> None:
    infos = [
        service("_ssh", "x", "$(reboot)", "10.0.0.1"),
        service("_ssh", "x", "\x1b[2J", "10.0.0.2"),
        service("_ssh", "x", "-oProxyCommand=id", "10.0.0.3"),
        service("_ssh", "Mini's Mac", "Minis-Mac", "fe80::1", "fd00::4", "10.0.0.4"),
        service("_ssh", "x", "lonely", "fe80::1"),
        service("_ssh", "x", "minis-mac", "10.0.0.5"),
    ]
    assert machines(infos) == [Neighbour("Minis-Mac", "10.0.0.4")]


def test_ssh_is_told_a_name_where_it_can_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str, _port: int) -> list[object]:
        if name != "pi5.local":
            raise socket.gaierror
        return [object()]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert Neighbour("pi5", "10.0.0.5").destination == "pi5.local"
    assert Neighbour("pi6", "10.0.0.6").destination == "10.0.0.6"


def test_a_machine_that_cannot_listen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroconf, "Zeroconf", Mock(side_effect=OSError(19, "No such device")))
    with pytest.raises(
        LaunchError, match=r"cannot listen for mDNS \(No such device\): leave --disc"
    ):
        discover(0)


def test_zeroconf_is_imported_only_when_it_is_needed() -> None:
    program = "import sys, smolcluster.launch.setup.init; sys.exit('zeroconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_names_of_which_nothing_more_is_said_take_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    class Liar:
        """Announces a hundred names, and answers nothing that is asked of them."""

        def __enter__(self) -> "Liar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def get_service_info(self, *_: object, timeout: float) -> None:
            nonlocal now
            now += timeout / 1000

    def browse(
        _: object, services: list[str], handlers: list[Callable[..., None]]
    ) -> AbstractContextManager[None]:
        for number in range(100):
            handlers[0](service_type=services[0], name=f"{number}.{services[0]}")
        return nullcontext()

    monkeypatch.setattr(zeroconf, "Zeroconf", lambda _: Liar())
    monkeypatch.setattr(zeroconf, "ServiceBrowser", browse)
    monkeypatch.setattr(discovering, "Deadline", partial(Deadline, clock=lambda: now))
    assert discover(0.0) == []
    assert now == pytest.approx(ANSWERS_S)
