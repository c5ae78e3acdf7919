"""The wheel: what is in it, and what it does in an empty environment, from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from harness import free_port
from processes import Processes
from smolcluster.launch.installed import installed_project

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "src" / "smolcluster"
OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import smolcluster


def mean_square(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def workload():
    inputs = torch.linspace(-1, 1, 64).reshape(64, 1)
    data = TensorDataset(inputs, 3 * inputs)
    return smolcluster.Workload(lambda: nn.Linear(1, 1), mean_square, data, data)
"""


def uv() -> str:
    found = shutil.which("uv") or shutil.which("uv", path=str(PROJECT / ".uv" / "bin"))
    if found is None:
        pytest.skip("there is no uv to build the wheel with")
    return found


def build(project: Path, folder: Path) -> Path:
    command = [uv(), "build", "--wheel", "--offline", "--out-dir", str(folder), str(project)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    if done.returncode and "hatchling" in done.stderr and "cache" in done.stderr:
        pytest.skip("uv's cache lacks the build backend, and nothing is downloaded here")
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("smolc")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(PROJECT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_whole_package(wheel: Path) -> None:
    """Its configurations, documents, the dashboard's files and `py.typed` as well."""
    held = {name.removeprefix("smolcluster/") for name in content(wheel)}
    left_out = ("__pycache__", "MNIST")
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and not set(left_out).intersection(path.parts)
    }
    assert "py.typed" in files
    assert files - held == set()


@pytest.mark.nightly
def test_other_machines_build_the_same_wheel_of_what_is_installed(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    project = installed_project()
    monkeypatch.undo()  # uv's own cache
    sent, ours = content(build(project, tmp_path / "sent")), content(wheel)
    code = {name for name in ours if name.startswith("smolcluster/")}
    assert {name for name in code if sent.get(name) != ours[name]} == set()
    [points] = [name for name in ours if name.endswith("entry_points.txt")]
    assert sorted(sent[points].split()) == sorted(ours[points].split())


def install(wheel: Path, folder: Path) -> Path:
    """An environment that has the wheel, and the packages that it needs of the one that runs the tests."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [uv(), "pip", "install", "--offline", "--no-deps", "--python", str(python)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True, timeout=300)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.with_name("smolcluster")


@pytest.mark.nightly
def test_the_wheel_trains_in_an_empty_environment_from_any_folder(
    wheel: Path, tmp_path: Path, processes: Processes
) -> None:
    command = install(wheel, tmp_path / "environment")
    del processes.environ["SMOLCLUSTER_RUNS_DIR"]
    folder = tmp_path / "empty"
    folder.mkdir()
    (tmp_path / "own.py").write_text(OWN)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for own in ((), ("--workload", f"{tmp_path / 'own.py'}:workload")):
            child = processes.start(
                *(str(command), "launch", "edp", "--local", "--workers", "1", *own),
                *("--override", f"port={free_port()}", "num_epochs=1", "metrics_port=null"),
                forked=False,
            )
            assert child.wait() == 0, child.output
    finally:
        os.chdir(before)
    summaries = list(folder.glob("runs/edp-*/summary.json"))
    assert len(summaries) == 2
    logs = "".join(path.read_text() for path in folder.glob("runs/edp-*/logs/*.log"))
    assert str(PACKAGE) not in logs
