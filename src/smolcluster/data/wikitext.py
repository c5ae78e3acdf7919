"""Text from the datasets of the Hugging Face hub, through the library `datasets`, or from copies of them.

WikiText-2 (Merity et al., 2016, arXiv 1609.07843) and SNLI (Bowman et al., 2015, arXiv 1508.05326) have names
of their own; any other is given by its repository and columns.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data.corpus import identity_of, list_files
from smolcluster.data.dataset import Dataset
from smolcluster.data.huggingface import hub, reason_of
from smolcluster.data.token_cache import ROLES, Documents, TextSource
from smolcluster.data.tokens import load_text
from smolcluster.errors import ConfigError, DataError

READING = 1
"""Number of the rules in this module by which rows become text; another number makes other cache keys."""

_OFFLINE = "what works offline is dataset.name=stdlib dataset.tokenizer=bytes"
_PAIRS = (
    ("wiki.train.raw", "wiki.valid.raw"),
    ("wiki.train.tokens", "wiki.valid.tokens"),
    ("train.txt", "validation.txt"),
)
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class _Wanted:
    """What is read of which dataset.

    Attributes:
        repository: its name on the hub; None: it is only looked for in a folder.
        columns: those whose texts, one a line, are a row's.
        splits: the names of the training and the validation split.
        is_running: all rows of a split are one document; else each row is one.
    """

    name: str
    repository: str | None
    configuration: str | None
    columns: tuple[str, ...]
    splits: tuple[str, str] = ("train", "validation")
    is_running: bool = False


def load_wikitext(config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
    """Load WikiText-2 in its raw form; each split is one document. As `load_huggingface`."""
    wanted = _Wanted(
        "wikitext", "Salesforce/wikitext", "wikitext-2-raw-v1", ("text",), is_running=True
    )
    return _load(wanted, config, length, log)


def load_snli(config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
    """Load SNLI; a document is a premise, and its hypothesis on the next line. As `load_huggingface`."""
    return _load(
        _Wanted("snli", "stanfordnlp/snli", None, ("premise", "hypothesis")), config, length, log
    )


def load_huggingface(config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
    """Load a dataset of the hub, or what `datasets` reads in the folder `config.root`; a row is a document.

    Raises:
        ConfigError: no dataset is named, or its folder does not exist.
        DataError: it is not there and cannot be fetched, lacks a column or split, or cannot be tokenized.
    """
    if config.repository is None and config.root is None:
        raise ConfigError(
            "dataset.name is huggingface, but dataset.repository is null; set it to a name such as "
            "Salesforce/wikitext, or dataset.root to a folder"
        )
    wanted = _Wanted(
        "huggingface",
        config.repository,
        config.configuration,
        config.columns,
        (config.train_split, config.validation_split),
    )
    return _load(wanted, config, length, log)


def _load(wanted: _Wanted, config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
    if config.root is None:
        place, read = wanted.repository, partial(_from_hub, wanted, config.download, log)
    else:
        folder = _folder(config.root.expanduser().absolute(), wanted)
        place, read = identity_of(list_files(folder)), partial(_from_folder, wanted, folder)
    how = [wanted.configuration, wanted.columns, wanted.splits, wanted.is_running]
    identity = json.dumps(["huggingface", READING, place, how])
    return load_text(
        config, TextSource(wanted.name, identity, partial(_documents, wanted, read)), length, log
    )


def _folder(root: Path, wanted: _Wanted) -> Path:
    """The folder that is read: in a copy of a repository, that of the configuration."""
    if not root.is_dir():
        raise ConfigError(
            f"dataset.root is {root}, which is no folder; set it to the one with the files of {wanted.name}"
        )
    inner = root / wanted.configuration if wanted.configuration else root
    return inner if inner.is_dir() else root


def _documents(wanted: _Wanted, read: Callable[[], Documents]) -> Documents:
    """Each document of what `read` gives: the rows of both splits."""
    for role, rows in read():
        if wanted.is_running:
            yield role, rows
        else:
            yield from ((role, (row,)) for row in rows)


def _from_hub(wanted: _Wanted, download: bool, log: logging.Logger) -> Documents:
    """Give both splits' rows, from the hub or from the library's cache."""
    import datasets  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds to import

    _be_quiet()
    log.info("fetching %s, or what was fetched of it before", wanted.repository)
    settings = datasets.DownloadConfig(max_retries=1, disable_tqdm=True)
    with hub(download=download) as problem:
        settings.local_files_only = problem is not None
        try:
            found = datasets.load_dataset(
                _not_a_path(wanted.repository), wanted.configuration, download_config=settings
            )
        except Exception as error:  # the library has no base of its errors
            tried = problem or reason_of(error)
            raise DataError(
                f"dataset {wanted.repository} was not fetched before and cannot be now ({tried}); put its "
                f"files into a folder and set dataset.root to that; {_OFFLINE}"
            ) from error
    yield from _both(wanted, str(wanted.repository), found)


def _not_a_path(repository: str | None) -> str | None:
    """The name, which may come from another machine; `datasets` would look for ./name first."""
    if Path(str(repository)).exists():
        raise FileExistsError("it is no dataset of the hub")
    return repository


def _from_folder(wanted: _Wanted, folder: Path) -> Documents:
    """Give both splits' rows, from plain text or from what `datasets` reads."""
    for names in _PAIRS:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            yield from zip(ROLES, (_lines(path, wanted) for path in paths), strict=True)
            return
    import datasets  # noqa: PLC0415 - as in _from_hub

    _be_quiet()
    with hub(download=False):
        try:
            known = datasets.get_dataset_config_names(str(folder))
            name = wanted.configuration if wanted.configuration in known else None
            found = datasets.load_dataset(str(folder), name, streaming=True)
        except Exception as error:  # as in _from_hub
            raise DataError(
                f"{folder} holds no dataset that can be read ({reason_of(error)}); put {_pairs()} there, or "
                "parquet or jsonl files with the split in their names"
            ) from error
        yield from _both(wanted, str(folder), found)


def _pairs() -> str:
    return ", or ".join(" and ".join(names) for names in _PAIRS)


def _both(wanted: _Wanted, place: str, found: Any) -> Documents:
    missing = next((name for name in wanted.splits if name not in found), None)
    if missing is not None:
        raise DataError(
            f"dataset {place} has no split {missing!r}, it has {', '.join(found)}; set dataset.train_split "
            "and dataset.validation_split"
        )
    yield from zip(
        ROLES, (_rows(wanted, place, found[split]) for split in wanted.splits), strict=True
    )


def _rows(wanted: _Wanted, place: str, split: Any) -> Iterator[str]:
    """The text of each row; a missing value is no text."""
    known = split.column_names or list(next(iter(split), {}))
    missing = next((name for name in wanted.columns if name not in known), None)
    if missing is not None:
        raise DataError(
            f"dataset {place} has no column {missing!r}, it has {', '.join(known)}; set dataset.columns"
        )
    try:
        for batch in split.select_columns(list(wanted.columns)).iter(batch_size=_ROWS_AT_ONCE):
            for name in wanted.columns:
                _check_texts(name, place, batch[name])
            for values in zip(*(batch[name] for name in wanted.columns), strict=True):
                yield "\n".join(filter(None, values))
    except DataError:
        raise
    except Exception as error:  # as in _from_hub
        raise DataError(f"dataset {place} cannot be read ({reason_of(error)})") from error


def _check_texts(name: str, place: str, values: list[Any]) -> None:
    wrong = next((value for value in values if not isinstance(value, str | None)), None)
    if wrong is not None:
        raise DataError(
            f"column {name!r} of dataset {place} holds {type(wrong).__name__}, not text; set "
            "dataset.columns to columns of text"
        )


def _lines(path: Path, wanted: _Wanted) -> Iterator[str]:
    """The lines of a text file as rows: with their ends where they make one document together.

    Lines of white space are left out, as in the hub's own copy of WikiText.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                if line.strip():
                    yield line if wanted.is_running else line.rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({reason_of(error)}); fetch it again") from error


def _be_quiet() -> None:
    import datasets  # noqa: PLC0415 - as in _from_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
