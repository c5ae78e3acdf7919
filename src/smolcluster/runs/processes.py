"""`processes.json`: which processes the launcher started for a run."""

from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from smolcluster.errors import DataError
from smolcluster.runs.files import write_whole


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


def write_processes(path: Path, entries: list[ProcessEntry]) -> None:
    """Replace the file.

    Raises:
        SmolclusterError: it cannot be written.
    """
    write_whole(path, _entries().dump_json(entries, indent=2).decode() + "\n")


def read_processes(path: Path) -> list[ProcessEntry]:
    """The entries of the file.

    Raises:
        DataError: it is missing, or not a list of processes.
    """
    try:
        return _entries().validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        raise DataError(f"{path} is not a list of processes: {error.errors()[0]['msg']}") from error


def _entries() -> TypeAdapter[list[ProcessEntry]]:
    return TypeAdapter(list[ProcessEntry])
