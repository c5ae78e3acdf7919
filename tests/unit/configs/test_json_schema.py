"""The JSON schemas say yes and no where the configuration does."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from smolcluster.configs.json_schema import json_schema
from smolcluster.configs.load import Kind, find_config, read_config, shipped_names
from smolcluster.configs.resolve import resolve
from smolcluster.configs.schema import ClusterConfig, TrainConfig
from smolcluster.errors import ConfigError

CLUSTER: dict[str, Any] = {
    "host_ip": {"a": "10.0.0.1", "b": "10.0.0.1"},
    "num_workers": 1,
    "workers": ["b"],
    "server": "a",
}
TRAIN: dict[str, Any] = {"dataset": {"name": "digits"}}


def accepts(kind: Kind, content: dict[str, Any]) -> bool:
    return bool(Draft202012Validator(json_schema(kind)).is_valid(content))


def is_right(kind: Kind, content: dict[str, Any]) -> bool:
    files = {"cluster": CLUSTER, "training": TRAIN} | {kind: content}
    try:
        resolve(cluster=files["cluster"], train=files["training"])
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("kind", ["cluster", "training"])
def test_the_schema_is_one_of_its_draft(kind: Kind) -> None:
    schema = json_schema(kind)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("cluster", "training") for name in shipped_names(kind)],
)
def test_shipped_files_are_accepted(kind: Kind, name: str) -> None:
    assert accepts(kind, read_config(find_config(name, kind), kind))


@pytest.mark.parametrize(
    ("kind", "content", "right"),
    [
        ("cluster", {}, True),
        ("cluster", {"port": 0}, False),
        ("cluster", {"prot": 6000}, False),
        ("cluster", {"timeout": None, "nodes": {"b": {"ssh": "pi@b", "threads": 2}}}, True),
        ("cluster", {"nodes": {"b": {"thread": 2}}}, False),
        ("cluster", {"nodes": {"b": {"env": {"1A": "x"}}}}, False),
        ("cluster", {"nodes": {"b": {"ssh": "-oProxyCommand=x"}}}, False),
        ("cluster", {"host_ip": {"a": "x", "b": "y", "c d": "z"}}, False),
        ("training", {}, True),
        ("training", {"batch_size": None}, True),
        ("training", {"batch_size": 0}, False),
        ("training", {"epochs": 3}, False),
        ("training", {"model": {"hidden": 64}}, True),
        ("training", {"model": {"model_dim": 64}}, False),
        ("training", {"model": {"type": "GPT", "model_dim": 64}}, True),
        ("training", {"model": {"type": "RNN"}}, False),
        ("training", {"training": {"epochs": 3, "grad_clip_norm": None}}, True),
        ("training", {"training": {"grad_clip_norm": 1.0}, "model": {"model_dim": 64}}, True),
        ("training", {"training": {}, "model": {"hidden": 64}}, False),
        ("training", {"training": {}, "model": {"type": "SimpleNN", "hidden": 64}}, True),
        ("training", {"training": {"epoch": 3}}, False),
    ],
)
def test_it_agrees_with_the_configuration(kind: Kind, content: dict[str, Any], right: bool) -> None:
    content = (CLUSTER if kind == "cluster" else TRAIN) | content
    assert is_right(kind, content) is right
    assert accepts(kind, content) is right


def test_the_nested_shape_needs_no_name_of_a_dataset() -> None:
    contents: list[dict[str, Any]] = [
        {"data": {}},
        {"data": {"tokenizer": "bytes"}, "training": {"epochs": None}},
    ]
    for content in contents:
        assert is_right("training", content)
        assert accepts("training", content)
    assert not accepts("training", {})


def test_who_brings_a_workload_names_no_dataset() -> None:
    content = {"workload": "train.py:workload", "workload_args": {"width": 3, "sizes": [1, 2]}}
    assert is_right("training", content)
    assert accepts("training", content)
    assert not is_right("training", {"workload_args": {}})


def test_every_key_is_described() -> None:
    for section, kind in ((ClusterConfig, "cluster"), (TrainConfig, "training")):
        text = json.dumps(json_schema(kind))  # type: ignore[arg-type]
        for name, field in section.model_fields.items():
            assert f'"{name}"' in text
            assert field.description, name
