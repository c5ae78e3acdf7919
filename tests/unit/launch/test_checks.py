"""What is thought of a machine, by what its own programs said."""

import tomllib
from pathlib import Path

import pytest

from doctoring import LINUX, MAC, answer, cluster, context
from smolcluster.launch.doctor.checks import (
    MIN_PYTHON,
    find_twins,
    identity,
    installing,
    judge_clock,
    judge_disk,
    judge_memory,
    judge_python,
    judge_rsync,
    judge_secret,
    judge_sleep,
    judge_system,
    judge_tmux,
    judge_uv,
    read_facts,
)
from smolcluster.launch.doctor.findings import MachineFacts

MAC_CONTACT = "system Darwin\nmachine arm64\napple_silicon 1\npackages brew\n"
PI_CONTACT = "system Linux\nmachine aarch64\napple_silicon \npackages apt-get\n"
MAC_DISK = """\
Filesystem   1024-blocks      Used Available Capacity  Mounted on
/dev/disk3s5   482797652 449876123   6543210    99%    /System/Volumes/Data
"""
PI_DISK = """\
environment there
Filesystem     1024-blocks     Used Available Capacity Mounted on
/dev/mmcblk0p2    61234567 60123456   1111111      99% /
"""
VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               {free}.
Pages active:                            412345.
Pages inactive:                           10000.
Pages speculative:                         1000.
Pages throttled:                              0.
Pages wired down:                        154321.
Pages purgeable:                           2000.
"""
MEMINFO = "MemTotal:        8245564 kB\nMemFree:          112233 kB\nMemAvailable:     {kb} kB\n"
PMSET = """\
System-wide power settings:
Currently in use:
 standby              0
 powernap             1
 disksleep            10
 sleep                {minutes} (sleep prevented by powerd)
 displaysleep         10
 womp                 1
"""


def test_facts_are_read_of_a_mac_and_a_pi() -> None:
    assert read_facts(answer(MAC_CONTACT)) == MAC
    assert read_facts(answer(PI_CONTACT)) == MachineFacts("Linux", "aarch64", packages="apt-get")


def test_a_mac_and_a_pi_are_fine_systems() -> None:
    assert judge_system(answer(MAC_CONTACT), context()).what == "Darwin arm64"
    assert judge_system(answer(PI_CONTACT), context()).state == "ok"


def test_a_mac_with_intel_has_no_pytorch() -> None:
    found = judge_system(answer("system Darwin\nmachine x86_64\napple_silicon \n"), context())
    assert (found.state, found.fix) == ("fail", "take it out of workers")
    assert "Intel" in found.what


def test_a_shell_under_rosetta_is_not_taken_for_intel() -> None:
    found = judge_system(answer("system Darwin\nmachine x86_64\napple_silicon 1\n"), context())
    assert found.state == "ok"


def test_a_32_bit_system_has_no_pytorch() -> None:
    found = judge_system(answer("system Linux\nmachine armv7l\npackages apt-get\n"), context())
    assert found.state == "fail"
    assert "64-bit" in found.fix


def test_windows_without_wsl_is_told_so() -> None:
    said = "'sh' is not recognized as an internal or external command,\r\noperable program or batch file."
    found = judge_system(answer("", 1, said), context("mini2"))
    assert found.state == "fail"
    assert "WSL 2" in found.fix
    assert "nodes.mini2.ssh" in found.fix


def test_git_bash_is_not_linux() -> None:
    found = judge_system(answer("system MINGW64_NT-10.0-22631\nmachine x86_64\n"), context())
    assert "MINGW64" in found.what
    assert found.state == "fail"


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        (LINUX, "`sudo apt-get install -y tmux`"),
        (MAC, "`brew install tmux`"),
        (MachineFacts("Linux", "x86_64", packages="pacman"), "`sudo pacman -S tmux`"),
        (MachineFacts("Linux", "x86_64", packages="apk"), "`sudo apk add tmux`"),
        (MachineFacts("Linux", "x86_64"), "install tmux with its package manager"),
        (MachineFacts("Darwin", "arm64", True), "(https://brew.sh), then `brew install tmux`"),
    ],
)
def test_installing_is_each_systems_own(facts: MachineFacts, command: str) -> None:
    assert installing(facts, "tmux").endswith(command)


def test_missing_tmux() -> None:
    found = judge_tmux(answer("", 127, "sh: 1: tmux: not found"), context())
    assert (found.what, found.fix) == (
        "tmux is not there",
        "there: `sudo apt-get install -y tmux`",
    )


def test_missing_rsync_on_a_mac() -> None:
    found = judge_rsync(answer("", 127, "sh: rsync: command not found"), context(facts=MAC))
    assert (found.state, found.fix) == ("fail", "there: `brew install rsync`")


def test_missing_uv() -> None:
    found = judge_uv(answer("", 127, "sh: uv: not found"), context())
    assert found.state == "fail"
    assert found.fix == "there: `curl -LsSf https://astral.sh/uv/install.sh | sh`"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("tmux 3.3a\n", "3.3a"),
        ("tmux next-3.6\n", "3.6"),
        ("openrsync: protocol version 29\nrsync version 2.6.9 compatible\n", "2.6.9"),
        ("uv 0.9.2 (141369ce7 2025-10-10)\n", "0.9.2"),
    ],
)
def test_versions_are_read(said: str, version: str) -> None:
    assert judge_tmux(answer(said), context()).what == version


def test_an_old_python_and_none() -> None:
    old = judge_python(answer("Python 3.9.6\n"), context())
    none = judge_python(answer("none\n"), context())
    assert [old.state, none.state] == ["warn", "warn"]
    assert old.what == "Python 3.9.6 is older than 3.11"
    assert "`uv python install 3.11`" in none.fix
    assert judge_python(answer("Python 3.13.0rc1\n"), context()).what == "3.13.0rc1"


def test_the_oldest_python_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == f">={MIN_PYTHON[0]}.{MIN_PYTHON[1]}"


def test_a_full_disk_of_a_pi() -> None:
    found = judge_disk(answer(PI_DISK), context())
    assert found.state == "fail"
    assert found.what == "only 1.1 GB free for ~/smolcluster"
    assert "nodes.pi5.project_dir" in found.fix


def test_pytorch_needs_room_to_be_installed() -> None:
    found = judge_disk(answer(MAC_DISK), context(facts=MAC))
    assert found.state == "fail"
    assert "still to be installed" in found.what
    assert judge_disk(answer("environment there\n" + MAC_DISK), context()).state == "warn"


def test_a_disk_with_room() -> None:
    said = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/a 9 9 47398644 1% /\n"
    assert judge_disk(answer(said), context()).what == "48.5 GB free"


def test_little_memory_on_linux_and_macos() -> None:
    linux = judge_memory(answer(MEMINFO.format(kb=412345)), context())
    mac = judge_memory(answer(VM_STAT.format(free=5000)), context(facts=MAC))
    assert (linux.state, linux.what) == ("warn", "only 422.2 MB free")
    assert (mac.state, mac.what) == ("warn", "only 294.9 MB free")
    assert "batch_size" in mac.fix


def test_enough_memory() -> None:
    assert judge_memory(answer(MEMINFO.format(kb=7000000)), context()).what == "7.2 GB free"
    assert judge_memory(answer(VM_STAT.format(free=500000)), context()).state == "ok"


def test_a_clock_that_is_minutes_ahead() -> None:
    found = judge_clock(answer("1000\n", begun=700.0, took_s=0.2), context())
    assert found.state == "fail"
    assert found.what == "its clock is 5 min ahead of this machine's"
    assert found.fix == "there: `sudo timedatectl set-ntp true`"


def test_a_macs_clock_that_is_seconds_behind() -> None:
    found = judge_clock(answer("1000\n", begun=1010.0, took_s=0.2), context(facts=MAC))
    assert (found.state, found.what) == ("warn", "its clock is 9 s behind this machine's")
    assert found.fix == "there: `sudo sntp -sS time.apple.com`"


def test_a_slow_answer_is_no_wrong_clock() -> None:
    assert judge_clock(answer("1000\n", begun=992.0, took_s=8.0), context()).state == "ok"
    assert judge_clock(answer("1000\n", begun=1000.9, took_s=0.1), context()).state == "ok"


def test_a_mac_that_falls_asleep() -> None:
    found = judge_sleep(answer(PMSET.format(minutes=15)), context(facts=MAC))
    assert found.state == "warn"
    assert "15 min" in found.what
    assert "`sudo pmset -a sleep 0`" in found.fix
    assert "`caffeinate -i`" in found.fix
    assert judge_sleep(answer(PMSET.format(minutes=0)), context(facts=MAC)).state == "ok"


def test_an_open_secret() -> None:
    path = "/home/pi/.config/smolcluster/secret"
    found = judge_secret(answer(f"-rw-r--r-- 1 pi pi 65 Nov 22 03:00 {path}\n"), context())
    assert (found.state, found.fix) == ("fail", f"there: `chmod 600 {path}`")


@pytest.mark.parametrize("mode", ["-rw-------", "-rw-------@", "-rw-------+", "-r--------."])
def test_a_closed_secret(mode: str) -> None:
    said = f"{mode} 1 me  staff  65 Nov 22 03:00 /Users/me/.config/smolcluster/secret\n"
    assert judge_secret(answer(said), context()).state == "ok"
    assert judge_secret(answer(""), context()).what == "launch brings it"


def test_one_machine_under_two_names() -> None:
    same = identity(answer("3d1219c7c4c5404a\npi5\n"))
    twins = find_twins(
        {"mini2": same, "pi5": same}, {"mini1": "a", "mini2": "b", "pi5": "c"}, cluster()
    )
    assert list(twins) == ["pi5"]
    assert twins["pi5"].what == "pi5 and mini2 are one machine"
    assert "nodes.pi5.ssh" in twins["pi5"].fix


def test_one_destination_under_two_names() -> None:
    twins = find_twins({}, {"mini1": "a", "mini2": "b", "pi5": "b"}, cluster())
    assert list(twins) == ["pi5"]


def test_clones_with_other_names_are_two_machines() -> None:
    identities = {"mini2": "3d1219c7 mini2", "pi5": "3d1219c7 pi5"}
    assert find_twins(identities, {"mini1": "a", "mini2": "b", "pi5": "c"}, cluster()) == {}


def test_on_the_loopback_one_machine_is_meant() -> None:
    on_one = cluster(host_ip=dict.fromkeys(("mini1", "mini2", "pi5"), "127.0.0.1"))
    assert find_twins({"mini2": "a", "pi5": "a"}, dict.fromkeys(on_one.host_ip), on_one) == {}
