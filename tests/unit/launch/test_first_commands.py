"""What `smolcluster` without a command shows: three commands that fit what is here."""

from pathlib import Path

import pytest

from smolcluster.cli import main
from smolcluster.launch.first_commands import first_commands


def names(folder: Path, *, is_running: bool = False) -> list[str]:
    return [command for command, _ in first_commands(folder, is_running=is_running)]


def test_who_has_nothing_yet_can_try_it_or_name_machines(tmp_path: Path) -> None:
    first, second, third = names(tmp_path)
    assert first == "smolcluster launch edp --local"
    assert second == "smolcluster init"
    assert third.startswith("smolcluster train --workload")


def test_who_has_named_machines_launches_on_them(tmp_path: Path) -> None:
    (tmp_path / "cluster_config_diloco.yaml").touch()
    commands = first_commands(tmp_path, is_running=False)
    assert commands[0] == (
        "smolcluster doctor",
        "examine the machines of cluster_config_diloco.yaml",
    )
    assert commands[2][0] == "smolcluster launch diloco"


def test_who_has_a_run_looks_at_it(tmp_path: Path) -> None:
    (tmp_path / "cluster_config_edp.yaml").touch()
    assert names(tmp_path, is_running=True) == [
        "smolcluster status",
        "smolcluster top",
        "smolcluster stop",
    ]


def test_without_a_command_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "smolcluster launch edp --local" in shown
    assert "smolcluster --help" in shown
