"""What becomes of a batch before the model sees it, and of one sample alone."""

from collections import OrderedDict, UserDict
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from smolcluster.data.dataset import Batch
from smolcluster.errors import NonFiniteLoss, UserCodeError
from smolcluster.training.batches import placed
from smolcluster.training.compute import Microbatch, forward_backward, lone_sample
from smolcluster.training.replica import Replica

META = torch.device("meta")


@pytest.mark.parametrize("kind", [dict, OrderedDict, MappingProxyType, UserDict])
def test_tensors_of_every_mapping_are_brought_to_the_device_and_type(kind: type) -> None:
    batch = kind({"input": torch.zeros(2), "more": kind({"ids": torch.arange(3), "name": "a"})})
    found = placed(batch, META, torch.float64)
    assert (found["input"].device, found["input"].dtype) == (META, torch.float64)
    assert (found["more"]["ids"].device, found["more"]["ids"].dtype) == (META, torch.int64)
    assert found["more"]["name"] == "a"
    assert batch["input"].device.type == batch["more"]["ids"].device.type == "cpu"
    if issubclass(kind, UserDict):
        assert type(found) is type(found["more"]) is kind


def test_nan_in_the_inputs_is_named_whatever_mapping_holds_them() -> None:
    replica = Replica(nn.Linear(2, 1), "sgd")

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean: Tensor = model(batch["input"]).mean()
        return mean

    part = Microbatch(2, lambda: UserDict({"input": torch.full((2, 2), float("nan"))}))
    with pytest.raises(NonFiniteLoss, match="check the dataset"):
        forward_backward(replica, loss, [part])


class Named(nn.Module):
    """Two norms: of four values a channel, and of one; each is given its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.BatchNorm2d(2)
        self.flat = nn.BatchNorm1d(2)
        self.outer = nn.Linear(2, 1)
        self.num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 2, 2, 2) to (batch, 1)."""
        self.num_calls += 1
        means = self.image(input=inputs).mean(dim=(2, 3))
        result: Tensor = self.outer(self.flat(input=means))
        return result


def squares(model: nn.Module, batch: Batch) -> Tensor:
    mean: Tensor = model(batch).square().mean()
    return mean


def test_one_sample_alone_is_computed_once_and_only_norms_that_must_use_running_statistics() -> (
    None
):
    model = Named()
    forward_backward(
        Replica(model, "sgd"), squares, [Microbatch(1, lambda: torch.rand(1, 2, 2, 2))]
    )
    assert model.num_calls == 1
    assert model.image.num_batches_tracked == 1
    assert model.flat.num_batches_tracked == 0
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("sizes", [(1, 4, 1, 2), (4, 1, 4, 1)])
def test_norms_of_a_compiled_model_rest_for_one_sample_alone_only(sizes: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    compiled = torch.compile(model, backend="eager")
    tracked = 0
    for size in sizes:
        if size == 1:
            with lone_sample(model):
                compiled(torch.rand(1, 3))
        else:
            compiled(torch.rand(size, 3))
            tracked += 1
        assert model[1].num_batches_tracked == tracked


class Mixing(nn.Linear):
    """Puts what a layer returns, which has fewer bits under autocast, into a tensor of the weights' type."""

    def forward(self, inputs: Tensor) -> Tensor:
        rows = torch.arange(len(inputs))
        return torch.zeros(len(inputs), 1).index_copy_(0, rows, super().forward(inputs))


def test_a_model_that_cannot_compute_in_fewer_bits_is_told_what_to_do() -> None:
    parts = [Microbatch(2, lambda: torch.ones(2, 2))]
    forward_backward(Replica(Mixing(2, 1), "sgd"), lambda model, batch: model(batch).mean(), parts)
    replica = Replica(Mixing(2, 1), "sgd", precision="bf16")
    with pytest.raises(UserCodeError) as refusal:
        forward_backward(replica, lambda model, batch: model(batch).mean(), parts)
    told = str(refusal.value)
    assert "Mixing.forward" in told and "\n" not in told
    assert "precision is bf16" in told and "x.float()" in told and "precision to fp32" in told
    assert "Mixing" not in told.partition("precision is")[2] and refusal.value.frames


def test_what_else_goes_wrong_in_fewer_bits_is_not_laid_to_them() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise ValueError("no such word")

    replica = Replica(nn.Linear(2, 1), "sgd", precision="bf16")
    with pytest.raises(UserCodeError, match=r"no such word$"):
        forward_backward(replica, loss, [Microbatch(2, lambda: torch.ones(2, 2))])
