"""Looking at machines before a run, and handing over the cluster's secret."""

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Done, Host
from smolcluster.launch.prepare import (
    MIN_FREE_NBYTES,
    check,
    forwarded,
    hand_over_secret,
    run_on_all,
)
from waiting import DEADLINE_S

HERE = Host("pi5")
SECRET = b"0123456789abcdef0123456789abcdef"


def that_says(said: str) -> Host:
    """A machine whose answer is known before."""

    class Scripted(Host):
        def run(self, *_: object, **__: object) -> Done:
            return Done(0, said, "")

    return Scripted("pi5", "pi@pi5")


# All at once


def test_all_machines_are_looked_at_at_once() -> None:
    barrier = threading.Barrier(3)
    places = run_on_all("abc", lambda name: (name, barrier.wait(timeout=DEADLINE_S)))
    assert [name for name, _ in places] == ["a", "b", "c"]
    assert run_on_all([], lambda name: name) == []


def test_every_failure_is_told_and_nobody_is_left_out() -> None:
    done = []

    def task(host: Host) -> None:
        if host.node != "b":
            raise LaunchError(f"{host.node} is ill")
        done.append(host.node)

    with pytest.raises(LaunchError, match=r"^a is ill; c is ill$"):
        run_on_all([Host(name) for name in "abc"], task)
    assert done == ["b"]


def test_a_bug_is_no_failure_of_a_machine() -> None:
    with pytest.raises(ZeroDivisionError):
        run_on_all([0], lambda number: 1 // number)


def test_what_is_wrong_with_several_nodes_alike_is_said_once() -> None:
    def task(host: Host) -> None:
        why = "no disk" if host.node == "c" else f"no torch (set nodes.{host.node}.torch)"
        raise LaunchError(f"{host.node}: {why}")

    with pytest.raises(LaunchError) as caught:
        run_on_all([Host(name) for name in "abc"], task)
    assert str(caught.value) == "a, b: no torch (set nodes.a.torch); c: no disk"


# Tools and disks


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a machine that has these programs only; what the script needs itself is there."""

    def make(*tools: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in ("sh", "awk", "df", "dirname"):
            found = shutil.which(name)
            assert found
            (folder / name).symlink_to(found)
        for name in tools:
            (folder / name).touch(mode=0o755)
        monkeypatch.setattr("smolcluster.launch.host.PREAMBLE", f"PATH={folder}; export PATH; ")

    return make


def test_missing_tools_are_told_with_what_installs_them(
    only: Callable[..., None], tmp_path: Path
) -> None:
    only("rsync")
    with pytest.raises(LaunchError) as caught:
        check(HERE, str(tmp_path), ["uv", "tmux"])
    message = str(caught.value)
    assert message.startswith("pi5 (this machine): has no uv and no tmux (there: `curl -LsSf ")
    assert "; there: install tmux with its package manager)" in message
    assert "rsync" not in message
    check(HERE, str(tmp_path / "not" / "yet there"), ["rsync"])


def test_a_full_disk_is_told() -> None:
    def disk(kib: int) -> Host:
        return that_says(
            f"system Linux\nsystem =0\npackages =0\ndisk /dev/a 9 9 {kib} 1% /\ndisk =0\n"
        )

    free_kib = MIN_FREE_NBYTES // 1024
    with pytest.raises(LaunchError, match="the disk of ~/p has 199 MiB left: free some"):
        check(disk(free_kib - 1), "~/p", [])
    assert check(disk(free_kib), "~/p", []) == "Linux"


def test_what_a_login_prints_besides_does_no_harm() -> None:
    noise = "Welcome!\n\nfree beer\ndisk\n=0\n"
    said = "system Linux\nsystem =0\npackages =0\ndisk no df\ndisk =127\nuv =0\n"
    assert check(that_says(noise + said), "~/p", ["uv"]) == "Linux"


# The secret


@pytest.fixture
def secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default place of the secret on this machine."""
    monkeypatch.setenv("HOME", str(tmp_path / "my home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path / "my home" / ".config" / "smolcluster" / "secret"


def test_a_secret_is_written_for_its_user_alone(secret_file: Path) -> None:
    """Also where it is already, open to others; and where another one is, which is told."""
    before = os.umask(0)
    try:
        assert hand_over_secret(HERE, None, SECRET) is False
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret_file.parent.stat().st_mode) == 0o700
    secret_file.chmod(0o644)
    written = secret_file.stat().st_ino
    assert hand_over_secret(HERE, None, SECRET) is False
    assert secret_file.stat().st_ino == written
    secret_file.write_text("another one, which is as long as they are\n")
    assert hand_over_secret(HERE, None, SECRET) is True
    assert secret_file.read_bytes() == SECRET + b"\n"
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert [path.name for path in secret_file.parent.iterdir()] == ["secret"]


def test_a_secret_goes_where_the_machine_expects_it(
    secret_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over_secret(HERE, "~/my own/$(x) secret", SECRET)
    assert (tmp_path / "my home" / "my own" / "$(x) secret").read_bytes() == SECRET + b"\n"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    hand_over_secret(HERE, None, SECRET)
    assert (tmp_path / "config" / "smolcluster" / "secret").is_file()
    assert not secret_file.exists()


def test_a_secret_is_never_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = []

    class Noting(Host):
        def run(self, *arguments: object, **options: object) -> Done:
            scripts.append(str(arguments))
            assert options == {"stdin": SECRET}
            return Done(3, "", "")

    assert hand_over_secret(Noting("pi5", "pi5"), None, SECRET) is True
    assert SECRET.decode() not in "".join(scripts)


def test_a_secret_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"^pi5: the secret cannot be written: ") as caught:
        hand_over_secret(HERE, str(tmp_path / "file" / "secret"), SECRET)
    assert SECRET.decode() not in str(caught.value)


# The environment


def test_of_the_environment_only_what_a_run_needs_is_forwarded() -> None:
    kept = {
        "WANDB_API_KEY": "k",
        "WANDB_MODE": "offline",
        "HF_TOKEN": "t",
        "HF_HUB_OFFLINE": "1",
        "SMOLCLUSTER_NUM_EPOCHS": "3",
        "SMOLCLUSTER_DATASET__NAME": "digits",
    }
    own = {
        "SMOLCLUSTER_RUNS_DIR": "/here",
        "SMOLCLUSTER_SECRET_FILE": "/here",
        "HOME": "/here",
        "PATH": "/here",
        "AWS_SECRET_ACCESS_KEY": "private",
        "HF_HOME": "/here",
        "SMOLCLUSTER_NODES__PI5__ENV": '{"HF_TOKEN": "pi5\'s"}',
        "SMOLCLUSTERS": "x",
    }
    assert forwarded(kept | own, ("WANDB_API_KEY", "HF_TOKEN")) == kept
    keyless = {name: value for name, value in kept.items() if value not in "kt"}
    assert forwarded(kept | own, ()) == keyless
