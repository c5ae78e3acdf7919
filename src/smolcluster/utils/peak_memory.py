"""The most memory that a process has at a time, to be told phase by phase.

On CUDA it is what PyTorch has allocated, of which CUDA keeps the peak. On MPS and the CPU nobody keeps one:
there it is the driver's memory, or the process's resident memory, at the beginning and the end of a phase.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


class PeakMemory:
    """Measures one stretch of time after another, in the thread that uses the device."""

    def __init__(self, device: "torch.device") -> None:
        self._reset, self._peak = _cuda(device) if device.type == "cuda" else _sampled(device)

    def begin(self) -> None:
        self._reset()

    def end(self) -> int:
        """The most since `begin`, bytes."""
        return self._peak()


def _cuda(device: "torch.device") -> tuple[Callable[[], None], Callable[[], int]]:
    import torch  # noqa: PLC0415  (nothing at the foot of the house imports torch by being imported)

    return (
        lambda: torch.cuda.reset_peak_memory_stats(device),
        lambda: torch.cuda.max_memory_allocated(device),
    )


def _sampled(device: "torch.device") -> tuple[Callable[[], None], Callable[[], int]]:
    process, at_begin = psutil.Process(), [0]

    def used() -> int:
        if device.type == "mps":
            import torch  # noqa: PLC0415 - as above

            return torch.mps.driver_allocated_memory()
        return int(process.memory_info().rss)

    def begin() -> None:
        at_begin[0] = used()

    return begin, lambda: max(at_begin[0], used())
