"""Single values from flags and variables, and a section on which they are laid."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from smolcluster.configs.keys import (
    A_NAME,
    KeyPath,
    KeySchema,
    find_shape,
    fixed_paths,
    nearest_key,
    shape_of,
    show,
    wrong_value,
)
from smolcluster.configs.load import parse_yaml
from smolcluster.configs.nested import DATA, TRAINING, entries, flat_path, flat_values, nested_path
from smolcluster.configs.node_names import rename_in_path, rename_in_value
from smolcluster.configs.schema import (
    NodeConfig,
    Section,
    cluster_section,
    own_keys,
    train_section,
)
from smolcluster.configs.spec import algorithms
from smolcluster.errors import ConfigError
from smolcluster.utils.words import one_line

ENVIRONMENT_PREFIX = "SMOLCLUSTER_"
NAME_VARIABLE, ATTACH_VARIABLE = "SMOLCLUSTER_NAME", "SMOLCLUSTER_ATTACH"
"""What a process that attaches is called, and what its launcher tells it, as JSON: no keys of a file."""
OWN_VARIABLES = frozenset({NAME_VARIABLE, ATTACH_VARIABLE})
OVERRIDE_FLAG = "--override"
MODEL = "model"

_MOST_PROBLEMS = 5
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class OverrideValue:
    """One value from a flag or a variable.

    Attributes:
        written: the path in the words of who set it, for messages.
        origin: the flag or variable, for messages.
        folded: the key was written in capitals, so free names in it match whatever their case.
    """

    path: KeyPath
    written: KeyPath
    value: Any
    origin: str
    folded: bool = False

    @property
    def is_node_key(self) -> bool:
        return find_shape(NodeConfig, self.path) is not None

    def names(self, known: str, part: str) -> bool:
        """Whether `part` of the path means the free name `known`."""
        return part == known or (self.folded and part.lower() == known.lower())

    def of_nodes(self, local_names: Mapping[str, str]) -> "OverrideValue":
        """The same with the names for which those of the cluster file stand, see `ClusterConfig.node_of`."""

        def rename(name: str) -> str:
            return next((new for old, new in local_names.items() if self.names(old, name)), name)

        path = rename_in_path(self.path, rename)
        return replace(self, path=path, value=rename_in_value(path, self.value, rename))

    def seen_by(self, node_name: str) -> "OverrideValue":
        """`nodes.<node_name>.key` as that node sees it: `key`."""
        if self.path[0] == "nodes" and len(self.path) > 2 and self.names(node_name, self.path[1]):
            return replace(self, path=self.path[2:])
        return self


def from_overrides(overrides: Iterable[str]) -> list[OverrideValue]:
    """The values of `key=value` flags.

    Raises:
        ConfigError: no `=`, an empty or unknown key, or a value that is no YAML.
    """
    assignments = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals:
            raise config_error(
                OVERRIDE_FLAG, f"{text!r} has no '=', must be key=value, such as port=6000"
            )
        assignments += _assign(key.strip(), raw, OVERRIDE_FLAG, folded=False)
    return assignments


def from_environment(environ: Mapping[str, str]) -> list[OverrideValue]:
    """The values of all variables called `SMOLCLUSTER_A__B`, whole sections before their keys.

    Raises:
        ConfigError: an unknown key, or a value that is no YAML.
    """
    assignments = []
    for name, raw in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in OWN_VARIABLES:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            assignments += _assign(key, raw, f"environment variable {name}", folded=True)
    return assignments


def config_error(origin: str, sentence: str) -> ConfigError:
    return ConfigError(one_line(f"{origin}: {sentence}"))


@dataclass
class Draft(Generic[S]):
    """One section while layers are put on it.

    Attributes:
        source: what the lowest layer is called in messages.
        values: changed in place; give it a copy.
        words: what those who set a key call it, where that is not its path.
    """

    section: type[S]
    source: str
    values: dict[str, Any]
    words: dict[KeyPath, KeyPath] = field(default_factory=dict)
    _origins: dict[KeyPath, str] = field(default_factory=dict)

    def take(self, assignment: OverrideValue) -> None:
        """Set the value, if its key is one of this section's."""
        if find_shape(self.section, assignment.path) is None:
            return
        target = self.values
        path: KeyPath = ()
        *above, last = assignment.path
        for part in above:
            name = _existing(target, part, assignment)
            path = (*path, name)
            if target.get(name) is None:
                target[name] = {}
            target = target[name]
            if not isinstance(target, dict):
                return  # check() will say that a mapping must stand here
        name = _existing(target, last, assignment)
        target[name] = assignment.value
        self._origins[(*path, name)] = assignment.origin
        self.words[(*path, name)] = assignment.written

    def check(self) -> S:
        """The finished section.

        Raises:
            ConfigError: what is wrong with it, the first problems on one line.
        """
        try:
            return self.section.model_validate(self.values)
        except ValidationError as error:
            found = error.errors(include_url=False)
            problems = [self._problem(details) for details in _innermost(found)]
        sentences, last = [], ""
        for origin, sentence in problems[:_MOST_PROBLEMS]:
            sentences.append(sentence if origin == last else f"{origin}: {sentence}")
            last = origin
        more = len(problems) - len(sentences)
        raise ConfigError(one_line("; ".join(sentences) + (f"; and {more} more" if more else "")))

    def _problem(self, details: ErrorDetails) -> tuple[str, str]:
        """Where a wrong value came from, and the sentence about it."""
        loc = _without_kind(details["loc"])
        path = tuple(str(part) for part in loc if part != "[key]")
        origin = self._origin(path)
        key = _written(self._named(loc))
        if details["type"] == "value_error":
            sentence = str(details["ctx"]["error"])
            if path and path != (MODEL,):
                return origin, f"{key} is {show(details['input'])}, {sentence}"
            return self._origin_of_words(sentence), sentence
        if details["type"] == "union_tag_invalid":
            loc, path, key = (*loc, "type"), (*path, "type"), f"{key}.type"
            origin = self._origin(path)
            details["input"] = details["input"]["type"]
        if details["type"] == "extra_forbidden":
            if find_shape(self.section, path) is not None:
                return origin, f"{key} is not a setting of a {details['loc'][1]}"
            if len(path) == 1 and path[0] in algorithms() and isinstance(details["input"], dict):
                path = (path[0], *list(details["input"])[:1])  # what `flatten` has left there
                siblings = tuple(own_keys(path[0]) & set(self.section.model_fields))
            else:
                parent = find_shape(self.section, path[:-1])
                siblings = parent.keys if parent else ()
            here = dict(_sections())[self.section]
            return origin, _unknown(path, siblings, self._named(path), here)
        if "[key]" in loc:
            return origin, f"{'.'.join(path[:-1])} has the key {path[-1]!r}, must be {A_NAME}"
        return origin, wrong_value(self.section, path, details, key)

    def _named(self, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """A place in the words of who set what is there."""
        path = tuple(map(str, loc))
        for length in range(len(path), 0, -1):
            if path[:length] in self.words:
                return (*self.words[path[:length]], *loc[length:])
        return loc

    def _origin(self, path: KeyPath) -> str:
        """Who set the value at `path` or above it."""
        above = (path[:length] for length in range(len(path), 0, -1))
        return next((self._origins[part] for part in above if part in self._origins), self.source)

    def _origin_of_words(self, sentence: str) -> str:
        """Who set one of the keys that a sentence about several of them names."""
        words = set(re.findall(r"\w+", sentence))
        return next((said for path, said in self._origins.items() if path[0] in words), self.source)


def _assign(key: str, raw: str, origin: str, *, folded: bool) -> list[OverrideValue]:
    """The values that `raw` gives to `key`, of either shape: several where it is a mapping."""
    written = tuple(part.strip() for part in key.split("."))
    if not all(written):
        raise config_error(
            origin, f"the key {key!r} is empty or has an empty part, must be like a.b"
        )
    is_section = len(written) == 1 and written[0] in (TRAINING, DATA, *algorithms())
    is_text = not is_section and _locate(flat_path(written), origin, written)[1].is_text
    value: Any = raw.strip()
    if not (is_text and _is_plain_text(value)):
        try:
            value = parse_yaml(value)
        except ValueError as error:
            raise config_error(origin, f"the value of {key}, {show(raw)}{error}") from None
    if is_section and not (isinstance(value, dict) and value):
        raise config_error(origin, f"{key} is {show(value)}, must be a mapping of keys to values")
    return [
        assignment
        for words, below in entries(written, value)
        for path, item in flat_values(words, below)
        for assignment in _spread(OverrideValue(path, words, item, origin, folded))
    ]


def _is_plain_text(raw: str) -> bool:
    """Whether text on a command line means itself: no YAML null and no quotes around it."""
    return raw not in ("", "~", "null", "Null", "NULL") and raw[0] not in "\"'"


def _spread(assignment: OverrideValue) -> Iterator[OverrideValue]:
    """A mapping's values one by one; anything else as it is."""
    path, shape = _locate(assignment.path, assignment.origin, assignment.written)
    assignment = replace(assignment, path=path)
    if shape.is_value or not isinstance(assignment.value, dict):
        yield assignment
        return
    if not assignment.value:
        said = ".".join(assignment.written)
        raise config_error(assignment.origin, f"{said} is an empty mapping; name the keys to set")
    for name, value in assignment.value.items():
        below = replace(
            assignment, path=(*path, name), written=(*assignment.written, name), value=value
        )
        yield from _spread(below)


def _locate(path: KeyPath, origin: str, written: KeyPath) -> tuple[KeyPath, KeySchema]:
    """The shape at `path`; a name with dots that ends a path is one part of it (`host_ip.pi5.local`).

    `written` is the path in the words of who set it.

    Raises:
        ConfigError: the schema has no such key.
    """
    tops = {
        key: shape_of(section)
        for section, _ in reversed(_sections())
        for key in shape_of(section).keys
    }
    shape = tops.get(path[0])
    if shape is None:
        raise config_error(origin, _unknown(path, tuple(tops), written, depth=0))
    for depth, name in enumerate(path):
        if shape.is_value:
            above = ".".join(path[:depth])
            raise config_error(
                origin,
                f"{above} has no keys, so {'.'.join(path)} is not a setting; set {above} itself",
            )
        below = shape.child(name)
        if below is None:
            raise config_error(origin, _unknown(path, shape.keys, written, depth=depth))
        if shape.holds_names and below.is_value:
            return (*path[:depth], ".".join(path[depth:])), below
        shape = below
    return path, shape


def _unknown(
    path: KeyPath,
    siblings: tuple[str, ...],
    written: tuple[int | str, ...],
    here: str | None = None,
    depth: int = -1,
) -> str:
    """The sentence about a key that does not exist, in the words of who set it.

    Args:
        path: the key; its part at `depth` is the one that nothing knows.
        siblings: what could stand there instead.
        written: the key as it was set.
        here: where the key stands; None where every key may stand, as in a flag.
        depth: index into `path`.
    """
    places = _places()
    meant = nearest_key(path, siblings, places, depth)
    if meant is None:
        return f"{_written(written)} is not a setting; known here: {', '.join(siblings)}"
    place = places.get(meant, here)
    elsewhere = f" in {place}" if here and place != here else ""
    if written[0] in (TRAINING, DATA) and find_shape(train_section(), meant):
        meant = nested_path(meant)
    return (
        f"{_written(written)} is not a setting{' here' if elsewhere else ''}; "
        f"did you mean {'.'.join(meant)}{elsewhere}?"
    )


def _innermost(found: list[ErrorDetails]) -> list[ErrorDetails]:
    """The errors without those of a list or mapping whose items have errors of their own."""
    places = [details["loc"] for details in found]
    return [
        details
        for details in found
        if not any(
            len(place) > len(details["loc"]) and place[: len(details["loc"])] == details["loc"]
            for place in places
        )
    ]


def _sections() -> tuple[tuple[type[Section], str], ...]:
    return (
        (cluster_section(), "the cluster file"),
        (train_section(), "the training file"),
        (NodeConfig, "nodes.<name> of the cluster file"),
    )


def _places() -> dict[KeyPath, str]:
    return {
        path: place for section, place in reversed(_sections()) for path in fixed_paths(section)
    }


def _existing(mapping: Mapping[str, Any], part: str, assignment: OverrideValue) -> str:
    """The key of `mapping` that `part` means; `part` itself when there is none."""
    if part in mapping:
        return part
    return next((known for known in mapping if assignment.names(known, part)), part)


def _without_kind(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A place without the part that says of which kind pydantic took the model to be."""
    return (MODEL, *loc[2:]) if loc[:1] == (MODEL,) else loc


def _written(loc: tuple[int | str, ...]) -> str:
    """A place as people write it: `workers[0]`, `model.hidden`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return "".join(parts).removeprefix(".")
