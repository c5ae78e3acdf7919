"""The hosts that other tests of this folder use are what they claim to be."""

import subprocess
from pathlib import Path

import pytest

from lab import HOMES, Host, Lab, Running
from waiting import eventually


def left_on_the_machine(of_tests: Path) -> list[set[str]]:
    """Its mounts, but for those in folders of tests; its network devices, and the homes that it sees."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = {line for line in lines if not Path(line.split()[4]).is_relative_to(of_tests)}
    places = (Path("/sys/class/net"), HOMES)
    return [mounts, *({path.name for path in place.iterdir()} for place in places)]


def sleeper(host: Host) -> Running:
    running = host.popen("exec sleep 1000")
    eventually(lambda: ("sleep", "1000") in [each.argv for each in host.processes()])
    return running


def test_each_host_has_a_tmux_and_files_of_its_own(lab: Lab) -> None:
    for host in (lab["mini1"], lab["mini2"]):
        lab.controller.output(
            ["ssh", host.name, f"tmux new -d -s of-{host.name} && touch /tmp/here"]
        )
    sessions = [
        host.output("tmux ls -F '#S'; ls -d /tmp/here") for host in (lab["mini1"], lab["mini2"])
    ]
    assert sessions == ["of-mini1\n/tmp/here", "of-mini2\n/tmp/here"]
    assert lab["pi5"].run("tmux ls || ls /tmp/here").returncode != 0
    for host in (lab["mini1"], lab["mini2"]):
        host.output("rm /tmp/here")
        host.end_processes()


def test_what_runs_on_a_host_is_seen_there_only(lab: Lab) -> None:
    for host in (lab.controller, *lab):
        host.end_processes()
    running = sleeper(lab["mini1"])
    (process,) = lab["mini1"].processes()
    assert process.argv == ("sleep", "1000")
    assert lab["mini2"].processes() == []
    lab.controller.output(["ssh", "mini1", f"kill {process.pid}"])
    assert running.wait() != 0
    eventually(lambda: lab["mini1"].processes() == [])


def test_a_command_past_its_deadline_is_killed_with_its_children(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab["pi5"].run("sleep 1000 & sleep 1001; true", timeout_s=0.5)
    eventually(lambda: lab["pi5"].processes() == [])


def test_nothing_is_left_of_a_lab(tmp_path_factory: pytest.TempPathFactory) -> None:
    of_tests = tmp_path_factory.getbasetemp().parent  # others of them mount disks at the same time
    before = left_on_the_machine(of_tests)
    with Lab() as other:
        assert not any(host.processes() for host in (other.controller, *other))
        sleeper(other["mini1"])
        other["mini2"].output("tmux new -d; touch /tmp/of-a-lab")
        first = [Path(f"/proc/{host.init}") for host in (other.controller, *other)]
        assert all(path.exists() for path in first)
    assert not any(path.exists() for path in first)
    assert left_on_the_machine(of_tests) == before
