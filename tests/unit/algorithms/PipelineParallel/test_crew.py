"""Which workers can still build layers, and what the server tells of its stages."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from smolcluster.algorithms.PipelineParallel.crew import MOST_LOST, Builders, Crew, stage_figures
from smolcluster.algorithms.PipelineParallel.link_speed import UNMEASURED
from smolcluster.algorithms.PipelineParallel.plan import Cut, StageMap
from smolcluster.algorithms.planning.layers import Link
from smolcluster.observability.view.stages import StageView
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import LeaseKey, StageDone

ONE, TWO = Member(1, 1, "node1", "a"), Member(2, 2, "node2", "b")


def lose(builders: Builders, times: int) -> None:
    for _ in range(times):
        builders.lost(ONE, "worker 1")


def test_workers_that_all_say_why_they_cannot_build_leave_none() -> None:
    builders = Builders()
    builders.failed(ONE, "worker 1: no file")
    assert builders.why_none_is_left([2]) is None, "worker 2 has not tried"
    builders.failed(TWO, "worker 2: no file")
    assert builders.why_none_is_left([]) == "worker 1: no file; worker 2: no file"


def test_a_worker_that_is_lost_without_a_word_may_come_back_twice() -> None:
    builders = Builders()
    lose(builders, MOST_LOST - 1)
    assert builders.why_none_is_left([]) is None
    assert builders.may_build(ONE)
    lose(builders, 1)
    assert builders.why_none_is_left([]) == (
        "worker 1 was lost 3 times while it built its layers (out of memory?)"
    )
    assert not builders.may_build(ONE)


def test_one_that_has_built_its_layers_counts_from_the_start_again() -> None:
    builders = Builders()
    lose(builders, MOST_LOST - 1)
    builders.built(ONE)
    lose(builders, 1)
    builders.failed(TWO, "worker 2: no file")
    assert builders.why_none_is_left([2]) is None
    builders.built(TWO)
    assert builders.why_none_is_left([]) is None
    assert builders.may_build(TWO)


def test_another_process_of_one_that_cannot_build_has_one_chance() -> None:
    def process(instance: str) -> Member:
        return replace(ONE, instance=instance)

    builders = Builders()
    builders.failed(ONE, "worker 1: no file")
    assert [builders.may_build(process(each)) for each in "ab"] == [False, True]
    builders.lost(process("b"), "worker 1")
    assert [builders.may_build(process(each)) for each in "abc"] == [False] * 3
    assert builders.why_not([2]) == "worker 1: no file"


def test_a_stage_is_shown_with_its_layers_times_and_what_it_sends_to_whom() -> None:
    """Ranks of the plan are not those of the workers: the layers may lie in another order."""
    layers = StageMap((0, 4, 6, 9, 12), (0, 1, 1, 0), ("win", "pi5"))
    peers = [SimpleNamespace(worker=SimpleNamespace(rank=rank)) for rank in (5, 2)]
    links = {("win", "pi5"): Link(4e6, 0.01), ("pi5", "win"): UNMEASURED}
    cut = Cut(layers, document=Mock(), problem=Mock(links=links))
    crew = Crew(1, cut, cast("list[Any]", peers))
    done = StageDone(
        attempt=1,
        lease=LeaseKey(incarnation="a1", epoch=0, start=0, stop=8, grant=1),
        loss=1.0,
        num_terms=8,
        squared_norm=1.0,
        seconds={"F": 0.5, "I": 0.25, "W": 0.125},
        sent_bytes=(0, 3000),
    )
    stage = StageView.of(stage_figures(crew, 0, done, took_s=2.0))
    assert stage is not None
    assert stage.layers == [(0, 4), (9, 12)]
    assert stage.op_s == {"forward": 0.5, "backward_input": 0.25, "backward_weight": 0.125}
    assert stage.bubble == pytest.approx(1 - 0.875 / 2)
    assert stage.sends == {2: 1500.0}
    assert stage.capacities == {2: 4e6}
    other = StageView.of(stage_figures(crew, 1, done, took_s=2.0))
    assert other is not None
    assert other.capacities == {}, "it was not measured"
