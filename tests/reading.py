"""Launched runs for tests of what reads them, and an `ssh` that stays on this machine."""

import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from smolcluster.runs.launched import Launched, LaunchedProcess, write_launched
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import Presence, RunState, RunStatus, WorkerStatus, instant

NOW = 1_790_000_000.0
FAKE_SSH = """#!/bin/sh
# Like ssh and its server, on this machine: the words after the destination become one line of a shell.
while [ "$1" != -- ]; do shift; done
shift; destination=$1; shift
case "$destination" in
  *cut*) echo "ssh: connect to host $destination port 22: Connection timed out" >&2; exit 255 ;;
  *strange*) echo "Welcome to $destination!"; exit 0 ;;
esac
export HOME="{home}"
exec sh -c "$*"
"""


def fake_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an `ssh` first on the PATH that runs everything here, in a home of its own; returns that home."""
    home, bin_folder = folder / "there", folder / "bin"
    home.mkdir()
    bin_folder.mkdir()
    ssh = bin_folder / "ssh"
    ssh.write_text(FAKE_SSH.replace("{home}", str(home)))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("COLUMNS", "200")
    return home


def replace_program(program: Path, text: str) -> str:
    """Put another program in its place at once, since it may run just now; returns what it was."""
    before, beside = program.read_text(), program.with_suffix(".new")
    beside.write_text(text)
    beside.chmod(0o755)
    beside.replace(program)
    return before


def server(ssh: str | None = "pi@mini1", run_dir: str = "~/runs/r1") -> LaunchedProcess:
    return LaunchedProcess(
        node="mini1", role="server", rank=None, ssh=ssh, run_dir=run_dir, session="no-such-server"
    )


def worker(
    rank: int, node: str, ssh: str | None, run_dir: str = "~/runs/r1", session: str = ""
) -> LaunchedProcess:
    return LaunchedProcess(
        node=node,
        role="worker",
        rank=rank,
        ssh=ssh,
        run_dir=run_dir,
        session=session or f"no-such-worker{rank}",
    )


def launched_run(
    root: Path, *processes: LaunchedProcess, run_id: str = "r1", algorithm: str = "edp"
) -> RunPaths:
    """What the launcher leaves on its own machine."""
    paths = create_run(root, run_id)
    write_launched(
        paths.launched, Launched(run_id=run_id, algorithm=algorithm, processes=tuple(processes))
    )
    return paths


def children_of(paths: RunPaths, *pids: int) -> None:
    """What a launcher leaves of its children: their process ids, the server's first."""
    processes = [
        LaunchedProcess(
            node=f"pi{place}" if place else "mini1",
            role="worker" if place else "server",
            rank=place - 1 if place else None,
            run_dir=str(paths.root),
            pid=pid,
        )
        for place, pid in enumerate(pids)
    ]
    write_launched(
        paths.launched,
        Launched(run_id=paths.run_id, algorithm="edp", processes=tuple(processes)),
    )


def status_of(
    state: RunState = "training",
    *,
    now: float | None = None,
    age_s: float = 0.2,
    workers: Mapping[int, tuple[str, Presence]] | None = None,
    reason: str | None = None,
) -> RunStatus:
    """A status at step 120 of 400, written `age_s` ago; `workers`: node and presence by rank."""
    moment = (time.time() if now is None else now) - age_s
    return RunStatus(
        run_id="r1",
        algorithm="edp",
        incarnation="abc",
        state=state,
        reason=reason,
        updated_at=instant(moment),
        started_at=instant(moment - 60),
        wall_s=60.0,
        step=120,
        total_steps=400,
        epoch=1,
        num_epochs=4,
        samples_applied=960,
        total_samples=3200,
        loss=0.25,
        val_loss=0.5,
        val_accuracy=0.9,
        val_perplexity=None,
        samples_per_s=512.0,
        workers=[
            WorkerStatus(
                rank=rank,
                node=node,
                state=presence,
                device="cpu",
                step=119,
                loss=0.27,
                samples=480,
                samples_per_s=256.0,
                last_seen=instant(moment - 0.2),
            )
            for rank, (node, presence) in (workers or {}).items()
        ],
    )


def said(processes: Sequence[str], written: RunStatus | None = None, now: float = NOW) -> str:
    """What a machine answers that is asked for its processes and, where it has one, the run's status."""
    lines = [f"::process {index}\n{words}" for index, words in enumerate(processes)]
    if written is not None:
        lines += [f"::now\n{now}", f"::status.json\n{written.model_dump_json(indent=2)}"]
        lines += ["::summary.json"]
    return "\n".join(lines) + "\n"


def log_line(seconds: float, message: str, level: str = "INFO", **fields: object) -> str:
    """A line of a log file."""
    ts = instant(NOW + seconds).isoformat()
    return json.dumps({"ts": ts, "level": level, "message": message, **fields}) + "\n"


class Terminal(io.StringIO):
    """A terminal on which these lines are typed."""

    def isatty(self) -> bool:
        return True


def write(path: Path, text: str) -> Path:
    """Make a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
