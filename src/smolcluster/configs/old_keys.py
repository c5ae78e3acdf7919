"""Keys of earlier versions, in one table.

What they say is put under today's keys where a file, a flag or a variable is read. Of one that has no effect
any more the user is told so.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from smolcluster.configs.keys import KeySchema
from smolcluster.configs.problems import SettingError
from smolcluster.utils.words import show

Values = dict[str, Any]


@dataclass(frozen=True)
class OldKey:
    """A key that is read and no longer written.

    Attributes:
        kind: the type of its value.
        now: what says the same today, or what holds whatever it says.
        read: puts what the key says into the mapping in which it, or its section, stood; None: it has no
            effect.
        default: what says nothing in a file, besides null and false.
    """

    kind: Any
    now: str
    read: Callable[[Values, Any], None] | None
    default: Any = None


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


def _renamed(key: str) -> Callable[[Values, Any], None]:
    def read(values: Values, told: Any) -> None:
        if told is not None:
            values[key] = told

    return read


_SHARE = Annotated[float, Field(gt=0, allow_inf_nan=False)]

OLD_KEYS: Mapping[str, OldKey] = MappingProxyType(
    {
        "use_quantization": OldKey(bool, "codec: int8", _use_quantization),
        "stores": OldKey(Literal["auto"] | None, "servers: auto", _stores),
        "store_shares": OldKey(list[_SHARE] | None, "servers: {NODE: SHARE}", _store_shares),
        "recompute": OldKey(bool, "activation_checkpointing: full", _recompute),
        "redundancy": OldKey(PositiveInt | None, "checkpoint_steps", _renamed("checkpoint_steps")),
        "momentum_delay": OldKey(
            PositiveInt | None, "momentum acts after two changes of each worker", read=None
        ),
        "slurm.launcher": OldKey(
            Literal["srun", "torchrun"], "srun starts the ranks", read=None, default="srun"
        ),
        "kubernetes.retries": OldKey(NonNegativeInt, "restarts", _renamed("restarts"), default=3),
    }
)
"""By name; of a key in a section with the section's name."""
TOP_LEVEL = tuple(name for name in OLD_KEYS if "." not in name)


def read_old_key(values: Values, name: str, told: Any, source: str) -> None:
    """Put what an old key says into the mapping in which it, or its section, stood.

    Raises:
        SettingError: it holds what it may not, or contradicts today's key.
    """
    key, adapter = OLD_KEYS[name], TypeAdapter(OLD_KEYS[name].kind)
    try:
        adapter.validate_python(told, strict=True)
    except ValidationError:
        allowed = KeySchema.build(adapter.json_schema(), {}).allowed(told)
        raise SettingError((name,), told, allowed=allowed) from None
    if key.read is not None:
        key.read(values, told)
    elif told not in (None, key.default):
        _say_once(f"{source}: {name} is {show(told)}, which has no effect any more: {key.now}")


@cache
def _say_once(line: str) -> None:
    """A configuration is read several times by one process."""
    sys.stderr.write(f"{line}\n")


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
        if not isinstance(values, dict):
            continue
        for name, key in OLD_KEYS.items():
            above, _, last = name.rpartition(".")
            section = values.get(above) if above else values
            if not isinstance(section, dict) or last not in section:
                continue
            told = section.pop(last)
            try:
                if told is not None and told is not False and told != key.default:
                    read_old_key(values, name, told, source)
            except SettingError as error:
                raise error.placed((*place, *name.split(".")), source) from None


def with_old_keys(*names: str) -> Callable[[dict[str, Any]], None]:
    """What adds old keys to the JSON schema of a section, so that editors know them."""

    def add(schema: dict[str, Any]) -> None:
        for name in names:
            key = OLD_KEYS[name]
            said = f"Now `{key.now}`." if key.read else f"No effect: {key.now}."
            told = {"deprecated": True, "description": said}
            last = name.rpartition(".")[2]
            schema["properties"][last] = TypeAdapter(key.kind).json_schema() | told

    return add
