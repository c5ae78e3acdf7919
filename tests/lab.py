"""Real hosts for tests of what travels over SSH and tmux, on one Linux machine, as root.

Each host is a set of namespaces (mount, network, PID, UTS, IPC) with an sshd on port 22, an account and
a home of its own, and a private /tmp, /run, /dev/pts and /var/log; the other files are the machine's.
The hosts are joined by bridges in one more network namespace, so the machine's own network stays as it is.
All that a host writes lies in its memory: when its first process dies, everything is gone.

Accounts have uid 0 under another name, because uv's cache belongs to root. uv is in `~/.local/bin`, which
is not on the PATH of a plain ssh command; it works offline, from the machine's cache, by symbolic links
(a hard link cannot leave a mount).
"""

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

REPOSITORY = Path(__file__).resolve().parents[1]
TOOLS = (
    *("unshare", "nsenter", "setpriv", "setsid", "script", "mount", "ip", "tc", "git"),
    *("ssh", "ssh-keygen", "tmux", "rsync", "/usr/sbin/sshd"),
)
HOMES = Path("/srv")
PRIVATE = (HOMES, Path("/tmp"), Path("/run"), Path("/var/tmp"), Path("/var/log"))  # noqa: S108
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"  # what macOS gives to ssh commands
ETC = Path("/run/lab")
START_TIMEOUT_S = 240.0
COMMAND_TIMEOUT_S = 180.0

Command = str | Sequence[str]


class LabError(Exception):
    """The lab could not do what a test asked of it."""


class Process(NamedTuple):
    """A process as its own host sees it."""

    pid: int
    argv: tuple[str, ...]


# --- what the machine has


def find_uv() -> Path:
    """The uv that prepared this environment."""
    candidates = (os.environ.get("UV"), REPOSITORY / ".uv/bin/uv", shutil.which("uv"))
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return Path(candidate).resolve()
    raise LabError(f"uv was not found: not in $UV, {REPOSITORY / '.uv'} or on the PATH")


def find_cache() -> Path:
    """The folder of uv's cache."""
    return Path(_checked(str(find_uv()), "cache", "dir").strip()).resolve()


def find_python() -> Path:
    """The interpreter on which this environment was made."""
    return Path(sys.base_prefix).resolve() / "bin/python3"


def obstacle() -> str | None:
    """Why there can be no lab on this machine, or None."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux's namespaces"
    if os.geteuid() != 0:
        return "the lab needs root, for namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the lab needs tools that are not installed: {', '.join(missing)}"
    try:
        needed = [REPOSITORY, Path(sys.prefix).resolve(), find_python(), find_uv(), find_cache()]
        _checked(*_unshare(pid=True), "true")
    except LabError as error:
        return f"no lab on this machine: {error}"
    hidden = [path for path in needed if any(path.is_relative_to(place) for place in PRIVATE)]
    return f"the hosts could not see {hidden[0]}" if hidden else None


def _checked(*argv: str) -> str:
    """Run a command on the machine itself and return what it prints."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{argv[0]}: {error}") from error
    if done.returncode:
        raise LabError(f"{shlex.join(argv)}: code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _unshare(*, pid: bool) -> list[str]:
    """The beginning of a command that runs in new namespaces and dies with its parent."""
    spaces = ["--net", *(["--pid", "--mount", "--mount-proc", "--uts", "--ipc"] if pid else [])]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child"]


def _wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)


# --- /proc of the machine


def _status(pid: int) -> dict[str, str]:
    """The fields of /proc/<pid>/status, none when the process is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _child(pid: int) -> int | None:
    """The only child of a process."""
    return next((other for other in _pids() if _status(other).get("PPid") == str(pid)), None)


def _space(pid: int) -> str | None:
    """The PID namespace of a process; None when it is gone."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return None


def _process(pid: int) -> Process | None:
    """How a process is called on its host, None when it is gone, or ends: then it has no command line."""
    status = _status(pid)
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    if not status or not raw:
        return None
    argv = tuple(part.decode(errors="replace") for part in raw.rstrip(b"\0").split(b"\0"))
    return Process(int(status["NSpid"].split()[-1]), argv)


def _is_sshd(process: Process) -> bool:
    """Whether it is the daemon, or serves a login."""
    name = process.argv[0]
    return name.startswith("sshd:") or name.endswith("/sshd")


# --- namespaces and what runs in them


class Space:
    """Namespaces that live as long as their first process, which only reaps what is left to it."""

    INIT = "echo ready; exec env --ignore-signal=CHLD sleep infinity"

    def __init__(self, *, pid: bool, setup: str = "") -> None:
        script = f"set -e\n{setup}\n{self.INIT}"
        self._outer = subprocess.Popen(
            [*_unshare(pid=pid), "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.init = 0
        try:
            self.init = self._wait_for_init()
        except BaseException:
            self.close()
            raise

    def _wait_for_init(self) -> int:
        stdout = self._outer.stdout
        assert isinstance(stdout, io.BufferedReader)
        os.set_blocking(stdout.fileno(), False)
        said = b""

        def is_ready() -> bool:
            nonlocal said
            said += stdout.read() or b""
            if self._outer.poll() is not None:
                raise LabError(f"no namespaces: {said.decode().strip()}")
            return said.endswith(b"ready\n")

        _wait_until(is_ready, START_TIMEOUT_S, "namespaces")
        init = _child(self._outer.pid)
        assert init is not None
        return init

    def close(self) -> None:
        """End all that runs here, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init or self._outer.pid, signal.SIGKILL)
        self._outer.wait(START_TIMEOUT_S)  # it waits for its child, and that one for the namespace
        if self._outer.stdout is not None:
            self._outer.stdout.close()


class Running:
    """A command on a host; both of its output streams are one."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        self._sink = tempfile.TemporaryFile()  # noqa: SIM115 # closed by stop()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=self._sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        size = os.fstat(self._sink.fileno()).st_size
        return os.pread(self._sink.fileno(), size, 0).decode(errors="replace")

    def type(self, text: str) -> None:
        r"""Give it input; "\x03" is Ctrl-C where it has a terminal."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def signal(self, signum: int) -> None:
        """Send a signal to the command and its process group, as a terminal does."""
        _signal_entered(self.process, signum)

    def wait(self, timeout_s: float = COMMAND_TIMEOUT_S) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(timeout_s)

    def wait_for(self, text: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Wait until it has printed `text`."""

        def is_there() -> bool:
            if text in self.output:
                return True
            if self.process.poll() is not None and text not in self.output:
                raise LabError(f"{shlex.join(self.argv)} ended without {text!r}:\n{self.output}")
            return False

        _wait_until(is_there, timeout_s, f"{text!r} from {shlex.join(self.argv)}")

    def stop(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait(START_TIMEOUT_S)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._sink.close()


def _signal_entered(process: "subprocess.Popen[bytes]", signum: int) -> None:
    """Signal the process group that nsenter started; nsenter itself would not pass it on."""
    entered = _child(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(entered or process.pid, signum)


# --- hosts


class Host:
    """One host: a name, an account, an sshd, and links to the others."""

    def __init__(self, name: str, user: str, number: int, switch: Space) -> None:
        self.name, self.user, self.number = name, user, number
        self.home = HOMES / user
        self.addresses: dict[int, str] = {}
        self._switch = switch
        self._running: list[Running] = []
        self._space = Space(pid=True, setup=_private_mounts(name, self.home))
        self.environ = _environ(self)

    @property
    def init(self) -> int:
        """The machine's PID of the host's first process, with which all others end."""
        return self._space.init

    @property
    def address(self) -> str:
        """The address in the first network."""
        return self.addresses[0]

    def path(self, path: str | Path) -> Path:
        """Where the test finds a path of this host; relative ones begin at its home."""
        return Path(f"/proc/{self.init}/root{self.home / path}")

    def write(self, path: str | Path, text: str, mode: int = 0o644) -> None:
        """Make a file."""
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=mode)
        file.write_text(text)

    # commands

    def run(
        self,
        command: Command,
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run words, or a bash script, in the home. Past the deadline its process group is killed.

        With `tty` it has a terminal of 40 x 120, and both streams come as `stdout`.

        Raises:
            subprocess.TimeoutExpired: what it left behind in other process groups goes on running.
        """
        if tty:
            return self._run_in_terminal(command, timeout_s, env or {}, stdin)
        argv = self._entering(command, env or {})
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                out, err = process.communicate(stdin.encode(), timeout_s)
            except BaseException:
                _signal_entered(process, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(
            argv, process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
        )

    def _run_in_terminal(
        self, command: Command, timeout_s: float, env: Mapping[str, str], stdin: str
    ) -> subprocess.CompletedProcess[str]:
        running = self.popen(command, env=env, tty=True)
        try:
            running.type(stdin)
            code = running.wait(timeout_s)
            return subprocess.CompletedProcess(running.argv, code, running.output, "")
        finally:
            running.stop()

    def output(self, command: Command, *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What a command prints that must succeed, without the blanks around it."""
        done = self.run(command, timeout_s=timeout_s)
        if done.returncode:
            raise LabError(
                f"{self.name}: {command}: code {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout.strip()

    def popen(
        self, command: Command, *, env: Mapping[str, str] | None = None, tty: bool = False
    ) -> Running:
        """Start words, or a bash script, in the home; it ends with the lab at the latest."""
        running = Running(self._entering(command, env or {}, tty=tty))
        self._running.append(running)
        return running

    def _entering(
        self, command: Command, env: Mapping[str, str], *, tty: bool = False
    ) -> list[str]:
        words = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if tty:
            env = {"TERM": "xterm-256color", **env}
            words = ["script", "-qefc", f"stty rows 40 cols 120; {shlex.join(words)}", "/dev/null"]
        variables = [f"{name}={value}" for name, value in {**self.environ, **env}.items()]
        spaces = ["--mount", "--net", "--pid", "--uts", "--ipc"]
        enter = ["nsenter", f"--target={self.init}", *spaces]
        return [*enter, "setsid", "env", "-i", "-C", str(self.home), *variables, *words]

    # processes

    def processes(self) -> list[Process]:
        """All processes of the host but its first one and sshd's."""
        space = _space(self.init)
        inside = [pid for pid in _pids() if pid != self.init and _space(pid) == space]
        found = [process for pid in inside if (process := _process(pid))]
        return sorted(process for process in found if not _is_sshd(process))

    def end_processes(self) -> None:
        """Kill all that `processes` tells of, for instance what a failed test left."""
        _wait_until(self._has_killed_all, START_TIMEOUT_S, f"the end of {self.processes()}")

    def _has_killed_all(self) -> bool:
        pids = [str(process.pid) for process in self.processes()]
        if pids:
            self.run(["kill", "-KILL", *pids])
        return not pids

    # links

    def connect(self, network: int) -> str:
        """Give the host an interface in a network, 10.77.<network>.0/24; returns its address there."""
        if network in self.addresses:
            return self.addresses[network]
        device, port = f"eth{network}", self._port(network)
        address = f"10.77.{network}.{self.number}"
        peer = ["peer", "name", device, "netns", str(self.init)]
        with contextlib.suppress(LabError):  # the first one in this network makes its bridge
            self._on_switch("ip", "link", "add", "name", f"br{network}", "type", "bridge")
        self._on_switch("ip", "link", "set", f"br{network}", "up")
        self._on_switch("ip", "link", "add", "name", port, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", port, "master", f"br{network}", "up")
        self.output(["ip", "address", "add", f"{address}/24", "dev", device])
        self.output(["ip", "link", "set", device, "up"])
        self.addresses[network] = address
        return address

    def disconnect(self, network: int) -> None:
        """Take the interface in a network away again."""
        self._on_switch("ip", "link", "del", self._port(network))
        del self.addresses[network]

    def cut(self, network: int = 0) -> None:
        """Pull the cable: nothing passes, and no socket is told."""
        self._on_switch("ip", "link", "set", self._port(network), "down")

    def join(self, network: int = 0) -> None:
        """Put the cable back."""
        self._on_switch("ip", "link", "set", self._port(network), "up")

    def shape(self, mbit_per_s: float, network: int = 0) -> None:
        """Let no more through, in either direction."""
        shaper = self._shaper(mbit_per_s)
        self._on_switch("tc", "qdisc", "replace", "dev", self._port(network), "root", *shaper)
        self.output(["tc", "qdisc", "replace", "dev", f"eth{network}", "root", *shaper])

    def unshape(self, network: int = 0) -> None:
        """Take the limit of `shape` away."""
        self._on_switch("tc", "qdisc", "del", "dev", self._port(network), "root")
        self.output(["tc", "qdisc", "del", "dev", f"eth{network}", "root"])

    def lose_large(self, peer: "Host", network: int) -> None:
        """Lose packets of more than 1400 bytes from and to a peer, in a network of their own; tell nobody.

        What the stack would cut later counts as small, so that is not made.
        """
        for host in (self, peer):
            host.connect(network)
            host.output(["ip", "link", "set", "dev", f"eth{network}", "gso_max_segs", "1"])
        self._on_switch("ip", "link", "set", "dev", self._port(network), "mtu", "1400")

    @staticmethod
    def _shaper(mbit_per_s: float) -> list[str]:
        rate = round(mbit_per_s * 1e6)
        burst_bytes = max(16_384, rate // 8 // 50)  # 20 ms
        return ["tbf", "rate", f"{rate}bit", "burst", f"{burst_bytes}b", "latency", "200ms"]

    def _port(self, network: int) -> str:
        return f"{self.name}-{network}"

    def _on_switch(self, *argv: str) -> None:
        _checked("nsenter", f"--target={self._switch.init}", "--net", *argv)

    # SSH

    def serve(self, hosts: str) -> str:
        """Start sshd; `hosts` is /etc/hosts. Returns the public host key."""
        for name, text in {**_accounts(self), "hosts": hosts, "resolv.conf": ""}.items():
            self.write(ETC / name, text)
            if self.path(f"/etc/{name}").exists():
                self.output(["mount", "--bind", str(ETC / name), f"/etc/{name}"])
        key, pid_file = ETC / "host_key", self.path("/run/sshd.pid")
        self.output(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        self.write(ETC / "sshd_config", _sshd_config(self.environ))
        sshd, log = f"/usr/sbin/sshd -f {ETC}/sshd_config", ETC / "sshd.log"
        self.output(f"{sshd} -E {log} || {{ cat {log}; exit 1; }}")
        _wait_until(pid_file.exists, START_TIMEOUT_S, f"sshd of {self.name}")
        return " ".join(self.path(f"{key}.pub").read_text().split()[:2])

    def close(self) -> None:
        """End all that runs on the host, and the host."""
        self._space.close()
        for running in self._running:
            running.stop()

    # the project

    def checkout(self, folder: str = "smolcluster") -> Path:
        """Copy the project, as git sees it, to a folder of the home; returns its path on the host."""
        git = ["git", "-c", f"safe.directory={REPOSITORY}", "-C", str(REPOSITORY)]
        listed = _checked(*git, "ls-files", "-z", "-co", "--exclude-standard")
        for name in filter(None, listed.split("\0")):
            source, target = REPOSITORY / name, self.path(folder) / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        return self.home / folder

    def prepare(self, folder: str = "smolcluster") -> Path:
        """Give a checkout a ready `.venv`, compiled code included; returns its `bin`."""
        programs = self.link_environment(f"{folder}/.venv")
        uv = self.home / ".local/bin/uv"
        self.output([str(uv), "sync", "--quiet", "--project", str(self.home / folder)])
        return programs

    def link_environment(self, folder: str) -> Path:
        """Make an environment that `uv sync` makes a checkout's own in no time; returns its `bin`.

        Its files are links to those of this environment; uv replaces links and never writes through them.
        """
        there = self.path(folder)
        there.parent.mkdir(parents=True, exist_ok=True)
        _checked("cp", "-as", str(Path(sys.prefix).resolve()), str(there))
        new = self.home / folder
        for program in (Path(sys.prefix) / "bin").iterdir():
            _move_program(program, there / "bin" / program.name, new)
        return new / "bin"


def _move_program(source: Path, target: Path, new_prefix: Path) -> None:
    """Let a program of an environment be one of another: python's links, and texts that name the place."""
    old, new = bytes(source.parents[1]), bytes(new_prefix)
    if source.is_symlink():
        target.unlink()
        target.symlink_to(source.readlink())
    elif not (text := source.read_bytes()).startswith(b"\x7fELF") and old in text:
        target.unlink()
        target.write_bytes(text.replace(old, new))
        target.chmod(source.stat().st_mode)


def _private_mounts(name: str, home: Path) -> str:
    """The shell lines that give a host what is its own."""
    lines = [f"mount -t tmpfs -o mode=1777 tmpfs {place}" for place in ("/tmp", "/var/tmp")]  # noqa: S108
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {place}" for place in ("/run", "/var/log", HOMES)]
    lines += [
        "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        "mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts /dev/pts",
        "mount -t sysfs -o ro sysfs /sys",
        "mkdir -m 755 /run/sshd",
        f"mkdir -p -m 700 {ETC} {home}",
        f"hostname {name}",
        "ip link set lo up",
    ]
    return "\n".join(lines)


def _environ(host: Host) -> dict[str, str]:
    """What a command on a host finds in its environment."""
    return {
        "HOME": str(host.home),
        "USER": host.user,
        "LOGNAME": host.user,
        "SHELL": "/bin/bash",
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "UV_OFFLINE": "1",
        "UV_LINK_MODE": "symlink",
        "UV_CACHE_DIR": str(find_cache()),
        "UV_PYTHON": str(find_python()),
    }


def _accounts(host: Host) -> dict[str, str]:
    """The account files: the user, and who sshd becomes before a login."""
    nobody = "sshd:x:102:65534::/run/sshd:/usr/sbin/nologin"
    users = (host.user, "root")
    people = "".join(f"{user}:x:0:0::{host.home}:/bin/bash\n" for user in users)
    return {
        "passwd": f"{people}{nobody}\n",
        "shadow": "".join(f"{user}:*:20000::::::\n" for user in (*users, "sshd")),
        "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    }


def _sshd_config(environ: Mapping[str, str]) -> str:
    given = [f"{name}={environ[name]}" for name in environ if name.startswith("UV_")]
    lines = [
        "Port 22",
        f"HostKey {ETC}/host_key",
        "PidFile /run/sshd.pid",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "AcceptEnv LANG LC_*",
        f"SetEnv PATH={PATH} {' '.join(given)}",
        "Subsystem sftp internal-sftp",
    ]
    return "\n".join(lines) + "\n"


PROFILE = 'export PATH="$HOME/.local/bin:$PATH"\n'  # as uv's installer does


def _furnish(host: Host) -> None:
    """Put into the home what people have there."""
    host.write(".profile", PROFILE)
    uv = host.path(".local/bin/uv")
    uv.parent.mkdir(parents=True)
    uv.symlink_to(find_uv())
    host.path(".ssh").mkdir(mode=0o700)


# --- the whole


class Lab:
    """Three hosts and a controller that can log in to them by name. Use it as a context.

    The hosts end with the thread that started them, also when it is killed.
    """

    USERS = {"mini1": "mini", "mini2": "mini", "pi5": "pi"}  # noqa: RUF012

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        with self._stack:
            self._switch = Space(pid=False)
            self._stack.callback(self._switch.close)
            self.controller = self._start("controller", "owner", 1)
            for number, (name, user) in enumerate(self.USERS.items(), start=2):
                self.hosts[name] = self._start(name, user, number)
            self._introduce()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def _start(self, name: str, user: str, number: int) -> Host:
        host = Host(name, user, number, self._switch)
        self._stack.callback(host.close)
        host.connect(0)
        _furnish(host)
        return host

    def _introduce(self) -> None:
        """Start the sshds, and let the controller into all hosts, itself included."""
        everyone = [self.controller, *self]
        names = "".join(f"{host.address} {host.name}\n" for host in everyone)
        known = ""
        for host in everyone:
            key = host.serve(f"127.0.0.1 localhost\n{names}")
            known += f"{host.name},10.77.*.{host.number} {key}\n"
        key_file = f"{self.controller.home}/.ssh/id_ed25519"
        self.controller.output(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key_file])
        self.controller.write(".ssh/known_hosts", known)
        self.controller.write(".ssh/config", "".join(map(_alias, self)), mode=0o600)
        public = self.controller.path(f"{key_file}.pub").read_text()
        for host in everyone:
            host.write(".ssh/authorized_keys", public, mode=0o600)


def _alias(host: Host) -> str:
    """The entry of ~/.ssh/config for a host."""
    return f"Host {host.name}\n  HostName {host.address}\n  User {host.user}\n\n"
