"""The two kinds of configuration files as JSON schemas (Draft 2020-12), for editors and other tools.

An editor that speaks YAML completes and checks a file that begins with
`# yaml-language-server: $schema=cluster.schema.json`. What joins several keys, such as `num_workers` and
`workers`, only `smolcluster config check` can judge.
"""

from collections.abc import Iterator
from typing import Any

from smolcluster.configs.load import Kind
from smolcluster.configs.schema import (
    GPTConfig,
    SimpleNNConfig,
    cluster_section,
    own_keys,
    train_section,
)
from smolcluster.configs.sections import DATA, DATASET, TRAINING, nested_path
from smolcluster.configs.spec import algorithms

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Json = dict[str, Any]


def json_schema(kind: Kind) -> Json:
    """The schema of cluster files, or of training files in either of their shapes."""
    schema = _closed(
        (cluster_section() if kind == "cluster" else train_section()).model_json_schema()
    )
    title = f"smolcluster: {kind} file"
    shared = schema["properties"]
    schema["properties"] = shared | dict(_own_sections(shared, schema.get("$defs", {})))
    if kind == "cluster":
        return {"$schema": DIALECT, **schema, "title": title}
    definitions = schema.pop("$defs")
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["workload"]}]
    return {
        "$schema": DIALECT,
        "title": title,
        "description": schema.pop("description"),
        "type": "object",
        "if": {"anyOf": [{"required": [TRAINING]}, {"required": [DATA]}]},
        "then": _nested(schema, definitions),
        "else": {**schema, "properties": _with_model(schema["properties"], SimpleNNConfig)},
        "$defs": definitions,
    }


def _own_sections(properties: Json, definitions: Json) -> Iterator[tuple[str, Json]]:
    """For each algorithm that has keys here, the section below its name, which may be a key, too."""
    for spec in algorithms().values():
        own = {key: properties[key] for key in properties if key in own_keys(spec.name)}
        if "$ref" in (same := own.pop(spec.name, {})):
            own = own | definitions[same["$ref"].rpartition("/")[2]]["properties"]
        if own:
            yield spec.name, {"type": "object", "properties": own, "additionalProperties": False}


def _nested(flat: Json, definitions: Json) -> Json:
    """The nested shape, which may hold keys of the flat one too."""
    properties = _with_model(flat["properties"], GPTConfig)
    dataset = definitions["DatasetConfig"]
    names = {key: nested_path((key,)) for key in properties}
    training = {path[1]: properties[key] for key, path in names.items() if path[0] == TRAINING}
    positive = {"type": "number", "exclusiveMinimum": 0}
    training["grad_clip_norm"] = {
        "anyOf": [positive, {"type": "null"}],
        "default": None,
        "description": "Largest global L2 norm of a gradient; null: gradients are not clipped.",
    }
    sections = {
        TRAINING: {"type": "object", "properties": training, "additionalProperties": False},
        DATA: {key: value for key, value in dataset.items() if key != "required"},
        DATASET: {key: value for key, value in dataset.items() if key != "required"},
    }
    return {"type": "object", "properties": properties | sections, "additionalProperties": False}


def _with_model(properties: Json, default: type[GPTConfig | SimpleNNConfig]) -> Json:
    """The keys of a shape in which a model that does not state its type is of the type `default`."""
    kinds = [
        {"$ref": f"#/$defs/{kind.__name__}"} | ({} if kind is default else {"required": ["type"]})
        for kind in (SimpleNNConfig, GPTConfig)
    ]
    return properties | {"model": {"anyOf": kinds, "description": "What is trained."}}


def _closed(schema: Any) -> Any:
    """The same, with mappings of free names that refuse names which break their pattern."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
