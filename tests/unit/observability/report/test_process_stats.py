import math
from pathlib import Path

import pytest

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.report.process_stats import (
    ProcessStats,
    Whose,
    process_stats_of,
    read_process_stats,
)
from smolcluster.observability.sinks.jsonl import MetricLine
from smolcluster.runs.files import utc_timestamp


def report(at_s: float, **values: float) -> MetricLine:
    return report_of(at_s, 0, "pi5", values)


def report_of(at_s: float, rank: int | None, node: str, values: dict[str, float]) -> MetricLine:
    kind = "server" if rank is None else "worker"
    record = MetricRecord(kind, 1, 0, values, rank=rank, node=node)  # type: ignore[arg-type]
    return MetricLine(utc_timestamp(at_s), "a1", record)


def of_pi(*reports: MetricLine) -> ProcessStats:
    return process_stats_of(reports)[Whose(0, "pi5")]


def test_means_are_over_time_not_over_reports() -> None:
    """First a report each second, later one in ten."""
    process_stats = of_pi(report(1, cpu=1.0), report(2, cpu=1.0), report(12, cpu=4.0))
    assert process_stats.mean("cpu") == pytest.approx((1 + 1 + 10 * 4) / 12)
    assert process_stats.values["cpu"].most == 4.0
    assert process_stats.values["cpu"].newest == 4.0


def test_a_night_without_the_worker_counts_a_minute() -> None:
    process_stats = of_pi(report(0, cpu=2.0), report(1, cpu=2.0), report(30_000, cpu=8.0))
    assert process_stats.mean("cpu") == pytest.approx((2 + 2 + 60 * 8) / 62)


def test_values_that_are_not_finite_are_left_out() -> None:
    process_stats = of_pi(report(1, cpu=math.nan), report(2, cpu=math.inf), report(3, cpu=2.0))
    assert process_stats.mean("cpu") == 2.0
    assert process_stats.mean("queue") is None


def test_the_clock_of_a_report_may_stand_still() -> None:
    assert of_pi(report(5, cpu=1.0), report(4, cpu=3.0)).mean("cpu") is not None


def test_shares_make_a_whole() -> None:
    some = of_pi(report(1, **{"share/forward": 0.25, "share/wait": 0.5})).shares
    assert some == {"forward": 0.25, "wait": 0.5, "other": 0.25}
    much = of_pi(report(1, **{"share/forward": 0.75, "share/backward": 0.75})).shares
    assert much == {"forward": 0.5, "backward": 0.5, "other": 0.0}
    assert of_pi(report(1, cpu=1.0)).shares == {}


def test_a_step_may_take_longer_than_a_report() -> None:
    """A step in two and a half seconds: two reports of five have one."""
    rates = (0.0, 0.0, 1.0, 0.0, 1.0)
    assert of_pi(*(report(i, steps_per_s=rate) for i, rate in enumerate(rates))).step_s == 2.5
    assert of_pi(report(1, step_s=0.5)).step_s == 0.5
    assert of_pi(report(1)).step_s is None


def test_each_process_has_its_own_the_server_first() -> None:
    who = ((2, "b"), (None, "mini1"), (0, "a"))
    found = process_stats_of(report_of(1.0, rank, node, {}) for rank, node in who)
    assert list(found) == [Whose(-1, "mini1"), Whose(0, "a"), Whose(2, "b")]


def test_only_reports_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"ts": "t", "kind": "step", "incarnation": "a", "step": 1, "epoch": 0, "cpu": 9}\n'
        '{"ts": "t", "kind": "worker", "incarnation": "a", "step": 1, "epoch": 0, "rank": 3, '
        '"node": "pi5", "cpu": 2, "queue": null}\n'
        '{"ts": "t", "kind": "worker", "incarnation": "a", "step": "no"}\n'
        '{"kind": "worker", half a li'
    )
    [(whose, process_stats)] = read_process_stats(file).items()
    assert whose == Whose(3, "pi5")
    assert process_stats.values.keys() == {"cpu"}
    assert read_process_stats(tmp_path / "none.jsonl") == {}
