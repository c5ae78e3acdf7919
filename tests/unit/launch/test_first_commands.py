"""What `smolcluster` without a command shows: three commands that fit what is here."""

from pathlib import Path

import pytest

from smolcluster.cli import main
from smolcluster.launch.first_commands import first_commands
from smolcluster.utils.words import as_typed


def names(folder: Path, *, is_running: bool = False, has_runs: bool = False) -> list[str]:
    commands = first_commands(folder, is_running=is_running, has_runs=has_runs)
    return [command for command, _ in commands]


def test_who_has_nothing_yet_can_try_it_or_name_machines(tmp_path: Path) -> None:
    first, second, third = names(tmp_path)
    assert first == "launch edp --local"
    assert second == "init"
    assert third.startswith("train --workload")


def test_who_has_trained_looks_at_it_and_goes_on(tmp_path: Path) -> None:
    assert names(tmp_path, has_runs=True) == ["report", *names(tmp_path)[1:]]


def test_who_has_named_machines_launches_on_them(tmp_path: Path) -> None:
    (tmp_path / "cluster_config_diloco.yaml").touch()
    commands = first_commands(tmp_path, is_running=False, has_runs=True)
    assert commands[0] == (
        "doctor",
        "examine the machines of cluster_config_diloco.yaml",
    )
    assert commands[2][0] == "launch diloco"


def test_who_has_a_run_looks_at_it(tmp_path: Path) -> None:
    (tmp_path / "cluster_config_edp.yaml").touch()
    assert names(tmp_path, is_running=True) == [
        "status",
        "top",
        "stop",
    ]


def test_without_a_command_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert as_typed("launch", "edp", "--local") in shown
    assert as_typed("--help") in shown
