"""What each key of the configuration may hold, in words, read from the schema."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from smolcluster.configs.schema import REMOTE_PATH
from smolcluster.utils.words import nearest

KeyPath = tuple[str, ...]
Json = Mapping[str, Any]

A_NAME = "a name of at most 64 letters, digits, '.', '_' and '-'"
A_REMOTE_PATH = "a path that begins with / or ~/, without backslashes"

_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class KeySchema:
    """A key's place in the schema: a section, a mapping of free names, or a value."""

    schema: Json
    definitions: Json
    nullable: bool = False
    is_mixed: bool = False
    """Whether values of another type may stand here as well."""

    @classmethod
    def build(cls, schema: Json, definitions: Json) -> "KeySchema":
        """Follow references, take `null` apart from the rest, and put kinds of a section together."""
        nullable = is_mixed = False
        while schema.keys() & {"$ref", "anyOf", "oneOf"}:
            if "$ref" in schema:
                schema = definitions[schema["$ref"].rpartition("/")[2]]
                continue
            if "oneOf" in schema:
                schema = _united([cls.build(kind, definitions) for kind in schema["oneOf"]])
                continue
            branches = [branch for branch in schema["anyOf"] if branch.get("type") != "null"]
            nullable = nullable or len(branches) < len(schema["anyOf"])
            is_mixed = is_mixed or len({branch.get("type") for branch in branches}) > 1
            schema = branches[0]
        return cls(schema, definitions, nullable, is_mixed)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a section; none for a mapping of free names and for a value."""
        return tuple(self.schema.get("properties", ()))

    @property
    def holds_names(self) -> bool:
        """Whether this is a mapping whose keys are free, such as `host_ip`."""
        return self.schema.get("type") == "object" and not self.keys

    @property
    def is_value(self) -> bool:
        """Whether nothing lies below this key."""
        return self.schema.get("type") != "object"

    @property
    def is_text(self) -> bool:
        """Whether the value is text, a path or a name: what needs no quotes on a command line."""
        return self.schema.get("type") == "string" and not self.is_mixed

    def child(self, name: str) -> "KeySchema | None":
        """The shape below `name`; None when there is no such key."""
        if self.keys:
            below = self.schema["properties"].get(name)
        elif self.holds_names:
            patterns = self.schema.get("patternProperties", {})
            below = next(iter(patterns.values()), self.schema.get("additionalProperties"))
        else:
            below = self.schema.get("items")
        return None if below is None else KeySchema.build(below, self.definitions)

    def allowed(self, value: Any = None) -> str:
        """What may stand here, as the end of the sentence "must be …", said to who wrote `value`."""
        unbounded = isinstance(value, float) and not math.isfinite(value)
        return self._kind(unbounded) + (", or null" if self.nullable else "")

    def _kind(self, unbounded: bool) -> str:  # noqa: PLR0911  (a table that reads from top to bottom)
        schema = self.schema
        choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if choices:
            return "one of " + ", ".join(map(str, choices))
        if "pattern" in schema:
            return A_REMOTE_PATH if schema["pattern"] == REMOTE_PATH else A_NAME
        match schema.get("type"):
            case "boolean":
                return "true or false"
            case "integer":
                return "a whole number" + _limits(schema)
            case "number":
                return ("a finite number" if unbounded else "a number") + _limits(schema)
            case "array":
                least = "of at least one, " if schema.get("minItems") else ""
                return f"a list {least}such as [a, b]"
            case "object" if self.keys:
                return "a mapping with keys of " + ", ".join(self.keys)
            case "object":
                return "a mapping of names to values"
        if schema.get("format") == "path":
            return "a path"
        return _text(schema.get("minLength", 0))


def _text(least: int) -> str:
    if least > 1:
        return f"text of at least {least} characters"
    return "text that is not empty" if least else "text"


def _united(kinds: list[KeySchema]) -> Json:
    """A section that may be of several kinds, as one with the keys of all; they share `type`."""
    keys = {name: schema for kind in kinds for name, schema in kind.schema["properties"].items()}
    names = [kind.schema["properties"]["type"]["const"] for kind in kinds]
    return {"type": "object", "properties": {**keys, "type": {"type": "string", "enum": names}}}


@functools.cache
def shape_of(section: type[BaseModel]) -> KeySchema:
    schema = section.model_json_schema()
    return KeySchema.build(schema, schema.get("$defs", {}))


def find_shape(section: type[BaseModel], path: KeyPath) -> KeySchema | None:
    """The shape at `path`; None when the schema has no such key."""
    shape: KeySchema | None = shape_of(section)
    for name in path:
        shape = shape.child(name) if shape else None
    return shape


def wrong_value(section: type[BaseModel], path: KeyPath, details: ErrorDetails, key: str) -> str:
    """A sentence about a value that a section refuses, which stands at `path` and is called `key`."""
    if details["type"] == "value_error":
        sentence = str(details["ctx"]["error"])
        if isinstance(details["input"], dict):
            return f"{key}: {sentence}"
        return f"{key} is {show(details['input'])}, {sentence}"
    shape = find_shape(section, path)
    allowed = shape.allowed(details["input"]) if shape else details["msg"]
    state = "missing" if details["type"] == "missing" else show(details["input"])
    return f"{key} is {state}, must be {allowed}"


def fixed_paths(section: type[BaseModel]) -> Iterator[KeyPath]:
    """All paths with fixed names, sections before what they hold."""

    def below(shape: KeySchema, path: KeyPath) -> Iterator[KeyPath]:
        for key in shape.keys:
            yield (*path, key)
            child = shape.child(key)
            if child:
                yield from below(child, (*path, key))

    yield from below(shape_of(section), ())


def nearest_key(
    path: KeyPath, siblings: tuple[str, ...], known: Iterable[KeyPath], depth: int
) -> KeyPath | None:
    """Which key `path` most likely means, whose part at `depth` nothing knows; `siblings` may stand there."""
    known = tuple(known)
    of_that_name = [other for other in known if other[-1] == path[-1]]
    if of_that_name:
        return min(of_that_name, key=len)
    close = nearest(path[depth], siblings)
    if close and path[depth] == path[-1]:
        return (*path[:-1], close)
    dotted = {".".join(other): other for other in known}
    by_name = {other[-1]: other for other in reversed(known)}
    near, near_name = nearest(".".join(path), dotted), nearest(path[-1], by_name)
    return dotted[near] if near else by_name[near_name] if near_name else None


def show(value: Any) -> str:
    """A value as it would be written in YAML, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping" if value else "an empty mapping"
        case list() | tuple():
            text = f"[{', '.join(map(show, value))}]"
        case str() | Path():
            text = repr(str(value))
        case date():
            text = value.isoformat()
        case _:
            text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _limits(schema: Json) -> str:
    above, low = schema.get("exclusiveMinimum"), schema.get("minimum")
    below, high = schema.get("exclusiveMaximum"), schema.get("maximum")
    if below is not None and schema["type"] == "integer":
        high, below = below - 1, None
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = [
        f"above {above}" if above is not None else "",
        f"of {low} or more" if low is not None else "",
        f"of {high} or less" if high is not None else "",
        f"below {below}" if below is not None else "",
    ]
    stated = " and ".join(bound for bound in bounds if bound)
    return f" {stated}" if stated else ""
