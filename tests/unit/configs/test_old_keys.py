"""Keys of earlier versions mean what they meant, in files, flags and variables."""

from typing import Any

import pytest

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.configs import old_keys
from smolcluster.configs.json_schema import json_schema
from smolcluster.configs.old_keys import OLD_KEYS
from smolcluster.configs.problems import SettingError
from smolcluster.configs.resolve import resolve
from smolcluster.configs.schema import Settings

CLUSTER: dict[str, Any] = {
    "host_ip": {"a": "10.0.0.1", "b": "10.0.0.1"},
    "num_workers": 1,
    "workers": ["b"],
    "server": "a",
}


def settle(
    content: dict[str, Any], *overrides: str, environ: dict[str, str] | None = None
) -> Settings:
    return resolve(
        cluster=CLUSTER | content,
        train={"dataset": {"name": "digits"}},
        overrides=overrides,
        environ=environ,
        cluster_file="mine.yaml",
    )


@pytest.mark.parametrize(
    ("content", "overrides", "codec"),
    [
        ({"use_quantization": True}, [], "int8"),
        ({"use_quantization": True, "codec": None}, [], "int8"),
        ({"use_quantization": True, "codec": "int8"}, [], "int8"),
        ({"use_quantization": False, "codec": "int8"}, [], "int8"),
        ({"use_quantization": False, "codec": "bf16"}, [], "bf16"),
        ({"use_quantization": False}, [], None),
        ({"use_quantization": True}, ["use_quantization=false"], None),
        ({"use_quantization": True}, ["codec=bf16"], "bf16"),
        ({"codec": "bf16"}, ["use_quantization=false"], "bf16"),
        ({}, ["use_quantization=true"], "int8"),
        ({}, ["use_quantization=true", "codec=int8"], "int8"),
    ],
)
def test_quantization_is_a_codec(
    content: dict[str, Any], overrides: list[str], codec: str | None
) -> None:
    assert settle(content, *overrides).cluster.codec == codec


@pytest.mark.parametrize(
    ("content", "overrides", "servers"),
    [
        ({"stores": "auto"}, [], "auto"),
        ({"stores": "auto"}, ["servers={a: 2, b: 1}"], {"a": 2, "b": 1}),
        ({"stores": "auto"}, ["stores=null"], None),
        ({"stores": None, "servers": None, "store_shares": None}, [], None),
        ({"servers": ["a", "b"], "store_shares": [2, 1]}, [], {"a": 2, "b": 1}),
        ({"servers": ["a", "b"]}, ["store_shares=[2, 1]"], {"a": 2, "b": 1}),
        ({}, ["store_shares=[2, 1]", "servers=[a, b]"], {"a": 2, "b": 1}),
        ({"servers": ["a", "b"], "store_shares": [2, 1]}, ["store_shares=null"], ("a", "b")),
        ({"servers": ["a", "b"], "store_shares": [2, 1]}, ["servers=null"], None),
        ({"store_shares": [1]}, [], None),
    ],
)
def test_shares_stand_beside_the_servers(
    content: dict[str, Any], overrides: list[str], servers: object
) -> None:
    assert settle(content, *overrides).cluster.servers == servers


@pytest.mark.parametrize(
    ("content", "overrides", "computed_again"),
    [
        ({"recompute": True}, [], "full"),
        ({"recompute": True, "activation_checkpointing": "none"}, [], "full"),
        ({"recompute": False, "activation_checkpointing": "selective"}, [], "selective"),
        ({"pipeline": {"recompute": True}}, [], "full"),
        ({"recompute": True}, ["recompute=false"], "none"),
        ({}, ["recompute=true"], "full"),
        ({}, ["pipeline.recompute=true"], "full"),
    ],
)
def test_recompute_is_activation_checkpointing(
    content: dict[str, Any], overrides: list[str], computed_again: str
) -> None:
    settings = settle(content, *overrides)
    assert settings.of(MeshConfig).activation_checkpointing == computed_again
    assert settings.of(PipelineConfig).activation_checkpointing == computed_again


@pytest.mark.parametrize("by_override", [False, True])
def test_stages_compute_again_as_they_are_told(*, by_override: bool) -> None:
    stages = {"host_ip": {"b": "127.0.0.1"}} | ({} if by_override else {"recompute": True})
    override = ["nodes.b.stages.recompute=true"] if by_override else []
    node = settle({"nodes": {"b": {"stages": stages}}}, *override).cluster.nodes["b"]
    assert node.stages is not None
    assert node.stages.activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("content", "overrides", "checkpoint_steps", "restarts"),
    [
        ({"redundancy": 5}, [], 5, 3),
        ({"pipeline": {"redundancy": 5}, "checkpoint_steps": 50}, [], 5, 3),
        ({"redundancy": None, "checkpoint_steps": 50}, [], 50, 3),
        ({"checkpoint_steps": 50}, ["redundancy=null"], 50, 3),
        ({"checkpoint_steps": 50}, ["pipeline.redundancy=5"], 5, 3),
        ({"kubernetes": {"retries": 5}}, [], 200, 5),
        ({"kubernetes": {"retries": 3}, "restarts": 0}, [], 200, 0),
        ({"restarts": 0}, ["kubernetes.retries=3"], 200, 3),
        ({}, ["kubernetes={retries: 4, nodes: 2}"], 200, 4),
    ],
)
def test_what_two_keys_said_one_says(
    content: dict[str, Any], overrides: list[str], checkpoint_steps: int, restarts: int
) -> None:
    cluster = settle(content, *overrides).cluster
    assert (cluster.checkpoint_steps, cluster.restarts) == (checkpoint_steps, restarts)


@pytest.mark.parametrize(
    ("content", "overrides", "says"),
    [
        ({"slurm": {"launcher": "torchrun"}}, [], "mine.yaml: slurm.launcher is 'torchrun'"),
        ({}, ["slurm.launcher=torchrun"], "--override: slurm.launcher is 'torchrun'"),
        ({"momentum_delay": 8}, [], "mine.yaml: momentum_delay is 8"),
        ({"diloco": {"momentum_delay": 9}}, [], "mine.yaml: momentum_delay is 9"),
        ({}, ["diloco.momentum_delay=8"], "--override: momentum_delay is 8"),
        ({"slurm": {"launcher": "srun"}, "momentum_delay": None}, [], ""),
    ],
)
def test_that_a_key_has_no_effect_any_more_is_said_once(
    content: dict[str, Any],
    overrides: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old_keys._say_once.cache_clear()
    for _ in range(2):
        settle(content, *overrides)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(", which has no effect")[0] for line in said] == [says] * bool(says)


def test_a_variable_may_hold_an_old_key() -> None:
    assert settle({}, environ={"SMOLCLUSTER_USE_QUANTIZATION": "true"}).cluster.codec == "int8"


@pytest.mark.parametrize(
    ("content", "overrides", "source", "key", "value"),
    [
        ({"use_quantization": "yes"}, [], "mine.yaml", "use_quantization", "yes"),
        ({}, ["use_quantization=yes"], "--override", "use_quantization", "yes"),
        (
            {"use_quantization": True, "codec": "bf16"},
            [],
            "mine.yaml",
            "use_quantization",
            True,
        ),
        ({}, ["use_quantization=true", "codec=int4"], "--override", "use_quantization", True),
        ({"stores": "auto", "servers": ["a", "b"]}, [], "mine.yaml", "stores", "auto"),
        ({"store_shares": [1, 2]}, [], "mine.yaml", "store_shares", [1, 2]),
        ({"servers": ["a"]}, ["store_shares=[0]"], "--override", "store_shares", [0]),
        (
            {"kubernetes": {"retries": -1}},
            [],
            "mine.yaml",
            "kubernetes.retries",
            -1,
        ),
        ({}, ["slurm.launcher=mpi"], "--override", "slurm.launcher", "mpi"),
        (
            {"nodes": {"b": {"stages": {"recompute": 1}}}},
            [],
            "mine.yaml",
            "nodes.b.stages.recompute",
            1,
        ),
    ],
)
def test_what_is_wrong_with_an_old_key_is_told_by_its_name(
    content: dict[str, Any], overrides: list[str], source: str, key: str, value: object
) -> None:
    with pytest.raises(SettingError) as caught:
        settle(content, *overrides)
    error = caught.value
    assert (error.source, error.key, error.value) == (source, key, value)


def test_editors_know_that_they_are_old() -> None:
    schema = json_schema("cluster")
    sections = {"slurm": "SlurmConfig", "kubernetes": "KubernetesConfig"}
    for name in OLD_KEYS:
        section, _, last = name.rpartition(".")
        place = schema["$defs"][sections[section]] if section else schema
        assert place["properties"][last]["deprecated"]
