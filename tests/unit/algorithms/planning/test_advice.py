"""Who is recommended."""

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


def test_of_equals_the_exact_one_is_taken() -> None:
    advice = advise([option("stale", 300), option("exact", 280, exact=True)], ALONE)
    assert advice.chosen and advice.chosen.algorithm == "exact"


def test_an_exact_one_that_is_slower_is_not() -> None:
    advice = advise([option("stale", 300), option("exact", 200, exact=True)], ALONE)
    assert advice.chosen and advice.chosen.algorithm == "stale"


def test_a_cluster_that_is_hardly_faster_than_its_fastest_machine_is_not_worth_it() -> None:
    advice = advise([option("stale", 105)], ALONE)
    assert advice.chosen is None
    assert advice.gain == 1.05


def test_a_codec_that_loses_something_must_gain_something() -> None:
    assert (
        best_settings([option("a", 97), option("a", 100, codec="int8")]).settings["codec"] == "fp32"
    )
    assert (
        best_settings([option("a", 60), option("a", 100, codec="int8")]).settings["codec"] == "int8"
    )
