"""One thread that does one thing after another, and that nobody waits for at the end of the process."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Does what is submitted, in order, in a thread that begins with the first of it."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """`begin` is called in the thread before all else."""
        self._name = name
        self._begin = begin
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, task: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put((future, task))
        if self._is_closed:
            future.cancel()
        return future

    def close(self) -> None:
        """Cancel what has not begun, and do nothing more; what is being done goes on. Does not wait."""
        self._is_closed = True
        with suppress(queue.Empty):
            while True:
                if (item := self._tasks.get_nowait()) is not None:
                    item[0].cancel()
        self._tasks.put(None)

    def _run(self) -> None:
        self._begin()
        while (item := self._tasks.get()) is not None:
            future, task = item
            if self._is_closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task, item
