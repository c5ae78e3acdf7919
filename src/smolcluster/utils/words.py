"""Words for messages: one line each, with the nearest thing that was meant."""

import difflib
from collections.abc import Iterable


def one_line(text: str) -> str:
    """`text` with everything that a terminal cannot print on one line escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely misspells, whatever its case; None when nothing is near."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None
