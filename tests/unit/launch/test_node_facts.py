"""What a machine says of itself, by the script itself on this one."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctoring import LINUX, MAC, facts, node_checks
from reading import fake_ssh
from smolcluster.launch.doctor import table
from smolcluster.launch.doctor.examine import make_contact
from smolcluster.launch.doctor.findings import Finding, NodeChecks
from smolcluster.launch.host import Host
from smolcluster.launch.node_facts import Facts, facts_of

HERE = Host("pi5")


def test_this_machine_says_what_it_is(tmp_path: Path) -> None:
    found = facts_of(HERE, "system", "identity", "folder", "disk", folder=str(tmp_path))
    assert (found.system, found.machine) == (os.uname().sysname, os.uname().machine)
    assert found.identity.endswith(f" {socket.gethostname()}")
    assert found.text("folder") == str(tmp_path)
    assert 0 < found.free_nbytes <= shutil.disk_usage(tmp_path).free + (1 << 30)


def test_lines_of_facts_that_come_at_the_same_time_do_not_mix() -> None:
    memory = facts_of(HERE, "memory", "addresses", "packages", "user").text("memory").splitlines()
    assert len(memory) > 3
    assert all(line.count(":") == 1 for line in memory)


@pytest.mark.parametrize("identity", ["", "mini\n", "\nmini\n"])
def test_without_an_id_or_a_name_a_machine_has_no_identity(identity: str) -> None:
    assert facts(identity=identity).identity == ""
    assert facts(identity="3d12\nmini\n").identity == "3d12 mini"


def test_a_shell_under_rosetta_is_one_of_a_mac_with_apple_silicon() -> None:
    assert MAC.is_apple_silicon
    assert facts(system="Darwin x86_64", apple_silicon="1").is_apple_silicon
    assert not facts(system="Linux x86_64", apple_silicon="1").is_apple_silicon


@pytest.mark.parametrize(
    ("known", "command"),
    [
        (LINUX, "`sudo apt-get install -y tmux`"),
        (MAC, "`brew install tmux`"),
        (facts(system="Linux x86_64", packages="pacman"), "`sudo pacman -S tmux`"),
        (facts(system="Linux x86_64", packages="apk"), "`sudo apk add tmux`"),
        (facts(system="Linux x86_64"), "install tmux with its package manager"),
        (facts(system="Darwin arm64"), "(https://brew.sh), then `brew install tmux`"),
    ],
)
def test_installing_is_each_systems_own(known: Facts, command: str) -> None:
    assert known.installing("tmux").endswith(command)


LINUX_LISTENS = """0100007F:FF98
00000000:0016
00000000000000000000000001000000:0277
0000000000000000FFFF00000101A8C0:FF99
00000000000000000000000000000000:2346
"""
MAC_LISTENS = """127.0.0.1.65432
*.22
::1.631
192.168.1.1.65433
fe80::1%lo0.9030
"""


@pytest.mark.parametrize(
    ("said", "port", "address", "is_taken"),
    [
        (LINUX_LISTENS, 65432, "127.0.0.1", True),
        (LINUX_LISTENS, 65432, "10.10.0.1", False),
        (LINUX_LISTENS, 65432, "0.0.0.0", True),  # noqa: S104
        (LINUX_LISTENS, 22, "10.10.0.1", True),
        (LINUX_LISTENS, 631, "::1", True),
        (LINUX_LISTENS, 65433, "192.168.1.1", True),
        (LINUX_LISTENS, 9030, "10.10.0.1", True),
        (LINUX_LISTENS, 65434, "127.0.0.1", False),
        (MAC_LISTENS, 65432, "127.0.0.1", True),
        (MAC_LISTENS, 65432, "10.10.0.1", False),
        (MAC_LISTENS, 22, "10.10.0.1", True),
        (MAC_LISTENS, 631, "::1", True),
        (MAC_LISTENS, 9030, "fe80::1", True),
        ("", 22, "127.0.0.1", False),
    ],
)
def test_who_listens_is_told_without_python(
    said: str, port: int, address: str, is_taken: bool
) -> None:
    known = facts(listeners=said)
    assert known.is_taken(port, [address]) is is_taken
    assert known.next_free(65432) == (65434 if said else None)


@pytest.mark.parametrize(
    "said",
    [
        'LISTEN 0 5 127.0.0.1:65432 0.0.0.0:* users:(("python3",pid=4711,fd=3))',
        "p4711\ncpython3\nf3",
    ],
)
def test_who_has_a_port_is_told_by_ss_and_by_lsof(said: str) -> None:
    assert facts(port_holder=said).port_holder == "python3 (process 4711)"
    assert facts(port_holder="").port_holder == ""


def test_this_machine_says_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = facts_of(HERE, "listeners", "port_holder", port=port)
    assert found.is_taken(port, ["127.0.0.1"])
    assert not found.is_taken(port, ["192.0.2.77"])
    if shutil.which("ss") or shutil.which("lsof"):
        assert found.port_holder.endswith(f"(process {os.getpid()})")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that comes first where a machine looks for programs."""
    folder = fake_ssh(tmp_path, monkeypatch) / ".local" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    folder.rename(tmp_path / "away")  # ends what hangs


def put_program(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def found_on(node: NodeChecks, *names: str) -> dict[str, Finding]:
    make_contact(node)
    rows = {each.name: each for each in table.TABLE if each.name in names}
    return {name: table.look_at(node, each, node.host.run) for name, each in rows.items()}


def test_a_fact_that_hangs_fails_alone(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    """All others have been told when the time is over; the clock is compared with when it was read."""
    monkeypatch.setattr(table, "CONTACT_S", 8.0)
    put_program(programs / "df", f"while [ -d '{programs}' ]; do sleep 0.1; done")
    put_program(programs / "date", f"echo $(($({shutil.which('date')} +%s) + 6))")
    found = found_on(node_checks(), "disk", "memory", "secret", "clock")
    assert {name: each.state for name, each in found.items()} == {
        "disk": "fail",
        "memory": "ok",
        "secret": "ok",
        "clock": "warn",
    }
    assert found["disk"].what == "no answer within 8 s"


def test_a_fact_that_makes_no_sense_is_told_with_its_own_words(programs: Path) -> None:
    put_program(programs / "df", "echo 'df: /srv: Stale file handle' >&2; exit 1")
    put_program(programs / "tmux", "sleep 1; echo 'tmux: broken' >&2; exit 1")
    found = found_on(node_checks(), "disk")
    assert found["disk"].what == "the answer makes no sense (df: /srv: Stale file handle)"


def test_an_id_whose_file_ends_without_a_newline_is_one_too(programs: Path) -> None:
    put_program(programs / "cat", "printf 3d1219c7")
    put_program(programs / "hostname", "echo pi5")
    assert facts_of(Host("pi5", "pi@pi5"), "identity").identity == "3d1219c7 pi5"
