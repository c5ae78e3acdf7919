"""Text from files: one that is given, all below a folder, or Python's own standard library.

Each file is a document. Of few documents the last tenth of the text is held out; of many, some whole ones,
which depends on nothing but their names and sizes.
"""

import codecs
import hashlib
import json
import logging
import mmap
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.dataset import Dataset
from smolcluster.data.huggingface import reason_of
from smolcluster.data.token_cache import Documents, Role, TextSource
from smolcluster.data.tokens import load_text
from smolcluster.errors import ConfigError, DataError
from smolcluster.utils.units import format_bytes

MANY_DOCUMENTS = 20
VALIDATION_SHARE_OF_MANY = 0.05
VALIDATION_SHARE_OF_FEW = 0.1
STDLIB_NBYTES = 4_200_000
STDLIB_VALIDATION_NBYTES = 200_000
STDLIB_LEAST_NBYTES = 1_000_000
SPLITTING = 1
"""Number of the rules in this module by which text is split; another number makes other keys of the cache."""

_BLOCK_NBYTES = 256 * 1024


@dataclass(frozen=True)
class CorpusFile:
    """A file: its name below the corpus's folder, with slashes, and what the system says of it."""

    path: Path
    name: str
    num_bytes: int
    mtime_ns: int


def load_corpus(config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
    """Load the text in the file `config.root`, or in all files below that folder.

    Hidden files and those that are no UTF-8 text are left out of a folder. `length`: tokens a sample.

    Raises:
        ConfigError: no file or folder is given, or it does not exist.
        DataError: there is no text, or it cannot be read or tokenized.
    """
    if config.root is None:
        raise ConfigError(
            "dataset.name is text, but dataset.root is null; set dataset.root to a text file, or to a folder "
            "of them"
        )
    root = config.root.expanduser().absolute()
    entries = list_files(root)
    source = TextSource(
        name="text",
        identity=json.dumps(["text", SPLITTING, identity_of(entries)]),
        read=partial(_read, root, entries, log),
        num_bytes=_num_bytes(entries),
    )
    return load_text(config, source, length, log)


def load_stdlib(config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
    """Load the source of top-level modules of this interpreter's standard library.

    At most `STDLIB_NBYTES` of them, drawn by their names: what a small GPT on two cores reads in minutes.

    Raises:
        DataError: this interpreter came without its source, or it cannot be tokenized.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    entries = stdlib_files(folder)
    if (found := _num_bytes(entries)) < STDLIB_LEAST_NBYTES:
        raise DataError(
            f"the source of Python's standard library in {folder} has {format_bytes(found)} in "
            f"{len(entries)} files, which is not the whole: choose dataset.name=text with dataset.root, or a "
            "complete Python"
        )
    drawn = draw(entries, STDLIB_NBYTES)
    entries = [entry for entry in entries if entry.name in drawn]
    sizes = [(entry.name, entry.num_bytes) for entry in entries]
    source = TextSource(
        name="stdlib",
        identity=json.dumps(["stdlib", SPLITTING, platform.python_version(), sizes]),
        read=partial(_read, folder, entries, log, STDLIB_VALIDATION_NBYTES),
        num_bytes=_num_bytes(entries),
    )
    return load_text(config, source, length, log)


def _num_bytes(entries: Iterable[CorpusFile]) -> int:
    return sum(entry.num_bytes for entry in entries)


def stdlib_files(folder: Path) -> list[CorpusFile]:
    """The modules of the standard library that are one file each, without those made for one machine."""
    return [
        entry
        for path in sorted(folder.glob("*.py"))
        if path.stem in sys.stdlib_module_names and (entry := _entry(path, path.name)).num_bytes
    ]


def list_files(root: Path) -> list[CorpusFile]:
    """The file `root`, or all files below that folder but hidden and empty ones, sorted by name.

    Raises:
        ConfigError: `root` does not exist.
        DataError: it holds nothing of the kind, or cannot be looked at.
    """
    if not root.exists():
        raise ConfigError(
            f"dataset.root is {root}, which does not exist; set it to a text file or a folder of them"
        )
    if not root.is_dir():
        entries = [_entry(root, root.name)]
    else:
        paths = [(path, path.relative_to(root).as_posix()) for path in _walk(root)]
        entries = [_entry(path, name) for path, name in sorted(paths, key=lambda pair: pair[1])]
    entries = [entry for entry in entries if entry.num_bytes]
    if not entries:
        raise DataError(f"dataset.root is {root}, which is empty; put text there, or set another")
    return entries


def identity_of(entries: Iterable[CorpusFile]) -> str:
    """SHA-256 over the names, sizes and times of files, in hex: reading none of them."""
    parts = [(entry.name, entry.num_bytes, entry.mtime_ns) for entry in entries]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def draw(entries: Iterable[CorpusFile], limit: float) -> frozenset[str]:
    """Draw documents by the hash of their names, as long as they hold no more than `limit` bytes together."""
    drawn, total = set(), 0
    for entry in sorted(entries, key=_place_of):
        if total + entry.num_bytes <= limit:
            drawn.add(entry.name)
            total += entry.num_bytes
    return frozenset(drawn)


def _place_of(entry: CorpusFile) -> str:
    return hashlib.sha256(os.fsencode(entry.name)).hexdigest()


def _walk(root: Path) -> Iterator[Path]:
    """All files below `root` that are not hidden, in any order."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths = (Path(folder) / name for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _entry(path: Path, name: str) -> CorpusFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return CorpusFile(path, name, status.st_size, status.st_mtime_ns)


def _read(
    root: Path, entries: list[CorpusFile], log: logging.Logger, most_held_out: float = float("inf")
) -> Documents:
    """Give each document's split and text; binary files are left out."""
    texts = [entry for entry in entries if _is_text(entry.path)]
    if not texts:
        what = "no text" if root.is_dir() else "not a text file"
        raise DataError(f"dataset.root is {root}, which is {what} in UTF-8; set it to some that is")
    if left_out := len(entries) - len(texts):
        log.info("%d files below %s are no UTF-8 text and are left out", left_out, root)
    total = _num_bytes(texts)
    if len(texts) < MANY_DOCUMENTS:
        yield from _split_few(texts, total)
        return
    drawn = draw(texts, min(VALIDATION_SHARE_OF_MANY * total, most_held_out))
    for entry in texts:
        role: Role = "validation" if entry.name in drawn else "train"
        yield role, _decoded(entry.path, 0, entry.num_bytes)


def _split_few(texts: list[CorpusFile], total: int) -> Documents:
    """Hold the last tenth out, which begins behind a line's end where the file has one."""
    place = total - int(VALIDATION_SHARE_OF_FEW * total)
    for entry in texts:
        size = entry.num_bytes
        border = _border(entry.path, place) if 0 < place < size else max(0, min(place, size))
        if border > 0:
            yield "train", _decoded(entry.path, 0, border)
        if border < size:
            yield "validation", _decoded(entry.path, border, size)
        place -= size


def _border(path: Path, place: int) -> int:
    """Where a file is cut in two: where a line begins, at `place` or soon after it; else before it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            behind = text.find(b"\n", place - 1) + 1
            if 0 < behind < len(text):
                return behind
            before = text.rfind(b"\n", 0, place) + 1
            if before:
                return before
            while text[place] & 0xC0 == 0x80:  # within a character
                place -= 1
            return place
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _is_text(path: Path) -> bool:
    """Whether a file is UTF-8 without a NUL in it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_NBYTES):
                if b"\0" in block:
                    return False
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _decoded(path: Path, start: int, stop: int) -> Iterator[str]:
    """The text of some bytes in blocks, as it is but for a byte order mark at the file's beginning."""
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
    left = stop - start
    try:
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(min(_BLOCK_NBYTES, left)):
                left -= len(block)
                yield decoder.decode(block)
        yield decoder.decode(b"", final=True)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read ({reason_of(error)}); mend its rights, or take it out of dataset.root"
    )
