"""Words for messages: one line each, with the nearest thing that was meant."""

import difflib
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from shutil import which
from typing import Any

from smolcluster.utils.folders import checkout

_LONGEST_SHOWN = 60


def one_line(text: str) -> str:
    """`text` with everything that a terminal cannot print on one line escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def show(value: Any) -> str:
    """A value as it would be written in YAML, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping" if value else "an empty mapping"
        case list() | tuple():
            text = f"[{', '.join(map(show, value))}]"
        case str() | Path():
            text = repr(str(value))
        case date():
            text = value.isoformat()
        case _:
            text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def say(line: str) -> None:
    """Print a line of a command's own words, at once."""
    sys.stdout.write(f"{one_line(line)}\n")
    sys.stdout.flush()


def write_json(document: Any) -> None:
    """Print a document for programs: in ASCII, so that no text of others steers a terminal."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def condensed(text: str, longest: int = 600) -> str:
    """What a tool has said on one line; of more than `longest` characters the beginning and the end.

    Tools name the cause last.
    """
    line = one_line(" ".join(text.split()))
    if len(line) <= longest:
        return line
    begin, end = line[: longest // 3], line[longest // 3 - longest :]
    return f"{begin.rpartition(' ')[0] or begin} … {end.partition(' ')[2] or end}"


def shortened(text: str, most: int) -> str:
    """The first so many characters of a text, and how many more it has."""
    num_more = len(text) - most
    return text if num_more <= 0 else f"{text[:most]} … ({num_more:,} characters more)"


def as_typed(*words: object) -> str:
    """A command of ours as this machine's user types it."""
    program = ["smolcluster"]
    if checkout() is not None:
        program = ["uv", "run", "smolcluster"] if which("uv") else [".venv/bin/smolcluster"]
    return shlex.join([*program, *map(str, words)])


def as_command(*words: object) -> str:
    """The same as a message quotes it."""
    return f"`{as_typed(*words)}`"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that `word` most likely misspells, whatever its case; None when nothing is near."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def a_few(names: Sequence[str], most: int = 8) -> str:
    """The first of these names, `most` at most, and how many more there are."""
    num_more = len(names) - most
    return ", ".join(names[:most]) + (f" and {num_more} more" if num_more > 0 else "")


def hint_at(word: str, known: Iterable[str]) -> str:
    """The end of a message that names what `word` most likely misspells; empty when nothing is near."""
    meant = nearest(word, known)
    return f"; did you mean {meant}?" if meant else ""
