"""Which interface leads to rank 0."""

import pytest

from smolcluster.algorithms.Mesh import interfaces
from smolcluster.algorithms.Mesh.interfaces import VARIABLES, choose_interface, own_address


def test_the_interface_is_the_one_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: {"127.0.0.1": "loop", "10.0.0.2": "eth7"})
    environ: dict[str, str] = {}
    choose_interface("127.0.0.1", 29500, environ)
    assert environ == dict.fromkeys(VARIABLES, "loop")


def test_what_the_user_says_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: {"127.0.0.1": "loop"})
    environ = {VARIABLES[0]: "eth1"}
    choose_interface("127.0.0.1", 29500, environ)
    assert environ == {VARIABLES[0]: "eth1", VARIABLES[1]: "loop"}


def test_an_address_that_nobody_knows_leaves_the_choice() -> None:
    assert own_address("no.such.host.invalid", 1) is None
    environ: dict[str, str] = {}
    choose_interface("no.such.host.invalid", 1, environ)
    assert environ == {}
