"""Which buffers of a model change, what has been added to them, and how they are given values."""

import pytest
import torch
from torch import Tensor, nn

from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.training.buffers import ModelBuffers


class Mixed(nn.Module):
    """One buffer of each kind; `change` says which ones the next call changes."""

    count: Tensor
    flag: Tensor
    halves: Tensor
    wave: Tensor
    cache: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(2**52 + 1))
        self.register_buffer("flag", torch.tensor([False, True]))
        self.register_buffer("halves", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("table", torch.tensor([float("nan"), float("-inf"), 1.0]))

    def count_up(self) -> None:
        self.count += 1

    def replace_all(self) -> None:
        self.count = self.count + 3
        self.flag = ~self.flag
        self.halves = self.halves * 2
        self.wave = self.wave * 1j
        self.cache = self.cache - 0.5


def names_of(buffers: ModelBuffers) -> set[str]:
    return {buffers.names[number] for number in buffers.changing}


def test_only_what_changes_is_found_also_when_it_changes_late_or_is_replaced() -> None:
    model = Mixed()
    buffers = ModelBuffers(model)
    buffers.mark()
    model.count_up()
    assert list(buffers.difference().values()) == [torch.ones(1, dtype=torch.float64)]
    assert names_of(buffers) == {"count"}
    buffers.mark()
    model.replace_all()
    added = {buffers.names[number]: each.tolist() for number, each in buffers.difference().items()}
    assert added == {
        "count": [3.0],
        "flag": [1.0, -1.0],
        "halves": [1.5, -2.0],
        "wave": [-3.0, -1.0],
        "cache": [-0.5, -0.5],
    }
    assert "table" not in names_of(buffers), "NaN is what it was"


def test_batch_norm_s_statistics_are_found_though_no_version_counter_tells() -> None:
    model = nn.BatchNorm1d(3)
    buffers = ModelBuffers(model)
    model(torch.randn(4, 3))
    buffers.find()
    assert names_of(buffers) == {"running_mean", "running_var", "num_batches_tracked"}


def test_batch_norm_that_begins_to_train_after_many_batches_is_found() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).eval()
    buffers = ModelBuffers(model)
    for _ in range(2):
        buffers.mark()
        model(torch.randn(4, 3))
        assert buffers.difference() == {}
    model[1].train()
    buffers.mark()
    model(torch.randn(4, 3))
    assert {buffers.names[number] for number in buffers.difference()} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_what_was_added_gives_the_same_buffers_elsewhere_bit_for_bit() -> None:
    torch.manual_seed(0)
    here, there = nn.BatchNorm1d(50), nn.BatchNorm1d(50)
    own, others = ModelBuffers(here), ModelBuffers(there)
    for scale in (1.0, 1e-6, 1e6):
        own.mark()
        here(scale * torch.randn(8, 50))
        others.add(own.difference())
    for name, buffer in here.named_buffers():
        assert torch.equal(buffer, there.get_buffer(name)), name


def test_buffers_are_given_values_and_what_is_left_out_is_as_at_the_beginning() -> None:
    model, other = Mixed(), Mixed()
    buffers, others = ModelBuffers(model), ModelBuffers(other)
    other.count_up()
    others.find()
    model.replace_all()
    buffers.load(others.values())
    for name, buffer in other.named_buffers():
        assert torch.equal(model.get_buffer(name).nan_to_num(), buffer.nan_to_num()), name
    model.count_up()
    model.replace_all()
    buffers.restore()
    assert model.count == other.count
    assert torch.equal(model.flag, other.flag)


def test_integers_are_rounded_when_a_fraction_is_added() -> None:
    model = Mixed()
    buffers = ModelBuffers(model)
    number = buffers.names.index("count")
    buffers.add({number: torch.tensor([0.6], dtype=torch.float64)})
    assert model.count == 2**52 + 2
    assert buffers.changing == [number]


def test_statistics_of_four_workers_with_ten_steps_between_pulls_come_to_those_of_the_data() -> (
    None
):
    torch.manual_seed(0)
    mean, deviation = torch.tensor([-40.0, 0.0, 7.0]), torch.tensor([0.1, 1.0, 30.0])
    server = nn.BatchNorm1d(3)
    theirs = ModelBuffers(server)
    workers = [nn.BatchNorm1d(3) for _ in range(4)]
    own = [ModelBuffers(worker) for worker in workers]
    for step in range(200):
        for worker, buffers in zip(workers, own, strict=True):
            if step % 10 == 0:
                buffers.load(theirs.values())
            buffers.mark()
            worker(mean + deviation * torch.randn(256, 3))
            theirs.add(buffers.difference(), num_workers=4)
            assert server.running_var is not None
            assert bool((server.running_var > 0).all())
    torch.testing.assert_close(server.running_mean, mean, rtol=0.01, atol=0.5)
    torch.testing.assert_close(server.running_var, deviation**2, rtol=0.1, atol=0.0)
    assert server.num_batches_tracked == 800


def test_a_variance_does_not_pass_below_zero() -> None:
    norm = nn.BatchNorm1d(2)
    buffers = ModelBuffers(norm)
    down = torch.tensor([-1.5, -0.25], dtype=torch.float64)
    numbers = {name: number for number, name in enumerate(buffers.names)}
    buffers.add({numbers["running_mean"]: down, numbers["running_var"]: down})
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.running_mean.tolist() == [-1.5, -0.25]
    assert norm.running_var.tolist() == [0.0, 0.75]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint64])
def test_what_several_workers_have_taken_away_is_gone(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("left", torch.ones(1, dtype=dtype))
    buffers = ModelBuffers(model)
    for _ in range(2):
        buffers.add({0: torch.tensor([-1.0], dtype=torch.float64)})
    assert model.get_buffer("left").item() == 0


def test_a_buffer_that_becomes_nan_is_named() -> None:
    model = nn.BatchNorm1d(2)
    buffers = ModelBuffers(model)
    buffers.mark()
    model(torch.tensor([[1.0, float("nan")], [2.0, 1.0]]))
    with pytest.raises(NonFiniteLoss, match="running_mean"):
        buffers.difference()


@pytest.mark.parametrize("first", [float("inf"), float("-inf"), float("nan")])
def test_a_buffer_that_begins_infinite_and_changes_is_refused_by_its_first_value(
    first: float,
) -> None:
    model = Mixed()
    model.halves.fill_(first)
    buffers = ModelBuffers(model)
    buffers.mark()
    assert buffers.difference() == {}
    model.halves.zero_()
    with pytest.raises(ConfigError, match=f"halves begins as {first}"):
        buffers.difference()


@pytest.mark.parametrize("is_changing", [False, True])
@pytest.mark.parametrize("later", [None, torch.ones(5)])
def test_a_buffer_that_is_removed_or_grows_is_that_machine_s_own(
    later: Tensor | None, is_changing: bool
) -> None:
    model, other = Mixed(), Mixed()
    buffers, others = ModelBuffers(model), ModelBuffers(other)
    for each in (model, other):
        if is_changing:
            each.cache += 1
    buffers.find()
    others.find()
    model.cache = later  # type: ignore[assignment]
    buffers.mark()
    model.count_up()
    added = buffers.difference()
    assert {buffers.names[number] for number in added} == {"count"}
    buffers.load(others.values())
    buffers.add(others.values())
    buffers.restore()
    assert model.cache is later
    assert ("cache" in buffers.to_save()) == (is_changing and later is not None)


def test_a_buffer_of_another_shape_is_refused_or_if_it_is_a_cache_left_alone() -> None:
    model = Mixed()
    buffers = ModelBuffers(model)
    model.cache = torch.ones(5)
    buffers.find()
    assert buffers.changing == []
    model.halves = torch.ones(3)
    with pytest.raises(ConfigError, match=r"buffer halves .* from \(2,\) to \(3,\)"):
        buffers.find()
