"""What is thought of a machine, the project on it and the server's port.

Some of it by what programs said there, the rest by faults that are planted in a home on this machine, into
which the doctor's own scripts look.
"""

import json
import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from doctoring import MAC, cluster, facts, machine_at, node_checks
from harness import free_port
from reading import fake_ssh, launched_run, server
from smolcluster.errors import PortBusy
from smolcluster.launch import host
from smolcluster.launch.doctor.checks import judge_system
from smolcluster.launch.doctor.checks_links import PORT_FACTS, check_links, check_port
from smolcluster.launch.doctor.examine import listening, make_contact
from smolcluster.launch.doctor.findings import Check, Finding, NodeChecks, ok, skipped
from smolcluster.launch.doctor.table import TABLE, look_at
from smolcluster.launch.host import Done, Host
from smolcluster.launch.node_facts import MIN_PYTHON, Facts, facts_of
from smolcluster.launch.project import LATEST, Project
from smolcluster.runs.launched import read_launched, write_launched
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RUNS_DIR

CHECKS = {check.name: check for check in (Check("system", None, judge_system), *TABLE)}
DF = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/disk 99 9 {kb} 99% /\n"
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
NO_SHELL = "'sh' is not recognized as an internal or external command,\r\noperable program."
RSYNC_OF_MACOS = "openrsync: protocol version 29\nrsync version 2.6.9 compatible\n"
SECRET = "/home/pi/.config/smolcluster/secret"
LISTED = f"{{}} 1 pi  staff  65 Nov 22 03:00 {SECRET}\n"
REFUSED = {"state": "refused", "port": 40000, "why": "Permission denied"}
LISTENED = {"places": {"10.10.0.1": REFUSED}, "own": ["10.10.0.1"]}
SLOW = '{"error": null, "ms": 3.0, "mb_per_s": 0.4}'
LATE = '{"error": null, "ms": 48.0, "mb_per_s": 12.0}'
FAST = '{"error": null, "ms": 0.31, "mb_per_s": 941.2}'


def answer(stdout: str, code: int = 0, stderr: str = "", **times: float) -> Done:
    return Done(code, stdout, stderr, **times)


def check_found(found: Finding, state: str, words: tuple[str, ...]) -> None:
    assert found.state == state
    assert bool(found.fix) == (state in ("warn", "fail"))
    for word in words:
        assert word in f"{found.what} -> {found.fix}"


def case(name: str, state: str, said: str | Done, *words: str, **stated: Any) -> Any:
    """What is said to a check, its finding's state, and keys and values that it names."""
    answered = answer(said) if isinstance(said, str) else said
    return pytest.param(
        name, answered, node_checks(**stated), state, words, id=f"{name} {state} {words}"
    )


@pytest.mark.parametrize(
    ("name", "answered", "node", "state", "words"),
    [
        case("system", "ok", "Darwin arm64\n", "Darwin arm64", facts=MAC),
        case("system", "fail", "Darwin x86_64\n", "Intel", "out of workers"),
        case("system", "ok", "Darwin x86_64\n", facts=MAC),
        case("system", "fail", answer("", 1, NO_SHELL), "WSL 2", "nodes.pi5.ssh"),
        case("rsync", "fail", answer("", 127), "`brew install rsync`", facts=MAC),
        case("tmux", "ok", "tmux 3.3a\n", "3.3a"),
        case("tmux", "ok", "tmux next-3.6\n", "3.6"),
        case("rsync", "ok", RSYNC_OF_MACOS, "2.6.9"),
        case("uv", "ok", "uv 0.9.2 (141369ce7 2025-10-10)\n", "0.9.2"),
        case("Python", "warn", "Python 3.9.6\n", "3.9.6", "3.11"),
        case("Python", "warn", "none\n", "`uv python install 3.11`"),
        case("Python", "ok", "Python 3.13.0rc1\n", "3.13.0rc1"),
        case("disk", "fail", DF.format(kb=6543210), "PyTorch", facts=MAC),
        case("disk", "warn", DF.format(kb=6543210), "6.7 GB", facts=facts(interpreter="")),
        case("disk", "ok", DF.format(kb=47398644), "48.5 GB free"),
        case("memory", "warn", VM_STAT.format(free=5000), "294.9 MB", facts=MAC),
        case("memory", "ok", VM_STAT.format(free=500000), facts=MAC),
        case("clock", "warn", answer("1000\n", begun=1010.0), "9 s behind this", "sntp", facts=MAC),
        case("clock", "ok", answer("1000\n", begun=992.0, took_s=8.0)),
        case("clock", "ok", answer("1000\n", begun=1000.9, took_s=0.1)),
        case("secret", "fail", LISTED.format("-rw-r--r--"), f"`chmod 600 {SECRET}`"),
        case("secret", "ok", LISTED.format("-rw-------@")),
        case("secret", "ok", LISTED.format("-rw-------+")),
        case("secret", "ok", LISTED.format("-r--------.")),
        case("code", "ok", "0\n"),
        case("port", "fail", json.dumps(LISTENED), "Permission denied", "1023"),
        case("port", "fail", answer("", 127, "sh: uv: not found"), "uv: not found"),
        *(case("port", "fail", said) for said in ("[]", '{"places": 3}', "null")),
        case("link", "warn", SLOW, "0.4 MB/s"),
        case("link", "warn", LATE, "48 ms"),
        case("link", "ok", FAST, "941 MB/s 0.31 ms"),
        case(
            *("link", "fail", '{"error": "large", "way": "from"}', "from mini1", "MTU"),
            "`ssh pi5 ping -M do -s 1472 192.168.50.1`",
        ),
        case("link", "fail", '{"error": "large", "way": "to"}', "to mini1 (192.168.50.1)"),
        case("link", "fail", '{"error": "broke", "why": "reset by peer"}', "reset by peer"),
    ],
)
def test_what_is_said_is_judged(
    name: str, answered: Done, node: NodeChecks, state: str, words: tuple[str, ...]
) -> None:
    node.facts = Facts({**node.facts.told, name: answered})
    check_found(CHECKS[name].judge(answered, node), state, words)


# Planted


FOLDER = LATEST.removeprefix("~/")
OURS = Project({"src/smolcluster/a.py": b"ours"}).sums
CODE = {f"{FOLDER}/src/smolcluster/a.py": "ours"}
PYTHON = f"{FOLDER}/.venv/bin/python"
WHOLE = {PYTHON: 'exec python3 "$@"'}
OWN = {"project_dir": "~/smolcluster"}
NVIDIA_SMI = ".local/bin/nvidia-smi"
H200 = {NVIDIA_SMI: "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1f2e)'"}


def program(name: str, text: str) -> dict[str, str]:
    """A program that is found first."""
    return {f".local/bin/{name}": text}


def torch(machine: str = "x86_64", **build: Any) -> dict[str, str]:
    cpu = {"version": "2.11.0", "cuda": None, "hip": None, "num_gpus": 0, "mps": False}
    return {PYTHON: f"echo 'torch {json.dumps({**cpu, 'machine': machine, **build})}'"}


GPU_BUILD, TWO_GPUS = (torch(cuda="12.8", num_gpus=count) for count in (1, 2))
Fault = tuple[str, str, dict[str, str], tuple[str, ...], dict[str, Any]]
FAULTS: list[Fault] = [
    # a check, its state, files there (programs where they may be executed), words, what is stated
    (
        "system",
        "fail",
        program("uname", '[ "$1" = -m ] && echo armv7l || echo Linux'),
        ("64-bit",),
        {},
    ),
    ("system", "fail", program("uname", "echo MINGW64_NT-10.0"), ("MINGW64", "WSL 2"), {}),
    ("uv", "fail", program("uv", "exit 127"), ("`curl -LsSf https://astral.sh/uv/install",), {}),
    ("tmux", "fail", program("tmux", "exit 127"), ("`sudo apt-get install -y tmux`",), {}),
    ("rsync", "fail", program("rsync", "exit 127"), ("rsync is not there",), {}),
    (
        *("disk", "fail", program("df", f"echo '{DF.format(kb=1111111).strip()}'") | torch()),
        *((f"only 1.1 GB free for ~/{FOLDER}",), {}),
    ),
    ("memory", "warn", program("cat", "echo MemAvailable: 412345 kB"), ("422.2 MB", "batch"), {}),
    ("clock", "fail", program("date", "echo $(($(/bin/date +%s) + 330))"), ("5 min", "ahead"), {}),
    (
        "sleep",
        "warn",
        program("pmset", "echo ' sleep   15 (by powerd)'"),
        ("15 min",),
        {"facts": MAC},
    ),
    ("sleep", "ok", program("pmset", "echo ' sleep   0'"), (), {"facts": MAC}),
    ("secret", "ok", {}, ("launch brings it",), {}),
    ("secret", "fail", {".config/smolcluster/secret": "x"}, ("open to others (-rw-r--r--)",), {}),
    ("secret", "fail", {"my own": "x"}, ("/my own is open",), {"secret_file": "~/my own"}),
    ("code", "ok", {}, ("launch brings it",), {}),
    ("code", "ok", CODE, ("this version",), {}),
    ("code", "fail", dict.fromkeys(CODE, "other"), ("in 1 file", "rm -rf"), {}),
    ("code", "fail", {}, ("is no clone", "leave nodes.pi5.project_dir out"), OWN),
    ("code", "warn", {"smolcluster/src/smolcluster/b.py": ""}, ("in 1 file", "as it is"), OWN),
    ("environment", "skipped", {}, ("needs the code",), {}),
    ("environment", "warn", CODE, ("`uv run smolcluster launch`",), {}),
    ("environment", "fail", {f"{FOLDER}/.venv/x": ""}, ("not found", "rm -rf"), {}),
    ("environment", "fail", {"smolcluster/x": ""}, ("no env", "cd ~/smolcluster && uv sync"), OWN),
    ("environment", "ok", WHOLE, ("whole",), {}),
    ("environment", "ok", {PYTHON: 'echo "$MINE"'}, ("whole",), {"env": {"MINE": "runs"}}),
    ("torch", "skipped", {}, ("no environment",), {}),
    (
        *("torch", "fail", {PYTHON: "echo \"No module named 'torch'\" >&2; false"}),
        *(("No module named 'torch'", "`rm -rf ", "then launch again"), {}),
    ),
    ("torch", "fail", torch() | H200, ("NVIDIA H200", "nodes.pi5.torch to auto", "`rm -rf"), {}),
    ("torch", "ok", torch() | H200, (), {"torch": "cpu"}),
    ("torch", "ok", torch() | H200, (), {"device": "cpu"}),
    ("torch", "fail", torch(cuda="12.8") | H200, ("CUDA 12.8", "NVIDIA H200", "cu126"), {}),
    ("torch", "ok", torch(cuda="12.8"), ("2.11.0 cpu",), {}),
    ("torch", "ok", GPU_BUILD | H200, ("2.11.0 cuda",), {}),
    ("torch", "fail", torch(mps=True), ("Rosetta", "install uv anew"), {"facts": MAC}),
    ("torch", "ok", torch("arm64", mps=True), ("2.11.0 mps",), {"facts": MAC}),
    ("torch", "fail", torch(), ("nodes.pi5.device is cuda", "or cpu"), {"device": "cuda"}),
    ("torch", "fail", GPU_BUILD | H200, ("sees 1 x cuda, cpu",), {"device": "cuda:1"}),
    ("torch", "ok", TWO_GPUS, (), {"device": "cuda:1"}),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return fake_ssh(tmp_path, monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]} {fault[1]} {fault[3]}")
def test_a_planted_fault_is_found_with_its_fix(home: Path, fault: Fault) -> None:
    name, state, files, words, stated = fault
    for path, text in files.items():
        is_program = "/bin/" in path
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(f"#!/bin/sh\n{text}\n" if is_program else text)
        (home / path).chmod(0o755 if is_program else 0o644)
    node = node_checks(**{"sums": OURS, **stated})
    make_contact(node)
    if name != "system":
        node.facts = Facts({**node.facts.told, **stated.get("facts", facts()).told})
        why, check = CHECKS[name].why_not(node), CHECKS[name]
        node.findings[name] = skipped(why) if why else look_at(node, check, node.host.run)
    check_found(node.findings[name], state, words)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine in which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("home")
def test_the_listener_tells_how_the_servers_port_is(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_DIR, str(tmp_path / "runs"))
    in_use = (f"port {taken} is in use by", "--override port=")
    foreign = ("192.0.2.77: no address of mini1, which has", "set host_ip to an address of mini1")
    for address, port, state, words in (
        ("127.0.0.1", free_port(), "ok", ("free",)),
        ("127.0.0.1", taken, "fail", in_use if shutil.which("ss") else in_use[1:]),
        ("192.0.2.77", taken, "fail", foreign),
    ):
        node = node_checks()
        host_ip = dict.fromkeys(node.cluster.host_ip, address)
        node.cluster = cluster(host_ip=host_ip, port=port)
        node.facts = facts_of(Host("pi5"), *PORT_FACTS, port=port)
        node.findings["system"] = ok("reached")
        with listening(node) as listener:
            assert listener
        check_found(node.findings["port"], state, words)


@pytest.mark.usefixtures("home")
def test_a_port_that_the_users_own_run_listens_on_is_no_failure(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_DIR, str(tmp_path))
    node = node_checks()
    node.cluster = cluster(host_ip=dict.fromkeys(node.cluster.host_ip, "127.0.0.1"), port=taken)
    node.facts = facts_of(Host("pi5"), *PORT_FACTS, port=taken)
    node.findings["system"] = ok("reached")
    for ssh, state, words in (
        ("pi5", "warn", ("by your run mine", "--override port=", "stop mine`")),
        ("mini9", "fail", (f"port {taken} is in use",)),
    ):
        paths = launched_run(tmp_path, server(ssh=ssh), run_id="mine")
        launched = read_launched(paths.launched)
        write_launched(paths.launched, launched.model_copy(update={"port": taken}))
        with run_lock(paths.lock), listening(node):
            pass
        check_found(node.findings["port"], state, words)


@pytest.mark.usefixtures("home")
def test_a_launch_onto_a_port_in_use_is_refused_with_a_free_one(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_DIR, str(tmp_path))
    for port in (taken, free_port()):
        stated = cluster(host_ip=dict.fromkeys(("mini1", "mini2", "pi5"), "127.0.0.1"), port=port)
        machines = {name: machine_at(Host(name, name)) for name in stated.machines}
        is_refused = pytest.raises(PortBusy, match=rf"mini1 .*: port {port} is in use.* port=\d+$")
        with is_refused if port == taken else nullcontext():
            check_port(stated, machines["mini1"].host)
        with is_refused if port == taken else nullcontext():
            check_links(stated, machines, stated.workers)
    paths = launched_run(tmp_path, server(ssh="mini1"), run_id="mine")
    launched = read_launched(paths.launched)
    write_launched(paths.launched, launched.model_copy(update={"port": taken}))
    is_own = pytest.raises(PortBusy, match=r"in use by your run mine; .* stop mine` ends it; take")
    with run_lock(paths.lock), is_own:
        check_port(stated.model_copy(update={"port": taken}), machines["mini1"].host)


def test_the_oldest_python_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == f">={MIN_PYTHON[0]}.{MIN_PYTHON[1]}"


def test_programs_of_a_node_have_its_environment_which_no_command_line_shows(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, seen, run_here = "the key's value", list[str](), host.run_here

    def spy(argv: Sequence[str], **how: Any) -> Done:
        seen.extend(argv)
        return run_here(argv, **how)

    monkeypatch.setattr(host, "run_here", spy)
    (home / PYTHON).parent.mkdir(parents=True)
    (home / PYTHON).write_text('#!/bin/sh\necho "$MINE"; echo "$MINE" >&2; exit 1\n')
    (home / PYTHON).chmod(0o755)
    node = node_checks(env={"MINE": said}, packages=("json",))
    make_contact(node)
    for name in ("environment", "torch", "workload"):
        found = look_at(node, CHECKS[name], node.host.run)
        assert said in found.what
    assert len(seen) > 4
    assert not [word for word in seen if "value" in word]


def test_packages_that_a_workload_imports_are_looked_for_in_the_environment() -> None:
    node = node_checks(python=sys.executable, packages=("json", "not_a_package_of_anybody"))
    check = CHECKS["workload"]
    script = check.script
    assert callable(script)
    done = Host(node.name).run(script(node), stdin=check.stdin(node))
    finding = check.judge(done, node)
    assert finding.state == "fail"
    assert "imports not_a_package_of_anybody, which" in finding.what
    assert "uv pip" not in finding.fix
    assert finding.fix == f"install what provides not_a_package_of_anybody on {node.name}"


def test_a_missing_module_is_installed_by_its_package_s_name() -> None:
    node = node_checks(python="/there/python")
    check = CHECKS["workload"]
    finding = check.judge(Done(0, 'missing ["yaml", "not_a_package_of_anybody"]', ""), node)
    assert "uv pip install --python /there/python PyYAML" in finding.fix
    assert "install what provides not_a_package_of_anybody" in finding.fix
