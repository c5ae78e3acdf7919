"""Keys of earlier versions, in one table.

What they say is put under today's keys where a file, a flag or a variable is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from smolcluster.configs.keys import KeySchema
from smolcluster.configs.problems import SettingError

Values = dict[str, Any]


@dataclass(frozen=True)
class OldKey:
    """A key that is read and no longer written.

    Attributes:
        kind: the type of its value.
        now: what says the same today.
        read: puts what the key says into the mapping in which it stood.
    """

    kind: Any
    now: str
    read: Callable[[Values, Any], None]


def _use_quantization(values: Values, told: Any) -> None:
    codec = values.get("codec")
    if told and codec not in (None, "int8"):
        problem = f"which means codec int8, but codec is {codec}; the two must agree"
        raise SettingError(("use_quantization",), told, problem)
    if told or codec == "int8":
        values["codec"] = "int8" if told else None


def _stores(values: Values, told: Any) -> None:
    servers = values.get("servers")
    if told and servers not in (None, told):
        raise SettingError(("stores",), told, "but servers lists nodes; set one of them to null")
    if told or servers == "auto":
        values["servers"] = told


def _store_shares(values: Values, told: Any) -> None:
    servers = values.get("servers") or [values.get("server")]
    if not isinstance(servers, list | dict) or (told and len(told) != len(servers)):
        problem = f"must have one share for each of servers, {len(servers)}"
        raise SettingError(("store_shares",), told, problem)
    if told and len(servers) > 1:
        values["servers"] = dict(zip(servers, told, strict=True))
    elif isinstance(servers, dict):
        values["servers"] = list(servers)


def _recompute(values: Values, told: Any) -> None:
    if told or values.get("activation_checkpointing") == "full":
        values["activation_checkpointing"] = "full" if told else "none"


_SHARE = Annotated[float, Field(gt=0, allow_inf_nan=False)]

OLD_KEYS: Mapping[str, OldKey] = MappingProxyType(
    {
        "use_quantization": OldKey(bool, "codec: int8", _use_quantization),
        "stores": OldKey(Literal["auto"] | None, "servers: auto", _stores),
        "store_shares": OldKey(list[_SHARE] | None, "servers: {NODE: SHARE}", _store_shares),
        "recompute": OldKey(bool, "activation_checkpointing: full", _recompute),
    }
)


def todays_key(name: str) -> str:
    """The key that holds today what the key of that name holds, or held."""
    return OLD_KEYS[name].now.partition(":")[0] if name in OLD_KEYS else name


def read_old_key(values: Values, name: str, told: Any) -> None:
    """Put what an old key says into the mapping in which it stood.

    Raises:
        SettingError: it holds what it may not, or contradicts today's key.
    """
    key, adapter = OLD_KEYS[name], TypeAdapter(OLD_KEYS[name].kind)
    try:
        adapter.validate_python(told, strict=True)
    except ValidationError:
        allowed = KeySchema.build(adapter.json_schema(), {}).allowed(told)
        raise SettingError((name,), told, allowed=allowed) from None
    key.read(values, told)


def read_old_keys(content: Values, source: str) -> None:
    """Replace the old keys of a cluster file; what they have by default says nothing.

    Raises:
        SettingError: as `read_old_key`.
    """
    nodes = content.get("nodes")
    nodes = nodes if isinstance(nodes, dict) else {}
    places: dict[tuple[str, ...], Any] = {(): content}
    for name, node in nodes.items():
        places["nodes", name, "stages"] = node.get("stages") if isinstance(node, dict) else None
    for place, values in places.items():
        told_old = [name for name in OLD_KEYS if name in values] if isinstance(values, dict) else []
        for name in told_old:
            told = values.pop(name)
            try:
                if told not in (None, False):
                    read_old_key(values, name, told)
            except SettingError as error:
                raise error.placed((*place, name), source) from None


def with_old_keys(*names: str) -> Callable[[dict[str, Any]], None]:
    """What adds old keys to the JSON schema of a section, so that editors know them."""

    def add(schema: dict[str, Any]) -> None:
        for name in names:
            told = {"deprecated": True, "description": f"Now `{OLD_KEYS[name].now}`."}
            schema["properties"][name] = TypeAdapter(OLD_KEYS[name].kind).json_schema() | told

    return add
