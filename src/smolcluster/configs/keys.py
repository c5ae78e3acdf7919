"""What each key of the configuration may hold, in words, read from the schema."""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from smolcluster.configs.problems import HAS_KEY, SettingError, UnknownKey
from smolcluster.utils.words import nearest

KeyPath = tuple[str, ...]
Json = Mapping[str, Any]

A_NAME = "a name of at most 64 letters, digits, '.', '_' and '-'"
A_REMOTE_PATH = "a path that begins with / or ~/, without backslashes"

REMOTE_PATH = r"^(~|~?/[^\x00-\x1f\\]*)$"
ALLOWED = "x-allowed"
"""What text of a pattern may be, in words, where the schema says it."""
MODEL = "model"
"""The key whose section is of one of several kinds."""


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
        """The keys of a section but for old ones; none for a mapping of free names and for a value."""
        told = self.schema.get("properties", {})
        return tuple(name for name, each in told.items() if not each.get("deprecated"))

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

    @property
    def allowed_name(self) -> str:
        """What the names of such a mapping may be, as the end of the sentence "must be …"."""
        return str(self.schema.get("propertyNames", {}).get(ALLOWED, ""))

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
            return str(schema.get(ALLOWED, f"text that matches {schema['pattern']}"))
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


def setting_errors(
    section: type[BaseModel], error: ValidationError, source: str = ""
) -> list[SettingError]:
    """What a section refuses, each with its place in the section.

    A list or mapping is not among them where one of its items is.
    """
    found = error.errors(include_url=False)
    places = [details["loc"] for details in found]
    return [
        _setting_error(section, details, source)
        for details, place in zip(found, places, strict=True)
        if not any(len(each) > len(place) and each[: len(place)] == place for each in places)
    ]


def refused(section: type[BaseModel], error: ValidationError, source: str = "") -> SettingError:
    """All that a section refuses, as one error."""
    first, *others = setting_errors(section, error, source)
    first.others = tuple(others)
    return first


def _setting_error(section: type[BaseModel], details: ErrorDetails, source: str) -> SettingError:
    place, kind, value = details["loc"], "", details["input"]
    if place[:1] == (MODEL,) and len(place) > 1:
        place, kind = (MODEL, *place[2:]), str(place[1])
    match details["type"]:
        case "value_error":
            raised = details["ctx"]["error"]
            if not isinstance(raised, SettingError):
                return SettingError(place, value, str(raised), source=source)
            raised.also = tuple((*place, *each) for each in raised.also)
            return raised.placed((*place, *raised.place), source)
        case "extra_forbidden":
            path = tuple(map(str, place))
            if find_shape(section, path) is not None:
                return UnknownKey(place, kind=kind, source=source)
            parent = find_shape(section, path[:-1])
            known = parent.keys if parent else ()
            return UnknownKey(place, nearest=nearest(path[-1], known), known=known, source=source)
        case "union_tag_invalid":
            place, value = (*place, "type"), value["type"]
        case "missing":
            value = ...
    if "[key]" in place:
        above, name, also = place[:-2], place[-2], (place[:-1],)
        names = find_shape(section, tuple(map(str, above)))
        allowed = names.allowed_name if names else ""
        return SettingError(above, name, verb=HAS_KEY, allowed=allowed, also=also, source=source)
    shape = find_shape(section, tuple(map(str, place)))
    allowed = shape.allowed(value) if shape else ""
    return SettingError(
        place, value, "" if shape else details["msg"], allowed=allowed, source=source
    )


def fixed_paths(section: type[BaseModel]) -> Iterator[KeyPath]:
    """All paths with fixed names, sections before what they hold."""

    def below(shape: KeySchema, path: KeyPath) -> Iterator[KeyPath]:
        for key in shape.keys:
            yield (*path, key)
            child = shape.child(key)
            if child:
                yield from below(child, (*path, key))

    yield from below(shape_of(section), ())


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
