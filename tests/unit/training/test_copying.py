"""A second model: a copy, also of what refuses copies once it has computed, or one that is made again."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from harness import digits_config
from smolcluster.configs.schema import DatasetPlace
from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.training.build import build
from smolcluster.training.copying import check_apart, copied, second, uncompiled
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload


class Keeping(nn.Module):
    """Keeps tensors of its last graph: a loss on itself, an output in a dict that a hook fills."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.aux_loss: Tensor | None = None
        self.seen: dict[str, Tensor] = {}
        self.last.register_forward_hook(self.note)

    def note(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self.seen["last"] = output

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(inputs)
        self.aux_loss = outputs.square().mean()
        return outputs


class Locked(nn.Module):
    """Holds a lock, which nothing can copy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2))
        setattr(self.inner[0], "lock", threading.Lock())  # noqa: B010 - modules declare other attributes
        self.register_buffer("table", torch.randn(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs) + self.table
        return outputs


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.Tanh())


def pruned() -> nn.Module:
    model = nn.Linear(3, 2)
    prune.l1_unstructured(model, "weight", 0.5)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize("make", [normed, pruned, Keeping])
def test_a_model_that_holds_tensors_of_a_graph_is_copied(make: Callable[[], nn.Module]) -> None:
    model, inputs = make(), torch.randn(4, 3)
    model(inputs).sum().backward()
    copy = copied(model)
    with torch.no_grad():
        assert torch.equal(copy(inputs), model(inputs))
        for parameter in copy.parameters():
            parameter.zero_()
    assert not torch.equal(copy(inputs), model(inputs))


class Slotted(nn.Linear):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.ones(2)


def test_what_lies_in_slots_is_copied_as_well() -> None:
    model = nn.ModuleDict({"inner": Slotted()})
    made = copied(model).get_submodule("inner")
    assert isinstance(made, Slotted)
    assert torch.equal(made.scale, torch.ones(2))
    assert made is not model["inner"]


def test_a_model_that_cannot_be_copied_is_made_again_with_the_same_state() -> None:
    model, inputs = Locked(), torch.randn(4, 3)
    other = second(model, Locked)
    assert other is not model
    assert torch.equal(other(inputs), model(inputs))


def test_what_cannot_be_copied_is_named_with_the_remedy() -> None:
    model = Locked()
    for make in (None, lambda: model, lambda: nn.Linear(3, 2)):
        with pytest.raises(
            UserCodeError, match=r"layer inner\.0 \(Linear\) cannot be copied"
        ) as refusal:
            second(model, make)
        assert "lambda: Model(...)" in str(refusal.value)
        assert "\n" not in str(refusal.value)


class Sharing(nn.Module):
    """Two layers, of which the second's weight has memory that `take` gives it of the first's."""

    def __init__(self, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight.data = take(self.one.weight.data)


@pytest.mark.parametrize("take", [lambda memory: memory, torch.t, lambda memory: memory[1:3, :2]])
def test_two_parameters_in_one_memory_are_refused_before_each_gets_its_own(
    take: Callable[[Tensor], Tensor],
) -> None:
    model = Sharing(take)
    for give in (copied, lambda model: Replica(model, "sgd")):
        with pytest.raises(ConfigError, match=r"other\.weight lies in the memory of one\.weight"):
            give(model)


def test_a_buffer_in_a_trained_parameter_s_memory_is_refused_and_in_a_frozen_one_s_not() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("view", model.weight.data[0])
    with pytest.raises(ConfigError, match="view lies in the memory of weight"):
        check_apart(model)
    check_apart(model.requires_grad_(requires_grad=False))


def test_parameters_may_be_parts_of_one_tensor_and_tied_ones_are_one() -> None:
    whole, model = torch.rand(4, 6), nn.Module()
    model.left, model.right = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])
    model.tied = model.left
    check_apart(model)
    check_apart(Replica(nn.Linear(3, 2), "sgd").model)


def test_what_is_evaluated_beside_training_is_made_again_where_it_cannot_be_copied() -> None:
    data = TensorDataset(torch.randn(8, 3))
    workload = Workload(Locked, lambda model, batch: model(batch[0]).square().mean(), data, data)
    training = build(
        digits_config(batch_size=4), 0, DatasetPlace(), torch.device("cpu"), workload=workload
    )
    inputs, other = torch.randn(4, 3), training.new_copy()
    assert other is not training.replica.model
    assert torch.equal(other(inputs), training.replica.model(inputs))


def test_blocks_that_compile_nothing_may_overlap() -> None:
    """As those of two threads do: the one that began first ends first."""
    compiled: list[int] = []

    def count(graph: Any, _inputs: object) -> Any:
        compiled.append(1)
        return graph

    double = torch.compile(lambda x: 2 * x, backend=count)
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    double(torch.ones(2))
    assert not compiled
    second.__exit__(None, None, None)
    double(torch.ones(2))
    assert compiled
