"""`smolcluster init` on real hosts: it measures, chooses the better way, and says why."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from lab import Host, Lab, Process
from smolcluster.configs.load import parse_yaml

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


def init(lab: Lab, *flags: str) -> "subprocess.CompletedProcess[str]":
    done = lab.controller.run([*INIT, *flags])
    assert "Traceback" not in done.stdout + done.stderr
    return done


def rate(line: str, address: str) -> float:
    """The bandwidth in MB/s that a line states for an address."""
    return float(line.partition(address)[2].partition(": ")[2].split()[0].replace(",", ""))


def test_each_worker_gets_its_best_way(two_ways: Lab) -> None:
    lab = two_ways
    done = init(
        lab,
        "--server",
        "mini1",
        "--worker",
        "pi5",
        "--worker",
        "mini2=mini@mini2",
        "--to",
        "c.yaml",
    )
    assert done.returncode == 0, done.stderr
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


def test_nothing_stays_behind(two_ways: Lab) -> None:
    lab = two_ways
    flags = ("--server", "mini1", "--worker", "pi5", "--to", "d.yaml")
    assert init(lab, *flags).returncode == 0
    for name in ("mini1", "pi5"):
        assert not pythons(lab[name])


def test_the_controller_may_be_the_server(lab: Lab) -> None:
    flags = (
        "--server",
        "controller=local",
        "--worker",
        "mini2",
        "--to",
        "here.yaml",
        "--algorithm",
        "syncps",
    )
    done = init(lab, *flags)
    assert done.returncode == 0, done.stderr
    cluster = parse_yaml(lab.controller.path("here.yaml").read_text())
    assert cluster["host_ip"] == dict.fromkeys(("controller", "mini2"), lab.controller.address)
    assert cluster["nodes"] == {"controller": {"ssh": "local"}}


def test_a_host_that_is_off_is_told(lab: Lab) -> None:
    done = init(lab, "--server", "mini1", "--worker", "off=10.77.0.99", "--to", "off.yaml")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: off (10.77.0.99): ")
    assert not lab.controller.path("off.yaml").exists()


@pytest.mark.parametrize(
    "evil", ["$(touch executed)", "`touch executed`", "a'; touch executed; '", "a b"]
)
def test_flags_are_never_executed(lab: Lab, evil: str) -> None:
    for flags in (
        ("--server", evil, "--worker", "pi5"),
        ("--server", "mini1", "--worker", evil),
        ("--server", f"mini1={evil}", "--worker", "pi5"),
        ("--server", "mini1", "--worker", f"pi5={evil}"),
    ):
        done = init(lab, *flags, "--to", "evil.yaml")
        assert done.returncode == 2
        assert len((done.stdout + done.stderr).splitlines()) == 1
    for host in (lab.controller, *lab):
        assert "executed" not in host.output("ls")


def test_a_project_folder_with_odd_letters_is_only_text(lab: Lab) -> None:
    folder = "~/my $(touch executed) 'smol\" # x: y"
    done = init(
        lab, "--server", "mini1", "--worker", "mini2", "--project-dir", folder, "--to", "odd.yaml"
    )
    assert done.returncode == 0, done.stderr
    cluster = parse_yaml(lab.controller.path("odd.yaml").read_text())
    assert cluster["nodes"]["mini1"] == {"project_dir": folder}
    assert "executed" not in lab["mini1"].output("ls") + lab.controller.output("ls")


def test_without_a_terminal_nothing_is_asked(lab: Lab) -> None:
    done = init(lab, "--server", "mini1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: init needs --server NODE[=SSH] and at least one --worker")


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


def test_ctrl_c_in_the_middle_leaves_nothing_behind(
    lab: Lab, eventually: Callable[[Callable[[], bool]], None]
) -> None:
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
