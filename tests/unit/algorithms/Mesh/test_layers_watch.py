"""What a layer of a mesh does to its own state while it computes is named."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from smolcluster.algorithms.Mesh.layers_watch import LayersWatch
from smolcluster.errors import ModelChanged

Change = Callable[["Changing"], object]


class Changing(nn.Module):
    """A layer that does something to itself in each forward."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self)
        outputs: Tensor = self.head(inputs)
        return outputs


@pytest.fixture
def group() -> Iterator[None]:
    """A rank of two, of which the other one is pretended, so that whole weights hold anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@torch.no_grad()
def in_place(layer: Changing) -> None:
    layer.head.weight.copy_(functional.normalize(layer.head.weight, dim=1))


def through_data(layer: Changing) -> None:
    layer.head.weight.data.mul_(0.5)


def reassigned(layer: Changing) -> None:
    layer.head.weight.data = functional.normalize(layer.head.weight.data, dim=1)


def replaced(layer: Changing) -> None:
    layer.head.weight = nn.Parameter(torch.ones(4, 4))


def late(layer: Changing) -> None:
    layer.late = nn.Parameter(torch.ones(4))


def frozen(layer: Changing) -> None:
    layer.head.requires_grad_(requires_grad=False)


def teaching(layer: Changing) -> None:
    layer.teacher.weight.data.add_(1.0)


def counting(layer: Changing) -> None:
    layer.get_buffer("mean").add_(1.0)


def new_buffer(layer: Changing) -> None:
    layer.register_buffer("late", torch.ones(4))


def caching(layer: Changing) -> None:
    layer.cache = torch.ones(5)


REFUSED = [
    (in_place, r"parameter 1\.head\.weight \(Linear\) changes.*register_buffer"),
    (through_data, r"parameter 1\.head\.weight \(Linear\) changes"),
    (reassigned, r"parameter 1\.head\.weight \(Linear\) gets other memory"),
    (replaced, r"parameter 1\.head\.weight \(Linear\) is replaced"),
    (late, r"parameter late is made only as the model computes"),
    (frozen, r"parameter 1\.head\.\w+ is to be trained .* and then frozen"),
    (teaching, r"parameter 1\.teacher\.weight \(Linear\) is frozen, but .* without a mesh"),
    (counting, r"buffer 1\.mean \(Changing\) changes .* without a mesh"),
    (new_buffer, r"buffer late \(Changing\) changes"),
]


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(("change", "told"), REFUSED)
@pytest.mark.usefixtures("group")
def test_a_layer_that_changes_its_state_is_refused_by_name(
    change: Change, told: str, *, is_sharded: bool
) -> None:
    model, watch = made(change, is_sharded=is_sharded)
    with pytest.raises(ModelChanged, match=told) as refusal, watch.looking(0):
        model(torch.ones(2, 4))
    assert refusal.value.exit_code == 3
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.usefixtures("group")
def test_layers_that_leave_it_alone_train(*, is_sharded: bool) -> None:
    """A cache is a rank's own, and what the optimizer does between batches is not the layer's."""
    model, watch = made(caching, is_sharded=is_sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in (0, 0, 1):
        with watch.looking(epoch):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("group")
def test_it_is_looked_again_as_an_epoch_begins() -> None:
    changes: list[Change] = []
    model, watch = made(lambda layer: [each(layer) for each in changes], is_sharded=False)
    for _ in range(3):
        with watch.looking(0):
            model(torch.ones(2, 4))
    changes.append(through_data)
    with watch.looking(0):
        model(torch.ones(2, 4))
    with pytest.raises(ModelChanged, match=r"1\.head\.weight"), watch.looking(1):
        model(torch.ones(2, 4))


def test_what_is_in_no_layer_is_looked_at_as_well() -> None:
    """Such as a table in front of the layers."""
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=0.1), Changing(lambda _: None))
    watch = LayersWatch(model, [model[1]])
    with pytest.raises(ModelChanged, match=r"0\.weight \(Embedding\).*max_norm=None"):  # noqa: SIM117
        with watch.looking(0):
            model(torch.arange(4))


def made(change: Change, *, is_sharded: bool) -> tuple[nn.Sequential, LayersWatch]:
    model = nn.Sequential(nn.Linear(4, 4), Changing(change))
    if is_sharded:
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model, LayersWatch(model, list(model))
