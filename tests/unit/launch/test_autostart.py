"""The jobs of systemd and launchd that let a machine join again."""

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from smolcluster.configs.schema import ClusterConfig
from smolcluster.launch.doctor.autostart import autostart, join_command, launchd_job, systemd_job
from smolcluster.launch.host import Done, Host

PROJECT = '/home/pi/100% "mine" $HOME\'s'
CLUSTER = ClusterConfig.model_validate(
    {
        "host_ip": {"mini1": "10.0.0.1", "pi5": "fd00::1"},
        "num_workers": 1,
        "workers": ["pi5"],
        "server": "mini1",
        "port": 6000,
    }
)
OWN = {"threads": 3, "dataset": {"root": "~/data", "download": False}, "torch": "cpu"}
COMMAND = join_command(CLUSTER, "pi5", PROJECT, OWN)


def inside(text: str) -> str:
    """The file that the text makes."""
    return text.split("<<'END'\n")[1].split("\nEND\n", maxsplit=1)[0]


def test_the_machine_joins_with_its_own_settings() -> None:
    assert [
        *(f"{PROJECT}/.venv/bin/python", "-P", "-m", "smolcluster.cli", "join", "[fd00::1]:6000"),
        *("--name", "pi5", "--wait", "120"),
        *("--override", 'runs_dir="~/smolcluster/runs"', "threads=3"),
        *('dataset.root="~/data"', "dataset.download=false"),
    ] == COMMAND


def test_launchd_gets_the_command_word_by_word() -> None:
    job = plistlib.loads(inside(launchd_job("pi5", COMMAND, PROJECT, "pi")).encode())
    assert (job["ProgramArguments"], job["UserName"], job["RunAtLoad"]) == (COMMAND, "pi", True)


def test_systemd_gets_the_command_word_by_word(tmp_path: Path) -> None:
    text = systemd_job("pi5", COMMAND, PROJECT)
    assert "loginctl enable-linger" in text
    unit = inside(text)
    assert r'ExecStart="/home/pi/100%% \"mine\" $$HOME' in unit
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here to judge the unit")
    file = tmp_path / "smolcluster-join.service"
    file.write_text(unit.replace(PROJECT.replace("%", "%%"), str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Unbalanced quoting" not in done.stderr


def test_what_a_machine_says_of_itself_cannot_move_the_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "system Linux\nsystem =0\nuser pi\nuser =0\nfolder /home/\x1b[2Jpi\nfolder =0\n"
    says = Done(0, told, "")
    monkeypatch.setattr(Host, "run", lambda *_, **__: says)
    assert autostart("edp", []) == 0
    text = capsys.readouterr().out
    assert r"/home/\x1b[2Jpi" in text
    assert all(line.isprintable() for line in text.splitlines())
