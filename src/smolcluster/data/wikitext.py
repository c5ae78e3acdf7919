"""Text from the datasets of the Hugging Face hub, through the library `datasets`, or from copies of them.

WikiText-2 (Merity et al., 2016, arXiv 1609.07843) and SNLI (Bowman et al., 2015, arXiv 1508.05326) have names
of their own; any other is given by its repository and columns.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
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


_KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "wikitext": {
            "repository": "Salesforce/wikitext",
            "configuration": "wikitext-2-raw-v1",
            "columns": ("text",),
        },
        "snli": {
            "repository": "stanfordnlp/snli",
            "configuration": None,
            "columns": ("premise", "hypothesis"),
        },
    }
)
"""What the datasets with names of their own are on the hub."""


def load_huggingface(config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
    """Load a dataset of the hub, or what `datasets` reads in the folder `config.root`.

    The texts of the wanted columns, one a line, are a row's. A row is a document: of SNLI a premise, and its
    hypothesis on the next line. Of WikiText-2, in its raw form, each split is one document.

    Raises:
        ConfigError: no dataset is named, or its folder does not exist.
        DataError: it is not there and cannot be fetched, lacks a column or split, or cannot be tokenized.
    """
    if known := _KNOWN.get(config.name):
        splits = {"train_split": "train", "validation_split": "validation"}
        config = config.model_copy(update={**known, **splits})
    if config.root is not None:
        folder = _folder(config.root.expanduser().absolute(), config)
        place, read = identity_of(list_files(folder)), partial(_from_folder, config, folder)
    elif config.repository is not None:
        place, read = config.repository, partial(_from_hub, config, config.repository, log)
    else:
        raise ConfigError(
            "dataset.name is huggingface, but dataset.repository is null; set it to a name such as "
            "Salesforce/wikitext, or dataset.root to a folder"
        )
    how = [config.configuration, config.columns, _splits(config), _is_running(config)]
    identity = json.dumps(["huggingface", READING, place, how])
    source = TextSource(config.name, identity, partial(_documents, config, read))
    return load_text(config, source, length, log)


def _splits(config: DatasetConfig) -> tuple[str, str]:
    """The names of the training and the validation split."""
    return config.train_split, config.validation_split


def _is_running(config: DatasetConfig) -> bool:
    """Whether all rows of a split are one document; else each row is one."""
    return config.name == "wikitext"


def _folder(root: Path, config: DatasetConfig) -> Path:
    """The folder that is read: in a copy of a repository, that of the configuration."""
    if not root.is_dir():
        raise ConfigError(
            f"dataset.root is {root}, which is no folder; set it to the one with the files of {config.name}"
        )
    inner = root / config.configuration if config.configuration else root
    return inner if inner.is_dir() else root


def _documents(config: DatasetConfig, read: Callable[[], Documents]) -> Documents:
    """Each document of what `read` gives: the rows of both splits."""
    for role, rows in read():
        if _is_running(config):
            yield role, rows
        else:
            yield from ((role, (row,)) for row in rows)


def _from_hub(config: DatasetConfig, repository: str, log: logging.Logger) -> Documents:
    """Give both splits' rows, from the hub or from the library's cache."""
    import datasets  # type: ignore[import-untyped]  # noqa: PLC0415 - seconds to import

    _be_quiet()
    log.info("fetching %s, or what was fetched of it before", repository)
    settings = datasets.DownloadConfig(max_retries=1, disable_tqdm=True)
    with hub(download=config.download) as problem:
        settings.local_files_only = problem is not None
        try:
            found = datasets.load_dataset(
                _not_a_path(repository), config.configuration, download_config=settings
            )
        except Exception as error:  # the library has no base of its errors
            tried = problem or reason_of(error)
            raise DataError(
                f"dataset {repository} was not fetched before and cannot be now ({tried}); put its "
                f"files into a folder and set dataset.root to that; {_OFFLINE}"
            ) from error
    yield from _both(config, repository, found)


def _not_a_path(repository: str) -> str:
    """The name, which may come from another machine; `datasets` would look for ./name first."""
    if Path(repository).exists():
        raise FileExistsError("it is no dataset of the hub")
    return repository


def _from_folder(config: DatasetConfig, folder: Path) -> Documents:
    """Give both splits' rows, from plain text or from what `datasets` reads."""
    for names in _PAIRS:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            yield from zip(ROLES, (_lines(path, config) for path in paths), strict=True)
            return
    import datasets  # noqa: PLC0415 - as in _from_hub

    _be_quiet()
    with hub(download=False):
        try:
            known = datasets.get_dataset_config_names(str(folder))
            name = config.configuration if config.configuration in known else None
            found = datasets.load_dataset(str(folder), name, streaming=True)
        except Exception as error:  # as in _from_hub
            raise DataError(
                f"{folder} holds no dataset that can be read ({reason_of(error)}); put {_pairs()} there, or "
                "parquet or jsonl files with the split in their names"
            ) from error
        yield from _both(config, str(folder), found)


def _pairs() -> str:
    return ", or ".join(" and ".join(names) for names in _PAIRS)


def _both(config: DatasetConfig, place: str, found: Any) -> Documents:
    missing = next((name for name in _splits(config) if name not in found), None)
    if missing is not None:
        raise DataError(
            f"dataset {place} has no split {missing!r}, it has {', '.join(found)}; set dataset.train_split "
            "and dataset.validation_split"
        )
    yield from zip(
        ROLES, (_rows(config, place, found[split]) for split in _splits(config)), strict=True
    )


def _rows(config: DatasetConfig, place: str, split: Any) -> Iterator[str]:
    """The text of each row; a missing value is no text."""
    known = split.column_names or list(next(iter(split), {}))
    missing = next((name for name in config.columns if name not in known), None)
    if missing is not None:
        raise DataError(
            f"dataset {place} has no column {missing!r}, it has {', '.join(known)}; set dataset.columns"
        )
    try:
        for batch in split.select_columns(list(config.columns)).iter(batch_size=_ROWS_AT_ONCE):
            for name in config.columns:
                _check_texts(name, place, batch[name])
            for values in zip(*(batch[name] for name in config.columns), strict=True):
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


def _lines(path: Path, config: DatasetConfig) -> Iterator[str]:
    """The lines of a text file as rows: with their ends where they make one document together.

    Lines of white space are left out, as in the hub's own copy of WikiText.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                if line.strip():
                    yield line if _is_running(config) else line.rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({reason_of(error)}); fetch it again") from error


def _be_quiet() -> None:
    import datasets  # noqa: PLC0415 - as in _from_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
