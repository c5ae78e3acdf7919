"""Random numbers of a block that have no effect on those after it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated_rng(device: torch.device | None = None, seed: int | None = None) -> Iterator[None]:
    """Let the generators of PyTorch, NumPy and Python go on after the block as if it had drawn nothing.

    In the block they are those of `seed`, if there is one. `device`: whose generator counts beside the CPU's.
    """
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)
