"""Processes of one machine reach each other without TCP, and nobody is fooled by it."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from connection_pairs import push
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection, accept_next, connect
from smolcluster.wire.local import address_of, listen_beside, reach
from smolcluster.wire.messages import frame_of
from waiting import DEADLINE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has abstract names")
PAYLOAD = bytes(range(16))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def ends(listener: socket.socket) -> tuple[Connection, Connection]:
    """A connection to a listener, and its other end."""
    beside = listen_beside([listener])
    dialled = connect("127.0.0.1", port_of(listener), DEADLINE_S)
    listener.setblocking(False)
    accepted = accept_next([listener, *beside], DEADLINE_S)
    for each in beside:
        each.close()
    assert accepted is not None
    for connection in (dialled, accepted):
        connection.proved(max_payload=1024, stall_timeout_s=DEADLINE_S)
    return dialled, accepted


def test_both_ends_are_of_a_unix_socket_and_have_the_address_that_was_dialled(
    listener: socket.socket,
) -> None:
    dialled, accepted = ends(listener)
    with closing(dialled), closing(accepted):
        for each in (dialled, accepted):
            assert each._socket.family == socket.AF_UNIX
            assert (each.address, each.own_address, each.stays_here) == (
                *("127.0.0.1",) * 2,
                True,
            )
        dialled.send(push(16), PAYLOAD)
        message, payload = accepted.receive(deadline=Deadline(DEADLINE_S))
        assert (message, bytes(payload)) == (push(16), PAYLOAD)


def test_a_payload_that_cannot_be_damaged_is_not_summed(listener: socket.socket) -> None:
    dialled, accepted = ends(listener)
    with closing(dialled), closing(accepted):
        frame = frame_of(push(16), PAYLOAD)
        dialled.send_frame(frame)
        accepted.receive(deadline=Deadline(DEADLINE_S))
        assert not frame._sum


def test_a_socket_of_another_user_is_left_alone(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    [beside] = listen_beside([listener])
    with beside:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert reach("127.0.0.1", port_of(listener)) is None


@pytest.mark.parametrize("host", ["127.0.0.2", "pi5.local", "::1"])
def test_what_does_not_listen_here_is_reached_by_tcp(listener: socket.socket, host: str) -> None:
    [beside] = listen_beside([listener])
    with beside:
        assert reach(host, port_of(listener)) is None


def test_a_name_that_is_taken_costs_nothing_but_speed(listener: socket.socket) -> None:
    [beside] = listen_beside([listener])
    with beside:
        assert listen_beside([listener]) == []


def test_other_unix_sockets_stand_for_no_address() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert address_of(one) is None
