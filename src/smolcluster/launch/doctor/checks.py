"""What `smolcluster doctor` looks at on a machine: the machine itself and its programs.

`checks_project` looks at the project on it, `checks_links` at the way from the workers to the server.
"""

import re
from collections.abc import Sequence
from functools import partial

from smolcluster.launch.doctor.findings import (
    Check,
    Finding,
    NodeChecks,
    fail,
    not_here,
    ok,
    warn,
)
from smolcluster.launch.host import Done
from smolcluster.launch.node_facts import MIN_PYTHON
from smolcluster.utils.units import format_bytes, format_duration

MIN_DISK, MIN_DISK_TO_INSTALL, LOW_DISK = 2e9, 8e9, 10e9
"""Bytes: to run at all, to install PyTorch, to keep checkpoints of some runs."""
LOW_MEMORY = 1e9
LARGE_SKEW_S, SKEW_S = 30.0, 2.0
LOOPBACK = re.compile(r"127\.|::1$|localhost$")


def judge_system(answer: Done, node: NodeChecks) -> Finding:
    facts = node.facts
    shown = f"{facts.system} {facts.machine}"
    if facts.system not in ("Linux", "Darwin") or not answer.ok:
        said = facts.system or answer.stderr_tail
        return fail(
            f"it has no POSIX shell of Linux or macOS ({said})",
            f"on Windows install WSL 2 with an SSH server in it, and set nodes.{node.name}.ssh to that",
        )
    if facts.is_mac and not facts.is_apple_silicon:
        return fail(f"{shown}: PyTorch is not built for Macs with Intel", "take it out of workers")
    if facts.machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        return fail(
            f"{shown}: PyTorch is not built for it",
            "install a 64-bit system (Raspberry Pi OS has one)",
        )
    return ok(shown)


def find_twins(nodes: Sequence[NodeChecks]) -> dict[str, Finding]:
    """The nodes that are one machine with a node before them.

    On one machine with itself (every address the loopback's) that is meant.
    """
    twins: dict[str, Finding] = {}
    first: dict[str, str] = {}
    for node in nodes:
        if LOOPBACK.match(node.address):
            continue
        keys = [f"ssh {node.host.destination}", *filter(None, [node.facts.identity])]
        if other := next((first[key] for key in keys if key in first), None):
            twins[node.name] = fail(
                f"{node.name} and {other} are one machine",
                f"take one of them out of workers, or mend nodes.{node.name}.ssh",
            )
        first = dict.fromkeys(keys, node.name) | first
    return twins


def judge_program(package: str, answer: Done, node: NodeChecks) -> Finding:
    """A program that is called as its package: there, with its version, or not."""
    if not answer.ok:
        return fail(f"{package} is not there", f"there: {node.facts.installing(package)}")
    found = re.search(r"\d+(\.\d+)+\w?", answer.stdout)
    return ok(found[0] if found else "there")


def judge_python(answer: Done, _node: NodeChecks) -> Finding:
    found = re.search(r"Python (\d+)\.(\d+)\S*", answer.stdout)
    wanted = ".".join(map(str, MIN_PYTHON))
    if found and (int(found[1]), int(found[2])) >= MIN_PYTHON:
        return ok(found[0].removeprefix("Python "))
    what = f"{found[0]} is older than {wanted}" if found else f"there is no Python {wanted}"
    return warn(
        what, f"there: `uv python install {wanted}` (launch does it, if the internet is in reach)"
    )


def judge_disk(_answer: Done, node: NodeChecks) -> Finding:
    free = node.facts.free_nbytes
    has_environment = node.machine.is_here or node.facts.has("interpreter")
    what = f"only {format_bytes(free)} free for {node.machine.project_dir}"
    fix = "free some"
    if free < MIN_DISK_TO_INSTALL and not has_environment:
        return fail(f"{what}, and PyTorch is still to be installed", fix)
    if free < MIN_DISK:
        return fail(what, fix)
    return warn(what, fix) if free < LOW_DISK else ok(f"{format_bytes(free)} free")


def judge_memory(answer: Done, _node: NodeChecks) -> Finding:
    available = available_memory(answer.stdout)
    shown = f"{format_bytes(available)} free"
    if available < LOW_MEMORY:
        return warn(f"only {shown}", "end other programs there, or set a smaller batch_size")
    return ok(shown)


def available_memory(text: str) -> int:
    """Bytes, from Linux's /proc/meminfo or macOS's vm_stat."""
    if linux := re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE):
        return int(linux[1]) * 1024
    page = re.search(r"page size of (\d+) bytes", text)
    if page is None:
        raise ValueError(text)
    kinds = r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)"
    return int(page[1]) * sum(map(int, re.findall(kinds, text, re.MULTILINE)))


def judge_clock(answer: Done, node: NodeChecks) -> Finding:
    """The difference between the clocks there and here, less what the round trip may explain."""
    there = int(answer.stdout) + 0.5  # `date` cuts off
    difference = there - (answer.begun + answer.took_s / 2)
    skew = max(0.0, abs(difference) - 0.5 - answer.took_s / 2)
    if skew <= SKEW_S:
        return ok("agrees")
    mac = node.facts.is_mac
    sync = "sudo sntp -sS time.apple.com" if mac else "sudo timedatectl set-ntp true"
    way = "ahead of" if difference > 0 else "behind"
    what = f"its clock is {format_duration(skew)} {way} this machine's"
    return (fail if skew > LARGE_SKEW_S else warn)(what, f"there: `{sync}`")


def only_macs(node: NodeChecks) -> str | None:
    return None if node.facts.is_mac else "only Macs"


def judge_sleep(answer: Done, _node: NodeChecks) -> Finding:
    found = re.search(r"^\s*sleep\s+(\d+)", answer.stdout, re.MULTILINE)
    if found is None or found[1] == "0":
        return ok("never sleeps")
    return warn(
        f"it sleeps when nobody has used it for {found[1]} min",
        "there: `sudo pmset -a sleep 0`, or `caffeinate -i` in a terminal while a run lasts",
    )


def judge_secret(answer: Done, _node: NodeChecks) -> Finding:
    listed = answer.stdout.strip()
    if not listed:
        return ok("launch brings it")
    mode, *_, path = listed.split(None, 8)
    if mode[4:10] == "------":
        return ok("only its user's")
    return fail(f"the secret {path} is open to others ({mode[:10]})", f"there: `chmod 600 {path}`")


MACHINE_CHECKS = (
    Check("clock", None, judge_clock),
    Check("Python", None, judge_python),
    Check("uv", None, partial(judge_program, "uv"), why_not=not_here),
    Check("tmux", None, partial(judge_program, "tmux")),
    Check("rsync", None, partial(judge_program, "rsync"), why_not=not_here),
    Check("disk", None, judge_disk),
    Check("memory", None, judge_memory),
    Check("sleep", None, judge_sleep, why_not=only_macs),
    Check("secret", None, judge_secret),
)
