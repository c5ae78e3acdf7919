"""A wrong setting as fields: where it stands, what it holds, what may stand there.

The sentence is made of the fields where the error is printed, `str(error)`.
"""

from typing import Any, Self

from smolcluster.errors import ConfigError
from smolcluster.utils.words import one_line, show

Place = tuple[str | int, ...]
"""The parts of a key; a number is an index into a list."""

HAS_KEY = "has the key"
_MOST_SHOWN = 5


class SettingError(ConfigError, ValueError):
    """A setting has a value that it may not have.

    A validator raises it with a place within its own section, without a source. Whoever knows the layers adds
    both, see `placed`.

    Attributes:
        place: the key's parts, as whoever set it calls them.
        value: what the key holds; `...`: nothing.
        verb: how the key has the value: `is`, `lists`, or `HAS_KEY`.
        allowed: what may stand there, as the end of "must be …".
        problem: what is wrong with the value, where that is not its kind.
        nearest: the known name that was most likely meant; None: none is near.
        also: places of other keys that the value does not fit.
        source: the file, flag or variable that set the key; empty: not known.
        others: what else is wrong with the same configuration.
    """

    def __init__(
        self,
        place: Place,
        value: Any = ...,
        problem: str = "",
        *,
        verb: str = "is",
        allowed: str = "",
        nearest: str | None = None,
        also: tuple[Place, ...] = (),
        source: str = "",
    ) -> None:
        super().__init__()
        self.place, self.value, self.verb = place, value, verb
        self.allowed, self.problem, self.nearest = allowed, problem, nearest
        self.also, self.source = also, source
        self.others: tuple[SettingError, ...] = ()

    @property
    def key(self) -> str:
        """The key as people write it: `workers[0]`, `model.hidden`."""
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.place)
        return "".join(parts).removeprefix(".")

    @property
    def sentence(self) -> str:
        """What is wrong, without the source."""
        stated = "missing" if self.value is ... else show(self.value)
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        told = self.problem or f"must be {self.allowed}"
        return f"{self.key} {self.verb} {stated}, {told}{hint}".lstrip()

    def placed(self, place: Place, source: str) -> Self:
        """The same error, with the place and the source that whoever set the key knows."""
        self.place, self.source = place, source
        return self

    def __str__(self) -> str:
        """The first problems on one line; a source is named once for all of its problems in a row."""
        told, last = [], ""
        problems = (self, *self.others)
        for each in problems[:_MOST_SHOWN]:
            source = "" if each.source == last else f"{each.source}: "
            told.append(f"{source}{each.sentence}")
            last = each.source
        num_more = len(problems) - len(told)
        return one_line("; ".join(told) + (f"; and {num_more} more" if num_more else ""))


class UnknownKey(SettingError):
    """There is no setting of that name; its value is never shown.

    Attributes:
        section: where the nearest key stands, if that is elsewhere.
        known: the keys that may stand there.
        kind: the kind of model that has no such key; empty: no kind has.
    """

    def __init__(
        self,
        place: Place,
        *,
        nearest: str | None = None,
        section: str = "",
        known: tuple[str, ...] = (),
        kind: str = "",
        source: str = "",
    ) -> None:
        super().__init__(place, nearest=nearest, source=source)
        self.section, self.known, self.kind = section, known, kind

    @property
    def sentence(self) -> str:
        if self.kind:
            return f"{self.key} is not a setting of a {self.kind}"
        if not self.nearest:
            return f"{self.key} is not a setting; known here: {', '.join(self.known)}"
        here, there = (" here", f" in {self.section}") if self.section else ("", "")
        return f"{self.key} is not a setting{here}; did you mean {self.nearest}{there}?"
