"""From measured layers and links to the problem that is planned."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pipelines import measured_layer
from smolcluster.algorithms.planning.layers import Link, Problem, one_more, plan_layers
from smolcluster.algorithms.planning.measured import problem_of
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.errors import ConfigError
from smolcluster.launch.advise import layer_plan as module
from smolcluster.launch.advise.layer_plan import (
    NO_WAY,
    FoundPlan,
    Wanted,
    find_layer_plan,
    measure_pairs,
    num_microbatches,
    relayed,
)
from smolcluster.launch.advise.show_layer_plan import lines, plan_file
from smolcluster.launch.host import Host
from smolcluster.launch.links import Way
from smolcluster.launch.requests import request_of, resolved
from smolcluster.training.stages.measure import LayerSpeeds
from smolcluster.wire.messages import MeasuredLayer


def settings(**train: Any) -> Settings:
    found = load_settings("edp", "digits", local=True, local_workers=2)
    return replace(found, train=found.train.model_copy(update=train))


def speeds(seconds: Mapping[str, float], num_layers: int = 6) -> dict[str, LayerSpeeds]:
    def layers(each: float) -> tuple[MeasuredLayer, ...]:
        return (measured_layer(each, frozen_bytes=10, activation_bytes=500),) * num_layers

    return {
        node: LayerSpeeds(layers=layers(each), memory_bytes=10**6, device="cpu")
        for node, each in seconds.items()
    }


def problem(
    found: Mapping[str, LayerSpeeds], own: Settings, num: int, codec: str = "fp32"
) -> Problem:
    return problem_of(found, {}, own.train, num_microbatches=num, schedule="1f1b", codec=codec)


def test_bytes_count_gradients_moments_and_the_codec() -> None:
    adam, sgd = settings(optimizer="AdamW"), settings(optimizer="sgd")
    [first, *_] = problem(speeds({"a": 1}), adam, 4, "int8").layers
    assert first.fixed_bytes == 10 + 4 * 1000
    assert first.output_bytes == pytest.approx(4096 / 4, rel=0.02)
    [first, *_] = problem(speeds({"a": 1}), sgd, 4).layers
    assert (first.fixed_bytes, first.output_bytes) == (10 + 2 * 1000, 4096)


def test_machines_with_other_layers_are_refused() -> None:
    both = speeds({"a": 1}) | speeds({"b": 1}, num_layers=5)
    with pytest.raises(ConfigError, match="b sees 5 layers and a 6"):
        problem(both, settings(), 4)


def test_microbatches_divide_the_batch() -> None:
    assert num_microbatches(settings(batch_size=30), Wanted()) == 6
    assert num_microbatches(settings(batch_size=32), Wanted(num_microbatches=16)) == 16
    with pytest.raises(ConfigError, match="choose one of 1, 2, 4, 8"):
        num_microbatches(settings(batch_size=8), Wanted(num_microbatches=3))


def test_machines_without_a_way_reach_each_other_by_a_third() -> None:
    links = {
        ("a", "s"): Link(100, 1),
        ("s", "a"): Link(50, 2),
        ("b", "s"): Link(10, 3),
        ("s", "b"): Link(80, 4),
    }
    assert relayed([("a", "b")], links) == {("a", "b"): Link(80, 5), ("b", "a"): Link(10, 5)}
    assert relayed([("a", "c")], links)["a", "c"] == NO_WAY


def test_all_pairs_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def ways(server: Host, workers: list[Host], *_: object) -> dict[str, Way]:
        asked.extend((server.node, each.node) for each in workers)
        return {each.node: Way("ip", "eth0", 0.01, 12.0, 6.0, "") for each in workers}

    monkeypatch.setattr(module, "measure_all_ways", ways)
    hosts = [Host("a", "a.lan"), Host("b", "b.lan"), Host("c", "c.lan")]
    links = measure_pairs(hosts, 1, print)
    assert asked == [("a", "b"), ("a", "c"), ("b", "c")]
    assert len(links) == 6
    assert links["b", "a"] == Link(12e6, 0.005)
    assert links["a", "b"] == Link(6e6, 0.005)


def test_the_plan_is_said_as_the_cluster_file_has_it() -> None:
    asked = problem(speeds({"a": 1e-3, "b": 2e-3}), settings(), 8)
    plan = plan_layers(asked)
    found = FoundPlan(asked, plan, one_more(asked, plan), {"a": "cpu", "b": "mps"})
    told = list(lines(found))
    assert told[-2] in ("shard_plan: {a: [0, 4], b: [4, 6]}", "shard_plan: {b: [0, 2], a: [2, 6]}")
    assert told[-1].startswith("one more machine like a: step ")
    assert {stage.machine: stage.device for stage in plan_file(found).stages} == found.devices


@pytest.mark.parametrize("recompute", [True, False])
def test_what_stages_compute_again_is_planned_for(
    monkeypatch: pytest.MonkeyPatch, *, recompute: bool
) -> None:
    monkeypatch.setattr(module, "_measured_here", lambda *_: speeds({"a": 1e-3}))
    request = request_of(local=True, num_workers=1, config=None, train_config=None, overrides=())
    found = find_layer_plan(resolved(request, local=True), Wanted(recompute=recompute), print)
    assert found.problem.recompute == recompute
