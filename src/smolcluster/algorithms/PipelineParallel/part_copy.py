"""A stage's part of a copy of the weights that a worker's own steps change: see `training/local_copy.py`.

Where a pipeline is one worker of an algorithm with local steps, each of its processes has what of θ, θ_start
and θ at the send belongs to its own layers. Others name what they want by places in the whole model's flat
weights. What is tied both ends hold; the first stage tells of it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.algorithms.PipelineParallel.execution import OwnStage
from smolcluster.codec.base import bytes_of
from smolcluster.data.pytree import DTYPES
from smolcluster.errors import ProtocolError
from smolcluster.training.kept import is_like
from smolcluster.training.local_copy import Followed
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.training.places import meeting, pieces
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import CopyOrder, CopyPiece, TensorSpec, frame_of

MOST_COPIES = 3
"""Of the weights besides θ: θ_start, θ at the send, and new values that arrive."""
Place = tuple[int, int]
"""Start and stop in the whole model's flat weights."""


@dataclass(frozen=True)
class Part:
    """A parameter of this process: its place in the whole, θ of it (numel,), and whether it is told here."""

    place: slice
    values: Tensor
    is_told: bool


@dataclass
class Arriving:
    """Values that come in pieces: where they belong, and how many are still to come."""

    targets: list[tuple[slice, Tensor]]
    num_left: int
    fragment: int | None = None
    """Whose they are; None: of the whole weights."""
    is_difference: bool = False


class PartCopy:
    """What of a worker's copy lies on this process."""

    def __init__(self, stages: Sequence[OwnStage], layers: Sequence[tuple[str, slice]]) -> None:
        """`layers`: each parameter's place in the whole model's flat weights."""
        whole = dict(layers)
        self._stages = stages
        self._parts = [
            Part(
                whole[name],
                stage.replica.params[own],
                stage.module.is_first or name not in stage.module.tied,
            )
            for stage in stages
            for name, own in stage.replica.layers
        ]
        self._fragments: list[list[slice]] = []
        self._members: list[list[Part]] = []
        """The parts of each fragment."""
        self._followed = Followed([])
        self._arriving: Arriving | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """All that is here, in order."""
        found: list[Place] = []
        for place in sorted({(each.place.start, each.place.stop) for each in self._parts}):
            if found and found[-1][1] == place[0]:
                found[-1] = found[-1][0], place[1]
            else:
                found.append(place)
        return tuple(found)

    def obey(self, order: CopyOrder) -> bool:
        """Do what an order says that concerns weights alone; False: it is done when values have come.

        Raises:
            ProtocolError: it speaks of a fragment that there is not.
        """
        match order.order:
            case "begin":
                self.begin(order.fragments)
            case "mark_sent":
                self.mark_sent(order.fragment)
            case "follow":
                return self.expect(order.fragment, is_difference=order.is_difference)
            case "load":
                return self.expect(None)
            case "reset":
                self.reset()
        return True

    def begin(self, fragments: Sequence[Sequence[Place]]) -> None:
        """Follow these fragments, of whole tensors each, with θ of now as θ_start and fresh moments."""
        self._fragments = [[slice(*place) for place in places] for places in fragments]
        self._members = [
            [
                part
                for part in self._parts
                if any(place.start <= part.place.start < place.stop for place in places)
            ]
            for places in self._fragments
        ]
        self._followed = Followed([[part.values for part in each] for each in self._members])
        self.reset()

    def holding(self, fragments: Collection[int]) -> AbstractContextManager[None]:
        """See `Followed.holding`."""
        return self._followed.holding(fragments)

    def change(self, fragment: int, part: slice) -> Iterator[tuple[int, Tensor]]:
        """What is told here of a part of a fragment's θ_start - θ: where it begins in the whole, and values.

        Raises:
            ProtocolError: there is no such fragment.
        """
        self._check(fragment)
        starts, nows = self._followed.start[fragment], self._followed.now[fragment]
        for place, _ in pieces(self._fragments[fragment], part):
            for each, start, now in zip(self._members[fragment], starts, nows, strict=True):
                own, _ = meeting(each.place, place)
                if each.is_told and own.start < own.stop:
                    yield each.place.start + own.start, (start[own] - now[own]).cpu()

    def mark_sent(self, fragment: int) -> None:
        """The change of now is on its way.

        Raises:
            ProtocolError: there is no such fragment.
        """
        self._check(fragment)
        self._followed.mark_sent(fragment)

    def expect(self, fragment: int | None, *, is_difference: bool = False) -> bool:
        """Values come, of a fragment or of all weights; True: none are for this process, and it is done.

        Raises:
            ProtocolError: there is no such fragment.
        """
        if fragment is None:
            targets = [(part.place, part.values) for part in self._parts]
        else:
            self._check(fragment)
            targets = [
                (part.place, torch.empty_like(part.values)) for part in self._members[fragment]
            ]
        num = sum(values.numel() for _, values in targets)
        self._arriving = Arriving(targets, num, fragment, is_difference)
        return self._is_whole()

    def take(self, start: int, values: Tensor) -> bool:
        """Take values (n,) of the whole's elements from `start` on; returns whether all have come.

        Raises:
            ProtocolError: they were not wanted.
        """
        arriving = self._arriving
        if arriving is None:
            raise ProtocolError("the server sends weights that were not wanted")
        found = 0
        for place, target in arriving.targets:
            own, given = meeting(place, slice(start, start + len(values)))
            if own.start < own.stop:
                target[own].copy_(values[given])
                found += own.stop - own.start
        if not found or found > arriving.num_left:
            raise ProtocolError(f"the server sends weights from {start} on, which were not wanted")
        arriving.num_left -= found
        return self._is_whole()

    def _is_whole(self) -> bool:
        """Take over what has come, if that is all."""
        arriving = self._arriving
        if arriving is None or arriving.num_left:
            return False
        self._arriving = None
        if arriving.fragment is None:
            self._followed.restart()
        else:
            new = [values for _, values in arriving.targets]
            self._followed.follow(arriving.fragment, new, is_difference=arriving.is_difference)
        return True

    def reset(self) -> None:
        """Forget the moments."""
        for stage in self._stages:
            stage.replica.optimizer.reset()

    @property
    def moments(self) -> dict[str, Tensor]:
        """Views of the optimizer's state by the model's own names, to be kept."""
        found: dict[str, Tensor] = {}
        for stage in self._stages:
            optimizer = stage.replica.optimizer
            for content, flat in optimizer.moments.items():
                for name, place in stage.replica.layers:
                    found[f"{content}.{name}"] = flat[place]
            if STEP_COUNT in optimizer.state:
                found[STEP_COUNT] = optimizer.state[STEP_COUNT]
        return found

    def take_up(self, kept: Mapping[str, Tensor]) -> bool:
        """Go on with such `moments`; False: they are of other layers, and those of now stay."""
        if not is_like(self.moments, kept):
            return False
        for stage in self._stages:
            optimizer = stage.replica.optimizer
            for content, flat in optimizer.moments.items():
                for name, place in stage.replica.layers:
                    flat[place].copy_(kept[f"{content}.{name}"])
            if STEP_COUNT in optimizer.state:
                optimizer.state[STEP_COUNT].copy_(kept[STEP_COUNT])
        return True

    def _check(self, fragment: int) -> None:
        if fragment >= len(self._fragments):
            raise ProtocolError(f"the server speaks of fragment {fragment}, which there is not")


def piece_frame(attempt: int, turn: int, start: int, values: Tensor) -> Frame:
    """The frame of `values` (n,), on the CPU, which must not change before they are sent."""
    dtype = str(values.dtype).removeprefix("torch.")
    shape = (values.numel(),)
    spec = TensorSpec(codec="raw", dtype=dtype, shape=shape, nbytes=values.nbytes)
    message = CopyPiece(attempt=attempt, turn=turn, start=start, tensor=spec)
    return frame_of(message, bytes_of(values.contiguous().view(torch.uint8)))


def values_of(piece: CopyPiece, payload: memoryview) -> Tensor:
    """The values (n,) of a piece, in memory of their own.

    Raises:
        ProtocolError: it is not described as so many floats.
    """
    spec, dtype = piece.tensor, DTYPES.get(piece.tensor.dtype)
    if dtype is None or not dtype.is_floating_point or spec.codec != "raw" or not payload.nbytes:
        raise ProtocolError("a piece of weights is not described as floats")
    if spec.shape != (payload.nbytes // dtype.itemsize,) or payload.nbytes % dtype.itemsize:
        raise ProtocolError("a piece of weights is not of the size that it says")
    return torch.frombuffer(bytearray(payload), dtype=dtype)
