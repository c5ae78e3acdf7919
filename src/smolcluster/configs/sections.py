"""The sections of a configuration: where each key may stand, and what else it may be called there.

A training file may also have a nested shape, as for language models:

    model: {…}   training: {batch_size, epochs, grad_clip_norm, …}   lr_schedule: {…}   data: {tokenizer, …}

It says the same as the flat shape of `TrainConfig` with other words, and has other defaults: a GPT on
WikiText-2, trained by AdamW, and no clipping unless it says so. Single keys may be given in either shape.
An algorithm's own keys may stand below its name.
"""

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from smolcluster.configs.keys import KeyPath, KeySchema, find_shape, fixed_paths, shape_of
from smolcluster.configs.old_keys import TOP_LEVEL, read_old_keys
from smolcluster.configs.problems import Place, SettingError, UnknownKey
from smolcluster.configs.schema import (
    NodeConfig,
    Section,
    cluster_section,
    own_keys,
    own_old_keys,
    train_section,
)
from smolcluster.configs.spec import algorithms
from smolcluster.utils.words import nearest

TRAINING, DATA, DATASET = "training", "data", "dataset"
CLIP_NORM: KeyPath = ("gradient_clipping", "max_norm")
CLIP_ENABLED: KeyPath = ("gradient_clipping", "enabled")
A_SECTION = "a mapping of keys to values"
CLOSE = 0.75
"""How alike an unknown key and one that stands elsewhere must be, of 1."""
Told = dict[KeyPath, tuple[KeyPath, str]]
"""What each key of the flat shape is called where it was set, and the file, flag or variable that set it."""

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


def is_nested(content: Mapping[str, Any]) -> bool:
    return TRAINING in content or DATA in content


def is_other_section(name: str) -> bool:
    """Whether keys of that section stand elsewhere in the flat shape."""
    return name in (TRAINING, DATA, *algorithms())


def flat_path(path: KeyPath) -> KeyPath:
    """What the flat shape calls a key of either shape, or of an algorithm's own section."""
    match path:
        case (str() as section, str() as name, *below) if section == TRAINING:
            return (*_FLAT.get(name, (name,)), *below)
        case (str() as section, *below) if section == DATA:
            return (DATASET, *below)
        case (str() as section, str() as name, *below) if name in own_keys(section) | own_old_keys(
            section
        ):
            return (name, *below)
    return path


def nested_path(path: KeyPath) -> KeyPath:
    """What the nested shape calls a key of the flat one."""
    if path[0] == DATASET:
        return (DATA, *path[1:])
    if path[0] in ("model", "lr_schedule", "logging"):
        return path
    return (TRAINING, *{flat: (name,) for name, flat in _FLAT.items()}.get(path, path))


def flat_values(written: KeyPath, value: Any) -> Iterator[tuple[KeyPath, KeyPath, Any]]:
    """A key of either shape and its value, as keys of the flat shape.

    Yields the flat path, the path as it was written, and the value. Of the data, and of a section that stands
    elsewhere in the flat shape, each key comes by itself. A largest norm switches clipping on.
    """
    by_key = is_other_section(written[0]) or (value and written[0] == DATASET)
    if len(written) == 1 and by_key and isinstance(value, dict):
        for name, below in value.items():
            yield from flat_values((*written, name), below)
        return
    flat = flat_path(written)
    if flat != CLIP_NORM or (written == flat and value is None):
        yield flat, written, value
        return
    yield CLIP_ENABLED, written, value is not None
    if value is not None:
        yield CLIP_NORM, written, value


def flatten(
    content: Mapping[str, Any], source: str, *, of_training: bool = True
) -> tuple[dict[str, Any], Told]:
    """A file as one in the flat shape, and what it calls each of its keys.

    Of a training file in the nested shape the defaults are filled in; keys of earlier versions are replaced.

    Raises:
        SettingError: a section is no mapping, a key is unknown or set in both shapes, or an old key is wrong.
    """
    flat: dict[str, Any] = {}
    told: Told = {}
    for section, values in content.items():
        if is_other_section(section) and not isinstance(values, dict):
            raise SettingError((section,), values, allowed=A_SECTION, source=source)
        for path, written, item in flat_values((section,), values):
            if is_other_section(path[0]):
                locate(path, source, written)
            if other := _said_before(told, path, written):
                also = f"and also set as {'.'.join(other)}; keep one of them"
                raise SettingError(written, item, also, source=source)
            told[path] = (written, source)
            _put(flat, path, copy.deepcopy(item))
    for path, item in _DEFAULTS.items() if of_training and is_nested(content) else ():
        if path != CLIP_ENABLED or CLIP_ENABLED[0] not in flat:
            _put(flat, path, item, only_if_missing=True)
    read_old_keys(flat, source)
    return flat, told


def _said_before(told: Told, path: KeyPath, written: KeyPath) -> KeyPath | None:
    """What else says the same as a key, or something of what it says."""
    for known, (other, _) in told.items():
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


def _sections() -> tuple[tuple[type[Section], str], ...]:
    return (
        (cluster_section(), "the cluster file"),
        (train_section(), "the training file"),
        (NodeConfig, "nodes.<name> of the cluster file"),
    )


def locate(path: KeyPath, origin: str, written: KeyPath) -> tuple[KeyPath, KeySchema]:
    """The shape at `path`; a name with dots that ends a path is one part of it (`host_ip.pi5.local`).

    `written` is the path in the words of who set it.

    Raises:
        UnknownKey: the schema has no such key.
    """
    shapes = [shape_of(section) for section, _ in _sections()]
    shape = next((each for each in shapes if each.child(path[0]) is not None), None)
    if shape is None:
        if own := sorted(own_keys(path[0])):
            raise unknown_key(path, written, tuple(own), origin)
        tops = tuple(dict.fromkeys(key for each in shapes for key in each.keys))
        raise unknown_key(path, written, tops, origin, depth=0)
    for depth, name in enumerate(path):
        if shape.is_value:
            raise UnknownKey(written, nearest=".".join(path[:depth]), source=origin)
        below = shape.child(name)
        if below is None:
            raise unknown_key(path, written, shape.keys, origin, depth=depth)
        if shape.holds_names and below.is_value:
            return (*path[:depth], ".".join(path[depth:])), below
        shape = below
    return path, shape


def unknown_key(
    path: KeyPath,
    written: Place,
    siblings: tuple[str, ...],
    source: str,
    *,
    depth: int = -1,
    here: type[Section] | None = None,
) -> UnknownKey:
    """An unknown key with the one that was most likely meant, in the words of whoever set it.

    Args:
        path: the key in the flat shape; its part at `depth` is the one that nothing knows.
        written: the key as it was set.
        siblings: what could stand there instead.
        source: the file, flag or variable.
        depth: index into `path`.
        here: the section of the file; None where every key may stand, as in a flag.
    """
    places = {
        each: name for section, name in reversed(_sections()) for each in fixed_paths(section)
    }
    also = (TRAINING, DATA, *algorithms(), *TOP_LEVEL) if len(path) == 1 or depth == 0 else ()
    meant = _nearest_key(path, (*siblings, *also), tuple(places), depth)
    if meant is None:
        return UnknownKey(written, known=siblings, source=source)
    own = dict(_sections())[here] if here else None
    there = places.get(meant, own) if own else None
    if written[0] in (TRAINING, DATA) and find_shape(train_section(), meant):
        meant = nested_path(meant)
    elsewhere = there if there and there != own else ""
    return UnknownKey(written, nearest=".".join(meant), section=elsewhere, source=source)


def _nearest_key(
    path: KeyPath, siblings: tuple[str, ...], known: tuple[KeyPath, ...], depth: int
) -> KeyPath | None:
    """Which key `path` most likely means, whose part at `depth` nothing knows; `siblings` may stand there."""
    close = _nearest_sibling(path[depth], siblings) if path[depth] == path[-1] else None
    if close and len(path) > 1:
        return (*path[:-1], close)
    of_that_name = [other for other in known if other[-1] == path[-1]]
    if of_that_name:
        return min(of_that_name, key=len)
    if close:
        return (close,)
    dotted = {".".join(other): other for other in known if other != path[: len(other)]}
    by_name = {other[-1]: other for other in reversed(known)}
    near = nearest(".".join(path), dotted, CLOSE)
    near_name = nearest(path[-1], by_name, CLOSE)
    return dotted[near] if near else by_name[near_name] if near_name else None


def _nearest_sibling(name: str, siblings: tuple[str, ...]) -> str | None:
    """What could stand in the place of an unknown name and is spelt like it, or begins with it."""
    longer = (each for each in siblings if len(name) > 2 and each.startswith(f"{name}_"))
    return nearest(name, siblings) or next(longer, None)
