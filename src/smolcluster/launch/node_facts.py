"""What a machine says of itself: one script finds the facts that are asked for, and prints their lines.

`doctor`, `init` and `launch` ask the same questions. All facts are looked for at the same time: one that
hangs, as the size of a disk does whose server is away, holds up no other. The script is POSIX, and needs only
what Linux and macOS bring.
"""

import ipaddress
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from smolcluster.errors import LaunchError
from smolcluster.launch.host import HAS_PYTHON3, Done, Host, shell_path
from smolcluster.utils.words import one_line

MIN_PYTHON = (3, 11)
ABSENT = 3
"""The exit code of `environment` where the project has none."""
ALL_ADDRESSES = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - nobody listens there
_LISTENER = re.compile(r"^([0-9A-F]{8,32}):([0-9A-F]{4})$", re.MULTILINE)
_MAC_LISTENER = re.compile(r"^(\S+)[.](\d+)$", re.MULTILINE)
_BY_SS = re.compile(r'\(\("(?P<program>[^"]+)",pid=(?P<pid>\d+)')
_BY_LSOF = re.compile(r"^p(?P<pid>\d+)\nc(?P<program>.+)$", re.MULTILINE)

SCRIPT = f"""
fact_system() {{ echo "$(uname -s) $(uname -m)"; }}
fact_apple_silicon() {{ sysctl -n hw.optional.arm64 2>/dev/null; }}
fact_packages() {{
  for tool in brew apt-get dnf pacman zypper apk; do
    if command -v $tool >/dev/null; then echo $tool; break; fi
  done
}}
fact_identity() {{
  echo "$({{ cat /etc/machine-id || ioreg -rd1 -c IOPlatformExpertDevice |
    awk -F'"' '/IOPlatformUUID/ {{print $4}}'; }} 2>/dev/null)"
  hostname 2>/dev/null
}}
fact_user() {{ id -un; }}
fact_clock() {{ date +%s; }}
fact_Python() {{
  if [ -x "$python" ]; then "$python" --version; return; fi
  found=$(uv python find --no-project --no-python-downloads '>={".".join(map(str, MIN_PYTHON))}' 2>/dev/null)
  if [ -n "$found" ]; then "$found" --version; return; fi
  if {HAS_PYTHON3}; then python3 --version; return; fi
  echo none
}}
fact_uv() {{ uv --version; }}
fact_tmux() {{ tmux -V; }}
fact_rsync() {{ rsync --version; }}
fact_folder() {{ cd "$folder" 2>/dev/null && pwd; }}
fact_interpreter() {{ [ -e "$python" ]; }}
fact_environment() {{
  [ -e "$folder/.venv" ] || return {ABSENT}
  eval "$exports"
  "$python" -c 'print("runs")' 2>&1 | tail -n 1
}}
fact_disk() {{
  place=$folder
  while [ ! -e "$place" ]; do place=$(dirname "$place"); done
  df -Pk "$place" 2>&1
}}
fact_memory() {{ cat /proc/meminfo 2>/dev/null || vm_stat; }}
fact_sleep() {{ pmset -g; }}
fact_secret() {{ [ ! -e "$secret" ] || ls -ld "$secret"; }}
fact_listeners() {{
  PATH="$PATH:/usr/sbin"
  if [ -r /proc/net/tcp ]; then
    awk '$4 == "0A" {{print $2}}' /proc/net/tcp /proc/net/tcp6 2>/dev/null
  else
    netstat -an -p tcp | awk '/LISTEN/ {{print $4}}'
  fi
}}
fact_port_holder() {{
  PATH="$PATH:/usr/sbin:/sbin"
  ss -Hltnp "sport = :$port" 2>/dev/null || lsof -nP "-iTCP:$port" -sTCP:LISTEN -Fpc 2>/dev/null
}}
fact_addresses() {{
  PATH="$PATH:/usr/sbin:/sbin"
  if command -v ip >/dev/null 2>&1; then
    ip -o addr
    for each in /sys/class/net/*/wireless; do [ -e "$each" ] && echo "wireless: $each"; done
  else
    ifconfig -a
    command -v networksetup >/dev/null 2>&1 && networksetup -listallhardwareports
  fi
  true
}}
tell() {{
  {{ "fact_$1"; echo "=$?"; }} </dev/null |
    while IFS= read -r line; do printf '%s %s\\n' "$1" "$line"; done
}}
for fact in $wanted; do tell "$fact" & done
wait"""
"""Prints each line of a fact behind the fact's name, and at its end `=` and the exit code.

A line that is written at once mixes with no other. A fact must not `exit`.
"""


@dataclass(frozen=True)
class Facts:
    """What a machine has said of itself, by the names of facts; what did not come in time is missing."""

    told: Mapping[str, Done]

    def text(self, name: str) -> str:
        return self.told[name].stdout.strip() if name in self.told else ""

    def has(self, name: str) -> bool:
        """Whether the machine has it: its command has succeeded."""
        return name in self.told and self.told[name].ok

    @property
    def system(self) -> str:
        """As `uname -s` says: Linux or Darwin; empty: unknown."""
        return self.text("system").partition(" ")[0]

    @property
    def machine(self) -> str:
        """As `uname -m` says."""
        return self.text("system").partition(" ")[2]

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"

    @property
    def is_apple_silicon(self) -> bool:
        """Also where a shell under Rosetta says x86_64."""
        return self.is_mac and self.text("apple_silicon") == "1"

    @property
    def packages(self) -> str:
        """The program that installs packages; empty: none that we know."""
        return self.text("packages")

    def installing(self, program: str) -> str:
        """What installs a program there that is called as its package."""
        if program == "uv":
            return "`curl -LsSf https://astral.sh/uv/install.sh | sh`"
        if not self.packages:
            if self.is_mac:
                return f"install Homebrew (https://brew.sh), then `brew install {program}`"
            return f"install {program} with its package manager"
        commands = {"brew": "brew install", "pacman": "sudo pacman -S", "apk": "sudo apk add"}
        return f"`{commands.get(self.packages, f'sudo {self.packages} install -y')} {program}`"

    @property
    def identity(self) -> str:
        """What no two machines have in common: the system's id and its name; empty: unknown."""
        said = self.text("identity").split("\n")
        return " ".join(said) if len(said) == 2 else ""

    @property
    def listeners(self) -> Mapping[int, set[str]]:
        """By port the addresses on which somebody listens; `*`: on all of them."""
        said, found = self.text("listeners"), dict[int, set[str]]()
        for address, port in _LISTENER.findall(said):
            found.setdefault(int(port, 16), set()).add(_linux_address(address))
        for address, port in _MAC_LISTENER.findall(said):
            found.setdefault(int(port), set()).add(address.partition("%")[0])
        return found

    def is_taken(self, port: int, addresses: Collection[str]) -> bool:
        """Whether somebody listens on this port on one of the addresses, as far as the machine tells."""
        there = self.listeners.get(port, set())
        meets_all = ALL_ADDRESSES & {*there, *addresses}
        return bool(there and (meets_all or there & {*addresses}))

    def next_free(self, port: int) -> int | None:
        """The first port above in which nobody listens; None: none is near, or it has not told."""
        taken = self.listeners
        near = range(port + 1, min(port + 100, 65536)) if taken else ()
        return next((each for each in near if each not in taken), None)

    @property
    def port_holder(self) -> str:
        """Who listens on the port that was asked for: `python3 (process 4711)`; empty: unknown."""
        found = _BY_SS.search(self.text("port_holder")) or _BY_LSOF.search(self.text("port_holder"))
        return f"{found['program']} (process {found['pid']})" if found else ""

    @property
    def free_nbytes(self) -> int:
        """What the disk of the folder has left for its user.

        Raises:
            ValueError, LookupError: `df` makes no sense.
        """
        return int(self.text("disk").splitlines()[-1].split()[3]) * 1024


NOTHING_KNOWN = Facts({})


def facts_of(host: Host, *names: str, folder: str = "~", port: int = 0) -> Facts:
    """These facts of a machine; `folder`: the project's there, `port`: the one whose holder is asked for.

    Raises:
        LaunchError: it cannot be asked, or has no POSIX shell.
    """
    done = host.run(facts_script(*names, folder=folder, port=port))
    facts = read_facts(done)
    if not facts.told.keys() >= set(names):
        raise LaunchError(
            f"{host.node} ({host.shown}): its shell does not run commands as a POSIX shell does: "
            f"{one_line(done.stderr_tail)}"
        )
    return facts


def facts_script(
    *names: str,
    folder: str = "~",
    interpreter: str = "",
    secret_file: str | None = None,
    port: int = 0,
) -> str:
    """What prints facts.

    `interpreter`: Python's, of the project's environment there; it runs with the exports that the script
    reads from its standard input.
    """
    return (
        f"wanted={shlex.quote(' '.join(names))} folder={shell_path(folder)} "
        f"python={shell_path(interpreter)} secret={secret_path(secret_file)} "
        f"exports=$(cat) port={port}{SCRIPT}"
    )


def secret_path(file: str | None) -> str:
    """Where the cluster's secret belongs on a machine, as words of its shell; None: the default place."""
    if file is None:
        return '"${XDG_CONFIG_HOME:-$HOME/.config}"/smolcluster/secret'
    return shell_path(file)


def _linux_address(said: str) -> str:
    """What `/proc/net/tcp` calls an address: in hex, each four bytes backwards."""
    packed = b"".join(bytes.fromhex(each)[::-1] for each in re.findall("." * 8, said))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def read_facts(done: Done) -> Facts:
    lines: dict[str, list[str]] = {}
    for line in done.stdout.split("\n"):
        name, _, said = line.partition(" ")
        lines.setdefault(name, []).append(said)
    return Facts(
        {
            name: replace(done, code=int(said[-1][1:]), stdout="\n".join(said[:-1]), stderr="")
            for name, said in lines.items()
            if re.fullmatch(r"=\d+", said[-1])
        }
    )
