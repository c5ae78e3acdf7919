"""Hosts for tests of the launcher."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import Lab, obstacle
from launching import Launching, Screen

HERE = Path(__file__).parent
NUM_LABS = 2


def is_story(item: pytest.Item) -> bool:
    """Whether it runs in CI or at night only."""
    return any(map(item.get_closest_marker, ("slow", "nightly")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have two processes run the tests of this folder, each with hosts of its own, and begin with them.

    Whole stories are dealt out in turn; the other tests of a file stay together.
    """
    here = [item for item in items if item.path.parent == HERE]
    here.sort(key=lambda item: not is_story(item))
    dealt: dict[object, int] = {}
    for item in here:
        unit = item if is_story(item) else item.path
        number = dealt.setdefault(unit, len(dealt)) % NUM_LABS
        item.add_marker(pytest.mark.xdist_group(f"lab-{number}"))
    items[:] = [*here, *(item for item in items if item.path.parent != HERE)]


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
