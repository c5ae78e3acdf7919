"""Faults of ssh and of the network, planted on hosts that are really there: the doctor finds each.

What can be planted in a home, `tests/unit/launch/test_checks.py` plants.
"""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab import Host, Lab, Running

pytestmark = pytest.mark.nightly

PROGRAM = """
import sys
from dataclasses import replace
from smolcluster.launch.doctor import table
from smolcluster.launch.doctor.findings import QUICK_S
quick = {check: check.limit_s == QUICK_S for check in table.TABLE}
table.TABLE = [replace(check, limit_s=150.0) if quick[check] else check for check in quick]
from smolcluster.launch.doctor.examine import doctor
for number, file in enumerate(sys.stdin):
    print(f"\\nend {number} {doctor(file.strip(), [], True)}", flush=True)
"""
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDvXYe9CDlBqfbcyQnAcxLmLnR0JHMgUrBvcWcKSUoDw"
BIN = Path(".local/bin")
TORCH = dict.fromkeys(("cuda", "hip", "num_gpus", "mps")) | {"version": "2", "machine": "arm64"}


class Surgery:
    """A doctor who stays in on the controller, and sees one cluster file after the other."""

    def __init__(self, lab: Lab) -> None:
        lab.controller.checkout("doctor")
        python = lab.controller.prepare("doctor") / "python"
        self._lab = lab
        self._doctor: Running = lab.controller.popen([str(python), "-c", PROGRAM])
        self._count = 0

    def examine(self, stated: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The exit code, and the checks of each node."""
        self._lab.controller.write("doctor.yaml", json.dumps(stated))
        before = self._doctor.output
        self._doctor.type("doctor.yaml\n")
        self._doctor.wait_for(f"\nend {self._count} ")
        told, _, code = self._doctor.output[len(before) :].partition(f"\nend {self._count} ")
        self._count += 1
        return int(code), {n: each["checks"] for n, each in json.loads(told)["nodes"].items()}

    def hang_up(self) -> None:
        """Close the connections that are kept open."""
        self._lab.controller.run(
            "for socket in ~/.ssh/smolcluster/*; do ssh -o ControlPath=$socket -O exit x; done"
        )


@pytest.fixture(scope="module")
def surgery(lab: Lab) -> Surgery:
    return Surgery(lab)


@dataclass
class Case:
    """What a fault may plant, and the cluster file to look at; what it undoes is undone after the test."""

    lab: Lab
    undo: contextlib.ExitStack
    hang_up: Callable[[], None]
    nodes: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)

    @property
    def pi5(self) -> Host:
        return self.lab["pi5"]

    @property
    def server(self) -> Host:
        return self.lab["mini1"]

    def run(self, host: Host, command: str, undo: str) -> None:
        host.output(command)
        self.undo.callback(host.run, undo)

    def write(self, path: str | Path, text: str, mode: int = 0o644) -> None:
        self.pi5.write(path, text, mode)
        self.undo.callback(self.pi5.run, f"rm -f {shlex.quote(str(path))}")

    def program(self, name: str, text: str) -> None:
        """Put a program where it is found first."""
        self.write(BIN / name, f"#!/bin/sh\n{text}\n", 0o755)

    def ssh(self, alias: str, *lines: str) -> None:
        """Look at pi5 by another entry of ~/.ssh/config, with its own settings."""
        config = self.lab.controller.path(".ssh/config")
        before = config.read_text()
        self.undo.callback(config.write_text, before)
        place = (f"HostName {self.pi5.address}", "User pi", *lines)
        config.write_text("\n  ".join((f"Host {alias}", *place)) + "\n\n" + before)
        self.nodes["pi5"] = {"ssh": alias}

    def two_nodes(self, address: str | None = None) -> None:
        """A server beside the worker."""
        server = self.server.address
        self.stated = {
            "host_ip": {"mini1": server, "pi5": address or server},
            "server": "mini1",
        }

    def file(self) -> dict[str, Any]:
        alone = {"host_ip": {"pi5": self.pi5.address}, "server": "pi5"}
        workers = {"workers": ["pi5"], "num_workers": 1, "port": 61432}
        return {**workers, **alone, **self.stated, "nodes": self.nodes}


@pytest.fixture
def case(lab: Lab, surgery: Surgery) -> Iterator[Case]:
    with contextlib.ExitStack() as undo:
        yield Case(lab, undo, surgery.hang_up)


# --- the faults


def stopped_sshd(case: Case) -> None:
    restart = "/usr/sbin/sshd -f /run/lab/sshd_config -E /run/lab/sshd.log"
    case.run(
        case.pi5,
        "kill $(cat /run/sshd.pid); while [ -e /run/sshd.pid ]; do sleep 0.02; done",
        restart,
    )
    case.hang_up()


def changed_host_key(case: Case) -> None:
    known = case.lab.controller.path(".ssh/known_hosts")
    case.undo.callback(known.write_text, known.read_text())
    known.write_text(f"{known.read_text()}changed {OTHER_KEY}\n")
    case.ssh("changed", "HostKeyAlias changed")


def unknown_host_key(case: Case) -> None:
    case.ssh("unknown", "HostKeyAlias unknown")


def no_key(case: Case) -> None:
    case.ssh("keyless", "IdentityFile /dev/null", "IdentitiesOnly yes")


def unknown_name(case: Case) -> None:
    case.nodes["pi5"] = {"ssh": "pi@nowhere.invalid"}


def cut_link(case: Case) -> None:
    case.hang_up()
    case.pi5.cut()
    case.undo.callback(case.pi5.join)


def sleepy_mac(case: Case) -> None:
    case.program("uname", '[ "$1" = -m ] && echo arm64 || echo Darwin')
    case.program("sysctl", "echo 1")
    case.program("pmset", "echo ' sleep                1 (sleep prevented by powerd)'")


def no_route(case: Case) -> None:
    case.two_nodes()
    route = f"unreachable {case.server.address}/32"
    case.run(case.pi5, f"ip route add {route}", f"ip route del {route}")


def local_network(case: Case) -> None:
    """A Mac on which only what is in tmux cannot reach others."""
    sleepy_mac(case)
    case.two_nodes()
    no_way = "ip link set lo up; ip route add unreachable default"
    in_tmux = f'exec unshare -n sh -c \'{no_way}; exec python3 "$@"\' x "$@"'
    lines = (
        "#!/bin/sh",
        f"""if [ "$*" = - ]; then echo 'torch {json.dumps(TORCH)}'; exit; fi""",
        f'[ -z "$TMUX" ] || {in_tmux}',
        'exec python3 "$@"\n',
    )
    case.write("smolcluster/.venv/bin/python", "\n".join(lines), 0o755)
    case.write("smolcluster/src/smolcluster/another.py", "")
    case.nodes["pi5"] = {"project_dir": "~/smolcluster"}
    case.undo.callback(case.pi5.run, "rm -rf smolcluster")


def slow_link(case: Case) -> None:
    case.two_nodes()
    case.pi5.shape(4)
    case.undo.callback(case.pi5.unshape)


def black_hole(case: Case) -> None:
    case.pi5.lose_large(case.server, 1)
    for host in (case.pi5, case.server):
        case.undo.callback(host.disconnect, 1)
    case.two_nodes(address=case.server.addresses[1])


Plant = Callable[[Case], None]
FAULTS: dict[Plant, tuple[str, str, str, str]] = {
    # the check that finds it, the state, words of what is said, words of the fix
    stopped_sshd: ("SSH", "fail", "no SSH server listens", "systemctl enable --now ssh"),
    changed_host_key: ("host key", "fail", "its host key has changed", "`ssh-keygen -R changed`"),
    unknown_host_key: ("host key", "fail", "not known here", "`ssh unknown` once by hand"),
    no_key: ("SSH", "fail", "does not let this user in", "`ssh-copy-id keyless`"),
    unknown_name: ("SSH", "fail", "its name has no address", "nodes.pi5.ssh"),
    sleepy_mac: ("sleep", "warn", "for 1 min", "`sudo pmset -a sleep 0`"),
    no_route: ("server", "fail", "no way to 10.77.0.", "host_ip.pi5"),
    local_network: ("server", "fail", "not from inside tmux (EHOSTUNREACH)", "Local Network"),
    black_hole: ("link", "fail", "large ones to mini1 (10.77.1.", "MTU"),
    slow_link: ("link", "warn", "the link to the server is slow: 0.", "use a cable"),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_is_found_with_its_fix(case: Case, surgery: Surgery, plant: Plant) -> None:
    check, state, what, fix = FAULTS[plant]
    plant(case)
    code, nodes = surgery.examine(case.file())
    found = nodes["pi5"][check]
    assert found["state"] == state
    assert what in found["what"]
    assert fix in found["fix"]
    failing = {name for name, each in nodes["pi5"].items() if each["state"] == "fail"}
    assert failing == ({check} if state == "fail" else set())
    assert code == int(bool(failing))


def test_a_cut_link_is_found_and_the_others_are_looked_at(case: Case, surgery: Surgery) -> None:
    case.two_nodes()
    cut_link(case)
    code, nodes = surgery.examine(case.file())
    assert code == 1
    assert nodes["pi5"]["SSH"]["state"] == "fail"
    assert nodes["mini1"]["port"]["state"] == "ok"


def test_healthy_hosts_are_ready_and_nothing_stays_behind(case: Case, surgery: Surgery) -> None:
    case.two_nodes()
    for host in (case.server, case.pi5):
        host.output("rm -rf /tmp/*")
    code, nodes = surgery.examine(case.file())
    assert code == 0, nodes
    assert {found["state"] for found in nodes["pi5"].values()} <= {"ok", "skipped", "warn"}
    assert nodes["pi5"]["code"]["what"] == "launch brings it"
    assert nodes["pi5"]["server"]["state"] == nodes["pi5"]["link"]["state"] == "ok"
    for host in (case.server, case.pi5):
        assert host.processes() == []
        assert host.output("ls -A /tmp") == ""
