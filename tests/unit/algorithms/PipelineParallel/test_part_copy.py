"""What stages have of a worker's copy of the weights is what one process has of it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from peers import opened
from pipelines import gpt, stages_of, whole
from smolcluster.algorithms.PipelineParallel.part_copy import (
    CopyStream,
    StagePart,
    copy_frames,
)
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import ProtocolError
from smolcluster.training.local_copy import InProcess, LocalCopy
from smolcluster.training.optimizer import clip_factor
from smolcluster.training.places import common, total, without
from smolcluster.training.replica import Replica
from smolcluster.wire.messages import CopyOrder, CopyPiece, Message

NBYTES = 400
"""Of the pieces that values come in: no parameter's."""


class Both:
    """The same copy in one process, and in parts on two, of which the first has first and last layers."""

    def __init__(self) -> None:
        workload = gpt(4, 8)
        self.replica = replica = Replica(whole(workload), "sgd")
        middle = [place for number, (_, place) in enumerate(replica.layers) if number % 3 == 0]
        others = [place for _, place in replica.layers if place not in middle]
        self.fragments = middle, others
        self.own = LocalCopy(InProcess(replica, replica.optimizer), self.fragments)
        first, inner, last = stages_of(workload, [0, 1, 2, 4])
        self.stages = [[first, last], [inner]]
        self.parts = [StagePart(each, replica.layers) for each in self.stages]
        places = tuple(
            tuple((place.start, place.stop) for place in each) for each in self.fragments
        )
        self.obey("begin", fragments=places)

    def obey(self, order: str, **told: Any) -> None:
        for part in self.parts:
            assert part.obey(ordered(order, **told))

    def draw(self, numel: int, seed: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    def compute(self, seed: int) -> None:
        """The stages have the sum over 4 loss terms of the gradient that one process has."""
        self.replica.grads.copy_(self.draw(self.replica.num_params, seed))
        grads = {name: self.replica.grads[place] for name, place in self.replica.layers}
        for stage in chain.from_iterable(self.stages):
            for name, place in stage.replica.layers:
                stage.replica.grads[place] = 4 * grads[name]

    def step(self, seed: int, held: Sequence[int] = (), *, is_added: bool = False) -> None:
        """Along the same gradient, which is added up before if that is wanted."""
        self.compute(seed)
        if is_added:
            self.own.add_gradient(4.0, held)
            self.obey("add_gradient", weight=1.0, held=tuple(held))
        norm = self.own.clip(GradientClipping(max_norm=1.0))
        self.own.step(0.1, held)
        clip = clip_factor(norm, GradientClipping(max_norm=1.0)) / 4
        self.obey("step", learning_rate=0.1, held=tuple(held), clip=clip)

    def give(self, order: CopyOrder, places: Sequence[slice], values: Tensor) -> None:
        """Send all parts what is theirs of `values`, those of the places."""
        flat = torch.zeros(self.replica.num_params)
        parts = torch.split(values, [total([place]) for place in places])
        for place, each in zip(places, parts, strict=True):
            flat[place] = each
        for part in self.parts:
            assert not part.obey(order)
            own = common(places, places_of(part))
            pieces = [opened(each) for each in copy_frames(1, 1, (flat[e] for e in own), NBYTES)]
            found = [part.arrive(*arrived(*each)) for each in pieces]
            assert found == [False] * (len(pieces) - 1) + [True]

    def load(self, seed: int) -> None:
        weights = self.draw(self.replica.num_params, seed)
        self.own.load([weights])
        self.give(ordered("load"), [slice(0, self.replica.num_params)], weights)

    def follow(self, fragment: int, seed: int, *, is_difference: bool) -> None:
        values = self.draw(total(self.fragments[fragment]), seed)
        self.own.follow(fragment, values, is_difference=is_difference)
        order = ordered("follow", fragment=fragment, is_difference=is_difference)
        self.give(order, self.fragments[fragment], values)

    def mark_sent(self, fragment: int) -> None:
        self.own.mark_sent(fragment)
        self.obey("mark_sent", fragment=fragment)

    def assert_same(self) -> None:
        expected = dict(self.replica.layers)
        for stages in self.stages:
            for stage in stages:
                for name, place in stage.replica.layers:
                    ours, theirs = stage.replica.params[place], self.replica.params[expected[name]]
                    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=name)

    def assert_same_change(self, fragment: int, num_terms: float | None = None) -> None:
        """Or the same mean gradient over so many loss terms."""
        is_gradient = num_terms is not None
        places = self.fragments[fragment]
        expected = self.own.change(fragment, is_gradient=is_gradient)[slice(0, total(places))]
        flat = torch.full((self.replica.num_params,), torch.nan)
        left = places
        for part in self.parts:
            wanted = common(left, places_of(part))
            left = without(left, wanted)
            stream, ends = CopyStream(wanted, flat.dtype), tuple((e.start, e.stop) for e in wanted)
            order = ordered("change", fragment=fragment, places=ends, is_gradient=is_gradient)
            for frame in copy_frames(1, 1, [part.change(order)], NBYTES):
                stream.take(*arrived(*opened(frame)))
            for place, values in stream.given:
                flat[place] = values / (num_terms or 1.0)
        found = torch.cat([flat[place] for place in places])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def ordered(order: str, **told: Any) -> CopyOrder:
    return CopyOrder.model_validate({"attempt": 1, "turn": 1, "order": order, **told})


def places_of(part: StagePart) -> list[slice]:
    return [slice(*place) for place in part.places]


def arrived(message: Message, payload: memoryview) -> tuple[CopyPiece, bytearray]:
    assert isinstance(message, CopyPiece)
    return message, bytearray(payload)


def test_parts_are_what_one_process_has() -> None:
    """Through loads, steps, held fragments, changes, new weights, differences, gradients."""
    both = Both()
    both.load(1)
    both.assert_same()
    both.step(8, held=[0, 1])
    both.step(9, is_added=True)
    both.step(10, held=[1], is_added=True)
    both.assert_same_change(0, num_terms=8.0)
    both.assert_same_change(1, num_terms=4.0)
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


def pieces_for(part: StagePart) -> list[tuple[CopyPiece, bytearray]]:
    values = torch.zeros(total(places_of(part)))
    return [arrived(*opened(each)) for each in copy_frames(1, 1, [values], NBYTES)]


def test_values_that_were_not_wanted_are_refused() -> None:
    part = Both().parts[0]
    first, *_ = pieces_for(part)
    with pytest.raises(ProtocolError, match="not wanted"):
        part.arrive(*first)


def test_a_piece_that_comes_twice_does_not_count_for_another_one() -> None:
    part = Both().parts[0]
    first, second, *_ = pieces_for(part)
    part.obey(ordered("load"))
    part.arrive(*first)
    with pytest.raises(ProtocolError, match="offset 0, expected 400"):
        part.arrive(*first)
    part.arrive(*second)


def test_a_piece_behind_the_last_one_is_refused() -> None:
    stream = CopyStream([slice(3, 5)], torch.float32)
    [piece] = [arrived(*opened(each)) for each in copy_frames(1, 1, [torch.ones(2)], NBYTES)]
    stream.take(*piece)
    assert stream.is_whole
    [(place, values)] = stream.given
    assert (place, values.tolist()) == (slice(3, 5), [1, 1])
    with pytest.raises(ProtocolError, match="nothing comes here"):
        stream.take(*piece)


def test_what_there_is_not_cannot_be_asked_for() -> None:
    part = Both().parts[1]
    with pytest.raises(ProtocolError, match="fragment 2"):
        part.obey(ordered("mark_sent", fragment=2))
    with pytest.raises(ProtocolError, match="fragment 3"):
        part.obey(ordered("step", held=(3,)))
    with pytest.raises(ProtocolError, match="not here"):
        part.change(ordered("change", places=((0, 10**6),)))


def test_moments_of_other_layers_are_not_taken_up() -> None:
    workload = gpt(4, 8)
    layers = Replica(whole(workload), "adamw").layers
    one, other = (StagePart([each], layers) for each in stages_of(workload, [0, 2, 4], "adamw"))
    kept = {name: torch.full_like(each, 3.0) for name, each in one.moments.items()}
    assert not other.resume(kept)
    assert one.resume(kept)
    assert all(bool((each == 3.0).all()) for each in one.moments.values())
