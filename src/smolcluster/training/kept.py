"""What of a run is a worker's own, kept on its machine beside the server's checkpoints.

Such as the moments of a worker's own optimizer, which never travel: whenever the server saves, its workers
save them under the same step, and take them up when the run goes on from there.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smolcluster.utils.replacing import replacing

_NAME = re.compile(r"step-([0-9]{8,})\.safetensors")


class KeptSteps:
    """One worker's tensors by step, a file each, in a folder of its own. A failing disk is no run's end."""

    def __init__(self, folder: Path, log: logging.Logger) -> None:
        """`folder` is made when something is saved."""
        self.folder = folder
        self._log = log

    def save(self, step: int, tensors: Mapping[str, Tensor], keep_last: int) -> None:
        """Write `tensors` for `step`, whole or not at all, and delete those before the last `keep_last`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".step-*.tmp"):  # by a process that was killed as it saved
                left.unlink(missing_ok=True)
            with replacing(self._place(step)) as draft:
                save_file({name: on_cpu(tensor) for name, tensor in tensors.items()}, draft)
            for old in self.steps()[:-keep_last]:
                self._place(old).unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            self._log.warning(
                "what is this worker's own of step %d is not saved: %s; a resumed run begins without it",
                step,
                error,
            )

    def load(self, step: int) -> tuple[int, dict[str, Tensor]] | None:
        """The newest tensors up to `step`, with their step, on the CPU; None: there are none that are good.

        Those of later steps, from which the run has been taken back, are deleted.
        """
        for later in [each for each in self.steps() if each > step]:
            self._place(later).unlink(missing_ok=True)
        for found in reversed(self.steps()):
            try:
                return found, load_file(self._place(found), backend="pread")
            except (OSError, SafetensorError) as error:
                self._log.warning("%s is left aside: %s", self._place(found), error)
        return None

    def steps(self) -> list[int]:
        """What there is, in order."""
        names = map(_NAME.fullmatch, (path.name for path in self.folder.glob("*")))
        return sorted(int(name[1]) for name in names if name)

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"


def is_like(live: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> bool:
    """Whether `stored` has a tensor of the same shape and type for each of `live`."""
    return all(
        name in stored and (stored[name].shape, stored[name].dtype) == (tensor.shape, tensor.dtype)
        for name, tensor in live.items()
    )


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, which is what safetensors takes."""
    return tensor.detach().to("cpu", copy=True).contiguous()
