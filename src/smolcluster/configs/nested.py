"""The nested shape of a training file, as for language models; and an algorithm's own section.

    model: {…}   training: {batch_size, epochs, grad_clip_norm, …}   lr_schedule: {…}   data: {tokenizer, …}

It says the same as the flat shape of `TrainConfig` with other words, and has other defaults: a GPT on
WikiText-2, trained by AdamW, and no clipping unless it says so. Single keys may be given in either shape.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from smolcluster.configs.keys import KeyPath
from smolcluster.configs.schema import own_keys
from smolcluster.configs.spec import algorithms
from smolcluster.errors import ConfigError, DataError
from smolcluster.utils.words import one_line

TRAINING, DATA = "training", "data"
DATASET = "dataset"
CLIP_NORM: KeyPath = ("gradient_clipping", "max_norm")
CLIP_ENABLED: KeyPath = ("gradient_clipping", "enabled")

_FLAT: Mapping[str, KeyPath] = MappingProxyType(
    {"epochs": ("num_epochs",), "grad_clip_norm": CLIP_NORM}
)
_DEFAULTS: Mapping[KeyPath, Any] = MappingProxyType(
    {
        ("model", "type"): "GPT",
        (DATASET, "name"): "wikitext",
        ("optimizer",): "adamw",
        CLIP_ENABLED: False,
    }
)

_DATASET_KEY = re.compile(rf"(?<![\w./-]){DATASET}\.(?=[a-z])")


def is_nested(content: Mapping[str, Any]) -> bool:
    return TRAINING in content or DATA in content


def flat_path(path: KeyPath) -> KeyPath:
    """What the flat shape calls a key of either shape, or of an algorithm's own section."""
    match path:
        case (str() as section, str() as name, *below) if section == TRAINING:
            return (*_FLAT.get(name, (name,)), *below)
        case (str() as section, *below) if section == DATA:
            return (DATASET, *below)
        case (str() as section, str() as name, *below) if name in own_keys(section):
            return (name, *below)
    return path


def nested_path(path: KeyPath) -> KeyPath:
    """What this shape calls a key of the flat one."""
    if path[0] == DATASET:
        return (DATA, *path[1:])
    if path[0] in ("model", "lr_schedule", "logging"):
        return path
    return (TRAINING, *{flat: (name,) for name, flat in _FLAT.items()}.get(path, path))


@contextmanager
def saying(section: str) -> Iterator[None]:
    """Let errors of the block, which know the flat keys, say `data.root` where that is this user's word."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if section == DATA:
            error.args = (_DATASET_KEY.sub(f"{DATA}.", str(error)),)
        raise


def entries(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """A key of either shape and its value; of this shape's own sections, each key in them."""
    if len(path) == 1 and path[0] in (TRAINING, DATA, *algorithms()) and isinstance(value, dict):
        yield from (((*path, name), below) for name, below in value.items())
    else:
        yield path, value


def flat_values(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """A key of either shape and its value, as keys of the flat shape. A largest norm switches clipping on."""
    flat = flat_path(path)
    if flat != CLIP_NORM or (path == flat and value is None):
        yield flat, value
        return
    yield CLIP_ENABLED, value is not None
    if value is not None:
        yield CLIP_NORM, value


def flatten(
    content: Mapping[str, Any], source: str
) -> tuple[dict[str, Any], dict[KeyPath, KeyPath]]:
    """A file as one in the flat shape, and how it calls each of its keys.

    An algorithm's own keys may stand below its name. Of the nested shape the defaults are filled in.

    Raises:
        ConfigError: a section is no mapping, or a key is set in both shapes.
    """
    flat: dict[str, Any] = {}
    words: dict[KeyPath, KeyPath] = {}
    for section, content_of_it in content.items():
        if section in (TRAINING, DATA, *algorithms()) and not isinstance(content_of_it, dict):
            raise ConfigError(one_line(f"{source}: {section} must be a mapping of keys to values"))
        for written, value in entries((section,), content_of_it):
            for path, item in flat_values(written, value):
                if other := _said_before(words, path, written):
                    here, there = ".".join(written), ".".join(other)
                    raise ConfigError(
                        one_line(f"{source}: {here} is also set as {there}; keep one of them")
                    )
                words[path] = written
                _put(flat, path, copy.deepcopy(item))
    for path, item in _DEFAULTS.items() if is_nested(content) else ():
        if path != CLIP_ENABLED or CLIP_ENABLED[0] not in flat:
            _put(flat, path, item, only_if_missing=True)
    return flat, words


def _said_before(
    words: Mapping[KeyPath, KeyPath], path: KeyPath, written: KeyPath
) -> KeyPath | None:
    """What else says the same as a key, or something of what it says."""
    for known, other in words.items():
        length = min(len(known), len(path))
        if other != written and known[:length] == path[:length]:
            return other
    return None


def _put(values: Any, path: KeyPath, item: Any, *, only_if_missing: bool = False) -> None:
    *above, last = path
    for name in above:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            return  # the schema will say that a mapping must stand here
    if not (only_if_missing and last in values):
        values[last] = item
