"""What `smolcluster doctor` looks at on a machine: the machine itself and its programs.

`checks_project` looks at the project on it, `checks_links` at the way from the workers to the server.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from smolcluster.configs.schema import ClusterConfig
from smolcluster.launch.doctor.findings import (
    Answer,
    Check,
    Context,
    Finding,
    MachineFacts,
    fail,
    fields,
    ok,
    warn,
)
from smolcluster.launch.host import HAS_PYTHON3, shell_path
from smolcluster.launch.prepare import DEFAULT_SECRET, TOOLS
from smolcluster.utils.units import format_bytes, format_duration

MIN_PYTHON = (3, 11)
MIN_DISK, MIN_DISK_TO_INSTALL, LOW_DISK = 2e9, 8e9, 10e9
"""Bytes: to run at all, to install PyTorch, to keep checkpoints of some runs."""
LOW_MEMORY = 1e9
LARGE_SKEW_S, SKEW_S = 30.0, 2.0

CONTACT_SCRIPT = """
echo "system $(uname -s)"; echo "machine $(uname -m)"
echo "apple_silicon $(sysctl -n hw.optional.arm64 2>/dev/null)"
for tool in brew apt-get dnf pacman zypper apk; do
  if command -v $tool >/dev/null; then echo "packages $tool"; break; fi
done"""


def read_facts(answer: Answer) -> MachineFacts:
    told = fields(answer.stdout)
    return MachineFacts(
        told.get("system", ""),
        told.get("machine", ""),
        told.get("system") == "Darwin" and told.get("apple_silicon") == "1",
        told.get("packages", ""),
    )


def judge_system(answer: Answer, context: Context) -> Finding:
    facts = read_facts(answer)
    shown = f"{facts.system} {facts.machine}"
    if facts.system not in ("Linux", "Darwin") or not answer.ok:
        said = facts.system or answer.stderr_tail
        return fail(
            f"it has no POSIX shell of Linux or macOS ({said})",
            f"on Windows install WSL 2 with an SSH server in it, and set nodes.{context.node}.ssh to that",
        )
    if facts.is_mac and not facts.is_apple_silicon:
        return fail(f"{shown}: PyTorch is not built for Macs with Intel", "take it out of workers")
    if facts.machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        return fail(
            f"{shown}: PyTorch is not built for it",
            "install a 64-bit system (Raspberry Pi OS has one)",
        )
    return ok(shown)


def installing(facts: MachineFacts, package: str) -> str:
    match facts.packages:
        case "":
            if facts.is_mac:
                return f"install Homebrew (https://brew.sh), then `brew install {package}`"
            return f"install {package} with its package manager"
        case "brew":
            return f"`brew install {package}`"
        case "pacman":
            return f"`sudo pacman -S {package}`"
        case "apk":
            return f"`sudo apk add {package}`"
        case tool:
            return f"`sudo {tool} install -y {package}`"


def judge_program(answer: Answer, context: Context, package: str) -> Finding:
    """A program that is called as its package: there, with its version, or not."""
    if not answer.ok:
        return fail(f"{package} is not there", f"there: {installing(context.facts, package)}")
    found = re.search(r"\d+(\.\d+)+\w?", answer.stdout)
    return ok(found[0] if found else "there")


def judge_tmux(answer: Answer, context: Context) -> Finding:
    return judge_program(answer, context, "tmux")


def judge_rsync(answer: Answer, context: Context) -> Finding:
    return judge_program(answer, context, "rsync")


def judge_uv(answer: Answer, context: Context) -> Finding:
    if answer.ok:
        return judge_program(answer, context, "uv")
    return fail("uv is not there", f"there: `{TOOLS['uv']}`")


def judge_python(answer: Answer, _context: Context) -> Finding:
    found = re.search(r"Python (\d+)\.(\d+)\S*", answer.stdout)
    wanted = ".".join(map(str, MIN_PYTHON))
    if found and (int(found[1]), int(found[2])) >= MIN_PYTHON:
        return ok(found[0].removeprefix("Python "))
    what = f"{found[0]} is older than {wanted}" if found else f"there is no Python {wanted}"
    return warn(
        what, f"there: `uv python install {wanted}` (launch does it, if the internet is in reach)"
    )


def python_script(context: Context) -> str:
    own = shell_path(context.python)
    wanted = ".".join(map(str, MIN_PYTHON))
    return f"""
if [ -x {own} ]; then exec {own} --version; fi
found=$(uv python find --no-project --no-python-downloads '>={wanted}' 2>/dev/null)
if [ -n "$found" ]; then exec "$found" --version; fi
if {HAS_PYTHON3}; then exec python3 --version; fi
echo none"""


def disk_script(context: Context) -> str:
    return f"""
folder={shell_path(context.folder)}
[ -e "$folder"/.venv/bin/python ] && echo "environment there"
while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
df -Pk "$folder" """


def judge_disk(answer: Answer, context: Context) -> Finding:
    last = answer.stdout.splitlines()[-1]
    free = int(re.split(r"\s+", last)[3]) * 1024
    has_environment = context.is_here or "environment there" in answer.stdout
    needed = MIN_DISK if has_environment else MIN_DISK_TO_INSTALL
    shown = f"{format_bytes(free)} free"
    fix = f"free some, or set nodes.{context.node}.project_dir to another disk"
    if free < needed:
        why = "" if has_environment else ", and PyTorch is still to be installed"
        return fail(f"only {shown} for {context.folder}{why}", fix)
    return warn(f"only {shown} for {context.folder}", fix) if free < LOW_DISK else ok(shown)


def judge_memory(answer: Answer, _context: Context) -> Finding:
    available = available_memory(answer.stdout)
    shown = f"{format_bytes(available)} free"
    if available < LOW_MEMORY:
        return warn(f"only {shown}", "end other programs there, or set a smaller batch_size")
    return ok(shown)


def available_memory(text: str) -> float:
    """Bytes, from Linux's /proc/meminfo or macOS's vm_stat."""
    linux = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if linux:
        return int(linux[1]) * 1024
    page = re.search(r"page size of (\d+) bytes", text)
    if page is None:
        raise ValueError(text)
    kinds = re.findall(
        r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", text, re.MULTILINE
    )
    return int(page[1]) * sum(map(int, kinds))


def judge_clock(answer: Answer, context: Context) -> Finding:
    """The difference between the clocks there and here, less what the round trip may explain."""
    there = int(answer.stdout) + 0.5  # `date` cuts off
    difference = there - (answer.begun + answer.took_s / 2)
    skew = max(0.0, abs(difference) - 0.5 - answer.took_s / 2)
    if skew <= SKEW_S:
        return ok("agrees")
    way = "ahead" if difference > 0 else "behind"
    sync = (
        "sudo sntp -sS time.apple.com" if context.facts.is_mac else "sudo timedatectl set-ntp true"
    )
    what = f"its clock is {format_duration(skew)} {way} of this machine's".replace(
        "behind of", "behind"
    )
    return (fail if skew > LARGE_SKEW_S else warn)(what, f"there: `{sync}`")


def judge_sleep(answer: Answer, _context: Context) -> Finding:
    found = re.search(r"^\s*sleep\s+(\d+)", answer.stdout, re.MULTILINE)
    if found is None or found[1] == "0":
        return ok("never sleeps")
    return warn(
        f"it sleeps when nobody has used it for {found[1]} min",
        "there: `sudo pmset -a sleep 0`, or `caffeinate -i` in a terminal while a run lasts",
    )


def judge_secret(answer: Answer, _context: Context) -> Finding:
    listed = answer.stdout.strip()
    if not listed:
        return ok("launch brings it")
    mode, *_, path = listed.split(None, 8)
    if mode[4:10] == "------":
        return ok("only its user's")
    return fail(f"the secret {path} is open to others ({mode[:10]})", f"there: `chmod 600 {path}`")


def secret_script(context: Context) -> str:
    file = DEFAULT_SECRET if context.secret_file is None else shell_path(context.secret_file)
    return f'file={file}\n[ -e "$file" ] || exit 0\nls -ld "$file"'


IDENTITY_SCRIPT = """
{ cat /etc/machine-id || ioreg -rd1 -c IOPlatformExpertDevice |
  awk -F'"' '/IOPlatformUUID/ {print $4}'; } 2>/dev/null
hostname"""


def judge_identity(answer: Answer, _context: Context) -> Finding:
    """Who the machine is; whether it has two names is seen when all have answered."""
    identity(answer)
    return ok("one name")


def identity(answer: Answer) -> str:
    """What no two machines have in common: the system's id and its name."""
    words = answer.stdout.split()
    if len(words) < 2:
        raise ValueError(answer.stdout)
    return " ".join(words)


LOOPBACK = re.compile(r"127\.|::1$|localhost$")


def find_twins(
    identities: Mapping[str, str], destinations: Mapping[str, str | None], cluster: ClusterConfig
) -> dict[str, Finding]:
    """The nodes that are one machine with a node before them.

    On one machine with itself (every address the loopback's) that is meant.
    """
    twins: dict[str, Finding] = {}
    first: dict[str, str] = {}
    for node, destination in destinations.items():
        if LOOPBACK.match(cluster.host_ip[node]):
            continue
        keys = [f"ssh {destination}"] + ([identities[node]] if node in identities else [])
        other = next((first[key] for key in keys if key in first), None)
        for key in keys:
            first.setdefault(key, node)
        if other is not None:
            twins[node] = fail(
                f"{node} and {other} are one machine",
                f"take one of them out of workers, or mend nodes.{node}.ssh",
            )
    return twins


def _not_here(context: Context) -> str | None:
    return "not needed here" if context.is_here else None


def _only_macs(context: Context) -> str | None:
    return None if context.facts.is_mac else "only Macs"


def _always(script: str) -> Callable[[Context], str]:
    return lambda _context: script


MACHINE_CHECKS: Iterable[Check] = (
    Check("clock", _always("date +%s"), judge_clock),
    Check("Python", python_script, judge_python),
    Check("uv", _always("uv --version"), judge_uv, why_not=_not_here),
    Check("tmux", _always("tmux -V"), judge_tmux),
    Check("rsync", _always("rsync --version"), judge_rsync, why_not=_not_here),
    Check("disk", disk_script, judge_disk),
    Check("memory", _always("cat /proc/meminfo 2>/dev/null || vm_stat"), judge_memory),
    Check("sleep", _always("pmset -g"), judge_sleep, why_not=_only_macs),
    Check("secret", secret_script, judge_secret),
    Check("identity", _always(IDENTITY_SCRIPT), judge_identity),
)
