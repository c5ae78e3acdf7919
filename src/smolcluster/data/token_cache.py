"""Tokenized text on disk: made once, then mapped into memory.

    <cache>/<key>/train.bin, validation.bin     token ids, one after the other, little-endian
                  meta.json                     what they are, and their checksums
    <cache>/<key>.lock                          held by the process that makes them

The key tells the tokenizer, the data and the way it is split, none of which takes reading a text. A folder is
made beside its place, as `<key>.building`, and renamed when it is whole. The system lets go of a lock when
its holder ends, however that happens: what a dead process left behind is cleared away by the next one.
"""

import hashlib
import itertools
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from smolcluster.data.huggingface import reason_of
from smolcluster.data.tokenizer import Tokenizer, cut
from smolcluster.errors import DataError
from smolcluster.runs.model_file import Strict
from smolcluster.utils.folders import user_cache
from smolcluster.utils.locks import held
from smolcluster.utils.units import format_bytes, format_duration

FORMAT: Final = 1
META_FILE = "meta.json"
BATCH_CHARS = 1024 * 1024
"""Text that is encoded at once: with some 40 bytes for each of its bytes this bounds the memory taken."""

Role = Literal["train", "validation"]
ROLES: tuple[Role, ...] = ("train", "validation")
Documents = Iterator[tuple[Role, Iterable[str]]]
"""Each document's split, and its text in chunks."""
Stream = NDArray[Any]
"""Token ids (num_tokens,) of one split."""

_MAX_META_NBYTES = 64 * 1024
_SMALL_VOCABULARY = 2**16


@dataclass(frozen=True)
class TextSource:
    """Text to be tokenized.

    Attributes:
        name: the dataset's registered name.
        identity: equal for equal text with equal splits; a path, size and time stand for a file's content.
        read: gives each document's split and its text in chunks. A document's chunks must be used up before
            the next one is asked for. Raises DataError.
        num_bytes: bytes of text in all, where that is known beforehand.
    """

    name: str
    identity: str
    read: Callable[[], Documents]
    num_bytes: int | None = None


class SplitMeta(Strict):
    """One split's file."""

    num_tokens: PositiveInt
    num_documents: PositiveInt
    text_bytes: NonNegativeInt = Field(description="Length of the text in UTF-8.")
    xxh3: str = Field(description="XXH3-128 of the file, in hex.")


class Meta(Strict):
    """What a folder of the cache holds."""

    format: Literal[1]
    dtype: Literal["uint16", "uint32"]
    vocab_size: PositiveInt
    content: str = Field(
        description="SHA-256 of the tokenizer's identity and both splits' ids, in hex."
    )
    train: SplitMeta
    validation: SplitMeta

    def split(self, role: Role) -> SplitMeta:
        return self.train if role == "train" else self.validation


@dataclass(frozen=True)
class Tokens:
    """Both splits of a text as token ids, mapped from files; `content` and `vocab_size` as in `Meta`."""

    train: Stream
    validation: Stream
    vocab_size: int
    content: str


class _Damaged(DataError):
    """A folder of the cache is not what its meta.json says."""


def cache_key(source: TextSource, tokenizer_identity: str) -> str:
    """The name of the folder that holds `source` as ids of a tokenizer."""
    parts = json.dumps([FORMAT, tokenizer_identity, source.identity])
    return hashlib.sha256(parts.encode()).hexdigest()


def open_tokens(
    source: TextSource,
    tokenizer_identity: str,
    load_tokenizer: Callable[[], Tokenizer],
    cache: Path | None,
    log: logging.Logger,
) -> Tokens:
    """Open `source` as token ids; make them first where they are missing or damaged.

    Of several processes that need the same ids one makes them, and the others wait for it.

    `load_tokenizer` is called only when there is something to encode, and gives one of that identity.

    Raises:
        DataError: the text cannot be read or encoded, a split is empty, or the cache cannot be written.
    """
    place = user_cache() / "tokens" if cache is None else cache.expanduser().absolute()
    folder = place / cache_key(source, tokenizer_identity)

    def waiting(holder: str) -> None:
        log.info("waiting for %s, which tokenizes %s", holder, source.name)

    with _storing(place):
        try:
            return _open(folder)
        except (_Damaged, FileNotFoundError):
            place.mkdir(parents=True, exist_ok=True)
        with held(folder.with_suffix(".lock"), waiting):
            try:
                return _open(folder)
            except FileNotFoundError:
                pass
            except _Damaged as damage:
                log.warning("%s; making the tokens anew", damage)
            _build(folder, source, load_tokenizer(), log)
            return _open(folder)


def _open(folder: Path) -> Tokens:
    """Map the files of a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        _Damaged: it is not whole.
    """
    folder.stat()
    try:
        with (folder / META_FILE).open("rb") as file:
            meta = Meta.model_validate_json(file.read(_MAX_META_NBYTES))
        train, validation = (
            _map(folder / f"{role}.bin", meta.split(role), np.dtype(meta.dtype)) for role in ROLES
        )
    except ValidationError as error:
        raise _Damaged(f"{folder / META_FILE} is damaged") from error
    except OSError as error:
        raise _Damaged(f"tokens in {folder} cannot be read ({reason_of(error)})") from error
    return Tokens(train, validation, meta.vocab_size, meta.content)


def _map(path: Path, meta: SplitMeta, dtype: np.dtype[Any]) -> Stream:
    expected, found = meta.num_tokens * dtype.itemsize, path.stat().st_size
    if found != expected:
        raise _Damaged(f"{path} is damaged: it has {found} bytes, not {expected}")
    stream = np.memmap(path, dtype=dtype.newbyteorder("<"), mode="r")
    if xxhash.xxh3_128_hexdigest(stream.data) != meta.xxh3:
        raise _Damaged(f"{path} is damaged: its checksum is not the one in {META_FILE}")
    return stream


@contextmanager
def _storing(place: Path) -> Iterator[None]:
    """Translate what the system says of the cache's folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"tokens cannot be stored in {place} ({reason_of(error)}); free some space or mend the "
            "folder's rights, or set dataset.cache to another folder"
        ) from error


def _build(folder: Path, source: TextSource, tokenizer: Tokenizer, log: logging.Logger) -> None:
    """Make `folder` anew, in the place of what may be there; for the holder of its lock."""
    scratch = folder.with_suffix(".building")
    _clear(scratch)
    scratch.mkdir()
    size = "" if source.num_bytes is None else f", {format_bytes(source.num_bytes)}"
    try:
        documents = _begun(source.read())  # what comes from afar is fetched by this
        log.info("tokenizing %s%s, into %s", source.name, size, folder.parent)
        start = time.monotonic()
        meta = _write(scratch, source, documents, tokenizer)
        (scratch / META_FILE).write_text(meta.model_dump_json(indent=1) + "\n")
        _clear(folder)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    splits = [meta.split(role) for role in ROLES]
    log.info(
        "tokenized %s: %d documents, %s, %d tokens, in %s",
        source.name,
        sum(split.num_documents for split in splits),
        format_bytes(sum(split.text_bytes for split in splits)),
        sum(split.num_tokens for split in splits),
        format_duration(time.monotonic() - start),
    )


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _begun(documents: Documents) -> Documents:
    """The same documents, the first of which is there."""
    first = next(documents, None)
    return documents if first is None else itertools.chain((first,), documents)


def _write(scratch: Path, source: TextSource, documents: Documents, tokenizer: Tokenizer) -> Meta:
    is_small = tokenizer.vocab_size <= _SMALL_VOCABULARY
    dtype: Literal["uint16", "uint32"] = "uint16" if is_small else "uint32"
    with (
        _progress(source) as advance,
        ExitStack() as stack,
    ):
        writers = {
            role: stack.enter_context(
                closing(_SplitWriter(scratch / f"{role}.bin", tokenizer, dtype, advance))
            )
            for role in ROLES
        }
        for role, chunks in documents:
            writers[role].add(chunks)
        for role, writer in writers.items():
            writer.flush()
            if not writer.num_tokens:
                raise DataError(f"dataset {source.name} has no text for its {role} split; add some")
        hashes = [writer.sha256.hexdigest() for writer in writers.values()]
        content = "|".join([tokenizer.identity, dtype, *hashes])
        return Meta(
            format=FORMAT,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            content=hashlib.sha256(content.encode()).hexdigest(),
            train=writers["train"].meta(),
            validation=writers["validation"].meta(),
        )


class _SplitWriter:
    """Encodes the documents of one split into a file, piece by piece."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, dtype: str, advance: Callable[[int], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._advance = advance
        self._file = path.open("xb", buffering=0)
        self.sha256, self._xxh3 = hashlib.sha256(), xxhash.xxh3_128()
        self._waiting: list[str | None] = []
        self._waiting_chars = 0
        self.num_tokens = self.num_documents = self.text_bytes = 0

    def close(self) -> None:
        self._file.close()

    def add(self, chunks: Iterable[str]) -> None:
        """Add a document; one without any text is none."""
        is_empty = True
        for piece in cut(chunks):
            is_empty = False
            self._waiting.append(piece)
            self._waiting_chars += len(piece)
            if self._waiting_chars >= BATCH_CHARS:
                self.flush()
        if not is_empty:
            self._waiting.append(None)
            self.num_documents += 1

    def flush(self) -> None:
        """Encode and write what waits; None in it is the end of a document."""
        pieces = [piece for piece in self._waiting if piece is not None]
        encoded = iter(self._tokenizer.encode_batch(pieces) if pieces else ())
        end = np.array([self._tokenizer.end_of_text])
        parts = [end if piece is None else next(encoded) for piece in self._waiting]
        self._waiting, self._waiting_chars = [], 0
        if parts:
            self._append(np.concatenate(parts).astype(self._dtype))
        num_bytes = sum(len(piece.encode()) for piece in pieces)
        self.text_bytes += num_bytes
        self._advance(num_bytes)

    def meta(self) -> SplitMeta:
        return SplitMeta(
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            text_bytes=self.text_bytes,
            xxh3=self._xxh3.hexdigest(),
        )

    def _append(self, ids: Stream) -> None:
        self.num_tokens += len(ids)
        data = memoryview(ids.tobytes())
        self.sha256.update(data)
        self._xxh3.update(data)
        while data:
            data = data[self._file.write(data) :]


@contextmanager
def _progress(source: TextSource) -> Iterator[Callable[[int], None]]:
    """Show how far the text is encoded while the block lasts, where somebody looks at a terminal.

    Yields:
        To be called with the number of bytes that were encoded since.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console, unseen = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=unseen) as progress:
        task = progress.add_task(f"tokenizing {source.name}", total=source.num_bytes)
        yield partial(progress.advance, task)
