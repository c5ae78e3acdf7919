"""A thread for one thing after another: what becomes of the rest when it is closed."""

import threading
from concurrent.futures import CancelledError

import pytest

from smolcluster.utils.background import Background


def test_what_has_not_begun_is_cancelled_when_it_is_closed() -> None:
    thread, has_begun, may_end = Background("test"), threading.Event(), threading.Event()

    def wait() -> int:
        has_begun.set()
        assert may_end.wait(60)
        return 1

    first, second = thread.submit(wait), thread.submit(lambda: 2)
    assert has_begun.wait(60)
    thread.close()
    third = thread.submit(lambda: 3)
    may_end.set()
    assert first.result(60) == 1
    for future in (second, third):
        with pytest.raises(CancelledError):
            future.result(60)
