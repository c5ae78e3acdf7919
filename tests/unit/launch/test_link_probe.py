"""The program that measures links, run as it is on other machines: by any Python, from its text."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from smolcluster.launch import link_probe
from smolcluster.launch.host import Host
from smolcluster.launch.probing import probe_script, probe_source, read_listener
from waiting import DEADLINE_S, eventually

HERE = Host("here")
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


@pytest.fixture
def listener(port: int) -> Iterator[dict[str, Any]]:
    told = probe("listen", port, TOKEN, 600, LOOPBACK, "192.0.2.77")
    yield told
    os.kill(told["pid"], signal.SIGKILL)


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
        first.sendall(b"m")
        assert first.recv(1) == b"g"
        with socket.create_connection((LOOPBACK, port)) as second:
            second.sendall(b"t0\n")
            assert second.recv(100) == link_probe.GREETING
            second.sendall(b"m")
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
        sock.sendall(b"u" + number.encode() + b"\n")
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
        told = probe("listen", taken, TOKEN, 1, LOOPBACK)
    assert told["places"][LOOPBACK]["state"] == "busy"
    assert told["places"][LOOPBACK]["port"] not in (0, taken)
    assert told["free"] > taken


def left_behind(port: int) -> int:
    """The process of a listener whose launcher was cut, started as on a machine."""
    script = probe_script(sys.executable, "listen", port, TOKEN, 60, LOOPBACK)
    listener = read_listener(HERE.run(script, stdin=probe_source()))
    assert listener is not None
    assert listener.places[LOOPBACK].port
    return listener.pid


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_a_port_is_taken_from_a_listener_whose_launcher_was_cut(port: int) -> None:
    first = left_behind(port)
    second = left_behind(port)
    assert not has_ended(first), "somebody may measure with it"
    assert probe("knock", LOOPBACK, port, TOKEN) == {"error": None}
    assert probe("release", port) == {"released": True}
    assert has_ended(first)
    assert has_ended(second)
    assert probe("release", port) == {"released": False}


@contextmanager
def running(*argv: str) -> Iterator[int]:
    """A shell that lives until the end of the block, under any arguments; its process id."""
    words = [argv[0], "-c", "read end", *argv[1:]]
    with subprocess.Popen(words, executable="/bin/sh", stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="reads /proc")
def test_a_command_that_only_names_a_listener_s_is_let_live(port: int) -> None:
    with running("/usr/bin/ssh", "/usr/bin/python3", "-", "listen", str(port), TOKEN) as pid:
        assert probe("release", port) == {"released": False}
        assert not has_ended(pid)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="reads /proc")
def test_another_user_s_listener_is_none_of_ours(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = left_behind(port)
    try:
        assert link_probe.listeners_of(port) == {pid}
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        assert link_probe.listeners_of(port) == set()
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "is_listener"),
    [
        ("python3|-|listen|6000|t0|58|192.0.2.1|", True),
        ("/Users/me/my project/.venv/bin/python|-|listen|6000|t0|58|", True),
        ("/Library/Python.app/Contents/MacOS/Python|-|listen|6000|t0|58|", True),
        ("python3|-|listen|60001|t0|58|192.0.2.1|", False),
        ("/usr/bin/ssh|mini1|/usr/bin/python3|-|listen|6000|t0|58|", False),
        ("/usr/bin/ssh mini1 /usr/bin/python3 - listen 6000 t0 58|", False),
        ("/root/.local/bin/uv|run|--quiet|python|-|listen|6000|t0|58|", False),
        ('sh|-c|python() { python3 "$@"; }; python - listen 6000 t0 58|', False),
        ("python3|-|measure|192.0.2.1|6000|t0|", False),
        ("python3|-m|smolcluster|server|--listen|6000|", False),
        ("", False),
    ],
)
def test_only_a_listener_of_the_port_is_one(command: str, is_listener: bool) -> None:
    assert link_probe.is_listener(command.split("|"), 6000) is is_listener


def test_only_listeners_of_the_port_are_found_by_ps() -> None:
    commands = """\
    11 python3 - listen 6000 t0 58 192.0.2.1 fe80::1%en0
    12 /Users/me/.venv/bin/python3.11 - listen 6000 t0 58 mini1.local
    13 /Library/Python.app/Contents/MacOS/Python - listen 6000 t0 58
   114 python3 - listen 60001 t0 58 192.0.2.1
   115 /root/.local/bin/uv run --no-project --quiet python - listen 6000 t0 58 192.0.2.1
   116 sh -c python() { python3 "$@"; }; python - listen 6000 t0 58 192.0.2.1
   117 python3 - measure 192.0.2.1 6000 t0
   118 python3 -m smolcluster server --listen 6000
   119 /usr/bin/ssh mini1 /usr/bin/python3 - listen 6000 t0 58 192.0.2.1
   120 /usr/bin/python3 - listen 6000
   121 /usr/bin/python3 - listen 6000 t0 58 192.0.2.1; sleep 60
"""
    assert link_probe.listeners_shown(6000, commands) == {11, 12, 13}


def test_nobody_there(port: int) -> None:
    assert probe("knock", LOOPBACK, port, TOKEN)["error"] == "ECONNREFUSED"
    assert probe("knock", "nowhere.invalid", port, TOKEN)["error"] == "name"


def test_the_listener_ends_by_itself(port: int) -> None:
    probe("listen", port, TOKEN, 1, LOOPBACK)

    def has_ended() -> bool:
        try:
            socket.create_connection((LOOPBACK, port)).close()
        except ConnectionRefusedError:
            return True
        return False

    eventually(has_ended)
