"""A machine on which the launcher runs commands: this one, or another one over the system's `ssh`.

`ssh` itself does the rest: `~/.ssh/config`, agents, ProxyJump and host keys work as the user has set them up,
and host keys are always verified. The first connection to a machine stays open for those that follow.
A script travels as one quoted word of `sh -c`, so that no name or path in it is ever executed: whatever goes
into a script passes through `shlex.quote`, `shlex.join` or `shell_path`.
"""

import os
import re
import select
import shlex
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError

HERE = "local"
"""What `nodes.<name>.ssh` says of the machine that launches."""
CONNECT_TIMEOUT_S = 6
COMMAND_TIMEOUT_S = 60.0
"""A machine that trains, or writes to a slow card, may take long for little."""
END_S = 5.0
"""How long a script may take to end when its standard input has."""
PERSIST_S = 300
"""How long a connection that nobody uses stays open."""
MAX_SOCKET_PATH = 86
"""A socket's path has at most 103 characters on macOS; ssh adds 17 of its own for a moment."""
SHORT_FOLDER = Path("/tmp")  # noqa: S108 - macOS' own temporary folder is too long; ours is checked
PREAMBLE = (
    'PATH="$HOME/.local/bin:$HOME/.cargo/bin:/opt/homebrew/bin:/usr/local/bin:$PATH"; export PATH; '
)
"""A shell that is not interactive does not know where people install things."""
HAS_PYTHON3 = (
    '{ [ "$(uname -s 2>/dev/null)" != Darwin ] || xcode-select -p >/dev/null 2>&1; } && '
    "command -v python3 >/dev/null"
)
"""A Mac without developer tools has a python3 that only opens a window."""
SSH_FAILED = 255
GREETING = "--- smolcluster ---"
"""What a shell's start-up files print comes before it."""

_CAUSES = (
    # what ssh says, what it means, what to do
    ("remote host identification has changed", "its host key has changed", "host_key_changed"),
    ("host key verification failed", "its host key is not known here", "host_key"),
    ("could not resolve hostname", "its name has no address", "name"),
    ("no route to host", "there is no route to it", "route"),
    ("network is unreachable", "there is no route to it", "route"),
    ("network is down", "there is no route to it", "route"),
    ("can't assign requested address", "there is no route to it", "route"),
    ("host is down", "there is no route to it", "route"),
    ("connection refused", "it answers, but no SSH server listens there", "port"),
    ("permission denied (", "it does not let this user in", "key"),
    ("too many authentication failures", "it does not let this user in", "key"),
    ("timed out", "it does not answer", "silent"),
    ("not responding", "it does not answer", "silent"),
    ("bad configuration option", "this machine's SSH configuration is wrong", "config"),
    ("bad owner or permissions", "this machine's SSH configuration is wrong", "config"),
)
_FIXES = {
    "host_key_changed": "if it was installed anew, `ssh-keygen -R {known}` and connect once by hand; "
    "otherwise somebody may be in between",
    "host_key": "`ssh {host}` once by hand, compare the fingerprint and accept it",
    "name": "use its address (nodes.{node}.ssh in the cluster file), or give {host} a HostName in "
    "~/.ssh/config",
    "route": "check its cable or Wi-Fi, and that this machine has an address in its network",
    "port": "turn on its SSH server (macOS: Sharing, Remote Login; Linux: systemctl enable --now ssh)",
    "key": "`ssh-copy-id {host}`, or name the user as user@host (nodes.{node}.ssh in the cluster file)",
    "silent": "switch it on and wake it up; check its address and firewall",
    "config": "`ssh {host}` says where",
    "closed": "`ssh -v {host}` says why",
}


class Unreachable(LaunchError):
    """No command can be run on a machine.

    Attributes:
        cause: name, route, port, silent, key, host_key, host_key_changed, config or closed.
        what: the same for a person: it does not answer.
        fix: what mends it.
    """

    def __init__(
        self, node: str, destination: str, cause: str, what: str, known_as: str | None = None
    ) -> None:
        """`known_as`: its name in the list of known hosts, where ssh has said it."""
        self.node, self.cause, self.what = node, cause, what
        known = shlex.quote(known_as or destination.rpartition("@")[2])
        self.fix = _FIXES[cause].format(host=destination, node=node, known=known)
        super().__init__(f"{node} ({destination}): {what}: {self.fix}")


@dataclass(frozen=True)
class Done:
    """A command that has ended, with the time here when it began and the seconds until its end."""

    code: int
    stdout: str
    stderr: str
    begun: float = 0.0
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def stderr_tail(self) -> str:
        """The last line of what it said, of its errors if there are any."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


class TookTooLong(LaunchError):
    """A command did not end in time; `stdout` is what it had printed by then."""

    stdout = ""


@dataclass(frozen=True)
class Host:
    """A machine, by its name in the cluster file.

    Attributes:
        node: the name.
        destination: what `ssh` is told, such as `pi5` or `pi@192.168.50.2`; None: it is this machine.
    """

    node: str
    destination: str | None = None

    @property
    def shown(self) -> str:
        return self.destination or "this machine"

    def argv(self, script: str, *, terminal: bool = False, alone: bool = False) -> list[str]:
        """The command that runs a POSIX shell script there; with a `terminal` for programs that draw.

        `alone`: over a connection of its own, for which the host's key is verified anew.
        """
        if self.destination is None:
            return ["sh", "-c", PREAMBLE + script]
        remote = shlex.join(["sh", "-c", PREAMBLE + script])
        # the first value of an option counts
        own = ["-o", "ControlMaster=no", "-o", "ControlPath=none"] if alone else []
        return ["ssh", *own, *ssh_options(terminal=terminal), "--", self.destination, remote]

    def run(
        self,
        script: str,
        *,
        stdin: bytes = b"",
        timeout_s: float = COMMAND_TIMEOUT_S,
        shielded: bool = False,
        alone: bool = False,
    ) -> Done:
        """Run a POSIX shell script there and wait for its end; `shielded` from a Ctrl-C at the terminal.

        `alone`: see `argv`.

        Raises:
            Unreachable: the machine cannot be reached, or does not let us in.
            TookTooLong: it takes longer than `timeout_s`.
        """
        try:
            greeted = f"echo {GREETING}; {script}"
            argv = self.argv(greeted, alone=alone)
            done = run_here(argv, stdin=stdin, timeout_s=timeout_s, shielded=shielded)
        except subprocess.TimeoutExpired as error:
            too_long = self._too_long(timeout_s)
            too_long.stdout = _greeted((error.stdout or b"").decode("utf-8", "replace"))
            raise too_long from error
        except OSError as error:
            raise _no_ssh(error) from error
        if self.destination is not None and done.code == SSH_FAILED:
            raise self.unreachable(done.stderr)
        return replace(done, stdout=_greeted(done.stdout))

    @contextmanager
    def holding(self, script: str, *, stdin: bytes, timeout_s: float) -> Iterator[Done]:
        """Run a POSIX shell script there until the block ends, when its standard input does.

        Yields the first line that it says; one that ends before is yielded with its exit code.

        Raises:
            Unreachable: the machine cannot be reached, or does not let us in.
            TookTooLong: it says nothing for `timeout_s`.
        """
        argv, patience_s = self.argv(f"echo {GREETING}; {script}"), 0.0
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(  # noqa: S603 - an argument list; a script in it is quoted
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
                )
            except OSError as error:
                raise _no_ssh(error) from error
            with process:
                assert process.stdin is not None  # noqa: S101 - it was asked for
                try:
                    with suppress(BrokenPipeError):
                        process.stdin.write(stdin)
                        process.stdin.flush()
                    code, stdout = _begun(process, timeout_s)
                    patience_s = END_S
                    errors.seek(0)
                    stderr = errors.read().decode("utf-8", "replace")
                    if self.destination is not None and code == SSH_FAILED:
                        raise self.unreachable(stderr)
                    yield Done(code, stdout, stderr)
                except subprocess.TimeoutExpired as error:
                    raise self._too_long(timeout_s) from error
                finally:
                    with suppress(BrokenPipeError):
                        process.stdin.close()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(patience_s)
                    process.kill()

    def _too_long(self, timeout_s: float) -> TookTooLong:
        return TookTooLong(
            f"{self.node} ({self.shown}): a command did not end within {timeout_s:g} s"
        )

    def unreachable(self, said: str) -> Unreachable:
        lowered = said.lower()
        for words, what, cause in _CAUSES:
            if words in lowered:
                named = re.search(r"host key for (\S+) has changed", said, re.IGNORECASE)
                return Unreachable(self.node, self.shown, cause, what, named and named[1])
        lines = said.strip().splitlines()
        words = lines[-1].strip() if lines else "the connection was closed"
        return Unreachable(self.node, self.shown, "closed", words)


def run_here(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout_s: float | None,
    shielded: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Done:
    """Run a command on this machine and wait for its end; `shielded` from a Ctrl-C at the terminal.

    `environ` is its environment; None: this process's.

    Its errors go to a file: an `ssh` of before 8.5 that stays in the background as everybody's connection
    keeps the pipe, whose end would be waited for.

    Raises:
        OSError: there is no such command.
        TimeoutExpired: it takes longer than `timeout_s`.
    """
    begun, start = time.time(), time.monotonic()
    with tempfile.TemporaryFile() as errors:
        ended = subprocess.run(  # noqa: S603 - an argument list; a script in it is quoted
            argv,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=timeout_s,
            check=False,
            start_new_session=shielded,
            env=environ,
        )
        errors.seek(0)
        said = errors.read()
    return Done(
        ended.returncode,
        ended.stdout.decode("utf-8", "replace"),
        said.decode("utf-8", "replace"),
        begun,
        time.monotonic() - start,
    )


def _greeted(said: str) -> str:
    """What came after the greeting; where there is none, all of it."""
    _, greeting, rest = said.partition(f"{GREETING}\n")
    return rest if greeting else said


def _no_ssh(error: OSError) -> LaunchError:
    return LaunchError(f"cannot run ssh: {error.strerror or error}")


def _begun(process: "subprocess.Popen[bytes]", timeout_s: float) -> tuple[int, str]:
    """The line after the greeting, with 0; of one that ends without, its exit code.

    Raises:
        TimeoutExpired: neither came in time.
    """
    assert process.stdout is not None  # noqa: S101 - it was asked for
    said, end = b"", time.monotonic() + timeout_s
    while select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        more = os.read(process.stdout.fileno(), 65_536)
        said += more
        line, newline, _ = said.partition(f"{GREETING}\n".encode())[2].partition(b"\n")
        if newline or not more:
            code = 0 if newline else process.wait(max(0.0, end - time.monotonic()))
            return code, line.decode("utf-8", "replace")
    raise subprocess.TimeoutExpired(process.args, timeout_s)


def host_of(cluster: ClusterConfig, node: str) -> Host:
    stated = cluster.nodes[node].ssh if node in cluster.nodes else None
    return Host(node, None if stated == HERE else stated or node)


def ssh_options(*, terminal: bool = False) -> list[str]:
    """The options of every `ssh` that is started: never a question, time limits, one connection for all.

    What people set for their own use of a machine is left out: a command that opens tmux there, a terminal,
    ports that are forwarded. `terminal`: the command needs one.
    """
    path = f"{str(control_folder()).replace('%', '%%')}/%C"
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT_S),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ControlMaster": "auto",
        # A home may have blanks in its path. Else no quotes: macOS' rsync takes those in its -e for text.
        "ControlPath": path if shlex.quote(path) == path else f'"{path}"',
        "ControlPersist": str(PERSIST_S),
        "RemoteCommand": "none",
        "RequestTTY": "yes" if terminal else "no",
        "ClearAllForwardings": "yes",
    }
    return [word for key, value in options.items() for word in ("-o", f"{key}={value}")]


def control_folder() -> Path:
    """Where the sockets of open connections are; only this user may enter it.

    Raises:
        LaunchError: it cannot be made, or is somebody else's.
    """
    folder = Path.home() / ".ssh" / "smolcluster"
    if len(str(folder)) + 41 > MAX_SOCKET_PATH:
        folder = SHORT_FOLDER / f"smolcluster-ssh-{os.getuid()}"
    try:
        # sshd trusts no ~/.ssh that others can write
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise LaunchError(f"cannot make {folder}: {error.strerror or error}") from error
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or stat.S_IMODE(status.st_mode) & 0o077:
        raise LaunchError(
            f"{folder} is not a folder of this user alone: remove it, so that it is made anew"
        )
    return folder


def shell_path(path: str) -> str:
    """A path as a word of a shell script; `~/` is the home of whoever runs the script."""
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
