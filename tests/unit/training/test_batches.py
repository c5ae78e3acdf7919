"""In what a loss, a model and metrics get their batches."""

import logging
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from smolcluster.data.pytree import decode, encode, tensors_in
from smolcluster.errors import UserCodeError
from smolcluster.training.batches import apart, placed
from smolcluster.training.build import Microbatching, TrainingContext
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload

CPU = torch.device("cpu")
BEGIN = 1.7e9
Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Bag:
    inputs: Tensor
    names: list[str]


class Couple(tuple[Any, ...]):
    """Takes other arguments than a tuple."""

    note: str

    def __new__(cls, first: Any, second: Any, note: str) -> Self:
        made = super().__new__(cls, (first, second))
        made.note = note
        return made


class Images(list[Any]):
    """Takes other arguments than a list."""

    def __init__(self, *images: Tensor, note: str) -> None:
        super().__init__(images)
        self.note = note


LIBRARY_BATCHES = ("output", "tokens")


def batches() -> dict[str, Any]:
    packed = pack_sequence([torch.randn(3, 2), torch.randn(1, 2)])
    return {
        "ordered": OrderedDict(b=torch.randn(2), a=torch.arange(2)),
        "named": Pair(torch.randn(2), ["x"]),
        "bag": Bag(torch.randn(2), ["a", "b"]),
        "packed": packed,
        "size": {"size": torch.randn(2, 3).shape},
        "complex": torch.randn(2, dtype=torch.complex128),
        "nested": [{"a": (torch.randn(1), None)}],
        "couple": Couple(torch.randn(1), ["x"], "a"),
        "images": Images(torch.randn(1), torch.randn(2), note="a"),
        "maximum": torch.randn(2, 3).max(dim=1),
    }


def batch_of(name: str) -> Any:
    if name not in LIBRARY_BATCHES:
        return batches()[name]
    from transformers import BatchEncoding
    from transformers.modeling_outputs import CausalLMOutput

    if name == "tokens":
        return BatchEncoding({"ids": torch.arange(2)})
    return CausalLMOutput(logits=torch.FloatTensor([1.0, 2.0]))


@pytest.mark.parametrize("name", [*batches(), *LIBRARY_BATCHES])
def test_each_reader_gets_the_same_kinds_of_containers_of_its_own(name: str) -> None:
    batch = batch_of(name)
    own = apart(placed(batch, CPU, torch.float32, lowers_doubles=False))
    assert type(own) is type(batch)
    given = zip(tensors_in(batch), tensors_in(own), strict=True)
    assert all(one.dtype is other.dtype for one, other in given)
    if isinstance(batch, list | dict | Bag):
        assert own is not batch
    shared = {each.data_ptr() for each in tensors_in(batch) if each.numel()}
    assert not shared.intersection(each.data_ptr() for each in tensors_in(own))
    assert getattr(own, "note", None) == getattr(batch, "note", None)
    if type(batch) is OrderedDict:
        own.pop("b")
        assert list(batch) == ["b", "a"]


@pytest.mark.parametrize(
    ("given", "parameters", "lowers", "expected"),
    [
        (torch.float64, torch.float32, False, torch.float64),
        (torch.float64, torch.float32, True, torch.float32),
        (torch.float32, torch.float64, False, torch.float64),
        (torch.float16, torch.float32, False, torch.float32),
        (torch.float64, torch.bfloat16, False, torch.bfloat16),
        (torch.int64, torch.float32, True, torch.int64),
        (torch.complex128, torch.float32, True, torch.complex128),
        (torch.bool, torch.float64, True, torch.bool),
    ],
)
def test_only_real_numbers_are_cast_and_none_to_less_precision_unasked(
    given: torch.dtype, parameters: torch.dtype, *, lowers: bool, expected: torch.dtype
) -> None:
    value = torch.ones(2).to(given)
    assert placed(value, CPU, parameters, lowers_doubles=lowers).dtype is expected


@pytest.mark.parametrize("name", ["packed", "size"])
def test_packed_sequences_and_sizes_arrive_whole_where_they_are_sent(name: str) -> None:
    batch = batch_of(name)
    memory = bytearray(b"".join(bytes(each) for each in encode(batch).pieces))
    there = decode(memoryview(memory))
    assert type(there) is type(batch)
    if isinstance(batch, PackedSequence):
        assert torch.equal(there.data, batch.data)
        assert torch.equal(there.batch_sizes, batch.batch_sizes)
    else:
        assert there == batch
        assert isinstance(there["size"], torch.Size)


def clock(model: nn.Module, batch: Any) -> Tensor:
    phase = (batch[0] - BEGIN).float()
    return functional.mse_loss(model(phase[:, None])[:, 0], phase)


def plain(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0][:, None])[:, 0], batch[0])


def huber(model: nn.Module, batch: Any) -> Tensor:
    """Its backward alone refuses targets of another type."""
    return functional.huber_loss(model(batch[0].float()[:, None])[:, 0], batch[0])


def context_for(loss: Any, begin: float) -> TrainingContext:
    torch.manual_seed(0)
    times = begin + torch.arange(8, dtype=torch.float64) / 8
    workload = Workload(lambda: nn.Linear(1, 1), loss, TensorDataset(times), TensorDataset(times))
    replica = Replica(workload.new_model(), "sgd")
    replica.doubles.log = logging.getLogger("smolcluster.test")
    return TrainingContext(workload, replica, 1, Microbatching(3))


def test_times_in_float64_keep_their_fractions() -> None:
    context = context_for(clock, BEGIN)
    found = context.compute(torch.arange(8))
    other = context_for(plain, 0.0)
    assert found.mean == pytest.approx(other.compute(torch.arange(8)).mean)
    evaluation = context.evaluate()
    assert evaluation is not None
    assert evaluation.loss == pytest.approx(found.mean, rel=1e-4)


@pytest.mark.parametrize("loss", [plain, huber])
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_float64_becomes_float32_where_the_model_takes_nothing_else_and_it_is_said_once(
    loss: Any, *, evaluates_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = context_for(loss, 0.0)
    if evaluates_first:
        assert context.evaluate() is not None
    for _ in range(2):
        context.compute(torch.arange(8))
    assert context.evaluate() is not None
    assert sum("cast to float32" in each.getMessage() for each in caplog.records) == 1


def test_another_error_of_the_loss_is_the_users() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("no dtype of mine")

    with pytest.raises(UserCodeError, match="no dtype of mine"):
        context_for(broken, 0.0).compute(torch.arange(8))


def test_a_metric_gets_the_batch_that_the_loss_got() -> None:
    def popping(model: nn.Module, batch: Any) -> Tensor:
        target = batch.pop("target")
        found = functional.mse_loss(model(batch["inputs"])[:, 0], target)
        target.zero_()
        return found

    def metric(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return batch.pop("target").sum(), 1

    data = [{"inputs": torch.ones(2), "target": torch.tensor(float(n))} for n in range(4)]
    workload = Workload(
        lambda: nn.Linear(2, 1), popping, data, data, metrics={"a": metric, "b": metric}
    )
    context = TrainingContext(
        workload, Replica(workload.new_model(), "sgd"), 1, Microbatching(None)
    )
    found = context.evaluate()
    assert found is not None
    assert found.metrics == {"a": 6.0, "b": 6.0}
