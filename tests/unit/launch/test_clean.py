"""Removing runs: which go, which stay, here and on machines that an `ssh` of this machine stands for."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reading import fake_ssh, launched_run, server, status_of, worker, write
from smolcluster.cli import main
from smolcluster.configs.begun import is_known, remember
from smolcluster.errors import ConfigError
from smolcluster.launch.clean import clean, parse_age
from smolcluster.launch.host import Host
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RUNS_DIR, RunPaths, create_run, latest_of, point_latest
from smolcluster.runs.status import write_status

DAY_S = 86400.0
R1 = f"r1-{os.getpid()}"
"""A run's id that no process of another test has in its command line."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_DIR, str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def a_run(root: Path, name: str, *, days: float = 1.0, step: int = 120) -> RunPaths:
    """A run of this machine that is over."""
    paths = create_run(root, name, newest=False)
    write(paths.lock, "")
    status = status_of("failed", reason="it broke").model_copy(update={"step": step})
    write_status(paths.status, status)
    began = time.time() - days * DAY_S - 60
    os.utime(write(paths.config, "x" * 1000), (began, began))
    return paths


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_by_itself_only_failed_starts_go_and_only_when_they_are_confirmed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(root, "failed", step=0)
    a_run(root, "trained", days=400)
    saved = a_run(root, "resumed", step=0)
    write(saved.checkpoints / "step-00000100" / "state.json", "{}")
    assert clean() == 0
    shown = capsys.readouterr().out
    [line] = [line.split() for line in shown.splitlines() if line.startswith("failed")]
    assert line[1:4] == ["here", "1", "d"]
    assert "--yes" in shown
    assert left(root) == {"failed", "trained", "resumed"}
    for run_id in ("failed", "trained"):
        remember(run_id, "launch.json", b"{}")
    assert main(["clean", "--yes"]) == 0
    assert left(root) == {"trained", "resumed"}
    known = [each for each in ("failed", "trained") if is_known(each, "launch.json", b"{}")]
    assert known == ["trained"], "nothing is left of what is removed"


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        (["--older-than", "30d"], {"d1", "d10", "d50"}),
        (["--older-than", "5d"], {"d1", "d50"}),
        (["--keep", "1"], {"d1", "d50"}),
        (["--keep", "0"], {"d50"}),
        (["--keep", "2", "--older-than", "1h"], {"d1", "d10", "d50"}),
        (["d50"], {"d1", "d10", "d90", "failed"}),
        (["latest", "d10"], {"d1", "d90", "failed"}),
    ],
)
def test_old_runs_go_as_they_are_asked_to_but_latest_only_by_name(
    root: Path, words: list[str], stay: set[str]
) -> None:
    for days in (1, 10, 50, 90):
        a_run(root, f"d{days}", days=days)
    a_run(root, "failed", days=0.5, step=0)
    point_latest(root, "d50")
    assert main(["clean", "--yes", *words]) == 0
    assert left(root) - {"latest"} == stay
    assert latest_of(root) == ("d50" if "d50" in stay else "d1")
    assert (root / "latest").is_dir()


def test_a_run_that_is_written_stays_whatever_is_asked(root: Path) -> None:
    paths = a_run(root, "living", days=90, step=0)
    by_hand = create_run(root, "edp-20260101-000000-3f9c", newest=False)
    log = write(by_hand.log_file("worker", "pi5", 0), "")
    for path in (log, by_hand.root):
        os.utime(path, (1.0, 1.0))
    code = "import sys; file = open(sys.argv[2]); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, "algorithms/EDP/worker.py", str(log)]
    with (
        run_lock(paths.lock),
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline()
        assert clean(older_than_s=0.0, keep=0, yes=True) == 0
        with pytest.raises(ConfigError, match="living"):
            clean(("living",), yes=True)
        assert left(root) == {"living", by_hand.run_id}
        process.communicate(timeout=60)
    assert clean(keep=0, yes=True) == 0
    assert left(root) == set()


def test_what_is_no_run_stays_and_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    treasure = write(tmp_path / "elsewhere" / "logs" / "treasure", "gold").parent.parent
    write(treasure / "status.json", "{}")
    (root / "linked").symlink_to(treasure)
    write(root / "thesis" / "config.yaml", "mine")
    write(root / "edp-20260101-000000-3f9c" / "mine.txt", "mine")
    write(root / "notes.txt", "mine")
    failed = a_run(root, "failed", step=0)
    (failed.root / "data").symlink_to(treasure)
    failed.lock.unlink()
    failed.lock.symlink_to(treasure / "logs" / "treasure")
    before = left(root)
    assert clean(older_than_s=0.0, keep=0, yes=True) == 0
    assert left(root) == before - {"failed"}
    assert (treasure / "logs" / "treasure").read_text() == "gold"
    for name in ("linked", "thesis", "nobody", "../elsewhere"):
        with pytest.raises(ConfigError):
            clean((name,), yes=True)


def elsewhere(there: Path, name: str) -> RunPaths:
    """A run's folder on another machine."""
    paths = create_run(there / "runs", name)
    write(paths.root / "pids" / "server-mini1", "1")
    write(paths.log_file("server", "mini1"), "x" * 5000)
    return paths


def remote_run(root: Path, name: str, *workers: tuple[str, str]) -> RunPaths:
    """A run that was launched on other machines, and is over without a step."""
    folder = f"~/runs/{name}"
    members = [worker(rank, node, ssh, folder) for rank, (node, ssh) in enumerate(workers)]
    paths = launched_run(root, server(run_dir=folder), *members, run_id=name)
    (root / "latest").unlink()
    status = status_of("failed", reason="it broke").model_copy(update={"step": 0})
    write_status(paths.status, status)
    return paths


def test_a_failed_start_goes_on_its_machines_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    remote_run(root, R1)
    elsewhere(there, R1)
    write(there / "runs" / f"{R1}0" / "pids" / "x", "")
    assert clean() == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [R1, "here"] in shown
    assert [R1, "mini1"] in shown
    assert left(there / "runs") == {R1, f"{R1}0", "latest"}
    assert clean(yes=True) == 0
    assert left(root) == set()
    assert left(there / "runs") == {f"{R1}0"}


def test_a_run_whose_servers_folder_is_not_there_may_have_trained(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk may not be mounted."""
    fake_ssh(tmp_path, monkeypatch)
    launched_run(root, server(run_dir=f"/mnt/disk/runs/{R1}"), run_id=R1)
    (root / "latest").unlink()
    assert clean(yes=True) == 1
    assert f"mini1 has no folder /mnt/disk/runs/{R1}" in capsys.readouterr().out
    assert left(root) == {R1}
    assert clean((R1,), yes=True) == 0
    assert left(root) == set()


def test_code_that_has_gone_and_code_that_stays_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {Host("pi5", "cut"): {"projects/1": 10, "environments/2": 10}}
    monkeypatch.setattr("smolcluster.launch.clean.old_projects", lambda _: found)
    monkeypatch.setattr("smolcluster.launch.clean.remove_projects", lambda _: ["projects/1 stays"])
    assert clean(yes=True) == 1
    assert left(root) == set()
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["removed 1 of 2 folders of code or environments", "projects/1 stays"]


def test_with_here_no_other_machine_is_asked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    remote_run(root, R1, ("pi5", "cut"))
    launched_run(root, server("cut"), run_id="unknown")
    (root / "latest").unlink()
    elsewhere(there, R1)
    assert main(["clean", "--here", "--yes"]) == 0
    assert left(root) == {"unknown"}, "it may live"
    assert (there / "runs" / R1).is_dir()


def test_a_machine_that_does_not_answer_is_said_and_the_run_stays_known(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    remote_run(root, R1, ("pi5", "cut"))
    a_run(root, "failed", step=0)
    elsewhere(there, R1)
    assert clean(yes=True) == 1
    assert "pi5 (cut)" in capsys.readouterr().out
    assert left(root) == {R1}
    assert not (there / "runs" / R1).exists()
    launched_run(root, server("cut"), run_id="unknown")
    (root / "latest").unlink()
    assert clean(yes=True) == 1
    assert "unknown" in left(root)


def test_a_folder_elsewhere_that_lives_has_trained_or_is_no_run_stays(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = fake_ssh(tmp_path, monkeypatch)
    for name in ("trained", "living", "strange", "linked"):
        remote_run(root, name)
    write(elsewhere(there, "trained").checkpoints / "step-00000100" / "state.json", "{}")
    living = elsewhere(there, "living").root
    write(there / "runs" / "strange" / "mine.txt", "mine")
    write(tmp_path / "other" / "pids" / "x", "")
    (there / "runs" / "linked").symlink_to(tmp_path / "other")
    script = write(living / "launch" / "server-mini1.sh", "echo; read line\n")
    before = left(there / "runs")
    with subprocess.Popen(
        ["sh", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert clean(yes=True) == 0
        process.communicate(timeout=60)
    assert left(there / "runs") == before
    assert (tmp_path / "other" / "pids" / "x").is_file()
    assert left(root) == {"trained", "living"}
    assert clean(yes=True) == 0
    assert left(root) == {"trained"}


@pytest.mark.parametrize(("text", "seconds"), [("12h", 43200), ("30d", 30 * DAY_S), (None, None)])
def test_ages(text: str | None, seconds: float | None) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "-1d", "30 days", "soon"])
def test_an_age_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--older-than"):
        parse_age(text)
