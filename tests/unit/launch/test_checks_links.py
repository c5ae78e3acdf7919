"""What is thought of the server's port, of the way to it, and of the link."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctoring import LINUX, MAC, cluster, healthy_nodes, large_cluster, node_checks
from smolcluster.launch.doctor.checks_links import (
    judge_reach,
    link_limit_s,
    listen_seconds,
    listening_addresses,
    reach_script,
)
from smolcluster.launch.doctor.findings import Finding
from smolcluster.launch.host import Done
from smolcluster.launch.links import Listener
from smolcluster.launch.node_facts import Facts


def listener(state: str = "listening") -> Listener:
    place = {"state": state, "port": 65432}
    told = {"places": {"192.168.50.1": place}, "own": ["10.10.0.1"]}
    return Listener.model_validate(told)


def reached(
    outside: str | None,
    inside: str | None = "absent",
    facts: Facts = LINUX,
    *,
    tmux_runs: bool = False,
) -> Finding:
    said = f"outside {json.dumps({'error': outside})}\n" + "tmux runs\n" * tmux_runs
    if inside != "absent":
        said += f"inside {json.dumps({'error': inside})}\n"
    return judge_reach(Done(0, said, ""), node_checks(facts=facts, listener=listener()))


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        (reached(None, None), "ok", ["from tmux too"]),
        (reached(None), "skipped", ["needs tmux"]),
        (reached(None, "tmux does not start"), "fail", ["`tmux new-session -d`"]),
        (
            reached(None, "EHOSTUNREACH", MAC),
            "fail",
            ["(EHOSTUNREACH)", "> Local Network", "nc -vz 192.168.50.1 65432"],
        ),
        (reached(None, "EHOSTUNREACH", LINUX), "fail", ["(EHOSTUNREACH)", "nc -vz 192.168.50.1"]),
        (
            reached("ETIMEDOUT"),
            "fail",
            ["65432 does not", "ETIMEDOUT", "`sudo ufw allow 65432/tcp`"],
        ),
        (reached("ENETUNREACH"), "fail", ["192.168.50.1:65432", "host_ip.pi5"]),
        (reached("stranger"), "fail", ["somebody else than mini1", "host_ip.pi5"]),
        (reached("name"), "fail", ["192.168.50.1", "host_ip.pi5"]),
        (
            judge_reach(Done(0, "outside {}", ""), node_checks(listener=listener("foreign"))),
            "fail",
            ["192.168.50.1 is no address of mini1", "set host_ip.pi5 to", "10.10.0.1"],
        ),
    ],
)
def test_why_the_server_is_not_reached(said: Finding, state: str, words: list[str]) -> None:
    assert said.state == state
    for word in words:
        assert word in f"{said.what} -> {said.fix}"
    assert ("Local Network" in said.fix) == (words[1:2] == ["> Local Network"])


@pytest.mark.parametrize("facts", [MAC, LINUX])
@pytest.mark.parametrize("inside", ["EHOSTUNREACH", "ETIMEDOUT"])
def test_all_sessions_are_only_ended_where_that_helps(facts: Facts, inside: str) -> None:
    old, new = (reached(None, inside, facts, tmux_runs=runs) for runs in (True, False))
    assert "`tmux kill-server`, which ends them all" in old.fix
    assert "kill-server" not in new.fix, "there is no server that could know less"


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
    script = reach_script(node_checks(listener=listener(), python=sys.executable))
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


def test_the_listener_outlives_everybody_who_may_come() -> None:
    many, few = (healthy_nodes(each)[0] for each in (large_cluster(16), cluster()))
    assert link_limit_s(many) > link_limit_s(few)
    assert listen_seconds(many.cluster) > link_limit_s(many)


def test_the_listener_is_where_the_server_would_be() -> None:
    assert listening_addresses(cluster()) == ["10.10.0.1", "192.168.50.1"]
    assert listening_addresses(cluster(bind=["0.0.0.0"])) == ["0.0.0.0"]  # noqa: S104
