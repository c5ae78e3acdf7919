import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness import digits_config, state_of
from smolcluster.configs.schema import DatasetPlace, GradientClipping
from smolcluster.data.digits import load_digits
from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.server.store import Store
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import builtin_workload
from smolcluster.training.checkpoint import CheckpointStore, Snapshot, export, restore
from smolcluster.training.loop import training_steps
from smolcluster.training.recipe import Training
from smolcluster.training.schedule import learning_rate

CPU = torch.device("cpu")


def built(training: Training, **changes: object) -> TrainingContext:
    train = digits_config(**changes)
    workload = builtin_workload(train, load_digits(42))
    workload.training = training
    return build(train, 42, DatasetPlace(), CPU, workload=workload)


def test_what_a_workload_says_stands_in_place_of_the_configuration() -> None:
    training = built(
        Training(learning_rate=0.5, schedule=lambda applied, total: 1 - applied / total)
    )
    steps = training_steps(training, digits_config(learning_rate=0.001))
    rates = [next(steps).learning_rate for _ in range(2)]
    assert rates == [0.5, 0.5 * (1 - 100 / (2 * training.num_samples))]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"precision": "bfloat16"},
            r"^Training: precision is 'bfloat16', must be one of fp32, bf16, fp16",
        ),
        ({"learning_rate": 0}, r"^Training: learning_rate is 0, must be a number above 0"),
        (
            {"gradient_clipping": {"max_norm": -1.0}},
            r"^Training: gradient_clipping\.max_norm is -1",
        ),
        ({"learning_rate": 1e-5}, r"^Training: lr_schedule\.min_lr is 0\.0001, must be at most"),
    ],
)
def test_what_a_configuration_may_not_say_a_workload_may_not_either(
    said: dict[str, Any], told: str
) -> None:
    falls = digits_config(lr_schedule={"warmup_iters": 1, "min_lr": 1e-4})
    with pytest.raises(ConfigError, match=told):
        Training(**said).applied_to(falls)


def test_a_workload_may_say_sections_as_mappings_and_has_its_own_schedule_for_any_rate() -> None:
    falls = digits_config(lr_schedule={"warmup_iters": 1, "min_lr": 1e-4})
    clipping: Any = {"max_value": 0.5}
    training = Training(
        learning_rate=1e-5, gradient_clipping=clipping, schedule=lambda *_: 1.0
    ).applied_to(falls)
    assert training.gradient_clipping == GradientClipping(max_value=0.5)
    assert (training.learning_rate, training.lr_schedule) == (1e-5, falls.lr_schedule)


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), None, "1"])
def test_a_factor_that_is_none_is_refused(factor: object) -> None:
    with pytest.raises(
        UserCodeError, match=r"training\.schedule .*, not .* after 100 of 200 samples"
    ):
        learning_rate(digits_config(), 100, 200, lambda *_: factor)  # type: ignore[arg-type]


# Clipping by value


@pytest.mark.parametrize(
    ("clipping", "told"),
    [
        ({"max_norm": 1.0, "max_value": 0.5}, r"max_value is 0\.5, but max_norm is 1"),
        ({"max_norm": None}, "must have max_norm or max_value"),
    ],
)
def test_a_gradient_is_clipped_in_one_way(clipping: dict[str, float | None], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        GradientClipping.model_validate(clipping)


def test_each_value_is_clipped_as_by_pytorch() -> None:
    clipping = GradientClipping(max_value=0.5)
    replica = built(Training(gradient_clipping=clipping, optimizer="sgd")).replica
    gradient = torch.randn(replica.num_params)
    expected = [gradient.clone().requires_grad_()]
    expected[0].grad = gradient.clone()
    torch.nn.utils.clip_grad_value_(expected, 0.5)
    replica.grads.copy_(gradient)
    assert replica.clip(clipping) == pytest.approx(gradient.norm().item())
    assert torch.equal(replica.grads, expected[0].grad)
    stores, before = Store.of(replica), replica.params.clone()
    kept = gradient.clone()
    stores.take(gradient)
    stores.step(1.0, 0.25, clipping.bound)
    torch.testing.assert_close(before - replica.params, 0.25 * expected[0].grad)
    assert torch.equal(gradient, kept), "it may be on its way to others"


# The average of the weights


def test_the_average_is_pytorch_s_and_is_what_is_evaluated(tmp_path: Path) -> None:
    training = built(Training(ema_decay=0.9, learning_rate=0.05))
    replica = training.replica
    mean: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    averaged_model = AveragedModel(replica.model, multi_avg_fn=mean)
    steps = training_steps(training, digits_config())
    for _ in range(10):
        next(steps)
        averaged_model.update_parameters(replica.model)
    assert replica.average is not None
    expected = torch.cat(
        [
            dict(averaged_model.module.named_parameters())[name].flatten()
            for name, _ in replica.layers
        ]
    )
    torch.testing.assert_close(replica.average, expected.detach())
    of_average = training.evaluate()
    replica.params.copy_(replica.average)
    replica.average = None
    assert training.evaluate() == of_average


def test_a_checkpoint_holds_the_average_and_export_writes_it(tmp_path: Path) -> None:
    training = built(Training(ema_decay=0.9))
    steps = training_steps(training, digits_config())
    for _ in range(3):
        next(steps)
    replica = training.replica
    store = CheckpointStore(tmp_path / "checkpoints", 1, logging.getLogger("test"))
    store.save(Snapshot.of(replica, state_of(3)))
    found = store.newest_good()
    assert found is not None
    export(found, tmp_path / "to")
    again = built(Training(ema_decay=0.9)).replica
    restore(again, found)
    assert again.average is not None
    assert replica.average is not None
    assert torch.equal(again.average, replica.average)
    exported = load_file(tmp_path / "to" / "ema.safetensors")
    for name, place in replica.layers:
        assert torch.equal(exported[name].flatten(), replica.average[place])
    assert not torch.equal(replica.average, replica.params)
    assert exported.keys() == load_file(tmp_path / "to" / "model.safetensors").keys()
