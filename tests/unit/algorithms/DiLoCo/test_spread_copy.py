"""A worker whose weights lie in parts, which it reads and writes a bucket at a time, is any other worker."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from own_workloads import normed
from smolcluster.algorithms.DiLoCo.exchange import Encoder, FragmentArrived, Layout
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.configs.schema import GradientClipping
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.server.weights import WeightsArrived
from smolcluster.training.build import TrainingContext
from smolcluster.training.kept import KeptSteps
from smolcluster.training.local_copy import Followed, Fragments, LocalCopy, Values
from smolcluster.wire.messages import Collect, LeaseKey, Welcome
from unit.algorithms.DiLoCo.actors import worker_of

NUM_RANKS = 3


class Spread:
    """A `LocalCopy` whose ranks are in this process: rank r has every third element from r on."""

    def __init__(self, training: TrainingContext, fragments: Fragments) -> None:
        self.training, self.fragments = training, fragments
        params = training.replica.params
        self.ranks = [
            Followed([[params[place][rank::NUM_RANKS] for place in each] for each in fragments])
            for rank in range(NUM_RANKS)
        ]
        self.largest = 0
        """Values that were ever asked for at once."""

    @property
    def sent(self) -> Collection[int]:
        return self.ranks[0].sent.keys()

    def clip(self, clipping: GradientClipping) -> float:
        return self.training.replica.clip(clipping)

    def step(self, learning_rate: float, held: Collection[int] = ()) -> None:
        kept = self.training.replica.params.clone()
        self.training.optimizer.step(learning_rate)
        for number in held:
            for place in self.fragments[number]:
                self.training.replica.params[place] = kept[place]

    def change(self, fragment: int) -> Values:
        return Change(self, fragment)

    def mark_sent(self, fragment: int) -> None:
        for each in self.ranks:
            each.mark_sent(fragment)

    def follow(self, fragment: int, values: Tensor, *, is_difference: bool) -> None:
        sizes = [place.stop - place.start for place in self.fragments[fragment]]
        for rank, each in enumerate(self.ranks):
            own = [part[rank::NUM_RANKS] for part in torch.split(values, sizes)]
            each.follow(fragment, own, is_difference=is_difference)

    def load(self, weights: Sequence[Tensor]) -> None:
        self.training.replica.load(*weights)
        for each in self.ranks:
            each.restart()

    def forget_sent(self) -> None:
        for each in self.ranks:
            each.sent.clear()

    def reset(self) -> None:
        self.training.optimizer.reset()

    def save(self, kept: KeptSteps, step: int, more: Mapping[str, Tensor], keep_last: int) -> None:
        raise NotImplementedError

    def take_up(self, kept: KeptSteps, step: int) -> tuple[int, Mapping[str, Tensor]] | None:
        raise NotImplementedError


class Change:
    """Put together from the ranks when it is asked for."""

    def __init__(self, copy: Spread, fragment: int) -> None:
        self.copy, self.fragment = copy, fragment

    def __getitem__(self, place: slice, /) -> Tensor:
        self.copy.largest = max(self.copy.largest, place.stop - place.start)
        parts = []
        for number, at in enumerate(self.copy.fragments[self.fragment]):
            whole = torch.empty(at.stop - at.start)
            for rank, each in enumerate(self.copy.ranks):
                start, now = each.start[self.fragment][number], each.now[self.fragment][number]
                whole[rank::NUM_RANKS] = start - now
            parts.append(whole)
        return torch.cat(parts)[place]


class SpreadContext(TrainingContext):
    def local_copy(self, fragments: Fragments) -> LocalCopy:
        return Spread(self, fragments)


class SpreadWorker(Worker):
    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        own = {each.name: getattr(training, each.name) for each in fields(training)}
        super().__init__(welcome, SpreadContext(**own))


def assigned(number: int, fragments: list[int] | None = None) -> Assigned:
    start, stop = 8 * number, 8 * number + 8
    key = LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=number)
    indices = torch.arange(start, stop, dtype=torch.int32)
    message, payload = assignment_of(
        key, indices, version=0, learning_rate=0.1, fragments=fragments
    )
    return Assigned(message, payload)


def go_through(worker: Worker) -> list[Tensor]:
    """Steps, a change, steps behind it, new weights, a repeated batch, and whole weights."""
    replica = worker.replica
    worker.begin_with(WeightsArrived(1, [replica.params.clone()], {}, 0))
    seen: list[Tensor] = []
    encode = worker.encoder.encode

    def watched(number: int, values: Values, *, counts: bool = True) -> list[Tensor]:
        found = encode(number, values, counts=counts)
        seen.extend(found)
        return found

    worker.encoder.encode = watched  # type: ignore[method-assign]
    worker.step(assigned(0))
    worker.send_change(Collect(request=1, fragment=1, wait=False))
    worker.step(assigned(1))
    torch.manual_seed(1)
    numel = worker.layout.fragments[1].numel
    worker.take_fragment(FragmentArrived(1, 1, 2, torch.randn(numel), {}))
    seen.append(replica.params.clone())
    worker.step(assigned(2, [0, 2]))
    worker.take_fragment(FragmentArrived(1, None, 3, torch.randn(numel), {}))
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
    assert isinstance(copy, Spread)
    for number, fragment in enumerate(worker.layout.fragments):
        layout = Layout(worker.layout.fragments, 64, torch.float32)
        encoded = Encoder("int8", layout).encode(number, copy.change(number))
        assert len(encoded) == -(-fragment.numel // 16)
    assert copy.largest == 16
