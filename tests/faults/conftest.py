"""The runs that all cases are compared with, and the table of what came of them.

`FAULTS_TABLE=path` writes the table as markdown at the end of the session.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from faults import meshes
from faults.cases import (
    Algorithm,
    Played,
    Reference,
    check_applied_once,
    check_everybody_ended_well,
    play,
)
from faults.table import Entry, markdown
from processes import Processes
from smolcluster.algorithms.DiLoCo.config import Mode

ENTRIES = pytest.StashKey[list[Entry]]()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run of the algorithm without any fault, played when it is first asked for."""

    @cache
    def of(algorithm: Algorithm, mode: Mode = "sync") -> Played:
        played = play(algorithm, tmp_path_factory.mktemp(f"reference-{algorithm}"), mode=mode)
        check_everybody_ended_well(played)
        check_applied_once(played)
        return played

    return of


@pytest.fixture(scope="session")
def mesh_reference(tmp_path_factory: pytest.TempPathFactory) -> meshes.PlayedMesh:
    """A mesh without any fault."""
    with Processes(tmp_path_factory.mktemp("reference-mesh")) as processes:
        played = meshes.play(processes)
    meshes.check_whole(played)
    return played


@pytest.fixture
def entries(request: pytest.FixtureRequest) -> list[Entry]:
    """Where cases that went well are noted for the table."""
    return request.config.stash.setdefault(ENTRIES, [])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a table is wanted, one process has all of it."""
    for item in items:
        if "FAULTS_TABLE" in os.environ and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group("faults"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table where it is wanted."""
    entries = session.config.stash.get(ENTRIES, [])
    path = os.environ.get("FAULTS_TABLE")
    if entries and path:
        Path(path).write_text(markdown(entries))
