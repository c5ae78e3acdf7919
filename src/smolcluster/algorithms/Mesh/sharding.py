"""A sharding file: groups by name, and the modules that each of them spreads.

    pp_stage0: {shard: {axis: 0, workers: [0, 1]}}             # a stage, on the ranks 0 and 1
    pp_stage0_colpar: {shard: {axis: 1, workers: [0, 1]}}      # its layers cut by their outputs
    pp_stage0_rowpar: {shard: {axis: 0, workers: [0, 1]}}      # its layers cut by their inputs

`axis` is that of a weight of (inputs, outputs). `layers: [0, 2]` names a stage's layers, end not included;
where no stage names any they are divided equally. `modules: [patterns]` of a `_colpar` or `_rowpar` group
name the linear layers that it means, as `fnmatch` does; without any the model's own plan says it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smolcluster.configs.load import parse_yaml, read_yaml
from smolcluster.errors import ConfigError
from smolcluster.utils.words import hint_at, show

STAGE = re.compile(r"^pp_stage(\d+)(?:_(colpar|rowpar))?$")
BOUNDARY = re.compile(r"^stage(\d+)_to_stage(\d+)$")
AXES = {None: (0, 1), "colpar": (1,), "rowpar": (0,)}
KEYS = ("shard", "workers", "layers", "modules", "backward", "compile")
"""`backward` and `compile` are of files for other engines, where they say nothing of placement."""
Cut = Literal["column", "row"]
CUTS: Mapping[str, Cut] = {"colpar": "column", "rowpar": "row"}


@dataclass(frozen=True)
class Sharding:
    """What a file says.

    Attributes:
        tp, pp: the sizes that follow.
        layers: of each stage `[start, end)`; None: divided equally.
        modules: how linear layers are cut, by patterns of their names; empty: as the model's plan says.
    """

    tp: int
    pp: int
    layers: tuple[range, ...] | None
    modules: Mapping[str, Cut]


class _File:
    """The groups of a file, and how its errors are told."""

    def __init__(self, path: str, content: Mapping[str, Any]) -> None:
        self.path = path
        self.stages: dict[int, dict[str, Any]] = {}
        self.cuts: list[tuple[int, str, dict[str, Any]]] = []
        for name, group in content.items():
            self._take(str(name), group)

    def _take(self, name: str, group: Any) -> None:
        if BOUNDARY.match(name):  # what passes from stage to stage follows from the stages
            return
        found = STAGE.match(name)
        if found is None:
            raise self.wrong(
                name, group, "must be pp_stage0, pp_stage0_colpar, pp_stage0_rowpar, …"
            )
        number, kind = int(found[1]), found[2]
        checked = self._group(name, kind, group)
        if kind is None:
            self.stages[number] = checked
        else:
            self.cuts.append((number, kind, checked))

    def _group(self, name: str, kind: str | None, group: Any) -> dict[str, Any]:
        if not isinstance(group, dict):
            raise self.wrong(
                name, group, "must be a mapping such as {shard: {axis: 0, workers: [0, 1]}}"
            )
        for key in group:
            if key not in KEYS:
                raise self.wrong(f"{name}.{key}", group[key], f"is no key{hint_at(key, KEYS)}")
        shard = group.get("shard", {"workers": group.get("workers")})
        place = f"{name}.shard" if "shard" in group else name
        if not isinstance(shard, dict) or shard.keys() - {"axis", "workers"}:
            raise self.wrong(place, shard, "must have axis and workers alone")
        if shard.get("axis", AXES[kind][0]) not in AXES[kind]:
            allowed = " or ".join(map(str, AXES[kind]))
            raise self.wrong(f"{place}.axis", shard["axis"], f"must be {allowed}")
        workers = self._numbers(f"{place}.workers", shard.get("workers"))
        if not workers or sorted(set(workers)) != workers:
            raise self.wrong(f"{place}.workers", workers, "must be ranks in order, each once")
        return {
            "workers": workers,
            "layers": self._layers(name, group),
            "modules": self._modules(name, kind, group),
        }

    def _layers(self, name: str, group: Mapping[str, Any]) -> range | None:
        if group.get("layers") is None:
            return None
        ends = self._numbers(f"{name}.layers", group["layers"])
        if len(ends) != 2 or ends[0] >= ends[1]:
            raise self.wrong(f"{name}.layers", ends, "must be [start, end], end not included")
        return range(*ends)

    def _modules(self, name: str, kind: str | None, group: Mapping[str, Any]) -> list[str]:
        patterns = group.get("modules", [])
        is_list = isinstance(patterns, list) and all(isinstance(each, str) for each in patterns)
        if not is_list or (kind is None and patterns):
            raise self.wrong(
                f"{name}.modules",
                patterns,
                "must be patterns of names, of a colpar or rowpar group",
            )
        return list(patterns)

    def _numbers(self, key: str, value: Any) -> list[int]:
        is_list = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
        if not is_list:
            raise self.wrong(key, value, "must be whole numbers in brackets")
        return list(value)

    def wrong(self, key: str, value: Any, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} is {show(value)}, {what}")


def read_sharding(told: str | Mapping[str, Any]) -> Sharding:
    """Read a sharding file, or what it holds.

    Raises:
        ConfigError: the file cannot be read, or a group is wrong; names file, key and value.
    """
    is_file = isinstance(told, str) and not told.lstrip().startswith("{")
    file = _File(str(told) if is_file else "sharding", groups_of(told))
    numbers = sorted(file.stages)
    if not numbers or numbers != list(range(len(numbers))):
        raise file.wrong("pp_stage", numbers, "must be stages from 0 on, none left out")
    _check_workers(file, numbers)
    return Sharding(
        tp=len(file.stages[0]["workers"]),
        pp=len(numbers),
        layers=_layers_of(file, numbers),
        modules=_modules_of(file),
    )


def groups_of(told: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """What a sharding file holds.

    Raises:
        ConfigError: it cannot be read.
    """
    if not isinstance(told, str):
        return told
    if not told.lstrip().startswith("{"):
        return read_yaml(Path(told).expanduser())
    found: Mapping[str, Any] = parse_yaml(told)  # an override's value is text
    return found


def _check_workers(file: _File, numbers: Sequence[int]) -> None:
    """Neighbouring ranks share a stage, as many each; a stage's groups are on its ranks."""
    size = len(file.stages[0]["workers"])
    for number in numbers:
        own = file.stages[number]["workers"]
        expected = list(range(number * size, (number + 1) * size))
        if own != expected:
            raise file.wrong(
                f"pp_stage{number}.workers", own, f"must be {expected}, as stages have {size} each"
            )
    for number, kind, group in file.cuts:
        key = f"pp_stage{number}_{kind}.workers"
        if number not in file.stages:
            raise file.wrong(key, group["workers"], f"is of no stage: pp_stage{number} is missing")
        if group["workers"] != file.stages[number]["workers"]:
            own = file.stages[number]["workers"]
            raise file.wrong(key, group["workers"], f"must be those of pp_stage{number}, {own}")


def _layers_of(file: _File, numbers: Sequence[int]) -> tuple[range, ...] | None:
    named = [file.stages[number]["layers"] for number in numbers]
    if all(each is None for each in named):
        return None
    start = 0
    for number, layers in enumerate(named):
        if layers is None or layers.start != start:
            told = None if layers is None else [layers.start, layers.stop]
            raise file.wrong(
                f"pp_stage{number}.layers",
                told,
                f"must begin with {start}; all name theirs, or none",
            )
        start = layers.stop
    return tuple(named)


def _modules_of(file: _File) -> dict[str, Cut]:
    plan: dict[str, Cut] = {}
    for number, kind, group in file.cuts:
        for pattern in group["modules"]:
            if plan.setdefault(pattern, CUTS[kind]) != CUTS[kind]:
                key = f"pp_stage{number}_{kind}.modules"
                raise file.wrong(key, pattern, "is of a colpar and of a rowpar group")
    return plan
