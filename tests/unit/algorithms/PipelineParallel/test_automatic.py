"""A cut by what workers have measured, on paper."""

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pipelines import measured_layer
from smolcluster.algorithms.PipelineParallel.automatic import (
    automatic_cut,
    measure,
    message_of,
)
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Peer
from smolcluster.configs.schema import DatasetConfig, SimpleNNConfig, TrainConfig
from smolcluster.data.dataset import Elsewhere
from smolcluster.errors import ConfigError
from smolcluster.training.stages.measure import LayerSpeeds
from smolcluster.wire.messages import MAX_LAYER_KINDS, HostPort, Listening

TRAIN = TrainConfig(
    batch_size=64, model=SimpleNNConfig(hidden=4), dataset=DatasetConfig(name="digits")
)
NUM_LAYERS = 32


def reported(
    seconds: float, *, memory_bytes: int = 10**9, host: str = "", num_layers: int = NUM_LAYERS
) -> Peer:
    layers = (measured_layer(seconds),) * num_layers
    speeds = LayerSpeeds(layers=layers, memory_bytes=memory_bytes, device="cpu")
    places = (HostPort(host=host or f"10.0.0.{int(1e3 * seconds)}", port=7777),)
    return Peer(Mock(), Listening(places=places), message_of(speeds))


def sizes(machines: Mapping[str, Peer]) -> dict[str, int]:
    config = PipelineConfig(shard_plan="auto", microbatches=32)
    found = automatic_cut(NUM_LAYERS, machines, config, TRAIN).document
    return {each.machine: each.end - each.start for each in found.stages}


def test_a_machine_gets_layers_by_its_speed() -> None:
    machines = {"a": reported(0.001), "b": reported(0.002), "c": reported(0.004)}
    found = sizes(machines | {"d": reported(0.004, host="10.0.1.1")})
    assert found == {"a": 16, "b": 8, "c": 4, "d": 4}


def test_layers_that_are_computed_again_take_longer_but_for_the_last_stage_s() -> None:
    config = PipelineConfig(shard_plan="auto", microbatches=32, activation_checkpointing="full")
    machines = {"a": reported(0.001), "b": reported(0.001, host="b")}
    found = automatic_cut(NUM_LAYERS, machines, config, TRAIN).map
    assert found.cuts == (0, 14, 32)


def test_a_machine_that_would_hold_up_the_others_is_left_out_and_named() -> None:
    config = PipelineConfig(shard_plan="auto", microbatches=4)
    machines = {"a": reported(0.001), "b": reported(1.0)}
    cut = automatic_cut(NUM_LAYERS, machines, config, TRAIN)
    assert cut.map.nodes == ("a",)
    assert cut.words.endswith("not used, because a step would be longer: b")


def test_processes_of_one_machine_share_its_memory() -> None:
    """32 layers of 1000 bytes, gradients and two moments make 128 kB."""
    apart = {name: reported(0.001, memory_bytes=80_000, host=name) for name in "ab"}
    assert sizes(apart) == {"a": 16, "b": 16}
    with pytest.raises(ConfigError, match=r"32 layers need .* have 0\.08 MB together"):
        sizes({name: reported(0.001, memory_bytes=80_000, host="one") for name in "ab"})


@pytest.mark.parametrize(
    "other", [Peer(Mock()), reported(0.004, num_layers=7)], ids=["nothing", "another model"]
)
def test_where_one_has_not_measured_all_get_as_many(other: Peer) -> None:
    assert sizes({"a": reported(0.001), "b": other}) == {"a": 16, "b": 16}


def test_schedules_of_several_stages_a_machine_are_cut_evenly() -> None:
    config = PipelineConfig(shard_plan="auto", schedule="zb-v", microbatches=32)
    machines = {"a": reported(0.001), "b": reported(0.004)}
    cut = automatic_cut(NUM_LAYERS, machines, config, TRAIN)
    assert cut.map.cuts == (0, 8, 16, 24, 32)
    assert cut.words == ""


def test_alike_layers_are_sent_once_and_too_many_kinds_not_at_all() -> None:
    alike = LayerSpeeds(layers=(measured_layer(0.1),) * 80, memory_bytes=1, device="cpu")
    assert len(message_of(alike).kinds) == 1
    layers = tuple(measured_layer(0.1, trained_bytes=size) for size in range(MAX_LAYER_KINDS + 1))
    with pytest.raises(ValueError, match="too many"):
        message_of(alike.model_copy(update={"layers": layers}))


def test_samples_that_the_server_sends_are_not_measured_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("measuring")
    served = SimpleNamespace(workload=SimpleNamespace(train=Elsewhere(52)))
    args: Any = (served, TRAIN, PipelineConfig(), torch.device("cpu"), log)
    assert measure(*args) is None
    assert "dealt out evenly: samples come from the server" in caplog.text
