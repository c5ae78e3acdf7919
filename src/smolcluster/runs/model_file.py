"""A small JSON file that holds one value of a pydantic type, replaced whole."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from smolcluster.errors import DataError
from smolcluster.runs.files import write_whole

T = TypeVar("T")


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""Null where nothing was measured yet, or no finite number."""


class Strict(BaseModel):
    """A part of such a file: other keys, other types and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class WithMetrics(Strict):
    """A part that has numbers of any name besides, if that begins with `val_`: a workload's own metrics.

    Those that are not finite are null.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Measured] = Field(init=False)

    @model_validator(mode="after")
    def _has_no_other_keys(self) -> Self:
        for name in self.__pydantic_extra__:
            if not name.startswith("val_"):
                raise ValueError(f"{name} is no key, and no metric such as val_{name}")
        return self


@dataclass(frozen=True)
class ModelFile(Generic[T]):
    """How values of one type are kept in files.

    Attributes:
        kind: their type, anything that pydantic validates.
        wrong: what is said of a file that holds none: `is damaged`.
        unless: why a file may be missing, as a question; empty: it ought to be there.
        durable: whether `write` waits for the disk.
    """

    kind: Any
    wrong: str
    unless: str = ""
    durable: bool = True

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self.kind)

    def write(self, path: Path, value: T) -> None:
        """Replace the file at once.

        Raises:
            SmolclusterError: it cannot be written.
        """
        write_whole(path, self.text(value), durable=self.durable)

    def text(self, value: T) -> bytes:
        """What the file holds then."""
        return self._adapter.dump_json(value, indent=2) + b"\n"

    def read(self, path: Path) -> T:
        """The value in the file.

        Raises:
            DataError: it is missing, or holds no such value.
        """
        try:
            return self._adapter.validate_json(path.read_bytes())
        except OSError as error:
            hint = f"; {self.unless}" if self.unless else ""
            raise DataError(f"cannot read {path}: {error.strerror or error}{hint}") from error
        except ValidationError as error:
            raise DataError(f"{path} {self.wrong}: {problem_of(error)}") from error

    def parse(self, text: str | bytes) -> T | None:
        """The value that a text from elsewhere says; None: it says none."""
        try:
            return self._adapter.validate_json(text)
        except ValidationError:
            return None


def problem_of(error: ValidationError) -> str:
    """The first thing that is wrong, and where; neither is longer than a line of a log may be."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])[:100]
    return ": ".join(filter(None, (where, problem["msg"][:200])))
