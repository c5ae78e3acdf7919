"""What becomes of an exception in a user's model, loss, data or metric."""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness import digits_config
from smolcluster.configs.schema import DatasetPlace
from smolcluster.errors import ConfigError, DeviceFailed, NonFiniteLoss, OutOfMemory, UserCodeError
from smolcluster.observability.logs import NodeLog
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.workload import OfLoss, Workload
from smolcluster.utils.device_errors import device_error
from smolcluster.utils.user_code import user_code

HERE = Path(__file__).name
DATA = TensorDataset(torch.randn(8, 3))
TRAIN = digits_config(batch_size=4)


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)


class Wrong(Model):
    def forward(self, input: Tensor) -> Tensor:  # noqa: ARG002 - it does not get so far
        raise ValueError("a\nmessage of two lines")


def mean(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def hits(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return mean(model, batch), 1


def lookup(model: nn.Module, batch: Any) -> Any:
    return mean(model, batch) * {"x": 1.0}["y"]


class Damaged:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int, /) -> Tensor:
        raise FileNotFoundError(2, "No such file", f"{index}.png")


def training(workload: Workload) -> TrainingContext:
    return build(TRAIN, 0, DatasetPlace(), torch.device("cpu"), workload=workload)


def compute(workload: Workload) -> None:
    training(workload).compute(torch.arange(4))


def line_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno + 1


def test_the_function_and_the_line_are_named() -> None:
    with pytest.raises(UserCodeError) as caught:
        compute(Workload(Model, lookup, DATA))
    assert str(caught.value) == f"loss, in lookup ({HERE}:{line_of(lookup)}): KeyError: 'y'"
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.exit_code == 3


def test_in_a_model_that_a_loss_calls_it_is_the_model_s_line() -> None:
    with pytest.raises(UserCodeError) as caught:
        compute(Workload(Wrong, mean, DATA))
    place = f"loss, in Wrong.forward ({HERE}:{line_of(Wrong.forward)})"
    assert str(caught.value) == f"{place}: ValueError: a message of two lines"
    shown = caught.value.frames
    assert "in mean" in shown
    assert "in forward" in shown
    assert "_call_impl" not in shown
    assert "compute.py" not in shown
    assert shown.endswith("ValueError: a\nmessage of two lines\n")


def test_data_are_named_as_well() -> None:
    with pytest.raises(UserCodeError, match=r"^data, in Damaged.__getitem__ .*: FileNotFoundError"):
        compute(Workload(Model, mean, Damaged()))


def test_a_model_that_cannot_be_made() -> None:
    def model() -> nn.Module:
        raise OSError("no weights")

    with pytest.raises(UserCodeError, match=rf"^model \({HERE}:\d+\): OSError: no weights$"):
        training(Workload(model, mean, DATA))


@pytest.mark.parametrize(
    "metric", [lambda _model, batch: (batch["x"], 1), OfLoss(lambda loss: 1 / (loss - loss))]
)
def test_metrics_are_called_by_their_names(metric: Any) -> None:
    context = training(Workload(Model, mean, DATA, DATA, metrics={"hits": metric}))
    with pytest.raises(UserCodeError, match=rf"^metric hits \({HERE}:\d+\): "):
        context.evaluate()


@pytest.mark.parametrize("count", [math.nan, math.inf, -1.0])
def test_a_number_of_terms_that_is_none_is_said(count: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return mean(model, batch), torch.tensor(count)

    context = training(Workload(Model, mean, DATA, DATA, metrics={"hits": loss}))
    with pytest.raises(UserCodeError, match=rf"^metric hits, .*: returned {count} as the number"):
        context.evaluate()
    with pytest.raises(
        UserCodeError, match=rf"^loss \({HERE}:\d+\): returned {count} as the number"
    ):
        compute(Workload(Model, loss, DATA))


@pytest.mark.parametrize(("result", "said"), [(None, "None"), ("0.5", "a str")])
def test_a_metric_that_is_no_number_is_said(result: Any, said: str) -> None:
    metrics = {"hits": OfLoss(lambda _: result)}
    context = training(Workload(Model, mean, DATA, DATA, metrics=metrics))
    expected = rf"^metric hits \({HERE}:\d+\): returned {said}, must be a number$"
    with pytest.raises(UserCodeError, match=expected):
        context.evaluate()


@pytest.mark.parametrize("result", [0.25, torch.tensor([0.25]), np.float32(0.25)])
def test_what_a_metric_of_the_loss_may_return(result: Any) -> None:
    metrics = {"hits": OfLoss(lambda _: result)}
    evaluation = training(Workload(Model, mean, DATA, DATA, metrics=metrics)).evaluate()
    assert evaluation is not None
    assert evaluation.metrics == {"hits": 0.25}
    assert type(evaluation.metrics["hits"]) is float


@pytest.mark.parametrize("name", ["", "loss"])
def test_no_metric_may_be_called_as_the_loss_is(name: str) -> None:
    with pytest.raises(ConfigError, match=f"a metric is named '{name}'"):
        Workload(Model, mean, DATA, DATA, metrics={name: hits})


def test_a_model_function_that_returns_no_module_is_said() -> None:
    def model() -> Any:
        return None

    expected = rf"^model \({HERE}:\d+\): returned None, must be a torch.nn.Module$"
    with pytest.raises(UserCodeError, match=expected):
        training(Workload(model, mean, DATA))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.zeros(4), r"a tensor of shape \(4,\)"),
        (None, "None"),
        (0.5, "a float"),
        ((torch.zeros(4), 4), r"\(a tensor of shape \(4,\), a int\)"),
    ],
)
def test_a_loss_that_is_no_scalar_is_told_what_it_is_and_must_be(result: Any, said: str) -> None:
    def loss(_scale: float, _model: nn.Module, _batch: Any) -> Any:
        return result

    expected = rf"^loss \({HERE}:{line_of(loss) - 1}\): returned {said}, must be a scalar"
    with pytest.raises(UserCodeError, match=expected):
        compute(Workload(Model, partial(loss, 1.0), DATA))


def test_a_loss_that_cannot_be_differentiated_is_said() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return mean(model, batch).detach()

    expected = r"^loss \(test_user_code.py:\d+\): does not depend on any trainable parameter"
    with pytest.raises(UserCodeError, match=expected):
        compute(Workload(Model, loss, DATA))


def test_an_error_of_the_backward_pass_has_no_line_of_the_user_s() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0]).exp()
        total: Tensor = output.sum()
        output.zero_()
        return total

    expected = "^backward of the loss: RuntimeError: one of the variables needed"
    with pytest.raises(UserCodeError, match=expected):
        compute(Workload(Model, loss, DATA))


def test_a_data_loader_s_own_process_tells_its_line() -> None:
    loader: DataLoader[Tensor] = DataLoader(Damaged(), batch_size=2, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(UserCodeError) as caught, user_code("data"):
        next(iter(loader))
    place = f"data, in __getitem__ ({HERE}:{line_of(Damaged.__getitem__)})"
    said = str(caught.value)
    assert said == f"{place}: FileNotFoundError: [Errno 2] No such file: '0.png'"
    assert "DataLoader worker process" in caught.value.frames


def test_an_exit_is_an_error_of_the_user_s_and_an_interrupt_is_none() -> None:
    def leave(_model: nn.Module, _batch: Any) -> Tensor:
        raise SystemExit(3)

    with pytest.raises(UserCodeError, match=rf"^loss, in leave \({HERE}:\d+\): SystemExit: 3$"):
        compute(Workload(Model, leave, DATA))
    with pytest.raises(KeyboardInterrupt), user_code("loss"):
        raise KeyboardInterrupt


def test_what_is_ours_passes_through() -> None:
    with pytest.raises(NonFiniteLoss), user_code("loss"):
        raise NonFiniteLoss("loss is nan")
    with pytest.raises(torch.OutOfMemoryError), user_code("loss"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ],
)
def test_a_device_s_failure_is_not_the_user_s(error: Exception) -> None:
    with pytest.raises(DeviceFailed) as caught, user_code("loss"):
        raise error
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 71


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"),
    ],
)
def test_out_of_memory_is_one_line(error: Exception) -> None:
    assert isinstance(device_error(error), OutOfMemory)
    assert device_error(RuntimeError("shapes cannot be multiplied")) is None


def test_the_log_has_the_user_s_frames_only(tmp_path: Path) -> None:
    log = NodeLog("worker", "pi5", 0)
    log.file_logs_to(tmp_path / "worker.log", "run")
    try:
        compute(Workload(Model, lookup, DATA))
    except UserCodeError as error:
        log.logger.log(logging.ERROR, "%s", error, exc_info=error)
    log.close()
    text = (tmp_path / "worker.log").read_text()
    assert "in lookup" in text
    assert "compute.py" not in text
