"""A few lines out of a large file of lines, at even distances, without reading the rest."""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

NUM_PLACES = 1200
WINDOW_NBYTES = 16 << 10
MAX_WINDOW_NBYTES = 1 << 20
_INCARNATION = re.compile(rb'"incarnation": ?"([^"]*)"')


def sampled(path: Path, end: int, num_places: int = NUM_PLACES) -> Iterator[list[bytes]]:
    """Whole lines that follow each other, from so many places before the byte `end`, in order.

    Where the writer has changed between two places, the new one's first lines are among them.

    Raises:
        OSError: the file cannot be read.
    """
    places = [end * index // num_places for index in range(num_places)]
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        here = window(descriptor, 0, end)
        yield here
        for before, place in pairwise(places):
            there = window(descriptor, place, end)
            if here and there and writer_of(here[-1]) != writer_of(there[0]):
                yield _first_of_next(descriptor, before, place, end, writer_of(here[-1]))
            if there:
                yield there
                here = there


def window(descriptor: int, place: int, end: int) -> list[bytes]:
    """The whole lines that begin soon after a place; none where lines are longer than any window."""
    nbytes = WINDOW_NBYTES
    while True:
        data = os.pread(descriptor, min(nbytes, end - place), place)
        start = data.find(b"\n") + 1 if place else 0
        lines = data[start : data.rfind(b"\n") + 1].splitlines()
        if lines or nbytes >= min(MAX_WINDOW_NBYTES, end - place):
            return lines
        nbytes *= 8


def _first_of_next(descriptor: int, low: int, high: int, end: int, writer: bytes) -> list[bytes]:
    """The first lines, after a place whose line is of `writer`, of another one."""
    while high - low > WINDOW_NBYTES // 2:
        middle = (low + high) // 2
        lines = window(descriptor, middle, end)
        if lines and writer_of(lines[0]) != writer:
            high = middle
        else:
            low = middle
    return [line for line in window(descriptor, low, end) if writer_of(line) != writer]


def writer_of(line: bytes) -> bytes:
    """The incarnation that a line tells; empty where it tells none."""
    found = _INCARNATION.search(line)
    return found[1] if found else b""
