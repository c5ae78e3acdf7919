"""Fixtures for tests with real processes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import DEADLINE_S, Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes and reaps them."""
    started = Processes(tmp_path)
    yield started
    for child in started.children:
        child.reap()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.05)

    return wait
