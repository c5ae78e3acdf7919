"""Parameters that no batch gives a gradient are named once."""

import torch
from torch import Tensor, nn

from peers import logger
from smolcluster.training.build import NUM_BATCHES, UnusedParameters
from smolcluster.training.compute import Microbatch, forward_backward
from smolcluster.training.replica import Replica


class Branches(nn.Module):
    """The second layer is used by batches whose first value is positive, the last one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        return hidden + self.second(hidden) if inputs[0, 0] > 0 else hidden


def mean_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).mean()
    return loss


def computed(signs: list[int]) -> tuple[Replica, list[str]]:
    replica, lines = Replica(Branches(), "sgd"), list[str]()
    unused = UnusedParameters(replica, logger(lines))
    for sign in signs:
        batch = torch.full((2, 3), float(sign))
        forward_backward(replica, mean_of, [Microbatch(2, batch.clone)])
        unused.batch_done()
    return replica, lines


def test_what_is_never_used_is_named_once_and_has_a_gradient_of_zero() -> None:
    replica, lines = computed([-1] * (NUM_BATCHES - 1) + [1, 1, 1])
    [line] = lines
    assert "last.weight" in line
    assert "second.weight" not in line
    places = dict(replica.layers)
    assert not replica.grads[places["last.weight"]].any()
    assert replica.grads[places["second.weight"]].any()


def test_nothing_is_said_before_enough_batches_or_where_all_is_used() -> None:
    assert computed([1] * (NUM_BATCHES - 1))[1] == []
    replica = Replica(nn.Linear(2, 2), "sgd")
    lines: list[str] = []
    unused = UnusedParameters(replica, logger(lines))
    for _ in range(NUM_BATCHES):
        forward_backward(replica, mean_of, [Microbatch(1, lambda: torch.ones(1, 2))])
        unused.batch_done()
    assert lines == []
