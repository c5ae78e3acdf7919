"""Running commands on machines: what ssh is told, what it says when it fails, and quoting."""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smolcluster.configs.schema import ClusterConfig, NodeConfig
from smolcluster.errors import LaunchError
from smolcluster.launch import host as host_module
from smolcluster.launch.host import (
    Host,
    TookTooLong,
    Unreachable,
    control_folder,
    host_of,
    shell_path,
    ssh_options,
)
from waiting import DEADLINE_S

STRANGE_NAMES = [
    "plain",
    "two  words ",
    "~",
    'it\'s "quoted"',
    "$(touch oops) `touch oops`",
    "; touch oops; &",
    "new\nline",
    "-n",
    "back\\slash\\n",
    "* ? [a] {b,c} !! #",
    "ünï😀",
]
SHELLS = ("sh", "bash", "dash", "zsh", "fish")
CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Offending ED25519 key in /home/u/.ssh/known_hosts:7
Host key for [192.168.50.2]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose path is as short as homes are; those of pytest are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("HOME", folder)
        yield Path(folder)


@pytest.fixture
def ssh_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """The file that is `ssh` in this test."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    file = tmp_path / "ssh"
    file.touch(mode=0o755)
    return file


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("ssh: Could not resolve hostname pi5: Name or service not known", "name"),
        ("ssh: Could not resolve hostname pi5: nodename nor servname provided, or not", "name"),
        ("ssh: connect to host 10.0.0.9 port 22: No route to host", "route"),
        ("ssh: connect to host 10.0.0.9 port 22: Host is down", "route"),
        ("ssh: connect to host 10.0.0.9 port 22: Network is unreachable", "route"),
        ("ssh: connect to host 10.0.0.9 port 22: Network is down", "route"),
        ("ssh: connect to host 10.0.0.9 port 22: Can't assign requested address", "route"),
        ("ssh: connect to host 10.0.0.9 port 22: Connection refused", "port"),
        ("ssh: connect to host 10.0.0.9 port 22: Connection timed out", "silent"),
        ("ssh: connect to host 10.0.0.9 port 22: Operation timed out", "silent"),
        ("Connection timed out during banner exchange", "silent"),
        ("Timeout, server 10.0.0.9 not responding.", "silent"),
        ("pi@10.0.0.9: Permission denied (publickey,password).", "key"),
        ("Received disconnect from 10.0.0.9 port 22:2: Too many authentication failures", "key"),
        (
            "No ED25519 host key is known for 10.0.0.9 and you have requested strict checking.\n"
            "Host key verification failed.",
            "host_key",
        ),
        (CHANGED, "host_key_changed"),
        (
            "/home/u/.ssh/config: line 3: Bad configuration option: hostnam\n"
            "/home/u/.ssh/config: terminating, 1 bad configuration options",
            "config",
        ),
        ("Bad owner or permissions on /home/u/.ssh/config", "config"),
        ("kex_exchange_identification: Connection closed by remote host", "closed"),
        ("Connection closed by 10.0.0.9 port 22", "closed"),
        ("", "closed"),
        (
            "Could not create directory '/home/u/.ssh' (Permission denied).\n"
            "ssh: connect to host 10.0.0.9 port 22: Connection timed out",
            "silent",
        ),
        (
            "channel 0: open failed: connect failed: No route to host\nstdio forwarding failed\n"
            "Connection closed by UNKNOWN port 65535",
            "route",
        ),
    ],
)
def test_what_ssh_says_is_understood(said: str, cause: str) -> None:
    error = Host("pi5", "pi@10.0.0.9").unreachable(said)
    assert error.cause == cause
    message = str(error)
    assert message.startswith(f"pi5 (pi@10.0.0.9): {error.what}: ")
    assert message.endswith(error.fix)
    assert "\n" not in message
    assert "{" not in message


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (
            "Could not resolve hostname",
            "use its address (nodes.pi5.ssh in the cluster file), or give pi@10.0.0.9 a HostName",
        ),
        ("Permission denied (publickey)", "`ssh-copy-id pi@10.0.0.9`"),
        ("Host key verification failed.", "`ssh pi@10.0.0.9` once by hand, compare the fingerpr"),
        (CHANGED, "`ssh-keygen -R '[192.168.50.2]:2222'`"),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED", "`ssh-keygen -R 10.0.0.9`"),
        ("Connection closed by 10.0.0.9", "`ssh -v pi@10.0.0.9` says why"),
    ],
)
def test_the_remedy_names_the_machine(said: str, fix: str) -> None:
    assert fix in Host("pi5", "pi@10.0.0.9").unreachable(said).fix


def test_a_connection_that_breaks_for_unknown_reasons_is_told_in_the_words_of_ssh() -> None:
    error = Host("pi5").unreachable("noise\nConnection reset by peer\n")
    assert error.what == "Connection reset by peer"
    assert Host("pi5").unreachable("").what == "the connection was closed"


def test_a_machine_that_ssh_does_not_reach_is_unreachable(ssh_that: Path) -> None:
    ssh_that.write_text("#!/bin/sh\necho 'connect to host: Connection refused' >&2; exit 255\n")
    with pytest.raises(Unreachable, match="no SSH server listens there") as caught:
        Host("pi5", "pi@pi5").run("true")
    assert (caught.value.cause, caught.value.exit_code) == ("port", 1)


def test_what_a_command_says_and_its_code_are_its_own(ssh_that: Path) -> None:
    ssh_that.write_text("#!/bin/sh\ncat; echo said; echo ouch >&2; exit 7\n")
    done = Host("pi5", "pi@pi5").run("true", stdin=b"given \xff\n")
    assert (done.code, done.ok) == (7, False)
    assert (done.stdout, done.stderr) == ("given \ufffd\nsaid\n", "ouch\n")
    assert done.stderr_tail == "ouch"
    here = Host("here").run("echo only this; exit 255")
    assert (here.code, here.stderr_tail) == (255, "only this")
    assert Host("here").run("exit 3").stderr_tail == "exit code 3"


def test_a_connection_that_stays_open_is_not_waited_for(ssh_that: Path, stays_open: str) -> None:
    """An old ssh keeps standard error open while it is everybody's connection in the background."""
    ssh_that.write_text(f"#!/bin/sh\n{stays_open}\necho said\n")
    assert Host("pi5", "pi5").run("true").stdout == "said\n"


@pytest.mark.parametrize("destination", [None, "pi5"])
def test_what_takes_too_long_is_given_up(destination: str | None, ssh_that: Path) -> None:
    """A command that does not end, and a script that is held and says nothing."""
    ssh_that.write_text("#!/bin/sh\nexec sleep 6000\n")
    host, why = Host("pi5", destination), r"pi5 \(.*\): a command did not end within 0\.2 s"
    with pytest.raises(TookTooLong, match=why):
        host.run("exec sleep 6000", timeout_s=0.2)
    with (
        pytest.raises(TookTooLong, match=why),
        host.holding("exec sleep 6000", stdin=b"", timeout_s=0.2),
    ):
        pytest.fail("it has begun")


def test_a_script_that_is_held_ends_with_its_input(tmp_path: Path) -> None:
    script = f"read name; echo hello $name; cat; echo over > {tmp_path}/said"
    with Host("pi5").holding(script, stdin=b"you\n", timeout_s=DEADLINE_S) as done:
        assert (done.code, done.stdout) == (0, "hello you")
        assert not (tmp_path / "said").exists()
    assert (tmp_path / "said").read_text() == "over\n"


def test_a_script_that_ends_before_it_says_anything_is_no_error_of_the_machine() -> None:
    script = "echo no >&2; exit 7"
    with Host("pi5").holding(script, stdin=b"", timeout_s=DEADLINE_S) as done:
        assert (done.code, done.stdout, done.stderr) == (7, "", "no\n")


def test_without_ssh_there_is_one_line(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(LaunchError, match="cannot run ssh: No such file"):
        Host("pi5", "pi5").run("true")
    with (
        pytest.raises(LaunchError, match="cannot run ssh: No such file"),
        Host("pi5", "pi5").holding("true", stdin=b"", timeout_s=1),
    ):
        pytest.fail("it has begun")


# Options


def as_ssh_reads(*words: str, config: Path = Path("/dev/null")) -> dict[str, str]:
    """What ssh makes of its options and of a configuration."""
    done = subprocess.run(
        ["ssh", "-F", str(config), "-G", *words], capture_output=True, text=True, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_host_keys_are_verified_and_nobody_is_ever_asked(home: Path) -> None:
    read, usual = as_ssh_reads(*ssh_options(), "pi5"), as_ssh_reads("pi5")
    trust = {name for name in usual if "hostkey" in name or "knownhosts" in name}
    assert {"stricthostkeychecking", "userknownhostsfile", "globalknownhostsfile"} <= trust
    for name in trust:
        assert read[name] == usual[name], name
    assert read["batchmode"] == "yes"
    assert 0 < int(read["connecttimeout"]) < 10
    assert int(read["serveraliveinterval"]) * int(read["serveralivecountmax"]) < 20
    assert read["controlmaster"] == "auto"
    assert Path(read["controlpath"]).parent == control_folder()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
@pytest.mark.parametrize("name", ["jo mueller", "a #1", "50%C"])
def test_a_home_may_have_any_path(home: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / name).mkdir()
    monkeypatch.setenv("HOME", str(home / name))
    read = as_ssh_reads(*ssh_options(), "pi5")
    assert Path(read["controlpath"]).parent == home / name / ".ssh/smolcluster"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_a_connection_of_its_own_shares_none(home: Path) -> None:
    read = as_ssh_reads(*Host("pi5", "pi5").argv("a", alone=True)[1:-1])
    assert read["controlmaster"] in ("no", "false")
    assert read.get("controlpath", "none") == "none"


def test_the_destination_cannot_be_an_option_and_the_script_is_one_word(home: Path) -> None:
    *options, dashes, destination, remote = Host("pi5", "-oProxyCommand=evil").argv("a; b")
    assert (dashes, destination) == ("--", "-oProxyCommand=evil")
    assert options == ["ssh", *ssh_options()]
    assert remote.startswith("sh -c ")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
@pytest.mark.parametrize("terminal", [False, True])
def test_what_people_set_for_their_own_logins_is_left_out(
    home: Path, tmp_path: Path, *, terminal: bool
) -> None:
    """With a RemoteCommand ssh refuses every command; a forwarded port fails for the second connection."""
    config = tmp_path / "config"
    config.write_text(
        "Host box\n  RemoteCommand tmux new -A -s work\n  RequestTTY force\n"
        "  LocalForward 8888 localhost:8888\n  ExitOnForwardFailure yes\n  User me\n"
    )
    *options, _, _, _ = Host("box", "box").argv("true", terminal=terminal)
    read = as_ssh_reads(*options[1:], "box", config=config)
    assert read.get("remotecommand", "none") == "none"
    assert read["requesttty"] == ("true" if terminal else "false")
    assert "localforward" not in read
    assert read["user"] == "me"


# Sockets


def test_connections_are_kept_where_only_the_user_may_go(home: Path) -> None:
    before = os.umask(0)
    try:
        folder = control_folder()
    finally:
        os.umask(before)
    assert folder == home / ".ssh" / "smolcluster"
    for each in (folder, folder.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700, "sshd trusts no open ~/.ssh"


@pytest.mark.parametrize("spare", [0, 1, -1])
def test_a_socket_s_path_is_never_too_long(
    home: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """Besides the 40 characters of %C, ssh appends 17 for a moment; macOS takes 103."""
    taken = len("/.ssh/smolcluster") + 1 + 40 + 17
    long_home = home / ("x" * (103 - taken - spare - len(str(home)) - 1))
    long_home.mkdir()
    monkeypatch.setenv("HOME", str(long_home))
    monkeypatch.setattr(host_module, "SHORT_FOLDER", home)
    folder = control_folder()
    assert (folder.parent == home) == (spare < 0)
    assert len(str(folder)) + 1 + 40 + 17 <= 103


def test_the_usual_short_folder_is_short() -> None:
    assert len(str(host_module.SHORT_FOLDER / "smolcluster-ssh-4294967295")) + 58 <= 103


@pytest.mark.parametrize("kind", ["open", "link", "another's", "file"])
def test_a_folder_that_is_not_this_user_s_alone_is_refused(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mine = control_folder(), os.getuid()
    if kind == "open":
        folder.chmod(0o777)
    elif kind == "another's":
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    elif kind == "file":
        folder.rmdir()
        folder.touch()
    else:
        folder.rename(home / "elsewhere")
        folder.symlink_to(home / "elsewhere")
    with pytest.raises(LaunchError, match=r"\.ssh/smolcluster"):
        control_folder()


# Quoting


@pytest.mark.parametrize("name", STRANGE_NAMES)
@pytest.mark.parametrize("prefix", ["~/", "/"])
def test_a_path_is_one_word_of_a_script_and_is_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, prefix: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = f"~/{name}" if prefix == "~/" else f"{tmp_path}/{name}"
    done = Host("here").run(f"mkdir {shell_path(path)} && cd {shell_path(path)} && pwd")
    assert done.stdout == f"{tmp_path}/{name}\n", done.stderr
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_the_home_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"{tmp_path}/my  home")
    for path, meant in (("~", ""), ("~/", "/"), ("~/a", "/a")):
        assert Host("here").run(f"printf %s {shell_path(path)}").stdout == (
            f"{tmp_path}/my  home{meant}"
        )
    assert Host("here").run(f"printf %s {shell_path('~root')}").stdout == "~root"


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(
            shell,
            marks=pytest.mark.skipif(
                shutil.which(shell) is None, reason=f"{shell} is not installed"
            ),
        )
        for shell in SHELLS
    ],
)
@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_a_script_passes_the_shell_of_the_other_side(home: Path, shell: str, name: str) -> None:
    """sshd gives the remote command to the user's login shell."""
    remote = Host("pi5", "pi5").argv(f"printf %s {shell_path(f'~/{name}')}")[-1]
    done = subprocess.run([shell, "-c", remote], capture_output=True, text=True, check=True)
    assert done.stdout == f"{home}/{name}"


# The cluster file


def test_a_node_is_found_where_its_file_says() -> None:
    cluster = ClusterConfig(
        host_ip=dict.fromkeys(("a", "b", "c"), "10.0.0.1"),
        num_workers=2,
        workers=("b", "c"),
        server="a",
        nodes={"a": NodeConfig(ssh="local"), "b": NodeConfig(ssh="pi@10.0.0.2")},
    )
    assert [host_of(cluster, name).destination for name in "abc"] == [None, "pi@10.0.0.2", "c"]
    assert [host_of(cluster, name).shown for name in "ab"] == ["this machine", "pi@10.0.0.2"]
