"""What of a model's state computing may change: buffers, and what follows the weights; no weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from smolcluster.configs.schema import DatasetConfig, DatasetPlace, TrainConfig
from smolcluster.errors import ModelChanged
from smolcluster.training.buffers import NUM_FIRST
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.compute import Microbatch, forward_backward
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload

Change = Callable[["Changing"], object]


class Changing(nn.Module):
    """Does something to itself in each forward."""

    num_steps: int
    mean: Tensor | None

    def __init__(self, change: Change = lambda _: None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.teacher = nn.Linear(3, 4).requires_grad_(requires_grad=False)
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self)
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def compute(replica: Replica, loss: Callable[[nn.Module, Tensor], Tensor] = mean_of) -> None:
    """A batch of two microbatches, the same each time."""
    batch = torch.arange(12.0).view(4, 3)
    replica.watch.begin(0)
    parts = [Microbatch(2, part.clone) for part in torch.split(batch, 2)]
    forward_backward(replica, loss, parts)
    replica.watch.end()


def training_of(workload: Workload) -> TrainingContext:
    config = TrainConfig(dataset=DatasetConfig(name="points"))
    return build(config, 7, DatasetPlace(), torch.device("cpu"), workload=workload)


@torch.no_grad()
def in_place(model: Changing) -> None:
    model.head.weight.copy_(functional.normalize(model.head.weight, dim=1))


def through_data(model: Changing) -> None:
    model.head.weight.data.mul_(0.5)


def reassigned(model: Changing) -> None:
    model.head.weight.data = functional.normalize(model.head.weight.data, dim=1)


def replaced(model: Changing) -> None:
    model.head.weight = nn.Parameter(torch.ones(2, 4))


def made_late(model: Changing) -> None:
    model.late = nn.Linear(2, 2)


def thawed(model: Changing) -> None:
    model.teacher.requires_grad_(requires_grad=True)


def refrozen(model: Changing) -> None:
    model.body.requires_grad_(requires_grad=False)


OF_HEAD = r"parameter head\.weight \(Linear\).*register_buffer"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (in_place, OF_HEAD),
        (through_data, OF_HEAD),
        (reassigned, OF_HEAD),
        (replaced, OF_HEAD),
        (made_late, r"parameter late\.\w+ is made only as the model computes"),
        (thawed, r"teacher\.\w+ is .*leave requires_grad as it is"),
        (refrozen, r"body\.\w+ is .*leave requires_grad as it is"),
    ],
)
def test_what_the_forward_does_to_parameters_is_refused_by_name(change: Change, told: str) -> None:
    with pytest.raises(ModelChanged, match=told) as refusal:
        compute(Replica(Changing(change), "sgd"))
    assert refusal.value.exit_code == 3
    assert "\n" not in str(refusal.value)


def test_weights_that_are_put_back_are_nobody_s_business() -> None:
    @torch.no_grad()
    def there_and_back(model: Changing) -> None:
        kept = model.head.weight.clone()
        model.head.weight.zero_()
        model.head.weight.copy_(kept)

    replica = Replica(Changing(there_and_back), "sgd")
    for _ in range(5):
        compute(replica)


def test_a_table_whose_rows_are_renormalised_is_told_to_have_no_max_norm() -> None:
    model = nn.Sequential(nn.Embedding(12, 3, max_norm=0.1), nn.Flatten(), nn.Linear(9, 1))
    replica = Replica(model, "sgd")
    with pytest.raises(ModelChanged, match=r"0\.weight \(Embedding\).*set max_norm=None"):
        compute(replica, lambda model, batch: mean_of(model, batch.long()))


def test_a_teacher_that_follows_the_weights_travels_as_buffers_do() -> None:
    @torch.no_grad()
    def follow(model: Changing) -> None:
        for own, theirs in zip(model.teacher.parameters(), model.body.parameters(), strict=True):
            own.data.lerp_(theirs, 0.1)

    one, other = Replica(Changing(follow), "sgd"), Replica(Changing(), "sgd")
    other.model.load_state_dict(one.model.state_dict())
    one.buffers.mark()
    compute(one)
    added = one.buffers.difference()
    assert {one.buffers.names[number] for number in added} == {"teacher.weight", "teacher.bias"}
    other.buffers.add(added)
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, other.model.get_parameter(name)), name


def test_a_teacher_that_begins_as_the_student_follows_once_steps_are_taken() -> None:
    @torch.no_grad()
    def follow(model: Changing) -> None:
        for own, theirs in zip(model.teacher.parameters(), model.body.parameters(), strict=True):
            own.lerp_(theirs, 0.5)

    model = Changing(follow)
    model.teacher.load_state_dict(model.body.state_dict())
    data = TensorDataset(torch.rand(8, 3))
    workload = Workload(model, lambda model, batch: mean_of(model, batch[0]), data)
    training = training_of(workload)
    replica = training.replica
    for _ in range(NUM_FIRST):
        assert training.rehearse(4)
    for _ in range(3):
        training.compute(torch.arange(4))
        replica.step(0.1)
    changed = {replica.buffers.names[number] for number in replica.buffers.difference()}
    assert changed == {"teacher.weight", "teacher.bias"}


def test_a_rehearsal_leaves_what_model_and_loss_count_as_it_is() -> None:
    def step(model: Changing) -> None:
        model.num_steps += 1
        model.mean = torch.ones(1) if model.mean is None else model.mean + 1

    class Counting:
        def __init__(self) -> None:
            self.num_calls = 0

        def __call__(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
            self.num_calls += 1
            return mean_of(model, batch[0])

    model, loss = Changing(step), Counting()
    model.num_steps, model.mean = 3, None
    training = training_of(Workload(model, loss, TensorDataset(torch.rand(8, 3))))
    own: Any = training.replica.model
    assert training.rehearse(4)
    assert (own.num_steps, own.mean, loss.num_calls) == (3, None, 0)
    training.compute(torch.arange(4))
    assert (own.num_steps, own.mean, loss.num_calls) == (4, torch.ones(1), 1)


def test_a_buffer_that_begins_to_change_late_and_through_data_is_found_in_the_next_epoch() -> None:
    model = Changing()
    model.register_buffer("table", torch.zeros(2))
    replica = Replica(model, "sgd")
    for _ in range(NUM_FIRST + 1):
        compute(replica)
        assert replica.buffers.difference() == {}
    model.get_buffer("table").data.add_(1.0)
    replica.watch.begin(1)
    replica.watch.end()
    assert [each.tolist() for each in replica.buffers.difference().values()] == [[1.0, 1.0]]


def test_a_frozen_parameter_that_begins_to_change_late_is_refused_by_name() -> None:
    model = Changing()
    replica = Replica(model, "sgd")
    for _ in range(4):
        compute(replica)
    model.teacher.weight.data.add_(1.0)
    with pytest.raises(ModelChanged, match=r"teacher\.weight \(Linear\) is frozen, but changes"):
        replica.watch.begin(1)


def clears(set_to_none: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        model.zero_grad(set_to_none=set_to_none)
        return mean_of(model, batch)

    return loss


@pytest.mark.parametrize("loss", [clears(set_to_none=True), clears(set_to_none=False)])
def test_a_loss_that_clears_gradients_loses_none(
    loss: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    replica = Replica(Changing(), "sgd")
    compute(replica)
    expected = replica.grads.clone()
    for _ in range(2):
        compute(replica, loss)
        assert torch.equal(replica.grads, expected)


def test_what_a_hook_puts_in_a_gradient_s_place_counts() -> None:
    model = Changing()
    replica = Replica(model, "sgd")

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2

    compute(replica)
    place = dict(replica.layers)["head.weight"]
    whole = replica.grads[place].clone()
    batch = torch.arange(12.0).view(4, 3)
    model.head.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
    forward_backward(replica, mean_of, [Microbatch(4, batch.clone)])
    torch.testing.assert_close(replica.grads[place], whole / 2)


def test_a_loss_that_goes_backward_itself_is_refused() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        mean_of(model, batch).backward()  # type: ignore[no-untyped-call]
        return mean_of(model, batch)

    with pytest.raises(ModelChanged, match="changes gradients; leave zero_grad"):
        compute(Replica(Changing(), "sgd"), loss)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_begins_as_none_is_refused_unless_it_is_a_cache(persistent: bool) -> None:
    def fill(model: Changing) -> None:
        model.table = torch.arange(3.0)

    model = Changing(fill)
    model.register_buffer("table", None, persistent=persistent)
    replica = Replica(model, "sgd")
    if not persistent:
        for _ in range(3):
            compute(replica)
        model.change = lambda model: setattr(model, "table", torch.rand(3))
    with pytest.raises(ModelChanged, match=r"buffer table .* shape \(3,\)"):
        compute(replica)
        replica.watch.begin(1)
        replica.watch.end()
