"""What is thought of the server's port, of the way to it, and of the link."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doctoring import LINUX, MAC, answer, cluster, context
from smolcluster.launch.doctor.checks_links import (
    judge_link,
    judge_port,
    judge_reach,
    link_limit_s,
    listen_seconds,
    listening_addresses,
    reach_script,
    read_listener,
)
from smolcluster.launch.doctor.findings import Answer, Context, Finding, Listener, MachineFacts

FREE = {"state": "listening", "port": 65432}
FOREIGN = {"state": "foreign", "port": 0, "why": "Cannot assign requested address"}
BUSY = {"state": "busy", "port": 40123, "why": ""}


def listened(places: dict[str, Any], holder: str = "", free: int = 0) -> Answer:
    own = ["10.10.0.1", "192.168.50.1"]
    told = {"places": places, "own": own, "holder": holder, "free": free, "pid": 4711}
    return answer(json.dumps(told) + "\n")


def listener(**states: str) -> Listener:
    return Listener(
        states or {"192.168.50.1": "listening"}, {"192.168.50.1": 65432}, ("10.10.0.1",), 1
    )


def reached(
    outside: str | None,
    inside: str | None = "absent",
    facts: MachineFacts = LINUX,
    node: str = "pi5",
    *,
    tmux_runs: bool = False,
) -> Finding:
    said = f"outside {json.dumps({'error': outside})}\n" + "tmux runs\n" * tmux_runs
    if inside != "absent":
        said += f"inside {json.dumps({'error': inside})}\n"
    return judge_reach(answer(said), context(node, facts, listener=listener()))


def server() -> Context:
    return context("mini1")


def test_a_free_port() -> None:
    found = judge_port(listened({"10.10.0.1": FREE, "192.168.50.1": FREE}), server())
    assert (found.state, found.what) == ("ok", "65432 free")


def test_a_busy_port_names_its_holder_and_the_next_free_one() -> None:
    found = judge_port(listened({"10.10.0.1": BUSY}, "python3 (process 812)", 65434), server())
    assert (found.state, found.what) == ("fail", "port 65432 is in use by python3 (process 812)")
    assert found.fix.endswith("--override port=65434")


def test_a_port_of_the_systems() -> None:
    refused = {"state": "refused", "port": 40000, "why": "Permission denied"}
    found = judge_port(listened({"10.10.0.1": refused}), server())
    assert found.state == "fail"
    assert found.fix == "take a port above 1023"


def test_no_address_is_the_servers() -> None:
    found = judge_port(listened({"10.9.9.9": FOREIGN}), server())
    assert found.state == "fail"
    assert found.fix == "set host_ip to an address of mini1: 10.10.0.1, 192.168.50.1"


def test_a_server_without_python() -> None:
    found = judge_port(answer("", 127, "sh: 1: uv: not found"), server())
    assert found.state == "fail"
    assert "uv: not found" in found.what
    assert "`uv python install`" in found.fix


def test_what_the_listener_says_is_read() -> None:
    read = read_listener(listened({"10.10.0.1": BUSY, "10.9.9.9": FOREIGN}))
    assert read is not None
    assert read.ports == {"10.10.0.1": 40123}
    assert read.states == {"10.10.0.1": "busy", "10.9.9.9": "foreign"}


@pytest.mark.parametrize("said", ["", "[]", '{"places": 3}', "null"])
def test_a_listener_that_says_something_else_is_none(said: str) -> None:
    assert read_listener(answer(said)) is None


def test_reached_from_tmux_too() -> None:
    assert reached(None, None).what == "from tmux too"


def test_a_mac_keeps_tmux_from_the_local_network() -> None:
    found = reached(None, "EHOSTUNREACH", MAC)
    assert found.state == "fail"
    assert "not from inside tmux (EHOSTUNREACH)" in found.what
    assert "Privacy & Security > Local Network" in found.fix
    assert "nc -vz 192.168.50.1 65432" in found.fix
    assert "kill-server" not in found.fix, "there is no server that could know less"


def test_on_linux_that_is_something_else() -> None:
    found = reached(None, "EHOSTUNREACH", LINUX)
    assert found.state == "fail"
    assert "Local Network" not in found.fix


@pytest.mark.parametrize("facts", [MAC, LINUX])
@pytest.mark.parametrize("inside", ["EHOSTUNREACH", "ETIMEDOUT"])
def test_all_sessions_are_only_ended_where_that_helps_and_who_does_it_knows(
    facts: MachineFacts, inside: str
) -> None:
    old, new = (reached(None, inside, facts, tmux_runs=runs) for runs in (True, False))
    assert "when you need none of its sessions any more" in old.fix
    assert "`tmux kill-server`, which ends them all" in old.fix
    assert "kill-server" not in new.fix


def test_a_tmux_that_does_not_start() -> None:
    found = reached(None, "tmux does not start")
    assert (found.state, found.what) == ("fail", "tmux does not start")
    assert found.fix == "there: `tmux new-session -d` says why"


TELLS_TMUX = b"import json, os; print(json.dumps({'error': os.environ.get('TMUX')}))"
"""In place of the program that knocks: it says where it is."""


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tmux keeps the sockets of its servers; in the end none of them runs."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home = Path(folder) / "my home"
        home.mkdir()
        for name, value in (("TMUX_TMPDIR", folder), ("TMPDIR", folder), ("HOME", str(home))):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TMUX", raising=False)
        yield Path(folder)
        tmux("kill-server")


def tmux(*words: str) -> str:
    """What the user's tmux server says; nothing if there is none."""
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=False).stdout


def knocked() -> dict[str, str]:
    """What the script says on this machine."""
    script = reach_script(context(listener=listener(), python=sys.executable))
    done = subprocess.run(
        ["sh", "-c", script], input=TELLS_TMUX, capture_output=True, check=True, timeout=60
    )
    assert done.stderr == b""
    return dict(line.split(" ", 1) for line in done.stdout.decode().splitlines())


@pytest.mark.parametrize(
    "configuration", ["", "set -g destroy-unattached on\n", "set -g remain-on-exit on\n"]
)
def test_it_looks_from_the_tmux_server_that_a_run_would_live_in(
    sockets: Path, configuration: str
) -> None:
    tmux("new-session", "-d", "-s", "work", "sleep 60")
    tmux("set-option", "-t", "work", "destroy-unattached", "off")
    (sockets / "own.conf").write_text(configuration)
    tmux("source-file", str(sockets / "own.conf"))
    tmux("set-environment", "-g", "PATH", "/nowhere")
    said = knocked()
    assert json.loads(said["outside"]) == {"error": None}
    socket = json.loads(said["inside"])["error"].split(",")[0]
    assert socket == f"{sockets}/tmux-{os.getuid()}/default"
    assert said["tmux"] == "runs"
    assert tmux("list-sessions", "-F", "#S") == "work\n", "its own session has ended, no other"
    assert {path.name for path in sockets.iterdir()} == {
        *("my home", "own.conf", f"tmux-{os.getuid()}")
    }


def test_where_no_tmux_server_runs_it_starts_one_of_its_own(sockets: Path) -> None:
    said = knocked()
    assert json.loads(said["inside"])["error"].split(",")[0].endswith("/socket")
    assert "tmux" not in said
    assert [path.name for path in sockets.iterdir()] == ["my home"], "nothing stays behind"


def test_a_tmux_that_refuses_is_told(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sockets / "tmux").write_text("#!/bin/sh\nexit 1\n")
    (sockets / "tmux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{sockets}{os.pathsep}{os.environ['PATH']}")
    assert json.loads(knocked()["inside"]) == {"error": "tmux does not start"}


def test_without_tmux_only_the_plain_way_is_known() -> None:
    assert reached(None).state == "skipped"


def test_a_firewall() -> None:
    found = reached("ETIMEDOUT")
    assert (found.state, found.what) == ("fail", "192.168.50.1:65432 does not answer (ETIMEDOUT)")
    assert "`sudo ufw allow 65432/tcp`" in found.fix


def test_no_route() -> None:
    found = reached("ENETUNREACH")
    assert "there is no way to 192.168.50.1:65432" in found.what
    assert "host_ip.pi5" in found.fix


def test_somebody_else_at_the_servers_address() -> None:
    found = reached("stranger")
    assert "somebody else than mini1 answers" in found.what
    assert "host_ip.pi5" in found.fix


def test_an_address_that_is_a_name_nobody_knows() -> None:
    assert "host_ip.pi5" in reached("name").fix


def test_an_address_that_is_not_the_servers() -> None:
    wrong = listener(**{"192.168.50.1": "foreign"})
    found = judge_reach(answer("outside {}"), context(listener=wrong))
    assert found.what == "192.168.50.1 is no address of mini1, which has 10.10.0.1"
    assert found.fix == "set host_ip.pi5 to an address of mini1: 10.10.0.1"


def test_a_slow_link_and_one_with_delays() -> None:
    slow = judge_link(answer('{"error": null, "ms": 3.0, "mb_per_s": 0.4}'), context())
    late = judge_link(answer('{"error": null, "ms": 48.0, "mb_per_s": 12.0}'), context())
    assert [slow.state, late.state] == ["warn", "warn"]
    assert "0.4 MB/s" in slow.what
    assert "use_quantization=true" in slow.fix
    assert "48 ms" in late.what
    fast = judge_link(answer('{"error": null, "ms": 0.31, "mb_per_s": 941.2}'), context())
    assert (fast.state, fast.what) == ("ok", "941 MB/s 0.31 ms")


@pytest.mark.parametrize("way", ["to", "from"])
def test_a_link_that_loses_large_packets(way: str) -> None:
    found = judge_link(answer(json.dumps({"error": "large", "way": way})), context())
    assert found.state == "fail"
    assert found.what == f"small packets pass, but large ones {way} mini1 (192.168.50.1) are lost"
    assert "MTU" in found.fix
    assert "`ssh pi5 ping -M do -s 1472 192.168.50.1`" in found.fix


def test_a_link_that_breaks_is_no_link_that_was_not_looked_at() -> None:
    found = judge_link(answer('{"error": "broke", "why": "Connection reset by peer"}'), context())
    assert found.state == "fail"
    assert "(Connection reset by peer)" in found.what


def test_the_listener_outlives_everybody_who_may_come() -> None:
    many = cluster(
        host_ip=dict.fromkeys((f"pi{number}" for number in range(16)), "10.10.0.1"),
        workers=[f"pi{number}" for number in range(1, 16)],
        num_workers=15,
        server="pi0",
    )
    assert link_limit_s(many) > link_limit_s(cluster())
    assert listen_seconds(many) > link_limit_s(many)


def test_the_listener_is_where_the_server_would_be() -> None:
    assert listening_addresses(cluster()) == ["10.10.0.1", "192.168.50.1"]
    assert listening_addresses(cluster(bind=["0.0.0.0"])) == ["0.0.0.0"]  # noqa: S104
