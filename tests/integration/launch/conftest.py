"""Hosts for tests of the launcher."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import Lab, obstacle
from launching import Launching, Screen

HERE = Path(__file__).parent


LAUNCHES = ("test_launch.py", "test_window.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have two processes run the tests of this folder, each with hosts of its own."""
    for item in items:
        if HERE in item.path.parents:
            name = "launches" if item.path.name in LAUNCHES else "lab"
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three hosts and a controller."""
    if reason := obstacle():
        pytest.skip(reason)
    with Lab() as started:
        yield started


@pytest.fixture(scope="session")
def _launching(lab: Lab) -> Launching:
    return Launching(lab)


@pytest.fixture
def launching(_launching: Launching) -> Iterator[Launching]:
    """A controller with a checkout, and hosts that the first launch has prepared for the others."""
    _launching.end_all()
    yield _launching
    _launching.end_all()


@pytest.fixture
def screen(launching: Launching) -> Iterator[Callable[[list[str]], Screen]]:
    """Opens a terminal on the controller, in which a command runs."""
    opened: list[Screen] = []

    def open_screen(words: list[str]) -> Screen:
        for each in opened:
            each.close()
        opened[:] = [Screen(launching.controller, words)]
        return opened[0]

    yield open_screen
    for each in opened:
        each.close()
