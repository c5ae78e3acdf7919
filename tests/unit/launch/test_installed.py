"""The project as it is sent to other machines from where there is no checkout."""

import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

import pytest

from smolcluster.errors import LaunchError
from smolcluster.launch import places
from smolcluster.launch.installed import installed_project
from smolcluster.launch.project import read_project

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_a_project_of_the_installed_package() -> None:
    folder = installed_project()
    stated = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    made = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for key in ("name", "version", "requires-python", "scripts", "entry-points"):
        assert made[key] == stated[key]
    assert made["dependencies"] == distribution("smolcluster").requires
    files = read_project(PROJECT).files
    code = {name: content for name, content in files.items() if name.startswith("src")}
    sent = dict(read_project(folder).files)
    del sent["pyproject.toml"]
    assert sent == code


def test_it_is_made_once() -> None:
    first = installed_project()
    marker = first / "made-once"
    marker.touch()
    assert installed_project() == first
    assert marker.exists()
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_two_launches_at_once_make_it_together() -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: installed_project(), range(4)))
    [folder] = folders
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_it_is_what_is_sent_where_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.project_root() == PROJECT
    monkeypatch.setattr(places, "checkout", lambda: None)
    assert places.project_root() == installed_project()


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(LaunchError, match="XDG_CACHE_HOME"):
        installed_project()
