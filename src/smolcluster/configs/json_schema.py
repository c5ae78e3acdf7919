"""The two kinds of configuration files as JSON schemas (Draft 2020-12), for editors and other tools.

An editor that speaks YAML completes and checks a file that begins with
`# yaml-language-server: $schema=cluster.schema.json`. What joins several keys, such as `num_workers` and
`workers`, only `smolcluster config check` can judge.
"""

from typing import Any

from smolcluster.configs.load import Kind
from smolcluster.configs.nested import DATA, DATASET, TRAINING, nested_path
from smolcluster.configs.schema import ClusterConfig, GPTConfig, SimpleNNConfig, TrainConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Json = dict[str, Any]


def json_schema(kind: Kind) -> Json:
    """The schema of cluster files, or of training files in either of their shapes."""
    schema = _closed((ClusterConfig if kind == "cluster" else TrainConfig).model_json_schema())
    title = f"smolcluster: {kind} file"
    if kind == "cluster":
        return {"$schema": DIALECT, **schema, "title": title}
    definitions = schema.pop("$defs")
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
