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
        now: the key that says the same today, or what holds whatever the old one says.
        has_effect: whether it says anything today.
        on: what `now` holds where the old key was switched on; None: what that said.
        off: what `now` holds where an override switches the old key off again.
        must_agree: whether `now` may hold nothing else where the old key is switched on.
        default: what says nothing in a file, besides null and false.
    """

    kind: Any
    now: str
    has_effect: bool = True
    on: Any = None
    off: Any = None
    must_agree: bool = False
    default: Any = None

    @property
    def instead(self) -> str:
        """What to write today."""
        return f"{self.now}: {self.on}" if self.on else self.now


def _servers_by_shares(values: Values, told: Any) -> Values:
    """Shares stood in a list of their own, in the order of `servers`."""
    servers = values.get("servers") or [values.get("server")]
    if not isinstance(servers, list | dict) or (told and len(told) != len(servers)):
        problem = f"must have one share for each of servers, {len(servers)}"
        raise SettingError((STORE_SHARES,), told, problem)
    if told and len(servers) > 1:
        return {"servers": dict(zip(servers, told, strict=True))}
    return {"servers": list(servers)} if isinstance(servers, dict) else {}


_SHARE = Annotated[float, Field(gt=0, allow_inf_nan=False)]
STORE_SHARES = "store_shares"

OLD_KEYS: Mapping[str, OldKey] = MappingProxyType(
    {
        "use_quantization": OldKey(bool, "codec", on="int8", must_agree=True),
        "stores": OldKey(Literal["auto"] | None, "servers", on="auto", must_agree=True),
        STORE_SHARES: OldKey(list[_SHARE] | None, "servers", on="{NODE: SHARE}"),
        "recompute": OldKey(bool, "activation_checkpointing", on="full", off="none"),
        "redundancy": OldKey(PositiveInt | None, "checkpoint_steps"),
        "momentum_delay": OldKey(
            PositiveInt | None, "momentum acts after two changes of each worker", has_effect=False
        ),
        "slurm.launcher": OldKey(
            Literal["srun", "torchrun"], "srun starts the ranks", has_effect=False, default="srun"
        ),
        "kubernetes.retries": OldKey(NonNegativeInt, "restarts", default=3),
    }
)
"""By name; of a key in a section with the section's name."""
TOP_LEVEL = tuple(name for name in OLD_KEYS if "." not in name)


def read_old_key(values: Values, name: str, told: Any, source: str) -> Values:
    """What an old key says in today's words, in the mapping in which it, or its section, stands.

    Raises:
        SettingError: it holds what it may not, or contradicts today's key.
    """
    key, adapter = OLD_KEYS[name], TypeAdapter(OLD_KEYS[name].kind)
    try:
        adapter.validate_python(told, strict=True)
    except ValidationError:
        allowed = KeySchema.build(adapter.json_schema(), {}).allowed(told)
        raise SettingError((name,), told, allowed=allowed) from None
    is_on, before = told is not None and told is not False, values.get(key.now)
    if name == STORE_SHARES:
        return _servers_by_shares(values, told)
    if not key.has_effect:
        if told not in (None, key.default):
            _say_once(f"{source}: {name} is {show(told)}, which has no effect any more: {key.now}")
        return {}
    if is_on and key.must_agree and before not in (None, key.on):
        problem = f"which means {key.instead}, but {key.now} is {show(before)}: leave {name} out"
        raise SettingError((name,), told, problem)
    if is_on:
        return {key.now: key.on or told}
    return {key.now: key.off} if key.on and before == key.on else {}


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
                    values.update(read_old_key(values, name, told, source))
            except SettingError as error:
                raise error.placed((*place, *name.split(".")), source) from None


def with_old_keys(*names: str) -> Callable[[dict[str, Any]], None]:
    """What adds old keys to the JSON schema of a section, so that editors know them."""

    def add(schema: dict[str, Any]) -> None:
        for name in names:
            key = OLD_KEYS[name]
            said = f"Now `{key.instead}`." if key.has_effect else f"No effect: {key.now}."
            told = {"deprecated": True, "description": said}
            last = name.rpartition(".")[2]
            schema["properties"][last] = TypeAdapter(key.kind).json_schema() | told

    return add
