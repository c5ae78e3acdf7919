"""What is thought of a machine, the project on it and the server's port, by what programs said there."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doctoring import LINUX, MAC, PI, TREE, answer, cluster, code, context
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
from smolcluster.launch.doctor.checks_links import judge_link, judge_port
from smolcluster.launch.doctor.checks_project import (
    environment_script,
    judge_environment,
    judge_folder,
    judge_torch,
    torch_script,
)
from smolcluster.launch.doctor.findings import Answer, Context, Finding, MachineFacts
from smolcluster.launch.probing import read_listener
from smolcluster.launch.sync import NOT_WRITABLE

Judge = Callable[[Answer, Context], Finding]

MAC_CONTACT = "system Darwin\nmachine arm64\napple_silicon 1\npackages brew\n"
PI_CONTACT = "system Linux\nmachine aarch64\napple_silicon \npackages apt-get\n"
DF = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/disk 99 9 {kb} 99% /\n"
THERE = "environment there\n"
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
PMSET = "System-wide power settings:\n disksleep            10\n sleep                {min} (by powerd)\n"
NO_SHELL = "'sh' is not recognized as an internal or external command,\r\noperable program."
RSYNC_OF_MACOS = "openrsync: protocol version 29\nrsync version 2.6.9 compatible\n"
SECRET = "/home/pi/.config/smolcluster/secret"
LISTED = f"{{}} 1 pi  staff  65 Nov 22 03:00 {SECRET}\n"
H200 = "gpu GPU 0: NVIDIA H200 (UUID: GPU-1f2e)\n"
NO_TORCH = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'"
NO_PYTHON = "mark e1\npython sh: 6: /home/pi/smolcluster/.venv/bin/python: not found\n"
READ_ONLY = "touch: cannot touch '/x/.smolcluster-812': Read-only file system"
MY_CLONE = code(TREE | {"src/a.py": "file 9"}, owner="a git clone with uncommitted changes")
NEVER_SENT = code(TREE | {"src/a.py": "file 9"}, {})
OLDER = code(TREE | {"src/a.py": "file 0"}, TREE | {"src/a.py": "file 0"})
FREE = {"state": "listening", "port": 65432}
FOREIGN = {"state": "foreign", "port": 0, "why": "Cannot assign requested address"}
BUSY = {"state": "busy", "port": 40123, "why": ""}
REFUSED = {"state": "refused", "port": 40000, "why": "Permission denied"}


def torch(before: str = "", **build: Any) -> str:
    cpu = {"version": "2.11.0", "cuda": None, "hip": None, "num_gpus": 0, "mps": False}
    return f"{before}torch {json.dumps({**cpu, 'machine': 'x86_64', **build})}\n"


def listened(places: dict[str, Any], holder: str = "", free: int = 0) -> str:
    own = ["10.10.0.1", "192.168.50.1"]
    told = {"places": places, "own": own, "holder": holder, "free": free, "pid": 4711}
    return json.dumps(told) + "\n"


def case(judge: Judge, state: str, said: str | Answer, *words: str, **stated: Any) -> Any:
    """What is said to a check, its finding's state, and keys and values that it names."""
    answered = answer(said) if isinstance(said, str) else said
    name = f"{judge.__name__.removeprefix('judge_')} {state} {' '.join(words)}"
    return pytest.param(judge, answered, context(**stated), state, words, id=name)


@pytest.mark.parametrize(
    ("judge", "answered", "of_node", "state", "words"),
    [
        case(judge_system, "ok", MAC_CONTACT, "Darwin arm64"),
        case(judge_system, "ok", PI_CONTACT),
        case(judge_system, "fail", "system Darwin\nmachine x86_64\n", "Intel", "out of workers"),
        case(judge_system, "ok", "system Darwin\nmachine x86_64\napple_silicon 1\n"),
        case(judge_system, "fail", "system Linux\nmachine armv7l\n", "64-bit"),
        case(judge_system, "fail", answer("", 1, NO_SHELL), "WSL 2", "nodes.pi5.ssh"),
        case(judge_system, "fail", "system MINGW64_NT-10.0\nmachine x86_64\n", "MINGW64"),
        case(judge_tmux, "fail", answer("", 127), "tmux", "`sudo apt-get install -y tmux`"),
        case(judge_rsync, "fail", answer("", 127), "`brew install rsync`", facts=MAC),
        case(
            judge_uv, "fail", answer("", 127), "`curl -LsSf https://astral.sh/uv/install.sh | sh`"
        ),
        case(judge_tmux, "ok", "tmux 3.3a\n", "3.3a"),
        case(judge_tmux, "ok", "tmux next-3.6\n", "3.6"),
        case(judge_rsync, "ok", RSYNC_OF_MACOS, "2.6.9"),
        case(judge_uv, "ok", "uv 0.9.2 (141369ce7 2025-10-10)\n", "0.9.2"),
        case(judge_python, "warn", "Python 3.9.6\n", "3.9.6", "3.11"),
        case(judge_python, "warn", "none\n", "`uv python install 3.11`"),
        case(judge_python, "ok", "Python 3.13.0rc1\n", "3.13.0rc1"),
        case(judge_disk, "fail", THERE + DF.format(kb=1111111), "1.1 GB", "nodes.pi5.project_dir"),
        case(judge_disk, "fail", DF.format(kb=6543210), "PyTorch", facts=MAC),
        case(judge_disk, "warn", THERE + DF.format(kb=6543210), "6.7 GB"),
        case(judge_disk, "ok", DF.format(kb=47398644), "48.5 GB free"),
        case(judge_memory, "warn", MEMINFO.format(kb=412345), "422.2 MB", "batch_size"),
        case(judge_memory, "ok", MEMINFO.format(kb=7000000), "7.2 GB free"),
        case(judge_memory, "warn", VM_STAT.format(free=5000), "294.9 MB", facts=MAC),
        case(judge_memory, "ok", VM_STAT.format(free=500000), facts=MAC),
        case(
            *(judge_clock, "fail", answer("1000\n", begun=700.0, took_s=0.2)),
            *("5 min ahead of", "`sudo timedatectl set-ntp true`"),
        ),
        case(
            *(judge_clock, "warn", answer("1000\n", begun=1010.0, took_s=0.2)),
            *("9 s behind this", "`sudo sntp -sS time.apple.com`"),
            facts=MAC,
        ),
        case(judge_clock, "ok", answer("1000\n", begun=992.0, took_s=8.0)),
        case(judge_clock, "ok", answer("1000\n", begun=1000.9, took_s=0.1)),
        case(judge_sleep, "warn", PMSET.format(min=15), "15 min", "`sudo pmset -a sleep 0`"),
        case(judge_sleep, "ok", PMSET.format(min=0)),
        case(judge_secret, "fail", LISTED.format("-rw-r--r--"), f"`chmod 600 {SECRET}`"),
        case(judge_secret, "ok", LISTED.format("-rw-------")),
        case(judge_secret, "ok", LISTED.format("-rw-------@")),
        case(judge_secret, "ok", LISTED.format("-rw-------+")),
        case(judge_secret, "ok", LISTED.format("-r--------.")),
        case(judge_secret, "ok", "", "launch brings it"),
        # the project there
        case(
            judge_folder, "warn", "state\0absent\0", "~/smolcluster", "`uv run smolcluster launch`"
        ),
        case(judge_folder, "fail", code(sending="yes"), "half-sent", "without --no-sync"),
        case(judge_folder, "warn", OLDER, "another version", "without --no-sync"),
        case(judge_folder, "ok", code()),
        case(judge_folder, "fail", MY_CLONE, "a git clone with unc", ": src/a.py", "--overwrite"),
        case(judge_folder, "fail", NEVER_SENT, "1 file", ": src/a.py", "--overwrite"),
        case(
            *(judge_folder, "fail", answer("", NOT_WRITABLE, READ_ONLY)),
            *("~/smolcluster", "Read-only file system", "nodes.pi5.project_dir"),
        ),
        case(judge_folder, "fail", "state\0foreign\0", "nodes.pi5.project_dir"),
        case(judge_environment, "warn", "", "`uv run smolcluster launch`"),
        case(judge_environment, "fail", NO_PYTHON, "not found", "rm -rf ~/smolcluster/.venv"),
        case(judge_environment, "warn", "mark \npython runs\n", "half-made", "without --no-sync"),
        case(
            judge_environment, "warn", "mark e0\npython runs\n", "other requ", "without --no-sync"
        ),
        case(judge_environment, "ok", "mark e1\npython runs\n"),
        case(judge_environment, "skipped", "folder absent\n"),
        # PyTorch
        case(
            *(judge_torch, "fail", answer("", 1, NO_TORCH)),
            *("No module named 'torch'", "`rm -rf ~/smolcluster/.venv`, then launch again"),
        ),
        case(judge_torch, "skipped", "absent\n"),
        case(judge_torch, "fail", torch(H200), "NVIDIA H200", "nodes.pi5.torch to auto", "`rm -rf"),
        case(judge_torch, "ok", torch(H200), torch="cpu"),
        case(judge_torch, "ok", torch(H200), device="cpu"),
        case(judge_torch, "fail", torch(H200, cuda="12.8"), "CUDA 12.8", "NVIDIA H200", "cu126"),
        case(judge_torch, "ok", torch(cuda="12.8"), "2.11.0 cpu"),
        case(judge_torch, "ok", torch(H200, cuda="12.8", num_gpus=1), "2.11.0 cuda"),
        case(judge_torch, "fail", torch(mps=True), "Rosetta", "install uv anew", facts=MAC),
        case(judge_torch, "ok", torch(mps=True, machine="arm64"), "2.11.0 mps", facts=MAC),
        case(
            *(judge_torch, "fail", torch(), "nodes.pi5.device is cuda", "to null", "or cpu"),
            device="cuda",
        ),
        case(
            *(judge_torch, "fail", torch(H200, cuda="12.8", num_gpus=1), "sees 1 x cuda, cpu"),
            device="cuda:1",
        ),
        case(judge_torch, "ok", torch(H200, cuda="12.8", num_gpus=2), device="cuda:1"),
        # the server's port, and the link to it
        case(judge_port, "ok", listened({"10.10.0.1": FREE}), "65432 free"),
        case(
            *(judge_port, "fail", listened({"10.10.0.1": BUSY}, "python3 (process 812)", 65434)),
            *("port 65432", "python3 (process 812)", "--override port=65434"),
        ),
        case(judge_port, "fail", listened({"10.10.0.1": REFUSED}), "Permission denied", "1023"),
        case(
            *(judge_port, "fail", listened({"10.9.9.9": FOREIGN})),
            *("10.9.9.9", "set host_ip to an address of mini1: 10.10.0.1, 192.168.50.1"),
        ),
        case(judge_port, "fail", answer("", 127, "sh: uv: not found"), "uv: not found"),
        case(judge_link, "warn", '{"error": null, "ms": 3.0, "mb_per_s": 0.4}', "0.4 MB/s"),
        case(judge_link, "warn", '{"error": null, "ms": 48.0, "mb_per_s": 12.0}', "48 ms"),
        case(
            judge_link, "ok", '{"error": null, "ms": 0.31, "mb_per_s": 941.2}', "941 MB/s 0.31 ms"
        ),
        case(
            *(judge_link, "fail", '{"error": "large", "way": "from"}', "from mini1", "MTU"),
            "`ssh pi5 ping -M do -s 1472 192.168.50.1`",
        ),
        case(judge_link, "fail", '{"error": "large", "way": "to"}', "to mini1 (192.168.50.1)"),
        case(judge_link, "fail", '{"error": "broke", "why": "reset by peer"}', "reset by peer"),
    ],
)
def test_what_is_said_is_judged(
    judge: Judge, answered: Answer, of_node: Context, state: str, words: tuple[str, ...]
) -> None:
    found = judge(answered, of_node)
    assert found.state == state
    assert bool(found.fix) == (state in ("warn", "fail"))
    for word in words:
        assert word in f"{found.what} -> {found.fix}"


def test_facts_are_read_of_a_mac_and_a_pi() -> None:
    assert read_facts(answer(MAC_CONTACT)) == MAC
    assert read_facts(answer(PI_CONTACT)) == PI


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


def test_the_oldest_python_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == f">={MIN_PYTHON[0]}.{MIN_PYTHON[1]}"


def test_the_names_of_one_machine_are_told_apart_from_two_machines() -> None:
    hosts = {"mini1": "a", "mini2": "b", "pi5": "c"}
    same = identity(answer("3d1219c7c4c5404a\npi5\n"))
    twins = find_twins({"mini2": same, "pi5": same}, hosts, cluster())
    assert list(twins) == ["pi5"]
    assert "mini2" in twins["pi5"].what
    assert "nodes.pi5.ssh" in twins["pi5"].fix
    assert list(find_twins({}, {**hosts, "pi5": "b"}, cluster())) == ["pi5"], "one destination"
    clones = {"mini2": "3d1219c7 mini2", "pi5": "3d1219c7 pi5"}
    assert find_twins(clones, hosts, cluster()) == {}
    on_one = cluster(host_ip=dict.fromkeys(("mini1", "mini2", "pi5"), "127.0.0.1"))
    assert find_twins({"mini2": "a", "pi5": "a"}, dict.fromkeys(on_one.host_ip), on_one) == {}


def test_pytorch_gets_the_environment_of_the_nodes_processes() -> None:
    node = context(env={"LD_LIBRARY_PATH": "/opt/my cuda"})
    for script in (torch_script(node), environment_script(node)):
        assert "export LD_LIBRARY_PATH='/opt/my cuda'" in script


def test_what_the_listener_says_is_read() -> None:
    read = read_listener(answer(listened({"10.10.0.1": BUSY, "10.9.9.9": FOREIGN})))
    assert read is not None
    assert read.ports == {"10.10.0.1": 40123}
    assert read.states == {"10.10.0.1": "busy", "10.9.9.9": "foreign"}


@pytest.mark.parametrize("said", ["", "[]", '{"places": 3}', "null"])
def test_a_listener_that_says_something_else_is_none(said: str) -> None:
    assert read_listener(answer(said)) is None
