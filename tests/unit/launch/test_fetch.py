"""The files of a launched run, brought home."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from reading import fake_ssh, launched_run, server, status_of, worker, write
from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host, ssh_options
from smolcluster.launch.watch import fetch as fetching
from smolcluster.launch.watch.fetch import (
    RemoteFiles,
    brought,
    failure,
    fetch,
    parts_of,
    rsync_command,
)
from smolcluster.runs.launched import read_launched
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import write_status

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")

STRANGE = "~/runs/a 'b' \"c\"; $(touch ~/oops) *"


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of all other machines."""
    return fake_ssh(tmp_path, monkeypatch)


def server_files(run: Path) -> None:
    write(run / "config.yaml", "a: 1\n")
    write(run / "events.jsonl", "{}\n" * 10)
    write(run / "logs/server-mini1.log", "{}\n")
    write(run / "checkpoints/step-00000001/model.safetensors", "m" * 1000)
    (run / "checkpoints/latest").symlink_to("step-00000001")
    (run / "checkpoints/evil").symlink_to("/etc")
    write(run / "checkpoints/.step-00000002.abcd.tmp/model.safetensors", "half")
    for name in (".lock", "pids/server-mini1", "exits/server-mini1", "launch/server-mini1.sh"):
        write(run / name, "x")
    write(run / "launch.json", "{evil")


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def test_everything_of_the_server_and_the_logs_of_the_others_come(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [server("ssh://pi@mini1:2222", STRANGE), worker(0, "pi5", "::1", "~/elsewhere")]
    paths = launched_run(tmp_path / "runs", *own)
    server_files(there / STRANGE[2:])
    write(there / "elsewhere/logs/worker-rank0-pi5.log", "{}\n{}\n")
    write(there / "elsewhere/logs/worker-rank0-pi5.console.txt", "oops\n")
    write(there / "elsewhere/config.yaml", "not this one")
    kept = write(paths.root / "notes.txt", "mine")
    before = paths.launched.read_text()
    assert fetch(str(paths.root)) == 0
    assert names(paths.root) == {
        *("launch.json", "notes.txt", "config.yaml", "events.jsonl", "logs/server-mini1.log"),
        *("checkpoints/step-00000001/model.safetensors", "report.html"),
        *("logs/worker-rank0-pi5.log", "logs/worker-rank0-pi5.console.txt"),
    }
    assert (paths.checkpoints / "latest/model.safetensors").read_text() == "m" * 1000
    assert not (paths.checkpoints / "evil").is_symlink(), "it leads out of the run"
    assert paths.config.read_text() == "a: 1\n"
    assert (kept.read_text(), paths.launched.read_text()) == ("mine", before)
    assert not (there / "oops").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mini1: 4 files (checkpoints, config.yaml, events.jsonl, logs), 1.0 kB"
    assert lines[1] == "pi5: 2 files (logs), 11 B"
    assert fetch(str(paths.root)) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "mini1: nothing new, 0 B",
        "pi5: nothing new, 0 B",
    ]
    write(there / STRANGE[2:] / "events.jsonl", "{}\n" * 11)
    fetch(str(paths.root))
    assert "mini1: 1 file (events.jsonl), 33 B" in capsys.readouterr().out


def test_checkpoints_can_be_left_out_and_stay(tmp_path: Path, there: Path) -> None:
    paths = launched_run(tmp_path / "runs", server())
    server_files(there / "runs/r1")
    write(paths.checkpoints / "step-00000000/state.json", "kept")
    assert fetch(str(paths.root), checkpoints=False) == 0
    assert (paths.root / "events.jsonl").exists()
    assert names(paths.checkpoints) == {"step-00000000/state.json"}


def test_a_machine_that_cannot_be_reached_keeps_nobody_else_back(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [server("cut"), worker(0, "pi5", "pi5"), worker(1, "win", "win", "~/missing")]
    paths = launched_run(tmp_path / "runs", *own)
    write(there / "runs/r1/logs/worker-rank0-pi5.log", "{}\n")
    assert fetch(str(paths.root)) == 1
    out = capsys.readouterr().out
    assert "error: mini1 (cut): it does not answer: switch it on" in out
    assert "win: there is no folder" in out
    assert "pi5: 1 file (logs), 3 B" in out


def test_a_command_brings_what_it_reads(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "cut"))
    server_files(there / "runs/r1")
    write_status(there / "runs/r1/status.json", status_of("ended"))
    write(there / "runs/r1/metrics.jsonl", "{}\n")
    assert brought(str(paths.root), checkpoints=False) == paths
    assert (paths.config.read_text(), paths.checkpoints.exists()) == ("a: 1\n", False)
    assert "r1 from mini1" in capsys.readouterr().err
    brought(str(paths.root), checkpoints=False)
    assert capsys.readouterr().err == "", "it is over"
    brought(str(paths.root), checkpoints=True)
    assert (paths.checkpoints / "latest/model.safetensors").is_file()


def test_a_command_reads_what_is_here_or_says_how_to_bring_it(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched_run(tmp_path / "runs", server("cut"))
    write(paths.config, "a: 1\n")
    with pytest.raises(LaunchError, match=r"does not answer.*`uv run smolcluster fetch r1`"):
        brought(str(paths.root), checkpoints=True)
    assert brought(str(paths.root), checkpoints=False) == paths
    assert "was fetched before" in capsys.readouterr().err


def test_a_disk_that_hangs_is_given_up(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command_of = fetching.rsync_command

    def rsync_command(part: RemoteFiles) -> list[str]:
        hasty = {"--timeout=60": "--timeout=1"} if part.host.node == "mini1" else {}
        return [hasty.get(word, word) for word in command_of(part)]

    monkeypatch.setattr(fetching, "rsync_command", rsync_command)
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi5", "~/elsewhere"))
    write(there / "elsewhere/logs/worker-rank0-pi5.log", "{}\n")
    (there / "runs/r1").mkdir(parents=True)
    hanging = f'#!/bin/sh\ncase "$PWD" in */r1) exec sleep 600;; esac\nexec {shutil.which("rsync")} "$@"\n'
    write(there / ".local/bin/rsync", hanging).chmod(0o755)
    assert fetch(str(paths.root)) == 1
    out = capsys.readouterr().out
    assert "error: mini1: nothing came for 60 s: look at its disk and network" in out
    assert "pi5: 1 file (logs), 3 B" in out


def test_a_connection_that_stays_open_is_not_waited_for(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str], stays_open: str
) -> None:
    """An old ssh keeps standard error open while it is everybody's connection in the background."""
    paths = launched_run(tmp_path / "runs", server())
    write(there / "runs/r1/events.jsonl", "{}\n")
    ssh = tmp_path / "bin/ssh"
    ssh.write_text(ssh.read_text().replace("exec sh", f"{stays_open}\nexec sh"))
    assert fetch(str(paths.root)) == 0
    assert "mini1: 1 file" in capsys.readouterr().out


def test_a_machine_without_rsync_is_named(
    tmp_path: Path, there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = launched_run(tmp_path / "runs", server())
    (there / "runs/r1").mkdir(parents=True)
    bare = tmp_path / "bare"
    bare.mkdir()
    monkeypatch.setattr("smolcluster.launch.watch.fetch.PREAMBLE", f"PATH={bare}; ")
    assert fetch(str(paths.root)) == 1
    assert "mini1: rsync is not installed there: sudo apt install rsync" in capsys.readouterr().out


def test_without_rsync_here_nothing_begins(
    tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = launched_run(tmp_path / "runs", server())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="rsync is not installed here: sudo apt install"):
        fetch(str(paths.root))


def test_what_is_here_already_is_not_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = create_run(tmp_path, "local")
    write(local.config, "")
    assert fetch(str(local.root)) == 0
    assert "ran on this machine" in capsys.readouterr().out
    here = str(tmp_path / "r1")
    elsewhere = str(tmp_path / "other place")
    own = [server(None, here), worker(0, "mini1", None, here), worker(1, "mini1", None, elsewhere)]
    paths = launched_run(tmp_path, *own)
    write(Path(elsewhere) / "logs/worker-rank1-mini1.log", "{}\n")
    (tmp_path / "link").symlink_to(tmp_path)
    linked = RunPaths(tmp_path / "link" / "r1")
    [part] = parts_of(read_launched(paths.launched), linked, checkpoints=True)
    assert (part.host, part.folder) == (Host("mini1"), f"{elsewhere}/logs")
    assert fetch(here) == 0
    assert "mini1: 1 file (logs), 3 B" in capsys.readouterr().out


def test_the_remote_command_is_right_for_every_login_shell(tmp_path: Path, there: Path) -> None:
    paths = launched_run(tmp_path / "runs", server(run_dir=STRANGE))
    [part] = parts_of(read_launched(paths.launched), paths, checkpoints=True)
    command = rsync_command(part)
    [there_command] = [word for word in command if word.startswith("--rsync-path=")]
    line = there_command.removeprefix("--rsync-path=") + " --version"
    (there / STRANGE[2:]).mkdir(parents=True)
    for shell in ("sh", "bash"):
        env = os.environ | {"HOME": str(there)}
        done = subprocess.run([shell, "-c", line], env=env, capture_output=True, check=True)
        assert b"rsync" in done.stdout


def test_macos_rsync_which_knows_no_quotes_splits_the_way_there_as_it_is_meant(
    tmp_path: Path, there: Path
) -> None:
    paths = launched_run(tmp_path / "runs", server())
    [part] = parts_of(read_launched(paths.launched), paths, checkpoints=True)
    command = rsync_command(part)
    words = command[command.index("-e") + 1].split(" ")
    assert words == ["ssh", *ssh_options(), "--", "pi@mini1"]


@pytest.mark.parametrize(
    ("code", "said", "sentence"),
    [
        (12, "mux_client: read from master failed: Broken pipe", "the connection broke: try again"),
        (12, "ssh: connect to host pi5 port 22: Connection timed out", "it does not answer"),
        (255, "", "the connection was closed"),
        (23, 'rsync: open "/x" failed: Permission denied (13)', "rsync failed: rsync: open"),
        (11, "", "rsync failed: exit code 11"),
        (
            11,
            "Warning: Permanently added 'pi5'\nrsync: [receiver] write failed: No space left on device (28)\n"
            "rsync error: error in file IO (code 11)",
            "rsync failed: rsync: [receiver] write failed: No space left on device (28)",
        ),
        (30, "io timeout after 60 seconds", "nothing came for 60 s: look at its disk and network"),
        (127, "sh: 1: exec: rsync: not found", "rsync is not installed there"),
    ],
)
def test_why_it_failed(code: int, said: str, sentence: str) -> None:
    assert sentence in str(failure(Host("pi5", "pi@pi5"), code, said))
