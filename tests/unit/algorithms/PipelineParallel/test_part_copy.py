"""What stages have of a worker's copy of the weights is what one process has of it."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from peers import opened
from pipelines import stages_of, whole
from smolcluster.algorithms.PipelineParallel.part_copy import PartCopy, piece_frame, values_of
from smolcluster.configs.schema import GPTConfig
from smolcluster.errors import ProtocolError
from smolcluster.models.gpt import GPT
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.local_copy import OwnCopy
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload
from smolcluster.wire.messages import CopyPiece, TensorSpec

SIZES = GPTConfig(
    type="GPT", model_dim=8, num_layers=4, num_heads=2, ff_dim=16, max_seq_len=8, dropout=0.0
)
LENGTH = 100
"""Of the pieces that weights come in: no parameter's."""


class Both:
    """The same copy in one process, and in parts on two, of which the first has first and last layers."""

    def __init__(self) -> None:
        workload = Workload(lambda: GPT(SIZES, 11), cross_entropy, [(torch.ones(1), 1)])
        self.replica = replica = Replica(whole(workload), "sgd")
        middle = [place for number, (_, place) in enumerate(replica.layers) if number % 3 == 0]
        others = [place for _, place in replica.layers if place not in middle]
        self.fragments = middle, others
        self.own = OwnCopy(replica, replica.optimizer, self.fragments)
        first, inner, last = stages_of(workload, [0, 1, 2, 4])
        self.stages = [[first, last], [inner]]
        self.parts = [PartCopy(each, replica.layers) for each in self.stages]
        places = [[(place.start, place.stop) for place in each] for each in self.fragments]
        for part in self.parts:
            part.begin(places)

    def step(self, seed: int, held: Sequence[int] = ()) -> None:
        """Along the same gradient."""
        generator = torch.Generator().manual_seed(seed)
        self.replica.grads.copy_(torch.randn(self.replica.num_params, generator=generator))
        whole_grads = {name: self.replica.grads[place] for name, place in self.replica.layers}
        self.own.step(0.1, held)
        for part, stages in zip(self.parts, self.stages, strict=True):
            with part.holding(held):
                for stage in stages:
                    for name, place in stage.replica.layers:
                        stage.replica.grads[place] = whole_grads[name]
                    stage.replica.step(0.1)

    def give(self, places: Sequence[slice], values: Tensor) -> list[bool]:
        """Send all parts what is theirs of `values`, those of the places; whether each has all then."""
        found = []
        for part in self.parts:
            is_whole = False
            for first, stop in part.places:
                for start, piece in cut(places, values):
                    low, high = max(start, first), min(start + len(piece), stop)
                    if low < high:
                        assert not is_whole, "there was more to come"
                        is_whole = part.take(low, piece[low - start : high - start])
            found.append(is_whole)
        return found

    def load(self, seed: int) -> None:
        weights = torch.randn(
            self.replica.num_params, generator=torch.Generator().manual_seed(seed)
        )
        self.own.load([weights])
        assert not any(part.expect(None) for part in self.parts)
        assert self.give([slice(0, self.replica.num_params)], weights) == [True, True]

    def follow(self, fragment: int, seed: int, *, is_difference: bool) -> None:
        numel = sum(place.stop - place.start for place in self.fragments[fragment])
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        self.own.follow(fragment, values, is_difference=is_difference)
        for part in self.parts:
            assert not part.expect(fragment, is_difference=is_difference)
        assert self.give(self.fragments[fragment], values) == [True, True]

    def mark_sent(self, fragment: int) -> None:
        self.own.mark_sent(fragment)
        for part in self.parts:
            part.mark_sent(fragment)

    def assert_same(self) -> None:
        expected = dict(self.replica.layers)
        for stages in self.stages:
            for stage in stages:
                for name, place in stage.replica.layers:
                    ours, theirs = stage.replica.params[place], self.replica.params[expected[name]]
                    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=name)

    def assert_same_change(self, fragment: int) -> None:
        expected = self.own.change(fragment)
        found = torch.full_like(expected, torch.nan)
        for start in range(0, len(expected), LENGTH):
            place = slice(start, min(start + LENGTH, len(expected)))
            for part in self.parts:
                for first, values in part.change(fragment, place):
                    at = [self.at(fragment, first + i) for i in range(len(values))]
                    assert torch.isnan(found[at]).all(), "told twice"
                    found[at] = values
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    def at(self, fragment: int, flat: int) -> int:
        """Where in the fragment's values an element of the flat weights is."""
        before = 0
        for place in self.fragments[fragment]:
            if place.start <= flat < place.stop:
                return before + flat - int(place.start)
            before += place.stop - place.start
        raise AssertionError("it is of another fragment")


def cut(places: Sequence[slice], values: Tensor) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for place in places:
        for first in range(place.start, place.stop, LENGTH):
            num = min(LENGTH, place.stop - first)
            yield first, values[start : start + num]
            start += num


def test_parts_are_what_one_process_has() -> None:
    """Through loads, steps, held fragments, changes, new weights, differences; what is tied is told once."""
    both = Both()
    both.load(1)
    both.assert_same()
    both.step(2)
    both.assert_same_change(0)
    both.mark_sent(0)
    both.step(3)
    both.assert_same()
    both.follow(0, 4, is_difference=False)
    both.assert_same()
    both.step(5, held=[1])
    both.follow(1, 6, is_difference=True)
    both.assert_same()
    both.assert_same_change(0)
    both.assert_same_change(1)
    both.load(7)
    both.assert_same()
    both.assert_same_change(1)


@pytest.mark.parametrize("start", [0, 10**6])
def test_values_that_were_not_wanted_are_refused(start: int) -> None:
    both = Both()
    if start:
        assert not both.parts[0].expect(None)
    with pytest.raises(ProtocolError, match="not wanted"):
        both.parts[0].take(start, torch.ones(3))


def test_a_fragment_that_there_is_not_is_refused() -> None:
    with pytest.raises(ProtocolError, match="fragment 2"):
        Both().parts[0].mark_sent(2)


def test_moments_of_other_layers_are_not_taken_up() -> None:
    workload = Workload(lambda: GPT(SIZES, 11), cross_entropy, [(torch.ones(1), 1)])
    layers = Replica(whole(workload), "adamw").layers
    one, other = (PartCopy([each], layers) for each in stages_of(workload, [0, 2, 4], "adamw"))
    kept = {name: torch.full_like(each, 3.0) for name, each in one.moments.items()}
    assert not other.take_up(kept)
    assert one.take_up(kept)
    assert all(bool((each == 3.0).all()) for each in one.moments.values())


def test_pieces_travel_as_they_are_and_are_not_believed() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = torch.randn(5).to(dtype)
        frame = piece_frame(1, 2, 30, values)
        piece, payload = opened(frame)
        assert isinstance(piece, CopyPiece)
        assert (piece.attempt, piece.turn, piece.start) == (1, 2, 30)
        assert torch.equal(values_of(piece, payload), values)
    for spec in (
        TensorSpec(codec="raw", dtype="int32", shape=(2,), nbytes=8),
        TensorSpec(codec="raw", dtype="float32", shape=(3,), nbytes=8),
        TensorSpec(codec="int8", dtype="float32", shape=(2,), nbytes=8),
    ):
        with pytest.raises(ProtocolError):
            values_of(CopyPiece(attempt=1, turn=1, start=0, tensor=spec), memoryview(bytes(8)))
