"""Values of `workload_args` beside the types with which a function's arguments are annotated."""

import ast
import json
from collections.abc import Mapping
from types import EllipsisType, MappingProxyType
from typing import Any, Literal, Optional, Union

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from smolcluster.configs.function_name import ARGS, from_environment
from smolcluster.errors import ConfigError
from smolcluster.utils.words import one_line, show

_TYPES: Mapping[str, Any] = MappingProxyType(
    {each.__name__: each for each in (bool, int, float, str, list, tuple, dict)}
    | {"Any": Any, "Literal": Literal, "Optional": Optional, "Union": Union}
)
"""What names in an annotation mean; of any other name nothing is known without an import."""


def checked_argument(
    key: str, stated: Any, hint: Any, said: str, environ: Mapping[str, str]
) -> Any:
    """A value for the argument `key` of a function, of the type `hint`.

    Args:
        key: the argument's name.
        stated: what the configuration says.
        hint: the type that the argument is annotated with.
        said: what the function is called.
        environ: the variables that `env:NAME` is taken from.

    Raises:
        ConfigError: the value is of another type, or a variable is not set.
    """
    value = from_environment(stated, environ, key)
    is_stated = value == stated  # what a variable holds is text, also of a number
    try:
        adapter = TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError):
        # A file cannot say such a class, or the hint is no type: the function may take the value as it is.
        return value
    try:
        return adapter.validate_json(json.dumps(value), strict=is_stated)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            one_line(
                f"{ARGS}.{key} is {show(stated)}, which {said} does not take: "
                f"{reason[0].lower()}{reason[1:]}"
            )
        ) from None


def type_of(annotation: ast.expr | None) -> Any:
    """The type that an annotation names, as `int | None`; of what only an import would tell, Any."""
    match annotation:
        case ast.Constant(value=None | EllipsisType() as value):
            return value
        case ast.Name(id=name):
            return _TYPES.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[type_of(left), type_of(right)]  # noqa: UP007 - `None | None` is no type
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _TYPES:
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _with_parts(name, parts)
    return Any


def _with_parts(name: str, parts: list[ast.expr]) -> Any:
    """The type `name[parts]`; Any if there is no such type."""
    if name == "Literal":
        known = [each.value for each in parts if isinstance(each, ast.Constant)]
        return _TYPES[name][*known] if len(known) == len(parts) else Any
    types = [type_of(each) for each in parts]
    try:
        return _TYPES[name][types[0] if len(types) == 1 else tuple(types)]
    except TypeError:
        return Any
