"""Random numbers of a block that have no effect on those after it."""

import gc
import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

_COLLECTOR = threading.Lock()
"""Held by the thread that has switched the garbage collector off."""


@contextmanager
def forked_rng(device: torch.device | None = None) -> Iterator[None]:
    """Let PyTorch's generators go on after the block as if it had drawn nothing.

    `device`: whose generator counts beside the CPU's. `torch.random.fork_rng` alone can hang where several
    threads use a generator: PyTorch holds the generator's lock while it makes the tensor of its state. If
    garbage is collected just then, a tensor that is freed lets another thread run, and that thread may wait
    for the lock without letting this one run again.
    """
    with ExitStack() as stack:
        with _uncollected():
            devices = [device] if device is not None and device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices))
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    with _COLLECTOR:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@contextmanager
def isolated_rng(device: torch.device | None = None, seed: int | None = None) -> Iterator[None]:
    """Let the generators of PyTorch, NumPy and Python go on after the block as if it had drawn nothing.

    In the block they are those of `seed`, if there is one. `device`: whose generator counts beside the CPU's.
    """
    with isolated_python(seed), forked_rng(device):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def isolated_python(seed: int | None) -> Iterator[None]:
    """As `isolated_rng`, of the generators of NumPy and Python alone."""
    kept = random.getstate(), np.random.get_state()
    if seed is not None:
        seed_python(seed)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def seed_python(seed: int) -> None:
    """Seed what `random` and NumPy draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def python_state() -> bytes:
    """The state of those generators, for comparison."""
    return pickle.dumps((random.getstate(), np.random.get_state()))
