"""A pipeline's state on its way: from the stages to the server's disk, and back to stages of another cut.

    server: KeepStages -> each stage: its tensors in pieces, StageKept -> a checkpoint, as of any other run
    server: Planned    -> each stage: WantState, 16 names at a time    -> the pieces of these

Tensors have the model's own names, so that a cut is nothing that a checkpoint knows of.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from smolcluster.algorithms.PipelineParallel.execution import OwnStage
from smolcluster.errors import CheckpointError, ProtocolError, SmolclusterError
from smolcluster.training.checkpoint import CheckpointStore, TrainingState, fill, model_tensors
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.training.pieces import WEIGHTS, Layout, PieceReader, PieceWriter
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import (
    MAX_WANTED,
    Planned,
    StageState,
    WantState,
)
from smolcluster.wire.streams import Assembler, Piece, byte_frames, byte_parts, bytes_piece

# stages


def tensors_of(stage: OwnStage) -> Iterator[tuple[str, str, Tensor]]:
    """Content, name and tensor of all that a checkpoint holds of a stage: views.

    It is known beforehand, so that it has no buffer that counts only once it has changed.
    """
    replica = stage.replica
    passing = replica.buffers.passing
    for name, tensor in model_tensors(replica).items():
        if name not in passing:
            yield WEIGHTS, name, tensor.detach()
    for content, flat in replica.optimizer.moments.items():
        for name, place in replica.layers:
            yield content, name, flat[place]


def state_frames(stage: OwnStage, attempt: int, step: int, piece_nbytes: int) -> Iterator[Frame]:
    """A stage's state in pieces, which must not change before they are sent.

    What several stages have the first of them sends.
    """
    for content, name, tensor in tensors_of(stage):
        if name in stage.module.held_before:
            continue
        make = partial(StageState, attempt=attempt, step=step, content=content, name=name)
        yield from byte_frames(make, byte_parts(tensor, piece_nbytes))


class StateLoader:
    """Fills a process's stages with the state of a step, as it comes."""

    def __init__(self, stages: list[OwnStage], plan: Planned) -> None:
        self._plan = plan
        self._places: dict[tuple[str, str], list[Tensor]] = {}
        for stage in stages:
            for content, name, tensor in tensors_of(stage):
                self._places.setdefault((content, name), []).append(tensor)
            if STEP_COUNT in stage.replica.optimizer.state:
                stage.replica.optimizer.state[STEP_COUNT].fill_(plan.step or 0)
        self._left = {key for key, (place, *_) in self._places.items() if place.nbytes}
        """What is not whole yet."""
        self._tensors = Assembler[StageState](
            "tensor", self._bytes_of, lambda *_, **__: _as_bytes(self._values)
        )
        self._values: Tensor
        """Of the tensor that arrives: its place, unless that is not contiguous."""

    def wanted(self) -> Iterator[WantState]:
        """What to ask the server for."""
        contents = dict.fromkeys(content for content, _ in self._places)
        for content in contents:
            names = (name for each, name in self._places if each == content)
            while chunk := tuple(islice(names, MAX_WANTED)):
                yield WantState(attempt=self._plan.attempt, content=content, names=chunk)

    @torch.no_grad()
    def take(self, piece: StageState, payload: bytes | bytearray) -> None:
        """Put a piece into its place.

        Raises:
            ProtocolError: it has none.
        """
        if piece.attempt != self._plan.attempt:
            return
        _, whole = self._tensors.take(piece, memoryview(payload))
        if whole is not None:
            self._left.discard((piece.content, piece.name))
            for place in self._places[piece.content, piece.name]:
                if place is not self._values:
                    fill(place, self._values)

    def _bytes_of(self, piece: StageState) -> list[Piece]:
        key = piece.content, piece.name
        if key not in self._left:
            raise ProtocolError(f"the server sends {piece.name!a}, which was not wanted"[:200])
        self._values = self._places[key][0].contiguous()
        return bytes_piece(self._values.nbytes, lambda start: {"offset": start})

    @property
    def is_whole(self) -> bool:
        return not self._left


def _as_bytes(contiguous: Tensor) -> Tensor:
    return contiguous.view(-1).view(torch.uint8)


# the server


@dataclass(frozen=True)
class Kept:
    """Where a run goes on from when a stage is lost: its state, and the checkpoint; None: the beginning."""

    state: TrainingState
    folder: Path | None


class Keeper:
    """The checkpoints of a run whose weights the server never has."""

    def __init__(
        self,
        store: CheckpointStore | None,
        outline: Replica,
        log: logging.Logger,
    ) -> None:
        self.kept: Kept
        """The newest one that is on the disk."""
        self.num_pieces = 0
        """That have come or gone in this run."""
        self.on_saved: Callable[[int, Path], None] = lambda *_: None
        self.on_not_saved: Callable[[int, Exception], None] = lambda *_: None
        self._store, self._outline, self._log = store, outline, log
        self._layout = Layout(outline)
        self._lock = threading.Lock()
        self._writer: PieceWriter | None = None
        self._open: tuple[int, int] = (0, 0)
        """Attempt and step of the pieces that are taken."""
        self._draft: Path | None = None
        self._problem: Exception | None = None
        self._disk = ThreadPoolExecutor(1, "disk")
        self._finishing: Future[Path] | None = None
        self._state: TrainingState

    @property
    def can_keep(self) -> bool:
        return self._store is not None

    def begin(self, attempt: int, state: TrainingState) -> None:
        """Take the pieces of this step from now on; those of one that was not finished go."""
        self.drop()
        self.settle(wait=True)
        assert self._store is not None  # noqa: S101 - `can_keep`
        self._state, self._problem = state, None
        try:
            self._draft = self._store.begin(state.step)
            writer = PieceWriter(self._layout, self._draft, state.step)
        except (OSError, CheckpointError) as error:
            self._problem = error
            self._remove()
            return
        with self._lock:
            self._writer, self._open = writer, (attempt, state.step)

    def take(self, piece: StageState, payload: memoryview) -> None:
        """Write a piece, in the thread that has read it.

        Raises:
            ProtocolError: it belongs nowhere.
        """
        with self._lock:
            self.num_pieces += 1
            if self._writer is None or (piece.attempt, piece.step) != self._open:
                return
            try:
                is_known = self._writer.write(piece.content, piece.name, piece.offset, payload)
            except OSError as error:
                self._problem = error
                return
        if not is_known:
            raise ProtocolError(f"{piece.name!a} is no tensor of this model"[:200])

    def finish(self) -> None:
        """All stages have sent theirs: make a checkpoint of it, beside the deciding thread."""
        with self._lock:
            writer, self._writer = self._writer, None
        problem, missing = self._problem, None
        if writer is not None:
            missing = writer.missing
            writer.close()
        if problem is None and missing is not None:
            problem = CheckpointError(f"nobody has {missing}")
        if writer is None or problem is not None or self._store is None or self._draft is None:
            self._not_saved(problem or CheckpointError("it was not begun"))
            self._remove()
            return
        outline, draft = self._outline, self._draft
        self._finishing = self._disk.submit(
            self._store.finish, draft, self._state, outline.fingerprint, outline.base
        )

    def settle(self, *, wait: bool = False) -> None:
        """Go on from the newest checkpoint as soon as that is on the disk."""
        finishing = self._finishing
        if finishing is None or not (wait or finishing.done()):
            return
        self._finishing = None
        try:
            folder = finishing.result()
        except SmolclusterError as error:  # a run is worth more than its checkpoint
            self._not_saved(error)
            return
        self.kept = Kept(self._state, folder)
        self.on_saved(self._state.step, folder)

    def _not_saved(self, problem: Exception) -> None:
        self._log.warning("step %d is not saved: %s", self._state.step, problem)
        self.on_not_saved(self._state.step, problem)

    def tell(self, state: TrainingState) -> bool:
        """Say on the disk what has become known of a step's weights; False: they are not kept."""
        self.settle(wait=True)
        if self._store is None or self.kept.folder is None or self.kept.state.step != state.step:
            return False
        try:
            self._disk.submit(self._store.tell, state).result()
        except SmolclusterError as error:
            self._log.warning("%s", error)
        return True

    def drop(self) -> None:
        """What was not finished is not wanted any more."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._remove()

    def _remove(self) -> None:
        if self._draft is not None:
            shutil.rmtree(self._draft, ignore_errors=True)

    def frames(self, wanted: WantState, piece_nbytes: int) -> Iterator[Frame]:
        """The tensors that a stage wants of what is kept now, each piece read when it is asked for.

        Any thread may ask for them. That raises CheckpointError, too, if the disk fails.

        Raises:
            CheckpointError: they cannot be read.
        """
        if self.kept.folder is None:
            return iter(())
        reader = PieceReader(self._outline, self.kept.folder)
        return self._frames(reader, wanted, self.kept.state.step, piece_nbytes)

    def _frames(
        self, reader: PieceReader, wanted: WantState, step: int, piece_nbytes: int
    ) -> Iterator[Frame]:
        content, attempt = wanted.content, wanted.attempt
        for name in wanted.names:
            make = partial(StageState, attempt=attempt, step=step, content=content, name=name)
            pieces = reader.read(content, name, piece_nbytes)
            for frame in byte_frames(make, (memoryview(data) for _, data in pieces)):
                with self._lock:
                    self.num_pieces += 1
                yield frame

    def close(self) -> None:
        with suppress(SmolclusterError):
            self.settle(wait=True)
        self.drop()
        self._disk.shutdown()
