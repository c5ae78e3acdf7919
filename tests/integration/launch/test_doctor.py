"""Faults that are really planted, on hosts that are really there: the doctor finds each, and its remedy."""

import contextlib
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab import Host, Lab, Running
from smolcluster.launch.manifest import SENDING, SENT

PROGRAM = """
import sys
from smolcluster.launch.doctor.examine import doctor
for number, file in enumerate(sys.stdin):
    print(f"\\nend {number} {doctor(file.strip(), [], True)}", flush=True)
"""
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDvXYe9CDlBqfbcyQnAcxLmLnR0JHMgUrBvcWcKSUoDw"
BIN = Path(".local/bin")
H200 = "GPU 0: NVIDIA H200 (UUID: GPU-1f2e)"
TORCH = {
    "version": "2.11.0+cpu",
    "cuda": None,
    "hip": None,
    "num_gpus": 0,
    "mps": False,
}


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

    def hide(self, program: str) -> None:
        self.run(self.pi5, f"mount --bind /dev/null {program}", f"umount {program}")

    def ssh(self, alias: str, *lines: str) -> None:
        """Look at pi5 by another entry of ~/.ssh/config, with its own settings."""
        config = self.lab.controller.path(".ssh/config")
        before = config.read_text()
        self.undo.callback(config.write_text, before)
        place = (f"HostName {self.pi5.address}", "User pi", *lines)
        config.write_text("\n  ".join((f"Host {alias}", *place)) + "\n\n" + before)
        self.nodes["pi5"] = {"ssh": alias}

    def project(self, manifest: str | None = SENT) -> None:
        """Put a folder of the project there, and a manifest of what was sent, if any was."""
        text = 'name = "smolcluster"\n'
        self.write("smolcluster/pyproject.toml", text)
        if manifest is not None:
            digest = hashlib.sha256(text.encode()).hexdigest()
            self.write(f"smolcluster/{manifest}", f"pyproject.toml\0file {digest}\0")
        self.undo.callback(self.pi5.run, "rm -rf smolcluster")

    def python(self, look: str, *rest: str) -> None:
        """Put an interpreter into the project's environment; `look` runs when PyTorch is looked at."""
        self.project()
        lines = (
            "#!/bin/sh",
            f'if [ "$*" = - ]; then {look}; exit; fi',
            *rest,
            'exec python3 "$@"\n',
        )
        self.write("smolcluster/.venv/bin/python", "\n".join(lines), 0o755)

    def torch(self, *rest: str, machine: str = "x86_64") -> None:
        said = shlex.quote(f"torch {json.dumps({**TORCH, 'machine': machine})}")
        self.python(f"echo {said}", *rest)

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


def old_system(case: Case) -> None:
    case.program("uname", '[ "$1" = -m ] && echo armv7l || echo Linux')


def windows(case: Case) -> None:
    case.program("uname", "echo MINGW64_NT-10.0-22631")


def missing_uv(case: Case) -> None:
    case.run(case.pi5, "mv .local/bin/uv uv.away", "mv uv.away .local/bin/uv")


def missing_tmux(case: Case) -> None:
    case.hide("/usr/bin/tmux")


def missing_rsync(case: Case) -> None:
    case.hide("/usr/bin/rsync")


def full_disk(case: Case) -> None:
    case.run(case.pi5, "mkdir -p small && mount -t tmpfs -o size=64m tmpfs small", "umount small")
    case.nodes["pi5"] = {"project_dir": "~/small/smolcluster"}


def little_memory(case: Case) -> None:
    case.write("meminfo", "MemTotal: 1000000 kB\nMemAvailable: 200000 kB\n")
    case.run(case.pi5, "mount --bind meminfo /proc/meminfo", "umount /proc/meminfo")


def wrong_clock(case: Case) -> None:
    case.program("date", "echo $(($(/bin/date +%s) - 330))")


def sleepy_mac(case: Case) -> None:
    case.program("uname", '[ "$1" = -m ] && echo arm64 || echo Darwin')
    case.program("sysctl", "echo 1")
    case.program("pmset", "echo ' sleep                1 (sleep prevented by powerd)'")


def open_secret(case: Case) -> None:
    case.write(".config/smolcluster/secret", "x" * 64, 0o644)


def half_sent(case: Case) -> None:
    case.project(SENDING)


def other_version(case: Case) -> None:
    case.project()


def edited_clone(case: Case) -> None:
    case.project(None)
    case.pi5.output("git init -q smolcluster")


def read_only(case: Case) -> None:
    mount = "mount -t tmpfs -o ro tmpfs smolcluster"
    case.run(case.pi5, f"mkdir smolcluster && {mount}", "umount smolcluster; rmdir smolcluster")


def foreign_folder(case: Case) -> None:
    case.run(case.pi5, "mkdir smolcluster && touch smolcluster/thesis.tex", "rm -r smolcluster")


def broken_environment(case: Case) -> None:
    case.project()
    case.run(case.pi5, "mkdir -p smolcluster/.venv/bin", "rm -r smolcluster/.venv")


def no_torch(case: Case) -> None:
    case.python("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; false")


def cpu_build(case: Case) -> None:
    case.torch()
    case.program("nvidia-smi", f"echo {shlex.quote(H200)}")


def missing_device(case: Case) -> None:
    case.torch()
    case.nodes["pi5"] = {"device": "cuda"}


def busy_port(case: Case) -> None:
    code = "import socket, time; s = socket.create_server(('', 61432)); print('up', flush=True)"
    running = case.pi5.popen(["python3", "-c", f"{code}; time.sleep(99)"])
    case.undo.callback(running.stop)
    running.wait_for("up")


def wrong_address(case: Case) -> None:
    case.two_nodes(address="10.77.0.99")


def no_address(case: Case) -> None:
    case.stated = {"host_ip": {"pi5": "10.99.0.1"}}


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
    case.torch(f'[ -z "$TMUX" ] || {in_tmux}', machine="arm64")


def slow_link(case: Case) -> None:
    case.two_nodes()
    case.pi5.shape(4)
    case.undo.callback(case.pi5.unshape)


def black_hole(case: Case) -> None:
    case.pi5.lose_large(case.server, 1)
    for host in (case.pi5, case.server):
        case.undo.callback(host.disconnect, 1)
    case.two_nodes(address=case.server.addresses[1])


def two_names(case: Case) -> None:
    address = case.pi5.address
    case.stated = {
        "host_ip": {"pi5": address, "again": address},
        "workers": ["pi5", "again"],
        "num_workers": 2,
    }
    case.nodes["again"] = {"ssh": f"pi@{address}"}


Plant = Callable[[Case], None]
FAULTS: dict[Plant, tuple[str, str, str, str]] = {
    # the check that finds it, the state, words of what is said, words of the fix
    stopped_sshd: ("SSH", "fail", "no SSH server listens", "systemctl enable --now ssh"),
    changed_host_key: ("host key", "fail", "its host key has changed", "`ssh-keygen -R changed`"),
    unknown_host_key: ("host key", "fail", "not known here", "`ssh unknown` once by hand"),
    no_key: ("SSH", "fail", "does not let this user in", "`ssh-copy-id keyless`"),
    unknown_name: ("SSH", "fail", "its name has no address", "nodes.pi5.ssh"),
    old_system: ("system", "fail", "Linux armv7l", "64-bit"),
    windows: ("system", "fail", "MINGW64", "WSL 2"),
    missing_uv: ("uv", "fail", "uv is not there", "https://astral.sh/uv/install.sh"),
    missing_tmux: ("tmux", "fail", "tmux is not there", "install -y tmux`"),
    missing_rsync: ("rsync", "fail", "rsync is not there", "install -y rsync`"),
    full_disk: ("disk", "fail", "only 67.1 MB free", "nodes.pi5.project_dir"),
    little_memory: ("memory", "warn", "only 204.8 MB free", "batch_size"),
    wrong_clock: ("clock", "fail", "its clock is 5 min", "timedatectl set-ntp true"),
    sleepy_mac: ("sleep", "warn", "for 1 min", "`sudo pmset -a sleep 0`"),
    open_secret: ("secret", "fail", "is open to others (-rw-r--r--)", "`chmod 600 /srv/pi/"),
    half_sent: ("code", "fail", "half-sent", "without --no-sync"),
    edited_clone: ("code", "fail", "a git clone with uncommitted changes, has 1", "--overwrite"),
    read_only: ("code", "fail", "cannot be written (Read-only", "nodes.pi5.project_dir"),
    other_version: ("code", "warn", "of another version", "without --no-sync"),
    foreign_folder: ("code", "fail", "something else than this project", "nodes.pi5.project_dir"),
    broken_environment: (
        "environment",
        "fail",
        "Python does not run",
        "rm -rf ~/smolcluster/.venv",
    ),
    no_torch: ("torch", "fail", "No module named 'torch'", "rm -rf ~/smolcluster/.venv"),
    cpu_build: ("torch", "fail", "there is an NVIDIA H200", "nodes.pi5.torch to auto"),
    missing_device: (
        "torch",
        "fail",
        "nodes.pi5.device is cuda",
        "null (the best there is) or cpu",
    ),
    busy_port: ("port", "fail", "port 61432 is in use by python3", "--override port=61433"),
    wrong_address: ("server", "fail", "10.77.0.99 is no address of mini1", "host_ip.pi5"),
    no_address: ("port", "fail", "no address of pi5, which has 10.77.0.", "host_ip"),
    no_route: ("server", "fail", "no way to 10.77.0.", "host_ip.pi5"),
    local_network: ("server", "fail", "not from inside tmux (EHOSTUNREACH)", "Local Network"),
    black_hole: ("link", "fail", "large ones to mini1 (10.77.1.", "MTU"),
    slow_link: ("link", "warn", "the link to the server is slow: 0.", "use a cable"),
}


ALONG: dict[Plant, set[str]] = {no_address: {"server"}}
"""What fails for the same reason."""


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
    assert failing == ({check} if state == "fail" else set()) | ALONG.get(plant, set())
    assert code == int(bool(failing))


def test_one_machine_under_two_names_is_found(case: Case, surgery: Surgery) -> None:
    two_names(case)
    code, nodes = surgery.examine(case.file())
    assert code == 1
    assert nodes["again"]["identity"]["what"] == "again and pi5 are one machine"


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
    assert code == 0
    assert {found["state"] for found in nodes["pi5"].values()} <= {"ok", "skipped", "warn"}
    assert nodes["pi5"]["code"]["what"] == "~/smolcluster is not there yet"
    assert nodes["pi5"]["server"]["state"] == nodes["pi5"]["link"]["state"] == "ok"
    for host in (case.server, case.pi5):
        assert host.processes() == []
        assert host.output("ls -A /tmp") == ""
