"""A second model: a copy, also of what refuses copies once it has computed, or one that is made again."""

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from smolcluster.errors import UserCodeError
from smolcluster.training.copying import copied, second


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
