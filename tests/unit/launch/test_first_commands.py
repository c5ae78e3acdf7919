"""What `smolcluster` without a command shows: three commands that fit what is here."""

from pathlib import Path

import pytest

from smolcluster.cli import main
from smolcluster.launch.first_commands import first_commands
from smolcluster.utils.words import as_typed


@pytest.mark.parametrize(
    ("named", "is_running", "has_runs", "commands"),
    [
        (None, False, False, ["launch edp --local", "init", "train --workload FILE.py:FUNCTION"]),
        (None, False, True, ["report", "init", "train --workload FILE.py:FUNCTION"]),
        (
            *("diloco", False, True),
            [
                "doctor --config cluster_config_diloco.yaml",
                "advise --config cluster_config_diloco.yaml",
                "launch diloco",
            ],
        ),
        ("edp", True, True, ["status", "top", "stop"]),
    ],
)
def test_they_fit_what_is_here(
    tmp_path: Path, named: str | None, is_running: bool, has_runs: bool, commands: list[str]
) -> None:
    if named is not None:
        (tmp_path / f"cluster_config_{named}.yaml").touch()
    found = first_commands(tmp_path, is_running=is_running, has_runs=has_runs)
    assert [command for command, _ in found] == commands


def test_without_a_command_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert as_typed("launch", "edp", "--local") in shown
    assert as_typed("--help") in shown
