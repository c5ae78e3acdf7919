"""Fixtures for tests with real processes."""

import time
from collections.abc import Callable

import pytest

from processes import DEADLINE_S


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.05)

    return wait
