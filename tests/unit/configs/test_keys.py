from datetime import date
from typing import Any

import pytest

from smolcluster.configs.keys import find_shape, fixed_paths, show, unknown_key
from smolcluster.configs.schema import NodeConfig, Section, cluster_section, train_section


@pytest.mark.parametrize(
    ("section", "key", "allowed"),
    [
        (cluster_section(), "port", "a whole number from 1 to 65535"),
        (cluster_section(), "num_workers", "a whole number above 0"),
        (cluster_section(), "seed", "a whole number from 0 to 9223372036854775807"),
        (cluster_section(), "use_quantization", "true or false"),
        (cluster_section(), "timeout", "a number above 0 and of 1000000 or less, or null"),
        (cluster_section(), "codec", "one of fp32, bf16, fp16, int8, or null"),
        (cluster_section(), "batch_share", "a mapping of names to values, or null"),
        (cluster_section(), "batch_share.anybody", "a number of 0 or more"),
        (cluster_section(), "update_rule", "one of gradient, mixing"),
        (cluster_section(), "nodes.anybody.microbatch", "a whole number above 0, or null"),
        (cluster_section(), "staleness.exponent", "a number of 0 or more"),
        (cluster_section(), "workers", "a list such as [a, b]"),
        (cluster_section(), "bind", "a list of at least one, such as [a, b], or null"),
        (cluster_section(), "server", "a name of at most 64 letters, digits, '.', '_' and '-'"),
        (NodeConfig, "project_dir", "a path that begins with / or ~/, without backslashes"),
        (cluster_section(), "host_ip", "a mapping of names to values"),
        (cluster_section(), "host_ip.anybody", "text that is not empty"),
        (cluster_section(), "nodes.anybody.threads", "a whole number above 0, or null"),
        (train_section(), "polyak_alpha", "a number from 0 to 1"),
        (train_section(), "global_batch_size", "a whole number above 0, or null"),
        (train_section(), "optimizer", "one of adam, adamw, sgd"),
        (train_section(), "dataset.root", "a path, or null"),
        (train_section(), "dataset.name", "text"),
        (train_section(), "lr_schedule", "a mapping with keys of warmup_iters, min_lr, or null"),
    ],
)
def test_what_a_key_may_hold_is_said_in_words(
    section: type[Section], key: str, allowed: str
) -> None:
    shape = find_shape(section, tuple(key.split(".")))
    assert shape is not None
    assert shape.allowed() == allowed


@pytest.mark.parametrize("section", [cluster_section(), train_section(), NodeConfig])
def test_every_key_can_be_said_in_words(section: type[Section]) -> None:
    for path in fixed_paths(section):
        shape = find_shape(section, path)
        assert shape is not None
        assert shape.allowed()


def test_nothing_is_found_below_a_value_or_under_a_wrong_name() -> None:
    for path in [("prot",), ("port", "x"), ("staleness", "x"), ("nodes", "pi5", "x")]:
        assert find_shape(cluster_section(), path) is None


def test_the_only_key_in_two_sections_is_the_dataset() -> None:
    tops = [set(s.model_fields) for s in (cluster_section(), train_section(), NodeConfig)]
    assert tops[0].isdisjoint(tops[1] | tops[2])
    assert tops[1] & tops[2] == {"dataset"}


PLACES = {("port",): "the cluster file", ("model", "hidden"): "the training file"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (("prot",), "prot is not a setting; did you mean port?"),
        (("hidden",), "not a setting here; did you mean model.hidden in the training file?"),
        (("a", "hiden"), "not a setting here; did you mean model.hidden in the training file?"),
        (("zzz",), "zzz is not a setting; known here: port"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(path: tuple[str, ...], says: str) -> None:
    assert unknown_key(path, ("port",), PLACES, "the cluster file").endswith(says)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        ("3", "'3'"),
        ([1, "a", None], "[1, 'a', null]"),
        ({"a": 1}, "a mapping"),
        (date(2026, 1, 2), "2026-01-02"),
        ("a\nb", r"'a\nb'"),
        (100 * "x", "'" + 59 * "x" + "…"),
    ],
)
def test_values_are_shown_as_in_yaml_and_not_at_length(value: Any, text: str) -> None:
    assert show(value) == text
