"""The program that measures links, run as it is on other machines: by any Python, from its text."""

import ast
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from smolcluster.launch import link_probe
from smolcluster.launch.links import probe_source
from waiting import DEADLINE_S

LOOPBACK, TOKEN = "127.0.0.1", "t0"
COMMAND = [sys.executable, "-I", "-S"]


def probe(*words: object) -> dict[str, Any]:
    command = [*COMMAND, "-", *map(str, words)]
    done = subprocess.run(
        command, input=probe_source(), capture_output=True, timeout=DEADLINE_S, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture
def port() -> int:
    """A port in which nobody listens."""
    with socket.create_server((LOOPBACK, 0)) as server:
        number: int = server.getsockname()[1]
        return number


@contextmanager
def listening(*words: object) -> Iterator[tuple[dict[str, Any], "subprocess.Popen[bytes]"]]:
    """What a listener says, and its process, whose standard input is open until the end of the block."""
    read = f"import sys; exec(sys.stdin.buffer.read({len(probe_source())}))"
    command = [*COMMAND, "-c", read, "listen", *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(probe_source())
        process.stdin.flush()
        try:
            yield json.loads(process.stdout.readline()), process
        finally:
            process.kill()


@pytest.fixture
def listener(port: int) -> Iterator[dict[str, Any]]:
    with listening(port, TOKEN, 600, LOOPBACK, "192.0.2.77") as (told, _):
        yield told


def test_python_3_9_and_its_standard_library_are_enough() -> None:
    tree = ast.parse(probe_source(), feature_version=(3, 9))
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    } | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - {"collections.abc"} <= sys.stdlib_module_names


def test_the_listener_answers_who_knows_the_token(port: int, listener: dict[str, Any]) -> None:
    places = listener["places"]
    assert places[LOOPBACK] == {"state": "listening", "port": port, "why": ""}
    assert places["192.0.2.77"]["state"] == "foreign"
    assert probe("knock", LOOPBACK, port, TOKEN) == {"error": None}
    assert probe("large", LOOPBACK, port, TOKEN) == {"error": None}
    assert probe("knock", LOOPBACK, port, "another") == {"error": "stranger"}


def test_two_workers_take_turns(port: int, listener: dict[str, Any]) -> None:
    with socket.create_connection((LOOPBACK, port)) as first:
        first.sendall(b"t0\n")
        assert first.recv(100) == link_probe.GREETING
        first.sendall(b"ping 1\n")
        assert first.recv(1) == b"g"
        with socket.create_connection((LOOPBACK, port)) as second:
            second.sendall(b"t0\n")
            assert second.recv(100) == link_probe.GREETING
            second.sendall(b"ping 1\n")
            second.settimeout(0.2)
            with pytest.raises(TimeoutError):
                second.recv(1)
            first.close()
            second.settimeout(DEADLINE_S)
            assert second.recv(1) == b"g"


def test_bandwidth_is_measured_both_ways(port: int, listener: dict[str, Any]) -> None:
    told = probe("both", LOOPBACK, port, TOKEN)
    assert told["error"] is None
    assert told["mb_per_s"] > 0
    assert told["down_mb_per_s"] > 0
    assert told["ms"] > 0


def test_a_crowd_sends_at_the_same_time(port: int, listener: dict[str, Any]) -> None:
    alone = threading.Thread(target=probe, args=("both", LOOPBACK, port, TOKEN))
    with ThreadPoolExecutor(2) as pool:
        crowd = [pool.submit(probe, "crowd", LOOPBACK, port, TOKEN, 2) for _ in range(2)]
        alone.start()  # who is measured in its turn needs not wait for them
        told = [each.result(timeout=DEADLINE_S) for each in crowd]
    alone.join()
    for each in told:
        assert each["error"] is None
        assert each["mb_per_s"] > 0
        assert each["down_mb_per_s"] > 0


@pytest.mark.parametrize("number", ["0", "1000000", "many"])
def test_no_crowd_of_that_size_is_waited_for(
    port: int, listener: dict[str, Any], number: str
) -> None:
    with socket.create_connection((LOOPBACK, port), timeout=DEADLINE_S) as sock:
        sock.sendall(b"t0\n")
        assert sock.recv(100) == link_probe.GREETING
        sock.sendall(b"up " + number.encode() + b"\n")
        assert sock.recv(1) == b""


@pytest.mark.parametrize("way", ["to", "from"])
@pytest.mark.parametrize("verb", ["large", "measure"])
def test_large_packets_that_are_lost_are_told_with_their_direction(verb: str, way: str) -> None:
    """Of a listener that behaves as one behind a smaller MTU: what is small passes."""
    with socket.create_server((LOOPBACK, 0)) as server:
        number = server.getsockname()[1]
        command = [*COMMAND, "-", verb, LOOPBACK, str(number), TOKEN]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin and process.stdout
            process.stdin.write(probe_source())
            process.stdin.close()
            server.settimeout(DEADLINE_S)
            sock, _ = server.accept()
            with sock:
                sock.settimeout(DEADLINE_S)
                assert sock.recv(3) == b"t0\n"
                sock.sendall(link_probe.GREETING + (b"l" if way == "from" else b""))
                told = json.loads(process.stdout.read())
    assert told == {"error": "large", "way": way}


def test_a_port_in_use_is_told_and_left_alone() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        taken = server.getsockname()[1]
        with listening(taken, TOKEN, 60, LOOPBACK) as (told, _):
            pass
    assert told["places"][LOOPBACK]["state"] == "busy"
    assert told["places"][LOOPBACK]["port"] not in (0, taken)


def test_nobody_there(port: int) -> None:
    assert probe("knock", LOOPBACK, port, TOKEN)["error"] == "ECONNREFUSED"
    assert probe("knock", "nowhere.invalid", port, TOKEN)["error"] == "name"


def test_the_listener_ends_with_its_input_and_at_the_latest_by_itself(port: int) -> None:
    with listening(port, TOKEN, 600, LOOPBACK) as (_, process):
        assert process.stdin
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
    with listening(port, TOKEN, 1, LOOPBACK) as (_, process):
        assert process.wait(DEADLINE_S) != 0
