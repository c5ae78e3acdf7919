"""Keys of earlier versions mean what they meant, in files, flags and variables."""

from typing import Any

import pytest

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
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
    properties = json_schema("cluster")["properties"]
    assert all(properties[name]["deprecated"] for name in OLD_KEYS)
