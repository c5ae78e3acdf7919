import errno
import itertools
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connection_pairs import DEADLINE_S, one_of_each, raw_and_connection, socket_pair
from smolcluster.errors import ConfigError, ConnectTimeout, PeerLost, PortBusy, SmolclusterError
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import (
    ConnectFailed,
    Connection,
    Scratch,
    accept_next,
    after,
    connect,
    is_local_address,
    listen,
)
from smolcluster.wire.frames import Buffer
from smolcluster.wire.messages import Goodbye, payload_nbytes

HOST = "127.0.0.1"
FOREIGN = "192.0.2.1"


def close(*everything: Connection | socket.socket) -> None:
    for each in everything:
        each.close()


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@given(st.lists(st.binary(), max_size=4), st.data())
def test_what_is_left_after_a_partial_send(buffers: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(buffers)
    sent = data.draw(st.integers(0, len(whole)))
    assert b"".join(after(buffers, sent)) == whole[sent:]


def test_a_connection_knows_when_the_last_byte_came_though_no_message_is_whole() -> None:
    here, there = socket_pair("socketpair")
    connection = Connection(here, "peer", stall_timeout_s=0.4)
    begun = connection.last_byte_at
    there.sendall(b"SMOL")
    with pytest.raises(PeerLost, match="silent"):
        connection.receive()
    assert begun < connection.last_byte_at < time.monotonic() - 0.3, "not when it was lost"
    close(connection, there)


def test_a_peer_that_takes_bytes_now_and_then_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transfer may last longer than the silence that is allowed."""
    here, there = socket_pair("socketpair")
    connection = Connection(here, "peer", stall_timeout_s=DEADLINE_S)
    tries = itertools.count()

    def sendmsg(buffers: Sequence[Buffer]) -> int:
        if next(tries) % 2:
            raise BlockingIOError
        return here.send(memoryview(buffers[0])[:1])

    monkeypatch.setattr(connection, "_channel", SimpleNamespace(sendmsg=sendmsg))
    connection.send(Goodbye(reason="it was stopped"))
    assert next(tries) > 50, "it was waited for oftener than silence may last"
    monkeypatch.setattr(connection, "_channel", SimpleNamespace(sendmsg=blocked))
    with pytest.raises(PeerLost, match="took no byte"):
        connection.send(Goodbye(reason="it was stopped"))
    close(connection, there)


def blocked(_: object) -> int:
    raise BlockingIOError


def test_where_a_connection_began_is_known_when_it_is_gone() -> None:
    here, there = socket_pair("tcp")
    connection = Connection(here)
    close(connection, there)
    assert (connection.own_address, connection.address) == (HOST, HOST)


def test_connections_share_memory_for_what_arrives_and_hold_none_while_they_wait() -> None:
    scratch = Scratch()
    pairs = [socket_pair("socketpair") for _ in range(2)]
    ours = [Connection(here, "peer", 0.01, scratch) for here, _ in pairs]
    theirs = [Connection(there, "peer") for _, there in pairs]
    message = next(each for each in one_of_each() if payload_nbytes(each))
    content = [bytes([fill]) * payload_nbytes(message) for fill in (1, 2)]
    for sender, payload in zip(theirs, content, strict=True):
        sender.send(message, payload)
    payloads = [each.receive()[1] for each in ours]
    assert [bytes(each) for each in payloads] == content, (
        "each has its own until it is done with it"
    )
    with pytest.raises(PeerLost, match="silent"):
        ours[0].receive()
    assert scratch.take(1).obj is payloads[0].obj
    for each in (*ours, *theirs):
        each.close()


def test_tcp_connections_send_at_once_and_notice_a_dead_peer() -> None:
    (listener,) = listen([HOST], 0)
    with listener, socket.create_connection((HOST, port_of(listener))) as sock:
        connection = Connection(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        assert sock.gettimeout() is None
        connection.close()


def test_nobody_there_is_refused() -> None:
    (listener,) = listen([HOST], 0)
    port = port_of(listener)
    listener.close()
    with pytest.raises(ConnectFailed, match=f"{HOST}:{port} refused: no server listens") as caught:
        connect(HOST, port, 5.0)
    assert caught.value.reason == "refused"
    assert isinstance(caught.value, ConnectTimeout)


@pytest.mark.parametrize(
    ("failure", "reason", "words"),
    [
        (TimeoutError(), "timeout", "did not answer within 3 s"),
        (ConnectionRefusedError(), "refused", "no server listens there"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route", "No route to host"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "no route", "check host_ip"),
        (socket.gaierror(socket.EAI_NONAME, "Name unknown"), "name", "the name 'mini1'"),
    ],
)
def test_failed_attempts_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, failure: OSError, reason: str, words: str
) -> None:
    def fail(*_: object) -> socket.socket:
        raise failure

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(ConnectFailed, match=words) as caught:
        connect("mini1", 65432, 3.0)
    assert caught.value.reason == reason
    assert "mini1:65432" in str(caught.value)


def test_a_busy_port_is_named_with_its_remedy() -> None:
    (listener,) = listen([HOST], 0)
    with listener, pytest.raises(PortBusy, match=rf"{HOST}:{port_of(listener)} is in use.*port="):
        listen([HOST], port_of(listener))


def test_an_address_of_another_machine_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=rf"'{FOREIGN}' is not an address of this machine"):
        listen([FOREIGN], 0)
    with pytest.raises(ConfigError, match="'no such name'"):
        listen(["no such name"], 0)


def test_nothing_stays_open_when_one_address_fails() -> None:
    (probe,) = listen([HOST], 0)
    port = port_of(probe)
    probe.close()
    with pytest.raises(ConfigError):
        listen([HOST, FOREIGN], port)
    listen([HOST], port)[0].close()


def test_the_same_address_twice_is_one_listener() -> None:
    listeners = listen([HOST, HOST], 0)
    assert len(listeners) == 1
    listeners[0].close()


def test_ipv6_literals_work_where_the_machine_has_them() -> None:
    if not is_local_address("::1"):
        pytest.skip("no IPv6 here")
    listeners = listen(["::1", HOST], 0)
    client = connect("::1", port_of(listeners[0]), DEADLINE_S)
    server = accept_next(listeners, DEADLINE_S)
    assert server is not None
    assert client.peer == f"[::1]:{port_of(listeners[0])}"
    close(client, server, *listeners)


def test_a_client_is_found_on_any_listener() -> None:
    listeners = listen([HOST, "127.0.0.2"], 0) if is_local_address("127.0.0.2") else []
    if not listeners:
        pytest.skip("one loopback address only")
    client = connect("127.0.0.2", port_of(listeners[1]), DEADLINE_S)
    server = accept_next(listeners, DEADLINE_S)
    assert server is not None
    close(client, server, *listeners)


def test_no_client_in_time_is_none() -> None:
    listeners = listen([HOST], 0)
    assert accept_next(listeners, 0.0) is None
    listeners[0].close()


def test_a_client_that_has_gone_again_does_not_block_the_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (listener,) = listen([HOST], 0)

    def says_ready(
        selector: selectors.DefaultSelector, _: float
    ) -> list[tuple[selectors.SelectorKey, int]]:
        return [(selector.get_key(listener), selectors.EVENT_READ)]

    monkeypatch.setattr(selectors.DefaultSelector, "select", says_ready)
    assert accept_next([listener], 0.1) is None
    listener.close()


def test_a_system_that_can_accept_no_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    (listener,) = listen([HOST], 0)

    def full(_: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")

    client = connect(HOST, port_of(listener), DEADLINE_S)
    monkeypatch.setattr(socket.socket, "accept", full)
    with pytest.raises(SmolclusterError, match="cannot accept a connection: Too many open files"):
        accept_next([listener], 5.0)
    client.close()
    listener.close()


@pytest.mark.parametrize(
    ("address", "local"),
    [(HOST, True), ("0.0.0.0", True), (FOREIGN, False), ("no such name", False)],  # noqa: S104
)
def test_addresses_of_this_machine_are_known(address: str, local: bool) -> None:
    assert is_local_address(address) is local


def test_a_server_that_is_gone_again_at_once_is_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (listener,) = listen([HOST], 0)
    create = socket.create_connection

    def reset(address: tuple[str, int], timeout_s: float) -> socket.socket:
        ours = create(address, timeout_s)
        theirs, _ = listener.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        return ours

    monkeypatch.setattr(socket, "create_connection", reset)
    connection = connect(HOST, port_of(listener), DEADLINE_S)
    with pytest.raises(PeerLost):
        connection.receive()
    close(connection, listener)


def test_a_reset_connection_is_a_lost_peer() -> None:
    raw, other = socket_pair("tcp")
    connection = Connection(other, "mini1")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()
    with pytest.raises(PeerLost, match=r"mini1: handshake: connection lost \(Connection reset"):
        connection.receive()
    connection.close()


def test_a_record_that_trickles_in_does_not_outlive_the_deadline() -> None:
    head = b"\x17\x03\x03\x40\x00"  # of a record of 16 KiB
    with (
        raw_and_connection("tls", proved=False) as (raw, connection),
        ThreadPoolExecutor(1) as pool,
    ):

        def trickle() -> None:
            with suppress(OSError):
                for byte in head + bytes(200):
                    socket.socket.sendall(raw, bytes([byte]))  # below TLS
                    time.sleep(0.05)
                raw.close()

        trickling = pool.submit(trickle)
        with pytest.raises(PeerLost, match="in time"):
            connection.receive(deadline=Deadline(0.5))
        connection.close()
        trickling.result(DEADLINE_S)
