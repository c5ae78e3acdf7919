import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from smolcluster.configs.schema import DatasetConfig, DatasetPlace, SimpleNNConfig, TrainConfig
from smolcluster.errors import ConfigError, DataError
from smolcluster.training import build as training_build
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.evaluate import LOSS, Totals
from smolcluster.training.workload import Workload

CPU = torch.device("cpu")


def config(model: SimpleNNConfig, dataset: str = "digits") -> TrainConfig:
    return TrainConfig(model=model, dataset=DatasetConfig(name=dataset))


def build_digits(seed: int = 42, **model: object) -> TrainingContext:
    sizes = SimpleNNConfig.model_validate({"input_dim": None} | model)
    return build(config(sizes), seed, DatasetPlace(), CPU)


def test_the_model_takes_its_input_from_the_data() -> None:
    training = build_digits(hidden=8)
    assert training.replica.model.get_parameter("fc1.weight").shape == (8, 64)
    assert training.workload.name == "digits"


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"input_dim": 784}, r"input_dim is 784, but dataset\.name=digits has 64 features"),
        ({"out": 5}, r"out is 5, but dataset\.name=digits has 10"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_naming_both(
    sizes: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{told}"):
        build_digits(**sizes)


def test_the_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = build_digits(seed=7).replica
    torch.manual_seed(2)
    again, other = build_digits(seed=7).replica, build_digits(seed=8).replica

    assert torch.equal(first.params, again.params)
    assert not torch.equal(first.params, other.params)


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_digits()
    assert torch.equal(torch.rand(3), expected)


def test_the_data_is_looked_for_at_this_machines_place(tmp_path: Path) -> None:
    elsewhere = TrainConfig(dataset=DatasetConfig(name="MNIST", root=Path("/nowhere")))
    with pytest.raises(DataError, match=str(tmp_path)):
        build(elsewhere, 1, DatasetPlace(root=tmp_path, download=False), CPU)


def test_buckets_have_the_size_asked_for() -> None:
    train = config(SimpleNNConfig(input_dim=None))
    replica = build(train, 1, DatasetPlace(), CPU, bucket_bytes=4096).replica
    assert replica.buckets[0] == slice(0, 1024)


def test_a_copy_is_evaluated_on_another_device_than_the_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = replace(build_digits(), eval_device=torch.device("meta"))
    seen: list[torch.device] = []

    def evaluated(model: nn.Module, _: object, device: torch.device, **__: object) -> Totals:
        seen.extend([next(model.parameters()).device, device])
        return {LOSS: (1.0, 1.0)}

    monkeypatch.setattr(training_build, "evaluate", evaluated)
    training.evaluate()
    assert [device.type for device in seen] == ["meta", "meta"]
    assert training.replica.params.device.type == "cpu"


@pytest.mark.parametrize(
    ("memory_format", "told"),
    [
        (torch.channels_last, "channels_last is not kept of 0.weight:"),
        (torch.contiguous_format, ""),
    ],
)
def test_channels_last_which_is_not_kept_is_told(
    memory_format: torch.memory_format, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """But convolutions compute in it where their inputs are given so, as the sentence says."""
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    weights = conv.get_parameter("0.weight").detach().clone()
    samples = [(torch.randn(3, 8, 8), torch.randn(144)) for _ in range(4)]
    workload = Workload(
        lambda: conv.to(memory_format=memory_format),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        *(samples, samples),
    )
    log = logging.getLogger("smolcluster.test")
    replica = build(
        config(SimpleNNConfig()), 1, DatasetPlace(), CPU, workload=workload, log=log
    ).replica
    assert ("channels_last" in caplog.text) == bool(told) and told in caplog.text
    weight = replica.parameters["0.weight"]
    assert weight.is_contiguous() and torch.equal(weight.detach(), weights)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    found: torch.Tensor = conv[0](images)
    assert found.is_contiguous(memory_format=torch.channels_last)
