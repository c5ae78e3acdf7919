"""What holds for these tests."""

from collections.abc import Iterator

import pytest

from peers import HandledDoor, wait_for_threads
from smolcluster.cluster import acceptor


@pytest.fixture(autouse=True)
def nothing_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every thread of a session, reception or evaluator ends, soon, with the test that started it."""
    monkeypatch.setattr(acceptor, "ACCEPT_TICK_S", 0.02)
    yield
    wait_for_threads()


@pytest.fixture
def door() -> Iterator[HandledDoor]:
    """A server's door by hand."""
    door = HandledDoor()
    yield door
    door.close()
