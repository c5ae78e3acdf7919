from datetime import date
from typing import Any

import pytest

from smolcluster.configs.keys import find_shape, fixed_paths
from smolcluster.configs.schema import NodeConfig, Section, cluster_section, train_section
from smolcluster.utils.words import show


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
