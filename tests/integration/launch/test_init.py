"""`smolcluster init` on real hosts: it measures, chooses the better way, and says why."""

import shlex
import sys
from collections.abc import Iterator

import pytest

from lab import Host, Lab, Process
from smolcluster.configs.load import parse_yaml
from waiting import eventually

pytestmark = pytest.mark.nightly

SECOND = 7
"""A network that only mini1 and pi5 are in."""
INIT = [sys.executable, "-m", "smolcluster.cli", "init"]


@pytest.fixture(scope="module")
def two_ways(lab: Lab) -> Iterator[Lab]:
    """The hosts, with a second cable between mini1 and pi5; pi5's first one is slow."""
    for name in ("mini1", "pi5"):
        lab[name].connect(SECOND)
    lab["pi5"].shape(20)
    yield lab
    lab["pi5"].unshape()
    for name in ("mini1", "pi5"):
        lab[name].output(["ip", "link", "delete", f"eth{SECOND}"])
        del lab[name].addresses[SECOND]


def rate(line: str, address: str) -> float:
    """The bandwidth in MB/s that a line states for an address."""
    return float(line.partition(address)[2].partition(": ")[2].split()[0].replace(",", ""))


def test_each_worker_gets_its_best_way(two_ways: Lab) -> None:
    lab = two_ways
    flags = ("--server", "mini1", "--worker", "pi5", "--worker", "mini2=mini@mini2")
    done = lab.controller.run([*INIT, *flags, "--to", "c.yaml"])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    text = lab.controller.path("c.yaml").read_text()
    cluster = parse_yaml(text)
    first, second = lab["mini1"].addresses[0], lab["mini1"].addresses[SECOND]
    assert cluster["host_ip"]["pi5"] == second
    assert cluster["host_ip"]["mini2"] == first
    assert cluster["nodes"] == {"mini2": {"ssh": "mini@mini2"}}
    [pi5] = [line for line in done.stdout.splitlines() if line.startswith("pi5 reaches mini1 best")]
    assert rate(pi5, f"{first} (eth0)") == pytest.approx(2.5, rel=0.3)
    assert rate(pi5, f"at {second}") > 10
    [mini2] = [line for line in text.splitlines() if line.startswith("  mini2: ")]
    assert f"{second} (eth{SECOND}): no " in mini2
    assert not any(pythons(lab[name]) for name in ("mini1", "pi5", "mini2")), "nothing stays behind"


def test_on_a_terminal_what_is_missing_is_asked(lab: Lab) -> None:
    running = lab.controller.popen(shlex.join([*INIT, "--to", "asked.yaml"]), tty=True)
    for question, answer in (
        ("Server: its name", "mini1"),
        ("Where ssh finds mini1", "10.77.0.99"),
        ("Where ssh finds mini1 (local: this machine) [10.77.0.99]", "mini1"),
        ("Worker 1: its name", "mini2"),
        ("Where ssh finds mini2", ""),
        ("Worker 2: its name, empty: no more", ""),
        ("Write asked.yaml?", "y"),
    ):
        running.wait_for(question)
        running.type(f"{answer}\n")
    assert running.wait() == 0
    assert "mini1 (10.77.0.99): " in running.output
    cluster = parse_yaml(lab.controller.path("asked.yaml").read_text())
    assert cluster["workers"] == ["mini2"]


def test_ctrl_c_ends_it(lab: Lab) -> None:
    running = lab.controller.popen(shlex.join([*INIT, "--to", "never.yaml"]), tty=True)
    running.wait_for("Server: its name")
    running.type("\x03")
    assert running.wait() == 130
    assert "Traceback" not in running.output
    assert len(running.output.split("\n")) <= 3
    assert not lab.controller.path("never.yaml").exists()


def test_ctrl_c_in_the_middle_leaves_nothing_behind(lab: Lab) -> None:
    command = [*INIT, "--server", "mini1", "--worker", "pi5", "--to", "never.yaml"]
    running = lab.controller.popen(shlex.join(command), tty=True)
    running.wait_for("measuring")
    running.type("\x03")
    assert running.wait() == 130
    assert "Traceback" not in running.output
    for host in (lab["mini1"], lab["pi5"]):
        eventually(lambda host=host: not pythons(host))  # type: ignore[misc]


def pythons(host: Host) -> list[Process]:
    """What of the measuring runs on a host."""
    return [each for each in host.processes() if "python" in each.argv[0]]
