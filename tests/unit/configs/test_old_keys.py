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


CHECKPOINTING = "activation_checkpointing"


@pytest.mark.parametrize(
    ("key", "content", "overrides", "value"),
    [
        ("codec", {"use_quantization": True}, [], "int8"),
        ("codec", {"use_quantization": True, "codec": None}, [], "int8"),
        ("codec", {"use_quantization": True, "codec": "int8"}, [], "int8"),
        ("codec", {"use_quantization": False, "codec": "int8"}, [], "int8"),
        ("codec", {"use_quantization": False, "codec": "bf16"}, [], "bf16"),
        ("codec", {"use_quantization": False}, [], None),
        ("codec", {"use_quantization": True}, ["use_quantization=false"], None),
        ("codec", {"use_quantization": True}, ["codec=bf16"], "bf16"),
        ("codec", {"codec": "bf16"}, ["use_quantization=false"], "bf16"),
        ("codec", {}, ["use_quantization=true"], "int8"),
        ("codec", {}, ["use_quantization=true", "codec=int8"], "int8"),
        ("servers", {"stores": "auto"}, [], "auto"),
        ("servers", {"stores": "auto"}, ["servers={a: 2, b: 1}"], {"a": 2, "b": 1}),
        ("servers", {"stores": "auto"}, ["stores=null"], None),
        ("servers", {"stores": None, "servers": None, "store_shares": None}, [], None),
        ("servers", {"servers": ["a", "b"], "store_shares": [2, 1]}, [], {"a": 2, "b": 1}),
        ("servers", {"servers": ["a", "b"]}, ["store_shares=[2, 1]"], {"a": 2, "b": 1}),
        ("servers", {}, ["store_shares=[2, 1]", "servers=[a, b]"], {"a": 2, "b": 1}),
        (
            "servers",
            {"servers": ["a", "b"], "store_shares": [2, 1]},
            ["store_shares=null"],
            ("a", "b"),
        ),
        ("servers", {"servers": ["a", "b"], "store_shares": [2, 1]}, ["servers=null"], None),
        ("servers", {"store_shares": [1]}, [], None),
        (CHECKPOINTING, {"recompute": True}, [], "full"),
        (CHECKPOINTING, {"recompute": True, "activation_checkpointing": "none"}, [], "full"),
        (
            CHECKPOINTING,
            {"recompute": False, "activation_checkpointing": "selective"},
            [],
            "selective",
        ),
        (CHECKPOINTING, {"pipeline": {"recompute": True}}, [], "full"),
        (CHECKPOINTING, {"recompute": True}, ["recompute=false"], "none"),
        (CHECKPOINTING, {}, ["recompute=true"], "full"),
        (CHECKPOINTING, {}, ["pipeline.recompute=true"], "full"),
        ("checkpoint_steps", {"redundancy": 5}, [], 5),
        ("checkpoint_steps", {"pipeline": {"redundancy": 5}, "checkpoint_steps": 50}, [], 5),
        ("checkpoint_steps", {"redundancy": None, "checkpoint_steps": 50}, [], 50),
        ("checkpoint_steps", {"checkpoint_steps": 50}, ["redundancy=null"], 50),
        ("checkpoint_steps", {}, ["redundancy=null"], 200),
        ("checkpoint_steps", {"checkpoint_steps": 50}, ["pipeline.redundancy=5"], 5),
        ("restarts", {"kubernetes": {"retries": 5}}, [], 5),
        ("restarts", {"kubernetes": {"retries": 3}, "restarts": 0}, [], 0),
        ("restarts", {"restarts": 0}, ["kubernetes.retries=3"], 3),
        ("restarts", {}, ["kubernetes={retries: 4, nodes: 2}"], 4),
    ],
)
def test_old_keys_mean_what_they_meant(
    key: str, content: dict[str, Any], overrides: list[str], value: object
) -> None:
    cluster = settle(content, *overrides).cluster
    assert getattr(cluster, key) == value
    for other, default in (("checkpoint_steps", 200), ("restarts", 3)):
        assert other in (key, *content) or getattr(cluster, other) == default


@pytest.mark.parametrize("algorithm", [MeshConfig, PipelineConfig])
def test_recompute_is_of_either_algorithm(algorithm: type[MeshConfig | PipelineConfig]) -> None:
    assert settle({"recompute": True}).of(algorithm).activation_checkpointing == "full"


@pytest.mark.parametrize("by_override", [False, True])
def test_stages_compute_again_as_they_are_told(*, by_override: bool) -> None:
    stages = {"host_ip": {"b": "127.0.0.1"}} | ({} if by_override else {"recompute": True})
    override = ["nodes.b.stages.recompute=true"] if by_override else []
    node = settle({"nodes": {"b": {"stages": stages}}}, *override).cluster.nodes["b"]
    assert node.stages is not None
    assert node.stages.activation_checkpointing == "full"


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
