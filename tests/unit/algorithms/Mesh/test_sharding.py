"""Sharding files: those that users have, ours, and broken ones."""

from pathlib import Path
from typing import Any

import pytest

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.Mesh.sharding import read_sharding
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError
from smolcluster.launch.plan import Request, portable_request


def stage(number: int, size: int = 2, **more: Any) -> str:
    ranks = list(range(number * size, (number + 1) * size))
    rest = "".join(f"  {key}: {value}\n" for key, value in more.items())
    return f"pp_stage{number}:\n  shard:\n    axis: 0\n    workers: {ranks}\n{rest}"


def cuts(number: int, size: int = 2, column: str = "", row: str = "") -> str:
    ranks = list(range(number * size, (number + 1) * size))
    groups = (("colpar", 1, column), ("rowpar", 0, row))
    return "".join(
        f"pp_stage{number}_{kind}:\n  shard:\n    axis: {axis}\n    workers: {ranks}\n{modules}"
        for kind, axis, modules in groups
    )


FOUR = "".join(stage(number) + cuts(number) for number in range(4))
"""TP 2 x PP 4 on 8 workers."""


def written(folder: Path, text: str) -> str:
    file = folder / "sharding.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_of_eight_workers_is_taken_as_it_is(tmp_path: Path) -> None:
    sharding = read_sharding(written(tmp_path, FOUR))
    assert (sharding.tp, sharding.pp, sharding.layers, sharding.modules) == (2, 4, None, {})
    config = MeshConfig.model_validate(
        {"mesh": {"tp": 2, "pp": 4}, "sharding": written(tmp_path, FOUR)}
    )
    config.check_division(num_samples=32, num_layers=8)
    assert list(config.cut(8, 4)) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


@pytest.mark.parametrize(
    ("text", "tp", "pp"),
    [
        ("pp_stage0:\n  workers: [0, 1, 2, 3]\npp_stage1:\n  workers: [4, 5, 6, 7]\n", 4, 2),
        ("".join(f"pp_stage{i}:\n  workers: [{i}]\n" for i in range(8)), 1, 8),
    ],
)
def test_its_variants_are_taken(tmp_path: Path, text: str, tp: int, pp: int) -> None:
    sharding = read_sharding(written(tmp_path, text))
    assert (sharding.tp, sharding.pp) == (tp, pp)


def test_stages_name_their_layers_and_groups_their_modules(tmp_path: Path) -> None:
    column, row = "  modules: ['*.up', '*.gate']\n", "  modules: ['*.down']\n"
    text = stage(0, layers=[0, 3]) + stage(1, layers=[3, 4]) + cuts(0, column=column, row=row)
    config = MeshConfig.model_validate(
        {"mesh": {"tp": 2, "pp": 2}, "sharding": written(tmp_path, text), "schedule": "1f1b"}
    )
    assert list(config.cut(4, 2)) == [range(0, 3), range(3, 4)]
    assert config.plan == {"*.up": "column", "*.gate": "column", "*.down": "row"}
    with pytest.raises(ConfigError, match="sharding names 4 layers"):
        config.cut(5, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stage0: {workers: [0]}\n", "stage0 is a mapping, must be pp_stage0"),
        ("pp_stage0: 3\n", "pp_stage0 is 3, must be a mapping"),
        ("pp_stage0: {worker: [0]}\n", r"pp_stage0.worker is .*workers"),
        ("pp_stage0: {shard: {axis: 0}}\n", "pp_stage0.shard.workers is null"),
        (
            "pp_stage0: {shard: {axis: 2, workers: [0]}}\n",
            "pp_stage0.shard.axis is 2, must be 0 or 1",
        ),
        ("pp_stage0: {shard: {axis: 0, workers: [0, a]}}\n", "pp_stage0.shard.workers is"),
        ("pp_stage0: {shard: {axis: 0, workers: [1, 0]}}\n", "ranks in order"),
        ("pp_stage0: {shard: {axis: 0, workers: [0, 0]}}\n", "each once"),
        (stage(1), "must be stages from 0 on"),
        (stage(0) + stage(1, size=3), "pp_stage1.workers is"),
        (stage(0) + cuts(1), "pp_stage1 is missing"),
        (stage(0) + cuts(0).replace("[0, 1]", "[0, 2]"), "must be those of pp_stage0"),
        (
            stage(0) + cuts(0).replace("axis: 1", "axis: 0"),
            "pp_stage0_colpar.shard.axis is 0, must be 1",
        ),
        (stage(0, layers=[0, 2]) + stage(1), "pp_stage1.layers is null, must begin with 2"),
        (stage(0, layers=[0, 2]) + stage(1, layers=[3, 4]), "must begin with 2"),
        (stage(0, layers=[2, 2]), "pp_stage0.layers is"),
        (stage(0, modules=["a"]), "pp_stage0.modules is"),
        (
            stage(0) + cuts(0, column="  modules: [a]\n", row="  modules: [a]\n"),
            "colpar and of a rowpar",
        ),
        ("pp_stage0: [\n", "sharding.yaml"),
    ],
)
def test_what_is_wrong_is_said_with_file_key_and_value(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        read_sharding(written(tmp_path, text))
    assert str(tmp_path / "sharding.yaml") in str(raised.value)


def test_a_file_of_other_sizes_is_refused(tmp_path: Path) -> None:
    config = MeshConfig.model_validate(
        {"mesh": {"tp": 4, "pp": 2}, "sharding": written(tmp_path, FOUR)}
    )
    with pytest.raises(ConfigError, match=r"set mesh.tp to 2 and mesh.pp to 4"):
        config.check_division(num_samples=32, num_layers=8)


def test_machines_are_told_what_the_file_holds(tmp_path: Path) -> None:
    overrides = (f"sharding={written(tmp_path, FOUR)}",)
    settings = load_settings("mesh", "stdlib", None, overrides, environ={})
    request = Request(get_algorithm("mesh"), overrides=overrides)
    told = portable_request(request, settings)
    (tmp_path / "sharding.yaml").unlink()
    settings = load_settings("mesh", "stdlib", None, told.overrides, environ={})
    assert read_sharding(settings.cluster.sharding).tp == 2  # type: ignore[attr-defined]
