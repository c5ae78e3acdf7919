"""`processes.json`: which processes the launcher started for a run."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from smolcluster.errors import DataError
from smolcluster.runs.files import write_whole


class ProcessEntry(BaseModel):
    """One process of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node: str
    role: str
    rank: int | None = None
    pid: PositiveInt


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
