"""What two machines compare before they train together, and what is said of an adapter's base."""

import copy
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn
from torch.utils.data import TensorDataset

from smolcluster.training.fingerprint import base_of, described_base, fingerprint
from smolcluster.training.workload import Workload
from smolcluster.wire.messages import Identifier


class Adapted(nn.Module):
    """Looks like what `peft` makes: a frozen base, a trained adapter, and `peft_config`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(4, 2)
        self.peft_config: dict[str, object] = {}


def frozen_first() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0].requires_grad_(requires_grad=False)
    return model


def test_the_content_of_frozen_weights_counts_and_that_of_trained_ones_does_not() -> None:
    model = frozen_first()
    before = fingerprint(model)
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] += 1
    assert fingerprint(model) == before
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] += 1e-3
    assert fingerprint(model) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_frozen_weights_of_any_type_are_compared(dtype: torch.dtype) -> None:
    model = frozen_first()
    model[0].to(dtype)
    assert fingerprint(model) == fingerprint(copy.deepcopy(model))


def test_a_compiled_model_is_the_same_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU())
    compiled = cast("nn.Module", torch.compile(model, backend="eager"))
    assert fingerprint(compiled) == fingerprint(model)


def test_the_base_of_adapters_is_what_is_frozen_below_them() -> None:
    whole = nn.Sequential(frozen_first(), Adapted())
    assert list(base_of(whole)) == ["1.base.weight", "1.base.bias"]
    assert base_of(frozen_first()) == {}
    assert described_base(frozen_first()) is None
    other = copy.deepcopy(whole)
    assert described_base(other) == described_base(whole)
    with torch.no_grad():
        other.get_parameter("1.base.bias")[0] += 1
    assert described_base(other) != described_base(whole)


class Forwards(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        if name == "peft_config":
            raise KeyError(name)
        return super().__getattr__(name)


def test_a_model_may_raise_anything_for_a_name_that_it_does_not_know() -> None:
    assert base_of(Forwards(2, 2)) == {}


def first_output(_model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.as_tensor(batch[0]).sum()


@pytest.mark.parametrize("said", ["imdb 2024", "größe", 200 * "a", ""])
def test_any_text_may_say_what_the_data_are(said: str) -> None:
    """A message holds one word of ASCII."""
    data = TensorDataset(torch.zeros(1, 3))
    marks = [
        Workload(lambda: nn.Linear(3, 1), first_output, data, fingerprint=each).fingerprint
        for each in (said, f"{said}1", "a-word")
    ]
    assert marks[2] == "a-word"
    assert len(set(marks)) == 3
    TypeAdapter(Identifier).validate_python(marks[0])
