"""Samples that are loaded before they are asked for: in a thread, or in the DataLoader's processes."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smolcluster.data.dataset import Batch, Place
from smolcluster.data.drawing import Drawing
from smolcluster.data.loading import LoadedSamples, MapSamples, StreamSamples
from smolcluster.data.processes import (
    Work,
    end_processes,
    load_packed,
    seed_process,
    start_processes,
    unpacked,
)
from smolcluster.errors import DataError
from smolcluster.utils.background import Background
from smolcluster.utils.user_code import user_code

Key = tuple[int, int]
"""An epoch, and a place in its order."""
MAX_CHUNK = 16
"""Samples that are loaded one after another before somebody can have them."""


class Prefetch:
    """Loads samples in the order in which they are wanted, and keeps them until they are taken."""

    def __init__(self, samples: LoadedSamples) -> None:
        self._samples = samples
        self._is_stream = isinstance(samples, StreamSamples)
        self._loading: dict[Key, tuple[Future[Any], int]] = {}
        """Of each sample, the chunk that it is in, and its place in that."""
        self._lock = threading.Lock()
        self._thread = Background("loader", partial(torch.set_num_threads, 1))
        self._processes: ProcessPoolExecutor | None = None

    @property
    def num_processes(self) -> int:
        loader = self._samples.loader
        is_map = isinstance(self._samples, MapSamples)
        return loader.num_workers if loader is not None and is_map else 0

    def want(self, indices: Tensor, place: Place) -> None:
        """Begin to load samples (n,), but those that are loaded; returns at once. Any thread."""
        with self._lock:
            self._begin(indices, place)

    def _begin(self, indices: Tensor, place: Place) -> None:
        size = min(MAX_CHUNK, max(1, len(indices) // (2 * max(1, self.num_processes))))
        numbers = [
            number
            for number in range(len(indices))
            if (place.epoch, place.start + number) not in self._loading
        ]
        while numbers:
            first = numbers[0]
            chunk = [number for number in numbers[:size] if number - first < size]
            stop = chunk[-1] + 1
            here = place._replace(start=place.start + first)
            future = self._submit(indices[first:stop], here)
            for number in chunk:
                self._loading[place.epoch, place.start + number] = future, number - first
            numbers = numbers[len(chunk) :]

    def load(self, indices: Tensor, place: Place) -> list[Any]:
        """The samples (n,), loaded now if nobody has wanted them; forgets what lies before them.

        Those of a stream, which is not read twice, can be had again until `forget_before` is told otherwise.

        Raises:
            DataError: a process that loads has ended, or could not be started.
        """
        keys = [(place.epoch, place.start + number) for number in range(len(indices))]
        with self._lock:
            if not self._is_stream:
                self._forget_before((place.epoch, place.start))
            self._begin(indices, place)
            loading = [self._loading[key] for key in keys]
            if not self._is_stream:
                for key in keys:
                    del self._loading[key]
        chunks = {future: self._result(future) for future in dict.fromkeys(f for f, _ in loading)}
        samples = [chunks[future][number] for future, number in loading]
        return [_own_copy(sample) for sample in samples] if self._is_stream else samples

    def forget_before(self, place: Place) -> None:
        """A step begins here: what lies before is not asked for again."""
        with self._lock:
            self._forget_before((place.epoch, place.start))

    def batch(self, indices: Tensor, place: Place) -> Batch:
        return self.collated(self.load(indices, place), place)

    def collated(self, samples: list[Any], place: Place) -> Batch:
        """The batch of samples that were loaded; what is random in it by `place`."""
        with user_code("data"):
            return self._samples.collated(samples, place)

    def close(self) -> None:
        self._thread.close()
        if self._processes is not None:
            end_processes(self._processes)

    def _submit(self, indices: Tensor, place: Place) -> Future[Any]:
        samples = self._samples
        if samples.loader is None or not (self.num_processes and isinstance(samples, MapSamples)):
            return self._thread.submit(partial(self._load, indices, place))
        try:
            if self._processes is None:
                load = partial(_load_seeded, MapSamples(samples.dataset))
                begin = partial(_begin_guarded, samples.loader.worker_init_fn)
                work = Work(samples.dataset, load, begin, place.seed)
                self._processes = start_processes(samples.loader, work)
            return self._processes.submit(load_packed, indices.tolist(), place)
        except BrokenExecutor as error:
            return _failed(error)
        except (pickle.PicklingError, TypeError, AttributeError, OSError) as error:
            return _failed(
                DataError(
                    f"the DataLoader's processes cannot be started: {error}; where they are not forked, "
                    "its dataset and worker_init_fn must be such as pickle can write"
                )
            )

    def _load(self, indices: Tensor, place: Place) -> list[Any]:
        with user_code("data"):
            return self._samples.load(indices, place)

    def _result(self, future: Future[Any]) -> list[Any]:
        try:
            result = future.result()
        except BrokenExecutor as error:
            raise DataError(
                f"one of the DataLoader's processes ({self.num_processes}) has died, perhaps for want of "
                "memory; lower its num_workers, or see what its dataset does"
            ) from error
        return unpacked(result) if isinstance(result, bytes) else result

    def _forget_before(self, key: Key) -> None:
        passed = {self._loading.pop(each)[0] for each in list(self._loading) if each < key}
        for future in passed.difference(future for future, _ in self._loading.values()):
            future.cancel()


def _own_copy(sample: Any) -> Any:
    """What a collate function may take fields from, and the next one that gets the sample finds whole."""
    return copy.copy(sample) if isinstance(sample, (dict, list)) else sample


def _failed(error: Exception) -> Future[Any]:
    """What is raised where the samples are taken, and not by who only wants them."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _load_seeded(samples: MapSamples, indices: Tensor, place: Place) -> list[Any]:
    """In a process of its own, whose generators are nobody else's."""
    loaded = []
    with user_code("data"):
        samples.begin(indices, place)
        for number, index in enumerate(indices.tolist()):
            seeded = partial(_seeded, samples.drawing, place.draw(number))
            loaded.append(samples.sample(index, seeded))
    return loaded


@contextmanager
def _seeded(drawing: Drawing, seed: int) -> Iterator[None]:
    seed_process(seed)
    drawing.seed_own(seed)
    yield


def _begin_guarded(worker_init: Callable[[int], None] | None, number: int) -> None:
    if worker_init is not None:
        with user_code("worker_init_fn"):
            worker_init(number)


def prefetch_of(samples: object) -> Prefetch | None:
    """What loads a user's data ahead; None: they lie in memory."""
    return Prefetch(samples) if isinstance(samples, LoadedSamples) else None
