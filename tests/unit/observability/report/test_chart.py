import re

import pytest

from smolcluster.observability.curves import Curves, Series
from smolcluster.observability.report.chart import (
    MAX_POINTS,
    SIZE,
    Axis,
    Chart,
    charts_of,
    from_zero,
    limits,
    path_of,
    round_numbers,
)


def chart_of(name: str, series: Series, **more: Series) -> Chart:
    [chart] = [c for c in charts_of(Curves("t", {name: series, **more}, {})) if c.name == name]
    return chart


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (0.0, 10.0, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0.93, 0.98, [0.93, 0.94, 0.95, 0.96, 0.97, 0.98]),
        (3.0, 1e6, [200000.0, 400000.0, 600000.0, 800000.0, 1000000.0]),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, numbers: list[float]) -> None:
    assert round_numbers(Axis(low, high)) == numbers


@pytest.mark.parametrize("high", [1e-320, 1e-300, 1e-9, 1.0, 1e308])
def test_there_are_ticks_for_any_range(high: float) -> None:
    assert len(Axis(0.0, high).ticks()) <= 7


def test_a_path_goes_from_corner_to_corner() -> None:
    path = path_of(Series([0.0, 10.0], [2.0, 4.0]), Axis(0.0, 10.0), Axis(2.0, 4.0))
    assert points_of(path) == [(0.0, SIZE), (SIZE, 0.0)]


def test_perplexities_over_a_decade_are_on_a_logarithmic_axis() -> None:
    assert limits([[10.0, 1000.0]], logarithmic=True).is_logarithmic
    assert not limits([[10.0, 50.0]], logarithmic=True).is_logarithmic
    assert not limits([[-1.0, 50.0]], logarithmic=True).is_logarithmic
    ticks = chart_of("val_perplexity", Series([1.0, 2.0], [10.0, 1000.0])).y_ticks
    assert {"10", "100", "1k"} <= {tick.text for tick in ticks}


def test_what_a_logarithmic_axis_does_not_have_is_below_it() -> None:
    assert Axis(0.1, 10.0, is_logarithmic=True).place(0.0) < 0.0
    path = path_of(Series([0.0, 1.0], [0.0, 1.0]), Axis(0.0, 1.0), Axis(0.1, 10.0, True))
    assert points_of(path) == [(0.0, 2 * SIZE), (SIZE, SIZE / 2)]


def test_rates_begin_at_zero() -> None:
    assert from_zero([[5.0, 10.0]]).low == 0.0
    assert from_zero([[0.0]]) == Axis(0.0, 1.0)


def test_a_long_run_is_drawn_with_few_points() -> None:
    count = 50_000
    series = Series([float(i) for i in range(count)], [1.0 + i % 7 for i in range(count)])
    chart = chart_of("loss", series)
    assert all(len(points_of(stroke.path)) <= MAX_POINTS for stroke in chart.strokes)


def test_one_step_is_a_dot() -> None:
    [chart] = charts_of(Curves("t", {"samples_per_s": Series([32.0], [5.0])}, {}))
    assert chart.strokes[-1].path.endswith("h0")


def test_accuracies_are_shown_in_percent() -> None:
    ticks = chart_of("val_accuracy", Series([1.0, 2.0], [0.9, 0.95])).y_ticks
    assert "92%" in [tick.text for tick in ticks]


def test_no_metrics_no_charts() -> None:
    assert charts_of(Curves("t", {}, {})) == []
