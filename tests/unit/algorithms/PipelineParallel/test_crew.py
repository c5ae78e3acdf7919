"""What the server tells of its stages."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from smolcluster.algorithms.PipelineParallel.crew import Crew, stage_figures
from smolcluster.algorithms.PipelineParallel.link_speed import UNMEASURED
from smolcluster.algorithms.PipelineParallel.plan import StageMap
from smolcluster.algorithms.planning.layers import Link
from smolcluster.observability.view.stages import StageView
from smolcluster.wire.messages import LeaseKey, StageDone


def test_a_stage_is_shown_with_its_layers_times_and_what_it_sends_to_whom() -> None:
    """Ranks of the plan are not those of the workers: the layers may lie in another order."""
    layers = StageMap((0, 4, 6, 9, 12), (0, 1, 1, 0), ("win", "pi5"))
    peers = [SimpleNamespace(worker=SimpleNamespace(rank=rank)) for rank in (5, 2)]
    links = {("win", "pi5"): Link(4e6, 0.01), ("pi5", "win"): UNMEASURED}
    crew = Crew(1, layers, cast("list[Any]", peers), links=links)
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
