"""How many samples go through the model at once on a machine whose memory is not known beforehand."""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

from smolcluster.errors import OutOfMemory
from smolcluster.utils.device_errors import empty_cache, first_line, is_out_of_memory

T = TypeVar("T")


class Microbatching:
    """So many samples of a batch at once; half of them once the device has run out of memory, and so on.

    Attributes:
        size: None: all that are asked for.
    """

    def __init__(
        self,
        size: int | None,
        what: str = "microbatch",
        log: logging.Logger | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        """`is_whole`: batches must not be cut, whatever the memory."""
        self.size = size
        self._is_whole = is_whole
        self._what = what
        self._log = log or logging.getLogger("smolcluster")

    def fitted(
        self,
        num_samples: int,
        compute: Callable[[int], T],
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """What `compute` returns of `num_samples` samples, so many at once; again with fewer if need be.

        `undo` puts back what a computation that ran out of memory may have changed.

        Raises:
            OutOfMemory: the device has too little memory for one sample.
        """
        while True:
            microbatch = min(self.size or num_samples, num_samples)
            try:
                return compute(microbatch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Only now, without the traceback, are the tensors of the attempt free.
            self._halve(microbatch, reason)
            gc.collect()
            empty_cache()
            undo()

    def _halve(self, microbatch: int, reason: str) -> None:
        if microbatch <= 1:
            raise OutOfMemory(
                f"out of memory with one sample at a time: {reason}; choose a smaller model, "
                "precision bf16 or another device"
            )
        if self._is_whole:
            raise OutOfMemory(
                f"out of memory with {microbatch} samples at once, and batch is whole: {reason}; lower "
                "batch_size, or set batch to cut"
            )
        self.size = (microbatch + 1) // 2
        self._log.warning(
            "out of memory with %d samples at once: from now on it is %d (%s): %s",
            *(microbatch, self.size, self._what, reason),
        )
