"""Hosts for tests of the launcher."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Lab, obstacle

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep all tests of this folder in one process: they share the hosts."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("lab"))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three hosts and a controller."""
    if reason := obstacle():
        pytest.skip(reason)
    with Lab() as started:
        yield started
