"""The nested training file: other words for the same settings, and other defaults."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.configs.load import find_config, read_yaml
from smolcluster.configs.problems import SettingError
from smolcluster.configs.resolve import resolve
from smolcluster.configs.schema import GPTConfig, Settings, SimpleNNConfig, train_section
from smolcluster.configs.sections import flatten

CLUSTER: dict[str, Any] = {
    "host_ip": {"mini1": "127.0.0.1", "pi5": "127.0.0.1"},
    "num_workers": 1,
    "workers": ["pi5"],
    "server": "mini1",
}
NESTED: dict[str, Any] = {
    "model": {"model_dim": 16, "num_layers": 1, "num_heads": 2, "ff_dim": 32, "max_seq_len": 16},
    "training": {"batch_size": 4, "epochs": 3},
    "data": {"name": "stdlib"},
}
FLAT: dict[str, Any] = {"dataset": {"name": "digits"}, "model": {"hidden": 8, "input_dim": None}}
FILE = "my_gpt.yaml"


def settle(
    train: dict[str, Any], *overrides: str, environ: dict[str, str] | None = None
) -> Settings:
    return resolve(
        cluster=CLUSTER,
        train=train,
        overrides=overrides,
        environ=environ,
        train_file=FILE,
    )


def raised(
    train: dict[str, Any], *overrides: str, environ: dict[str, str] | None = None
) -> SettingError:
    with pytest.raises(SettingError) as caught:
        settle(train, *overrides, environ=environ)
    return caught.value


def refusal(train: dict[str, Any], *overrides: str, environ: dict[str, str] | None = None) -> str:
    text = str(raised(train, *overrides, environ=environ))
    assert text.isprintable()
    assert "pydantic" not in text
    return text


def variable(key: str) -> str:
    return "SMOLCLUSTER_" + key.upper().replace(".", "__")


def value_at(settings: Settings, key: str) -> Any:
    value: Any = settings.train
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_key(key: str, value: Any, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """A training file with one key set."""
    changed = copy.deepcopy(NESTED if content is None else content)
    *above, last = key.split(".")
    section = changed
    for name in above:
        section = section.setdefault(name, {})
    section[last] = value
    return changed


# Each key's translation

KEYS = [
    ("training.batch_size", 7, "batch_size"),
    ("training.batch", "whole", "batch"),
    ("training.epochs", 7, "num_epochs"),
    ("training.num_epochs", 7, "num_epochs"),
    ("training.num_steps", 7, "num_steps"),
    ("training.tensorboard", True, "tensorboard"),
    ("training.learning_rate", 0.5, "learning_rate"),
    ("training.weight_decay", 0.25, "weight_decay"),
    ("training.grad_clip_norm", 2.5, "gradient_clipping.max_norm"),
    ("training.gradient_clipping.max_norm", 2.5, "gradient_clipping.max_norm"),
    ("training.gradient_accumulation", 3, "gradient_accumulation"),
    ("training.global_batch_size", 12, "global_batch_size"),
    ("training.patience", 2, "patience"),
    ("training.precision", "bf16", "precision"),
    ("training.eval_steps", 9, "eval_steps"),
    ("training.track_gradients", False, "track_gradients"),
    ("training.memory_profiling", True, "memory_profiling"),
    ("training.polyak_alpha", 0.25, "polyak_alpha"),
    ("training.optimizer", "sgd", "optimizer"),
    ("training.ema_decay", 0.9, "ema_decay"),
    ("training.optimizer_args", {"eps": 0.01}, "optimizer_args"),
    ("training.workload", "of.mine:workload", "workload"),
    ("training.workload_args", {"width": 3}, "workload_args"),
    ("lr_schedule.warmup_iters", 5, "lr_schedule.warmup_iters"),
    ("lr_schedule.min_lr", 0.0001, "lr_schedule.min_lr"),
    ("model.model_dim", 32, "model.model_dim"),
    ("data.name", "snli", "dataset.name"),
    ("data.tokenizer", "a/b", "dataset.tokenizer"),
    ("data.source", "server", "dataset.source"),
    ("data.repository", "a/b", "dataset.repository"),
    ("logging.project_name", "mine", "logging.project_name"),
]


@pytest.mark.parametrize(("key", "value", "flat"), KEYS)
@pytest.mark.parametrize("layer", ["file", "override", "environment"])
def test_each_key_means_the_flat_one_in_every_layer(
    key: str, value: Any, flat: str, layer: str
) -> None:
    written = str(value).lower() if isinstance(value, bool) else str(value)
    match layer:
        case "file":
            before = NESTED | {"training": {"batch_size": 4}}
            settings = settle(with_key(key, value, before))
        case "override":
            settings = settle(NESTED, f"{key}={written}")
        case _:
            settings = settle(NESTED, environ={variable(key): written})
    assert value_at(settings, flat) == value
    assert value_at(settle(NESTED | {"lr_schedule": {}}), flat) != value


def test_every_key_of_the_training_file_can_be_said_in_the_nested_shape() -> None:
    told = {flat.partition(".")[0] for _, _, flat in KEYS}
    assert told == set(train_section().model_fields)


@pytest.mark.parametrize(("key", "value"), [("num_epochs", 7), ("dataset.tokenizer", "x/y")])
def test_single_keys_may_be_given_in_the_flat_shape_too(key: str, value: Any) -> None:
    assert value_at(settle(NESTED, f"{key}={value}"), key) == value
    assert value_at(settle(NESTED, environ={variable(key): str(value)}), key) == value


def test_nested_keys_may_be_laid_on_a_flat_file() -> None:
    train = settle(FLAT, "training.epochs=7", "training.grad_clip_norm=null").train
    assert (train.num_epochs, train.gradient_clipping.enabled) == (7, False)
    assert train.optimizer == "adam", "the nested shape's defaults belong to its files"


def test_a_whole_section_may_be_laid_on_by_one_override_or_variable() -> None:
    train = settle(NESTED, "training={epochs: 5, grad_clip_norm: 2}", "data={tokenizer: x/y}").train
    assert (train.num_epochs, train.batch_size) == (5, 4)
    assert (train.gradient_clipping.enabled, train.dataset.tokenizer) == (True, "x/y")
    environ = {
        "SMOLCLUSTER_TRAINING": "{epochs: 5, batch_size: 2}",
        "SMOLCLUSTER_TRAINING__EPOCHS": "6",
    }
    settings = settle(NESTED, environ=environ)
    assert (settings.train.num_epochs, settings.train.batch_size) == (6, 2)


def test_an_override_beats_the_environment_whatever_the_shapes() -> None:
    environ = {"SMOLCLUSTER_TRAINING__EPOCHS": "5"}
    assert settle(NESTED, "num_epochs=6", environ=environ).train.num_epochs == 6
    environ = {"SMOLCLUSTER_NUM_EPOCHS": "5"}
    assert settle(NESTED, "training.epochs=6", environ=environ).train.num_epochs == 6


def test_where_the_data_lie_is_the_machines() -> None:
    train = with_key("data.cache", "/cache", with_key("data.root", "/data"))
    assert str(settle(train).node.dataset.root) == "/data"
    assert str(settle(train).node.dataset.cache) == "/cache"
    assert str(settle(train, "data.root=/other").node.dataset.root) == "/other"


def test_its_defaults_are_those_of_a_language_model_and_a_flat_file_has_its_own() -> None:
    train, flat = settle({"training": {}}).train, settle(FLAT).train
    assert isinstance(train.model, GPTConfig)
    assert (train.dataset.name, train.dataset.tokenizer) == ("wikitext", "bytes")
    assert (train.optimizer, train.gradient_clipping.enabled) == ("adamw", False)
    assert isinstance(flat.model, SimpleNNConfig)
    assert (flat.optimizer, flat.gradient_clipping.enabled) == ("adam", True)


# Both shapes at once


@pytest.mark.parametrize(
    ("extra", "here", "there"),
    [
        ({"batch_size": 3}, "batch_size", "training.batch_size"),
        ({"num_epochs": 3}, "num_epochs", "training.epochs"),
        ({"dataset": {"name": "snli"}}, "dataset.name", "data.name"),
    ],
)
def test_a_key_in_both_shapes_is_refused(extra: dict[str, Any], here: str, there: str) -> None:
    for first, last, train in ((there, here, NESTED | extra), (here, there, extra | NESTED)):
        error = raised(train)
        assert (error.source, error.key) == (FILE, last)
        assert str(error).endswith(f", and also set as {first}; keep one of them")


def test_where_the_data_lie_may_be_told_in_either_shape() -> None:
    """As messages about the data advise, which say `dataset.root`."""
    train = settle(NESTED | {"dataset": {"root": "/data"}}).train
    assert (train.dataset.name, str(train.dataset.root)) == ("stdlib", "/data")


@pytest.mark.parametrize("norm", [1.0, None])
@pytest.mark.parametrize("clipping", [{"max_norm": 2.0}, {"enabled": True}])
def test_clipping_in_both_shapes_is_refused(norm: float | None, clipping: dict[str, Any]) -> None:
    train = with_key("training.grad_clip_norm", norm)
    assert "also set as" in refusal(train | {"gradient_clipping": clipping})
    assert "also set as" in refusal({"gradient_clipping": clipping} | train)
    assert "also set as" in refusal(with_key("training.gradient_clipping", clipping, train))


# Words of messages


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("training.epochs", 0, "training.epochs is 0, must be a whole number above 0, or null"),
        ("training.epochs", "zero", "training.epochs is 'zero', must be a whole number above 0"),
        ("training.batch_size", "x", "training.batch_size is 'x', must be a whole number above 0"),
        ("training.grad_clip_norm", 0, "training.grad_clip_norm is 0, must be a number above 0"),
        ("training.optimizer", None, "training.optimizer is null, must be one of adam, adamw, sgd"),
        ("data.download", "yes", "data.download is 'yes', must be true or false"),
        ("data.columns", [1], "data.columns[0] is 1, must be text"),
        ("data.source", "cloud", "data.source is 'cloud', must be one of local, server"),
        ("data.tokeniser", "x", "data.tokeniser is not a setting; did you mean data.tokenizer?"),
        ("training.num_epoch", 1, "training.num_epoch is not a setting; did you mean training.epo"),
        ("lr_schedule.min_lr", -1, "lr_schedule.min_lr is -1, must be a number of 0 or more"),
        ("model.max_len", 1, "model.max_len is not a setting; did you mean model.max_seq_len?"),
        ("model.type", "gpt", "model.type is 'gpt', must be one of SimpleNN, GPT"),
        ("model.type", "", "model.type is '', must be one of SimpleNN, GPT"),
        ("model.hidden", 8, "model.hidden is not a setting of a GPT"),
        ("model.num_heads", 3, "model.num_heads is 3, must divide model.model_dim, 16"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_its_layer(key: str, value: Any, says: str) -> None:
    assert refusal(with_key(key, value)).startswith(f"{FILE}: {says}")
    written = json.dumps(value)
    assert refusal(NESTED, f"{key}={written}").startswith(f"--override: {says}")
    said = refusal(NESTED, environ={variable(key): written})
    assert said.startswith(f"environment variable {variable(key)}: {says}")


def test_a_key_of_another_kind_of_model_is_refused_in_a_flat_file_too() -> None:
    text = refusal(FLAT, "model.num_heads=2")
    assert text == "--override: model.num_heads is not a setting of a SimpleNN"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_epochs", "zero", "num_epochs is 'zero', must be a whole number above 0, or null"),
        ("dataset.source", "cloud", "dataset.source is 'cloud', must be one of local, server"),
        ("training", "5", "training is 5, must be a mapping of keys to values"),
        ("data", "{}", "data is an empty mapping, must be a mapping of keys to values"),
        ("training", "{epochs: 0}", "training.epochs is 0, must be a whole number above 0"),
    ],
)
def test_what_is_wrong_in_a_flag_or_variable_is_said_in_its_words(
    key: str, value: str, says: str
) -> None:
    assert refusal(NESTED, f"{key}={value}").startswith(f"--override: {says}")
    said = refusal(NESTED, environ={variable(key): value})
    assert said.startswith(f"environment variable {variable(key)}: {says}")


@pytest.mark.parametrize("section", ["training", "data"])
@pytest.mark.parametrize("content", [None, [1], "x"])
def test_a_section_that_is_no_mapping_is_refused(section: str, content: Any) -> None:
    error = raised(NESTED | {section: content})
    assert (error.source, error.key, error.value) == (FILE, section, content)
    assert error.allowed == "a mapping of keys to values"


# What null means


@pytest.mark.parametrize(
    ("length", "batch_size"), [(1, 32), (127, 32), (128, 32), (129, 16), (1024, 16)]
)
def test_a_batch_of_null_depends_on_the_length_of_sequences(length: int, batch_size: int) -> None:
    train = with_key("model.max_seq_len", length, with_key("training.batch_size", None))
    assert settle(train).train.batch_size == batch_size
    settings = settle(NESTED, "training.batch_size=null", f"model.max_seq_len={length}")
    assert settings.train.batch_size == batch_size


@pytest.mark.parametrize(
    ("name", "epochs"),
    [("wikitext", 30), ("snli", 20), ("stdlib", 10), ("text", 10), ("huggingface", 10)],
)
def test_epochs_of_null_depend_on_the_dataset(name: str, epochs: int) -> None:
    train = with_key("data.name", name, with_key("training.epochs", None))
    assert settle(train).train.num_epochs == epochs
    settings = settle(NESTED, "training.epochs=null", f"data.name={name}")
    assert settings.train.num_epochs == epochs


def test_a_stated_value_is_not_chosen_anew() -> None:
    train = settle(NESTED, "model.max_seq_len=512", "data.name=wikitext").train
    assert (train.batch_size, train.num_epochs) == (4, 3)


# What is shipped

DOCUMENT: dict[str, Any] = {
    "model": {
        "model_dim": 256,
        "num_layers": 6,
        "num_heads": 4,
        "ff_dim": 1024,
        "dropout": 0.1,
        "max_seq_len": 128,
    },
    "training": {
        "batch_size": None,
        "epochs": None,
        "learning_rate": 6e-4,
        "weight_decay": 0.01,
        "grad_clip_norm": 1.0,
    },
    "lr_schedule": {"warmup_iters": 100, "min_lr": 6e-5},
    "data": {"tokenizer": "openai-community/gpt2"},
    "logging": {"project_name": "smolcluster-gpt-wikitext2"},
}


def test_the_shipped_gpt_file_holds_exactly_what_users_have() -> None:
    assert read_yaml(find_config("gpt", "training")) == DOCUMENT


# Kinds of models


@pytest.mark.parametrize("model", [5, None, [], "GPT"])
def test_a_model_that_is_no_mapping_is_refused(model: Any) -> None:
    assert refusal(NESTED | {"model": model}).startswith(f"{FILE}: model is ")


# The two shapes say the same

numbers = st.floats(1e-6, 10, allow_nan=False)
counts = st.integers(1, 100)
training_keys: dict[str, st.SearchStrategy[Any]] = {
    "batch_size": st.none() | counts,
    "epochs": st.none() | counts,
    "learning_rate": numbers,
    "weight_decay": numbers,
    "grad_clip_norm": st.none() | numbers,
    "gradient_accumulation": counts,
    "patience": st.none() | counts,
    "precision": st.sampled_from(["fp32", "bf16"]),
    "eval_steps": counts,
    "optimizer": st.sampled_from(["adam", "adamw", "sgd"]),
    "track_gradients": st.booleans(),
}
data_keys: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(["wikitext", "snli", "text", "stdlib"]),
    "tokenizer": st.sampled_from(["bytes", "openai-community/gpt2"]),
    "root": st.sampled_from([None, "/data"]),
    "source": st.sampled_from(["local", "server"]),
}
model_keys: dict[str, st.SearchStrategy[Any]] = {
    "type": st.just("GPT"),
    "num_heads": st.sampled_from([1, 2, 4]),
    "max_seq_len": counts,
    "dropout": st.floats(0, 0.9),
}


def spelt_flat(
    training: dict[str, Any], data: dict[str, Any], model: dict[str, Any]
) -> dict[str, Any]:
    """The same file as a person would write it in the flat shape."""
    flat: dict[str, Any] = {"optimizer": "adamw", "dataset": {"name": "wikitext"} | data}
    flat["model"] = {"type": "GPT"} | model
    flat["gradient_clipping"] = {"enabled": False}
    for name, value in training.items():
        match name:
            case "epochs":
                flat["num_epochs"] = value
            case "grad_clip_norm" if value is None:
                pass
            case "grad_clip_norm":
                flat["gradient_clipping"] = {"enabled": True, "max_norm": value}
            case _:
                flat[name] = value
    return flat


@given(
    training=st.fixed_dictionaries({}, optional=training_keys),
    data=st.fixed_dictionaries({}, optional=data_keys),
    model=st.fixed_dictionaries({}, optional=model_keys),
    shuffled=st.randoms(),
)
def test_a_nested_file_is_the_flat_one_that_says_the_same(
    training: dict[str, Any], data: dict[str, Any], model: dict[str, Any], shuffled: Any
) -> None:
    sections = [("training", training), ("data", data), ("model", model)]
    shuffled.shuffle(sections)
    flat, _ = flatten(dict(sections), FILE)
    expected = spelt_flat(training, data, model)
    assert flat == expected
    assert settle(dict(sections)) == settle(expected)


# Whatever names a largest norm means that gradients are clipped


@pytest.mark.parametrize(
    ("content", "override", "expected"),
    [
        ({"data": {}}, [], (False, 1.0)),
        ({"training": {"grad_clip_norm": None}}, [], (False, 1.0)),
        ({"training": {"grad_clip_norm": 2.0}}, [], (True, 2.0)),
        ({"training": {"grad_clip_norm": 2.0}}, ["training.grad_clip_norm=null"], (False, 2.0)),
        ({"data": {}, "gradient_clipping": {"max_norm": 2.0}}, [], (True, 2.0)),
        ({"data": {}, "gradient_clipping": {"enabled": False}}, [], (False, 1.0)),
        ({"data": {}}, ["gradient_clipping.max_norm=3.0"], (True, 3.0)),
        ({"training": {"grad_clip_norm": None}}, ["training.grad_clip_norm=3.0"], (True, 3.0)),
        ({"training": {"grad_clip_norm": 2.0}}, ["gradient_clipping.enabled=false"], (False, 2.0)),
    ],
)
def test_a_largest_norm_switches_clipping_on(
    content: dict[str, Any], override: list[str], expected: tuple[bool, float]
) -> None:
    clipping = resolve(cluster=CLUSTER, train=content, overrides=override).train.gradient_clipping
    assert (clipping.enabled, clipping.max_norm) == expected
