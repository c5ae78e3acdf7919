"""The settings of an orchestrator and its workers."""

import pytest
from torch import nn

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.api.config import VARIABLES, DistributedConfig
from smolcluster.api.network_worker import NetworkWorker
from smolcluster.api.orchestrator import Orchestrator
from smolcluster.api.settings import rank_settings, server_settings
from smolcluster.configs.schema import MeshSizes
from smolcluster.errors import ConfigError


def test_an_unknown_attribute_is_refused_with_the_nearest_one() -> None:
    config = DistributedConfig()
    with pytest.raises(ConfigError, match="'max_gradnorm'; did you mean max_grad_norm"):
        config.max_gradnorm = 1.0
    with pytest.raises(ConfigError, match="did you mean num_workers"):
        DistributedConfig(num_worker=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_workers", 0), ("use_amp", "yes"), ("learning_rate", float("nan")), ("master_port", 0)],
)
def test_a_wrong_value_is_refused_where_it_is_assigned(name: str, value: object) -> None:
    config = DistributedConfig()
    before = getattr(config, name)
    with pytest.raises(ConfigError, match=f"^DistributedConfig.{name} is ") as raised:
        setattr(config, name, value)
    assert "\n" not in str(raised.value)
    assert ", must be " in str(raised.value)
    assert getattr(config, name) == before


def test_the_seed_s_environment_is_understood() -> None:
    """The block of exports of seed 000, as it stands there."""
    exported = {
        "DATA_PARALLEL": "1",
        "MODEL_PARALLEL": "0",
        "PIPELINE_PARALLEL": "0",
        "TENSOR_PARALLEL": "0",
        "MICRO_BATCHES": "4",
        "TENSOR_PARALLEL_SIZE": "2",
        "ACT_TIMEOUT_SEC": "60",
        "ACK_TIMEOUT_SEC": "30",
        "RESENDS_MAX": "3",
        "RESEND_PROBE_SEC": "5",
        "ALLOW_ACT_REUSE": "0",
        "ACT_CACHE_STEPS": "256",
        "COMPACT_LOG": "1",
        "LOG_STEP_EVERY": "100",
        "LOG_ACT": "0",
    }
    assert set(exported) == set(VARIABLES)
    config = DistributedConfig.from_env(exported, num_workers=3)
    assert (config.activation_timeout, config.ack_timeout) == (60.0, 30.0)
    assert config.reconnect_timeout == 15.0
    assert (config.compact_log, config.log_step_every, config.num_workers) == (True, 100, 3)
    assert list(config.notes()) == [
        "activation_timeout: a worker whose part of a step is 60 s later than the first one gets help from "
        "another (timeout)",
        "ack_timeout: who is silent for 30 s is lost (heartbeat_timeout_s)",
        "max_resends x resend_probe_interval: a worker that lost its connection tries to get back for 15 s "
        "(reconnect_timeout_s)",
        "no effect without pipeline_parallel: micro_batches, act_cache_steps",
        "no effect without tensor_parallel: tensor_parallel_size",
    ]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DATA_PARALLEL", "maybe"), ("RESENDS_MAX", "three")],
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}={value}: "):
        DistributedConfig.from_env({variable: value})


def test_what_is_not_stated_has_no_note() -> None:
    assert list(DistributedConfig().notes()) == []
    assert DistributedConfig().reconnect_timeout is None


@pytest.mark.parametrize(
    ("exported", "num_microbatches"),
    [
        ({"MODEL_PARALLEL": "1", "MICRO_BATCHES": "4"}, 1),
        ({"PIPELINE_PARALLEL": "1", "MICRO_BATCHES": "4", "DATA_PARALLEL": "0"}, 4),
    ],
)
def test_layers_are_spread_where_that_is_asked_for(
    exported: dict[str, str], num_microbatches: int
) -> None:
    config = DistributedConfig.from_env(exported, num_workers=2)
    settings = server_settings(config, ["one", "two"], {})
    assert config.runs_algorithm == "pipeline"
    assert settings.of(PipelineConfig).microbatches == num_microbatches


@pytest.mark.parametrize(
    ("exported", "num_workers", "mesh", "num_microbatches"),
    [
        ({}, 1, MeshSizes(tp=2), 1),
        ({"DATA_PARALLEL": "0"}, 1, MeshSizes(tp=2), 1),
        ({"DATA_PARALLEL": "1"}, 2, MeshSizes(dp=2, tp=2), 1),
        ({"MODEL_PARALLEL": "1"}, 2, MeshSizes(pp=2, tp=2), 2),
        ({"PIPELINE_PARALLEL": "1", "MICRO_BATCHES": "4"}, 2, MeshSizes(pp=2, tp=2), 4),
    ],
)
def test_tensors_are_split_where_that_is_asked_for(
    exported: dict[str, str], num_workers: int, mesh: MeshSizes, num_microbatches: int
) -> None:
    told = {"TENSOR_PARALLEL": "1", "TENSOR_PARALLEL_SIZE": "2", **exported}
    config = DistributedConfig.from_env(told, num_workers=num_workers)
    settings = rank_settings(config, {}, 32)
    assert config.runs_algorithm == "mesh"
    assert settings.of(MeshConfig).mesh == mesh
    assert settings.of(MeshConfig).microbatches == num_microbatches
    assert settings.train.samples_per_step == 32
    assert list(config.notes()) == []


def test_what_ranks_of_one_machine_have_no_use_for_is_said() -> None:
    told = {"ack_timeout": 30.0, "act_cache_steps": 4, "micro_batches": 4}
    config = DistributedConfig(tensor_parallel=True, tensor_parallel_size=2, **told)
    [note] = config.notes()
    assert note.endswith(": ack_timeout, micro_batches, act_cache_steps")


def test_tensors_are_split_among_more_than_one_rank() -> None:
    config = DistributedConfig(tensor_parallel=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 1"):
        rank_settings(config, {}, 32)


def test_no_worker_connects_where_the_orchestrator_starts_the_ranks() -> None:
    config = DistributedConfig(tensor_parallel=True, tensor_parallel_size=2)
    assert Orchestrator(config).wait_for_workers() == 1
    with pytest.raises(ConfigError, match="the orchestrator starts all ranks"):
        NetworkWorker(0, config, lambda: nn.Linear(1, 1))


def test_something_must_be_parallel() -> None:
    config = DistributedConfig(data_parallel=False)
    with pytest.raises(ConfigError, match="data_parallel is False"):
        server_settings(config, ["one"], {})
