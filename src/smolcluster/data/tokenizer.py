"""Tokenizers: text to token ids and back.

Three kinds have one name each in the configuration: `bytes` (UTF-8, nothing to fetch), a path to the files
of a tokenizer (absolute, or beginning with a dot), and the name of one on the Hugging Face hub, which is
never taken for a path, because it may come from another machine. Which one is meant, and what its files hold,
is told without loading it: that takes seconds.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smolcluster.configs.schema import BYTES, OWN_FILES
from smolcluster.data.huggingface import hub, reason_of
from smolcluster.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[Any]
"""Token ids (n,) of an unsigned type."""

PIECE_CHARS = 64 * 1024
LONGEST_PIECE_CHARS = 16 * PIECE_CHARS

_SEAM = re.compile(r"(?<=\S)\n(?=\S)")
_SPACE = re.compile(r"(?<=\S) (?=\S)")
_PAIR = ("vocab.json", "merges.txt")
_FILES = frozenset(
    {
        *_PAIR,
        "added_tokens.json",
        "config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }
)
_FILE_SUFFIXES = frozenset({".model", ".tiktoken"})
_SEPARATORS = ("eos_token_id", "bos_token_id", "sep_token_id", "pad_token_id")
_SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_OFFLINE = (
    "what works offline is dataset.tokenizer=bytes (and dataset.name=stdlib as text), or a path to a folder "
    "with vocab.json and merges.txt"
)


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8; byte 0, which no text holds, stands after each document.

    Attributes:
        identity: equal for two tokenizers of which it is known that they give the same ids.
        vocab_size: ids lie in 0 … vocab_size - 1.
        end_of_text: the id that stands after each document.
    """

    identity: str = BYTES
    vocab_size: int = 256
    end_of_text: int = 0

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without any added at its ends.

        Raises:
            DataError: a text holds what the tokenizer has no id for.
        """
        if any("\0" in text for text in texts):
            raise DataError(
                "a text holds the character NUL, which separates documents with dataset.tokenizer=bytes; "
                "take it out, or choose another tokenizer"
            )
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text that `ids` stand for; what is no whole character becomes U+FFFD."""
        return bytes(ids).decode(errors="replace")


@dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer of the transformers library, with the interface of `ByteTokenizer`."""

    identity: str
    vocab_size: int
    end_of_text: int
    theirs: "PreTrainedTokenizerBase" = field(repr=False)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, on all cores where the tokenizer is a fast one."""
        backend = getattr(self.theirs, "backend_tokenizer", None)
        if backend is None:
            rows = self.theirs(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        else:
            batch = backend.encode_batch_fast(list(texts), add_special_tokens=False)
            rows = (encoding.ids for encoding in batch)
        return [np.array(ids, dtype=np.uint32) for ids in rows]

    def decode(self, ids: Iterable[int]) -> str:
        text = self.theirs.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)
        return str(text)


Tokenizer = ByteTokenizer | SubwordTokenizer


def tokenizer_identity(name: str) -> str:
    """What tells the tokenizer `name` from others, without loading it.

    Returns:
        `bytes`; of a path the SHA-256 over its files' names and contents; else the name on the hub.

    Raises:
        ConfigError: a path that does not exist.
        DataError: a path that cannot be read, or without a tokenizer's files.
    """
    if name == BYTES:
        return BYTES
    path = _local(name)
    return name if path is None else _digest(name, _files(name, path))


def load_tokenizer(name: str, *, download: bool = True) -> Tokenizer:
    """Load the tokenizer that the configuration calls `name`; with `download`, fetch it if need be.

    Raises:
        ConfigError: a path that does not exist.
        DataError: there is none of that name, it is damaged or cannot be fetched, or it has no token that
            could separate documents.
    """
    if name == BYTES:
        return ByteTokenizer()
    identity, path = tokenizer_identity(name), _local(name)
    theirs = _fetch(name, download=download) if path is None else _read(name, path)
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is not None:  # a tokenizer.json may say that texts are cut short or filled up
        backend.no_truncation()
        backend.no_padding()
    vocabulary = theirs.get_vocab()
    return SubwordTokenizer(
        identity=identity,
        vocab_size=max(vocabulary.values()) + 1,
        end_of_text=_separator(name, theirs, vocabulary),
        theirs=theirs,
    )


def cut(chunks: Iterable[str]) -> Iterator[str]:
    """Join `chunks` and cut them again, into pieces of at least 64 Ki characters except for the last one.

    A piece ends behind a newline between two characters that are no white space: GPT-2's tokenizer never
    joins what stands on both sides of that, so the pieces have the tokens of the whole. Where none comes
    for long, it ends before a single space, which mostly does as well, or anywhere.
    """
    waiting: list[str] = []
    num_chars, enough = 0, 2 * PIECE_CHARS
    for chunk in chunks:
        waiting.append(chunk)
        num_chars += len(chunk)
        if num_chars >= enough:
            *pieces, rest = _pieces("".join(waiting))
            yield from pieces
            waiting, num_chars, enough = [rest], len(rest), len(rest) + 2 * PIECE_CHARS
    yield from filter(None, _pieces("".join(waiting)))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while (end := _piece_end(text, start)) is not None:
        yield text[start:end]
        start = end
    yield text[start:]


def _piece_end(text: str, start: int) -> int | None:
    """Where the piece from `start` on may end; None: more text must tell."""
    if seam := _SEAM.search(text, start + PIECE_CHARS):
        return seam.end()
    if len(text) - start <= LONGEST_PIECE_CHARS:
        return None
    space = _SPACE.search(text, start + PIECE_CHARS, start + LONGEST_PIECE_CHARS)
    return space.start() if space else start + LONGEST_PIECE_CHARS


def _local(name: str) -> Path | None:
    """The path that `name` is; None: it is a name on the hub."""
    if name == OWN_FILES:
        raise ConfigError(
            "the run's tokenizer lies in files; set dataset.tokenizer_path to where this machine has them "
            "(--override, or nodes.<name> of the cluster file), or dataset.source=server on the server"
        )
    path = _from_home(name) if name.startswith("~") else Path(name)
    return path if path.is_absolute() or name.startswith(".") else None


def _from_home(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"dataset.tokenizer is {name}, which begins with the home folder of an unknown user; {_OFFLINE}"
        ) from None


def _files(name: str, path: Path) -> list[Path]:
    """The files of the tokenizer at `path`, by name; raises as `tokenizer_identity`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"dataset.tokenizer is {name}, which does not exist; {_OFFLINE}")
    if _is_pair(path):
        return [path / file for file in sorted(_PAIR)]
    try:
        files = sorted(
            entry
            for entry in path.iterdir()
            if entry.name in _FILES or entry.suffix in _FILE_SUFFIXES
        )
    except OSError as error:
        raise _unreadable(name, error) from error
    if not files:
        raise DataError(f"tokenizer {name} is a folder without a tokenizer's files; {_OFFLINE}")
    return files


def _is_pair(path: Path) -> bool:
    """Whether a folder has the vocabulary and merges of GPT-2's kind, and nothing that says otherwise."""
    others = ("tokenizer.json", "tokenizer_config.json")
    return all((path / file).is_file() for file in _PAIR) and not any(
        (path / file).exists() for file in others
    )


def _digest(name: str, files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise _unreadable(name, error) from error
        digest.update(f"{file.name}|{content}|".encode())
    return digest.hexdigest()


def _read(name: str, path: Path) -> "PreTrainedTokenizerBase":
    import transformers  # noqa: PLC0415 - seconds to import, only for text that is tokenized anew

    try:
        if path.is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
        if _is_pair(path):
            vocabulary, merges = (str(path / file) for file in _PAIR)
            return transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
        return _automatic(str(path))
    except (
        Exception
    ) as error:  # the library has no base of its errors, and its Rust part raises Exception
        raise DataError(
            f"tokenizer {name} is damaged or of no known kind ({reason_of(error)}); {_OFFLINE}"
        ) from error


def _fetch(name: str, *, download: bool) -> "PreTrainedTokenizerBase":
    """Load a tokenizer of the hub, from the library's cache where it is there."""
    with hub(download=False):
        try:
            return _automatic(_snapshot(name, local_files_only=True))
        except Exception as error:
            missing = error
    with hub(download=download) as problem:
        if problem is not None:
            raise DataError(
                f"tokenizer {name} is no folder here, was not fetched before, and {problem}; {_OFFLINE}"
            ) from missing
        try:
            return _automatic(_snapshot(name, local_files_only=False))
        except Exception as error:
            raise DataError(
                f"tokenizer {name} is no folder here and could not be fetched from the Hugging Face hub "
                f"({reason_of(error)}); check its name; {_OFFLINE}"
            ) from error


def _snapshot(name: str, *, local_files_only: bool) -> str:
    """The folder of the library's cache with the files of `name`: `AutoTokenizer` would look for ./name."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - as in _read

    wanted = [*_FILES, *(f"*{suffix}" for suffix in _FILE_SUFFIXES)]
    return snapshot_download(name, allow_patterns=wanted, local_files_only=local_files_only)


def _automatic(folder: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer  # noqa: PLC0415 - as in _read

    theirs: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    return theirs


def _separator(name: str, theirs: "PreTrainedTokenizerBase", vocabulary: dict[str, int]) -> int:
    """The id that stands between documents."""
    own = (getattr(theirs, attribute, None) for attribute in _SEPARATORS)
    usual = (vocabulary.get(token) for token in _SEPARATOR_NAMES)
    for token_id in (*own, *usual):
        if token_id is not None:
            return int(token_id)
    raise DataError(
        f"tokenizer {name} has no token for the end of a text (eos, bos, sep or pad); "
        "name one in its tokenizer_config.json, or choose another tokenizer"
    )


def _unreadable(name: str, error: OSError) -> DataError:
    return DataError(
        f"tokenizer {name} cannot be read ({error.strerror}); mend the rights of its files"
    )
