"""The most memory that a process has at a time, to be told phase by phase.

On CUDA it is what PyTorch has allocated, of which CUDA keeps the peak. On MPS and the CPU nobody keeps one:
there it is the driver's memory, or the process's resident memory, at the beginning and the end of a phase.
"""

from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


class PeakMemory:
    """Measures one stretch of time after another, in the thread that uses the device."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._process = psutil.Process()
        self._at_begin = 0

    def begin(self) -> None:
        import torch  # noqa: PLC0415  (nothing at the foot of the house imports torch by being imported)

        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._at_begin = self._used()

    def end(self) -> int:
        """The most since `begin`, bytes."""
        import torch  # noqa: PLC0415 - as above

        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(self._at_begin, self._used())

    def _used(self) -> int:
        import torch  # noqa: PLC0415 - as above

        if self._device.type == "mps":
            return torch.mps.driver_allocated_memory()
        return int(self._process.memory_info().rss)
