"""A stage's part of a copy of the weights that a worker's own steps change: see `training/local_copy.py`.

Where a pipeline is one worker of an algorithm with local steps, each of its processes has what belongs to its
own layers. Its head names what it wants by places in the whole model's flat weights. What is tied both ends
have.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from smolcluster.algorithms.PipelineParallel.execution import OwnStage
from smolcluster.errors import ProtocolError
from smolcluster.training.kept import is_like
from smolcluster.training.local_copy import Layers, Place
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.training.places import common, total
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import CopyOrder, CopyPiece
from smolcluster.wire.streams import Assembler, Piece, byte_frames, byte_parts, bytes_piece

MOST_COPIES = 3
"""Of the weights besides θ: θ_start; θ at the send, or a sum of gradients; and new values that arrive."""


class CopyStream:
    """The values of some places of the flat weights, which a peer sends one after the other."""

    def __init__(self, places: Sequence[slice], dtype: torch.dtype) -> None:
        self._places, self._dtype = places, dtype
        self._pieces = Assembler[CopyPiece]("copy", self._pieces_of)
        self._values = torch.empty(0, dtype=dtype)

    @property
    def is_whole(self) -> bool:
        return len(self._values) == total(self._places)

    def _pieces_of(self, _first: CopyPiece) -> list[Piece]:
        if self.is_whole:
            return []
        nbytes = total(self._places) * self._dtype.itemsize
        return bytes_piece(nbytes, lambda start: {"offset": start})

    def take(self, piece: CopyPiece, payload: bytes | bytearray) -> None:
        """Take the next piece.

        Raises:
            ProtocolError: it is another one.
        """
        _, whole = self._pieces.take(piece, memoryview(payload))
        if whole is not None:
            self._values = whole.view(self._dtype)

    @property
    def given(self) -> list[tuple[slice, Tensor]]:
        """Each place and its values, once it is whole."""
        sizes = [total([place]) for place in self._places]
        return list(zip(self._places, torch.split(self._values, sizes), strict=True))


def copy_frames(
    attempt: int, turn: int, values: Iterable[Tensor], most_nbytes: int
) -> Iterator[Frame]:
    """The frames of a `CopyStream` with these `values`, which must not change before they are sent."""
    make = partial(CopyPiece, attempt=attempt, turn=turn)
    parts = chain.from_iterable(byte_parts(each, most_nbytes) for each in values)
    return byte_frames(make, parts)


class StagePart(Layers):
    """The `Part` of a process that has some of the layers; it does what `CopyOrder`s say."""

    def __init__(self, stages: Sequence[OwnStage], layers: Sequence[tuple[str, slice]]) -> None:
        """`layers`: each parameter's place in the whole model's flat weights."""
        whole = dict(layers)
        self._replicas = [each.replica for each in stages]
        super().__init__(
            (whole[name], replica, own)
            for replica in self._replicas
            for name, own in replica.layers
        )
        self._arriving: tuple[CopyOrder, CopyStream] | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """All that is here, in order."""
        found: list[Place] = []
        for place in sorted({(each.start, each.stop) for each in self._places}):
            if found and found[-1][1] == place[0]:
                found[-1] = found[-1][0], place[1]
            else:
                found.append(place)
        return tuple(found)

    def step_along(self, learning_rate: float) -> None:
        for replica in self._replicas:
            replica.step(learning_rate)

    def reset(self) -> None:
        for replica in self._replicas:
            replica.optimizer.reset()

    @property
    def moments(self) -> dict[str, Tensor]:
        """Views of the optimizer's state by the model's own names, to be kept."""
        found: dict[str, Tensor] = {}
        for replica in self._replicas:
            optimizer = replica.optimizer
            for content, flat in optimizer.moments.items():
                for name, place in replica.layers:
                    found[f"{content}.{name}"] = flat[place]
            if STEP_COUNT in optimizer.state:
                found[STEP_COUNT] = optimizer.state[STEP_COUNT]
        return found

    def resume(self, moments: Mapping[str, Tensor]) -> bool:
        """Go on with such `moments`; False: they are of other layers, and those of now stay."""
        if not is_like(self.moments, moments):
            return False
        for replica in self._replicas:
            optimizer = replica.optimizer
            for content, flat in optimizer.moments.items():
                for name, place in replica.layers:
                    flat[place].copy_(moments[f"{content}.{name}"])
            if STEP_COUNT in optimizer.state:
                optimizer.state[STEP_COUNT].copy_(moments[STEP_COUNT])
        return True

    def obey(self, order: CopyOrder) -> bool:
        """Do what an order says that concerns weights alone; False: it is done when values have come.

        Raises:
            ProtocolError: it speaks of a fragment that there is not.
        """
        fragment = order.fragment
        match order.order:
            case "begin":
                self.begin(order.fragments)
                self.reset()
            case "add_gradient":
                self.add_gradient(order.weight, self._known(*order.held))
            case "step":
                held = self._known(*order.held)
                self.step(order.learning_rate, held, order.clip, order.bound)
            case "mark_sent":
                self._known(fragment)
                self.mark_sent(fragment)
            case "follow" | "load":
                wanted = [slice(*place) for place in self.places]
                if order.order == "follow":
                    self._known(fragment)
                    wanted = common(self.fragments[fragment], wanted)
                self._arriving = order, CopyStream(wanted, self.dtype)
                return self._has_taken()
            case "reset":
                self.reset()
        return True

    def arrive(self, piece: CopyPiece, payload: bytes | bytearray) -> bool:
        """Take in values that an order wants; returns whether all have come.

        Raises:
            ProtocolError: they were not wanted.
        """
        if self._arriving is None:
            raise ProtocolError("the server sends weights that were not wanted")
        self._arriving[1].take(piece, payload)
        return self._has_taken()

    def _has_taken(self) -> bool:
        """Take over what has come, if that is all."""
        if self._arriving is None or not self._arriving[1].is_whole:
            return False
        (order, stream), self._arriving = self._arriving, None
        fragment = order.fragment if order.order == "follow" else None
        self.take(stream.given, fragment, order.is_difference)
        return True

    def change(self, order: CopyOrder) -> Tensor:
        """The values (numel,) that a `change` wants.

        Raises:
            ProtocolError: there is no such fragment, or they are not here.
        """
        self._known(order.fragment)
        wanted, here = ([slice(*place) for place in each] for each in (order.places, self.places))
        if common(wanted, here) != wanted:
            raise ProtocolError("the server asks for weights that are not here")
        return self.read(order.fragment, order.places, order.is_gradient)

    def _known(self, *fragments: int) -> tuple[int, ...]:
        for each in fragments:
            if each >= len(self.fragments):
                raise ProtocolError(f"the server speaks of fragment {each}, which there is not")
        return fragments
