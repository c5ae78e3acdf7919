"""Who is recommended."""

import pytest

from smolcluster.algorithms.planning.advice import Option, advise, best_settings
from smolcluster.algorithms.planning.costs import Forecast


def option(name: str, samples_per_s: float, *, codec: str = "fp32", exact: bool = False) -> Option:
    return Option(name, {"codec": codec}, Forecast(samples_per_s, 0.0, 0.0, 0.0, is_exact=exact))


ALONE = {"mini1": 100.0, "pi5": 20.0}


def test_the_fastest_is_taken() -> None:
    advice = advise([option("slow", 150), option("fast", 300)], ALONE)
    assert advice.chosen and advice.chosen.algorithm == "fast"
    assert [each.algorithm for each in advice.options] == ["fast", "slow"]
    assert advice.alone == ("mini1", 100.0)
    assert advice.gain == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([option("stale", 300), option("exact", 280, exact=True)], "exact"),
        ([option("stale", 300), option("exact", 200, exact=True)], "stale"),
        ([option("stale", 105)], None),
    ],
    ids=["of equals the exact one", "one that is slower is not", "hardly faster than one machine"],
)
def test_who_is_taken(options: list[Option], expected: str | None) -> None:
    chosen = advise(options, ALONE).chosen
    assert (chosen and chosen.algorithm) == expected


def test_a_codec_that_loses_something_must_gain_something() -> None:
    assert (
        best_settings([option("a", 97), option("a", 100, codec="int8")]).settings["codec"] == "fp32"
    )
    assert (
        best_settings([option("a", 60), option("a", 100, codec="int8")]).settings["codec"] == "int8"
    )
