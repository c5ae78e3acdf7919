"""The algorithms by name."""

from pathlib import Path

import pytest

from smolcluster.configs import spec
from smolcluster.configs.load import find_config
from smolcluster.configs.spec import algorithms, get_algorithm, title_of
from smolcluster.errors import ConfigError


@pytest.mark.parametrize("name", algorithms())
def test_an_algorithm_has_the_files_that_are_its_processes(name: str) -> None:
    algorithm = get_algorithm(name)
    assert algorithm.name == name
    assert all((algorithm.folder / file).is_file() for file in algorithm.roles.values())
    assert algorithm.is_group or algorithm.roles.keys() >= {"server", "worker"}


@pytest.mark.parametrize("name", algorithms())
def test_an_algorithm_has_a_cluster_file_of_its_name(name: str) -> None:
    assert find_config(name, "cluster").stem == f"cluster_config_{name}"


def test_an_unknown_algorithm_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'edpp'.*edp"):
        get_algorithm("edpp")


def test_titles_are_for_people() -> None:
    assert title_of("edp") == "EDP"
    assert title_of("syncps") == "SyncPS"
    assert title_of("single") == "Single"


def test_a_checkout_s_algorithms_are_found_by_an_environment_that_is_older(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec, "entry_points", lambda **_: [])
    assert algorithms.__wrapped__() == algorithms()


def test_a_project_into_which_the_package_was_copied_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.poetry]\nname = "mine"\n')
    monkeypatch.setattr(spec, "__file__", str(tmp_path / "vendor/smolcluster/configs/spec.py"))
    assert spec._of_checkout() == []
