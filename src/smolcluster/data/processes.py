"""The processes of a DataLoader: they load samples for who asks, and end with whoever has started them."""

import io
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

from smolcluster.data.dataset import Place
from smolcluster.utils.isolated_rng import seed_python
from smolcluster.utils.seed import derive_seed

LOOK_EVERY_S = 1.0
_own: dict[str, Any] = {}
"""What a process that loads was given when it began; empty in all others."""
OPEN_FILES = Path("/dev/fd")


@dataclass(frozen=True)
class Work:
    """What the processes of a DataLoader do.

    Attributes:
        load: the samples of these indices.
        worker_init: called in each with its number, after it was seeded from that and the run's `seed`.
    """

    dataset: Any
    load: Callable[[Tensor, Place], list[Any]]
    worker_init: Callable[[int], None]
    seed: int


def start_processes(loader: DataLoader[Any], work: Work) -> ProcessPoolExecutor:
    """`num_workers` processes, as the loader starts them: by fork where the system does so."""
    context = loader.multiprocessing_context or multiprocessing.get_context()
    numbers = context.SimpleQueue()
    for number in range(loader.num_workers):
        numbers.put(number)
    return ProcessPoolExecutor(
        loader.num_workers,
        mp_context=context,
        initializer=_begin,
        initargs=(work, numbers, loader.num_workers),
    )


def end_processes(executor: ProcessPoolExecutor) -> None:
    """End them, whatever they do: who waited for them at its exit would wait for a dataset that is stuck."""
    processes = list((executor._processes or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()  # SIGTERM would call what a fork has copied: the handler of the parent


def load_packed(indices: list[int], place: Place) -> bytes:
    """In one of the processes: the samples of these indices, for the one that asks.

    Tensors are packed by their values, not by open files.
    """
    samples, memory = _own["load"](torch.tensor(indices), place), io.BytesIO()
    _Pickler(memory, protocol=pickle.HIGHEST_PROTOCOL).dump(samples)
    return memory.getvalue()


def unpacked(data: bytes) -> list[Any]:
    """What a process of ours has packed."""
    samples: list[Any] = pickle.loads(data)  # noqa: S301 - it comes from a child of this process
    return samples


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not Tensor or thing.device.type != "cpu" or thing.requires_grad:
            return NotImplemented
        try:
            return torch.from_numpy, (thing.numpy(),)
        except (TypeError, RuntimeError):  # a type that NumPy has not, or no plain tensor
            return NotImplemented


def _begin(work: Work, numbers: Any, num_processes: int) -> None:
    """What a new process does first. What fails in `worker_init` is raised when it is to load."""
    _own["load"] = work.load
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go_of_connections()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    number = numbers.get()
    seed = derive_seed(work.seed, "loader", number)
    seed_process(seed)
    info = torch_worker.WorkerInfo(
        id=number, num_workers=num_processes, seed=seed, dataset=work.dataset
    )
    torch_worker._worker_info = info  # what `get_worker_info` returns
    try:
        work.worker_init(number)
    except Exception as error:
        _own["load"] = partial(_fail, error)


def _fail(error: Exception, _indices: Tensor, _place: Place) -> list[Any]:
    raise error


def seed_process(seed: int) -> None:
    """Seed what is drawn by `random`, NumPy and PyTorch, in a process that only loads."""
    seed_python(seed)
    torch.default_generator.manual_seed(seed)


def begin_to_read(worker_init: Callable[[int], None] | None, number: int) -> None:
    """What a process of a DataLoader does first that reads a stream."""
    _let_go_of_connections()
    if worker_init is not None:
        worker_init(number)


def _let_go_of_connections() -> None:
    """Close what fork has copied: a peer of the parent must see its end, though this process lives on."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in _connections():
        os.dup2(nothing, number)  # not closed, or the number would soon be another file's
    os.close(nothing)


def _connections() -> Iterator[int]:
    if not OPEN_FILES.is_dir():
        return
    for number in [int(path.name) for path in OPEN_FILES.iterdir()]:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
                        yield number


def _end_with_parent() -> None:
    """End this process with the one that it loads for, or with the fork server that has started it."""
    parent, starter = multiprocessing.parent_process(), os.getppid()
    while parent is not None and parent.is_alive() and os.getppid() == starter:
        parent.join(LOOK_EVERY_S)
    os._exit(0)
