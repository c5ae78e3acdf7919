"""`processes.json`: which processes the launcher started for a run."""

from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, PositiveInt

from smolcluster.runs.model_file import ModelFile


class ProcessEntry(BaseModel):
    """One process of a run.

    `started` tells it from others that get its id after its end, see `start_of`; null in files of before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node: str
    role: str
    rank: int | None = None
    pid: PositiveInt
    started: str | None = None

    @property
    def is_itself(self) -> bool | None:
        """Whether the process that has its id now is this one; None: the entry does not tell."""
        return None if self.started is None else start_of(self.pid) == self.started


def start_of(pid: int) -> str | None:
    """When a process started, exactly, as its system counts time; None: it has ended.

    On Linux that is ticks since the boot, which no change of the clock touches.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if fields[0] in "ZX" else f"{boot}+{fields[19]}"
    except OSError:
        pass
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time()}"
    except psutil.Error:
        return None


PROCESSES = ModelFile[list[ProcessEntry]](list[ProcessEntry], "is not a list of processes")
read_processes, write_processes = PROCESSES.read, PROCESSES.write
