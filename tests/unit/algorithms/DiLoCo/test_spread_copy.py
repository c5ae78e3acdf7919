"""A worker whose weights lie in parts, which it reads and writes a bucket at a time, is any other worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from own_workloads import CPU, normed
from smolcluster.algorithms.DiLoCo.exchange import Encoder, FragmentArrived, Layout
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.configs.schema import DatasetPlace
from smolcluster.server.weights import WeightsArrived
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.local_copy import InProcess, Values
from smolcluster.training.replica import Replica
from smolcluster.wire.messages import Collect, Welcome
from unit.algorithms.DiLoCo.actors import assigned, worker_of

NUM_RANKS = 3


class Rank(InProcess):
    """Of the whole model, of which every third element from `first` on counts."""

    def __init__(self, replica: Replica, first: int) -> None:
        super().__init__(replica, replica.optimizer)
        self.replica, self.counts = replica, torch.arange(replica.num_params) % NUM_RANKS == first

    def fill(self, place: slice, tensors: Mapping[int, Tensor], out: Tensor) -> None:
        super().fill(place, tensors, out)
        out.mul_(self.counts[place])


class Spread:
    """An `Executor` whose ranks are in this process."""

    divisor = 1.0
    moments: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, replica: Replica, others: Sequence[Replica]) -> None:
        """`replica` computes with the weights that the others have."""
        self.replica = replica
        self.ranks = [Rank(other, first) for first, other in enumerate(others)]
        self.largest = 0
        """Values that were ever asked for at once."""

    @property
    def grad_norm(self) -> float:
        return self.replica.grad_norm()

    def order(self, name: str, *given: Any, **told: Any) -> Any:
        for rank in self.ranks:
            rank.replica.grads.copy_(self.replica.grads)
        found = [rank.order(name, *given, **told) for rank in self.ranks]
        if name == "read":
            self.largest = max(self.largest, len(found[0]))
            return torch.stack(found).sum(dim=0)
        for rank in self.ranks:
            self.replica.params[rank.counts] = rank.replica.params[rank.counts]
        return None


@dataclass(frozen=True, kw_only=True)
class SpreadContext(TrainingContext):
    spread: Spread

    @property
    def executor(self) -> Spread:
        return self.spread


class SpreadWorker(Worker):
    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        own = {each.name: getattr(training, each.name) for each in fields(training)}
        run, workload = welcome.run, training.workload
        others = [
            build(run.train, run.seed, DatasetPlace(), CPU, workload=workload).replica
            for _ in range(NUM_RANKS)
        ]
        self.spread = Spread(training.replica, others)
        super().__init__(welcome, SpreadContext(**own, spread=self.spread))


def go_through(worker: Worker) -> list[Tensor]:
    """A mean gradient, steps, a change, steps behind it, new weights, a repeated batch, and whole weights."""
    replica = worker.replica
    worker.begin_with(WeightsArrived(1, [replica.params.clone()], {}, 0))
    seen: list[Tensor] = []
    encode = worker.encoder.encode

    def watched(number: int, values: Values, *, counts: bool = True) -> list[Tensor]:
        found = encode(number, values, counts=counts)
        seen.extend(found)
        return found

    worker.encoder.encode = watched  # type: ignore[method-assign]
    torch.manual_seed(1)
    numel = worker.layout.fragments[1].numel
    worker.step(assigned(4, is_gradient=True))
    worker.step(assigned(5, [1], is_gradient=True))
    worker.send_change(Collect(request=0, fragment=1, wait=False))
    worker.take_fragment(FragmentArrived(1, 1, 2, torch.randn(numel), {}))
    seen.append(replica.params.clone())
    worker.step(assigned(0))
    worker.send_change(Collect(request=1, fragment=1, wait=False))
    worker.step(assigned(1))
    worker.take_fragment(FragmentArrived(1, 2, 3, torch.randn(numel), {}))
    seen.append(replica.params.clone())
    worker.step(assigned(2, [0, 2]))
    worker.take_fragment(FragmentArrived(1, None, 4, torch.randn(numel), {}))
    seen.append(replica.params.clone())
    worker.send_change(Collect(request=2, fragment=0, wait=False))
    worker.begin_with(WeightsArrived(5, [torch.randn(replica.num_params)], {}, 0))
    assert not worker.copy.sent
    worker.step(assigned(3))
    worker.send_change(Collect(request=3, fragment=2, wait=False))
    return [*seen, replica.params.clone()]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_weights_in_parts_train_and_travel_as_weights_in_one_piece(codec: str) -> None:
    what = "mode=streaming", "fragments=3"
    whole = go_through(worker_of(Worker, *what, codec=codec, workload=normed()))
    spread = go_through(worker_of(SpreadWorker, *what, codec=codec, workload=normed()))
    assert len(whole) == len(spread)
    for one, other in zip(whole, spread, strict=True):
        assert torch.equal(one, other)


def test_a_change_is_gathered_no_more_than_a_bucket_at_a_time() -> None:
    worker = worker_of(
        SpreadWorker, "mode=streaming", "fragments=3", codec="int8", workload=normed()
    )
    worker.step(assigned(0))
    copy = worker.copy
    for number, fragment in enumerate(worker.layout.fragments):
        layout = Layout(worker.layout.fragments, 64, torch.float32)
        encoded = Encoder("int8", layout).encode(number, copy.change(number))
        assert len(encoded) == -(-fragment.numel // 16)
    assert worker.spread.largest == 16
