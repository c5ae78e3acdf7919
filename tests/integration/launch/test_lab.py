"""The hosts that other tests of this folder use are what they claim to be."""

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
