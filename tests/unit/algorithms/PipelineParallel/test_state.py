"""A stage's state in pieces: what has come whole is what was sent, and nothing else is taken."""

import errno
import logging
import os
from collections.abc import Iterable
from contextlib import closing
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from harness import state_of
from peers import opened
from pipelines import gpt, stages_of, whole
from smolcluster.algorithms.PipelineParallel.execution import OwnStage
from smolcluster.algorithms.PipelineParallel.state import (
    Keeper,
    Kept,
    StateLoader,
    state_frames,
    tensors_of,
)
from smolcluster.errors import CheckpointError, ConfigError, ProtocolError
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.checkpoint import CheckpointStore, fill
from smolcluster.training.pieces import Layout, PieceWriter
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import Planned, StageState

PIECE_NBYTES = 100
STATE = state_of(3, algorithm="pipeline")


def stage() -> OwnStage:
    return stages_of(gpt(2, 8), [0, 1, 2], "adamw")[0]


def sent(step: int = 3) -> tuple[OwnStage, list[tuple[StageState, bytearray]]]:
    """A stage of random weights and moments, and its state as it arrives."""
    own, said = stage(), []
    with torch.no_grad():
        for _, _, tensor in tensors_of(own):
            tensor.copy_(torch.randn(tensor.shape))
    for frame in state_frames(own, 1, step, PIECE_NBYTES):
        message, payload = opened(frame)
        assert isinstance(message, StageState)
        said.append((message, bytearray(payload)))
    return own, said


def loader_of(own: OwnStage) -> StateLoader:
    plan = Planned(attempt=1, turn=0, rank=0, cuts=(0, 2), ranks=(0,), neighbours=(), step=3)
    return StateLoader([own], plan)


def test_a_state_arrives_as_it_was_whatever_tensor_comes_first() -> None:
    theirs, said = sent()
    ours = stage()
    loader = loader_of(ours)
    names = dict.fromkeys((message.content, message.name) for message, _ in said)
    for name in reversed(names):
        for message, payload in said:
            if (message.content, message.name) == name:
                assert not loader.is_whole
                loader.take(message, payload)
    assert loader.is_whole
    for (*_, one), (*_, other) in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert torch.equal(one, other)


def test_a_piece_that_comes_twice_does_not_count_for_one_that_has_not_come() -> None:
    _, said = sent()
    loader = loader_of(stage())
    place = next(at for at, (message, _) in enumerate(said) if message.offset)
    for piece in said[:place]:
        loader.take(*piece)
    with pytest.raises(ProtocolError, match="offset"):
        loader.take(*said[place - 1])


def test_a_tensor_that_was_not_wanted_or_has_come_is_refused() -> None:
    _, said = sent()
    loader = loader_of(stage())
    for piece in said:
        loader.take(*piece)
    stranger = said[0][0].model_copy(update={"name": "a.stranger"})
    for message in (said[0][0], stranger):
        with pytest.raises(ProtocolError, match="not wanted"):
            loader.take(message, said[0][1])


def test_a_piece_of_an_older_plan_is_passed_over() -> None:
    _, said = sent()
    loader = loader_of(stage())
    loader.take(said[0][0].model_copy(update={"attempt": 0, "offset": 7}), said[0][1])
    assert not loader.is_whole


class Counting(nn.Linear):
    """Changes a buffer that is not persistent, and has one that several of its kind have."""

    calls: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", table)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(value)


class Masked(nn.Module):
    """A layer that is no module of the model, whose buffer it takes."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)


class Odd(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        table = torch.ones(4)
        self.blocks = nn.ModuleList(Counting(table) for _ in range(3))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        for each in self.blocks[1:]:
            each.bias = frozen

    def stages(self) -> list[nn.Module]:
        return [*self.blocks, Masked(self.mask)]


def test_buffers_that_are_no_state_or_are_shared_do_not_keep_a_pipeline_from_its_checkpoints(
    tmp_path: Path,
) -> None:
    """What is kept is read as it was when it was asked for, by any thread."""
    log, odd = logging.getLogger("test"), Workload(Odd, cross_entropy, [(torch.zeros(4), 0)])
    theirs = stages_of(odd, [0, 1, 2, 4], "adamw")
    for own in theirs:
        for module in own.module.modules():
            if isinstance(module, Counting):
                module(torch.ones(4))
        own.replica.buffers.find()
    store = CheckpointStore(tmp_path / "checkpoints", 2, log)
    with closing(Keeper(store, Replica(whole(odd), "adamw"), log)) as keeper:
        sent = (state_frames(own, 1, STATE.step, PIECE_NBYTES) for own in theirs)
        save(keeper, chain.from_iterable(sent))
        assert keeper.kept.folder is not None
        for ours in stages_of(odd, [0, 2, 4], "adamw"):
            loader = loader_of(ours)
            frames = [keeper.frames(each, PIECE_NBYTES) for each in loader.wanted()]
            kept, keeper.kept = keeper.kept, Kept(STATE, None)
            num_pieces = keeper.num_pieces
            for frame in (each for several in frames for each in several):
                message, payload = opened(frame)
                assert isinstance(message, StageState)
                loader.take(message, bytearray(payload))
            assert loader.is_whole
            assert keeper.num_pieces > num_pieces, "nobody hangs while they go"
            keeper.kept = kept


class Frozen(nn.Linear):
    """Has tensors that no flat memory holds, of all kinds that PyTorch allows."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        for dtype in (torch.complex64, torch.uint16, torch.uint64, torch.float8_e4m3fn):
            values = torch.randint(100, (3,)).to(dtype)
            self.register_buffer(str(dtype).partition(".")[2], values)
        images = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
        self.images = nn.Parameter(images, requires_grad=False)
        self.turned = nn.Parameter(torch.rand(3, 2).t(), requires_grad=False)
        self.register_buffer("expanded", torch.rand(3, 1).expand(3, 4))


class Named(nn.Module):
    """Its layer has a name that is no word of ASCII."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({f"die größte Aufgabe {'x' * 200}": Frozen()})

    def stages(self) -> list[nn.Module]:
        return [*self.tasks.values()]


def test_tensors_of_any_name_type_and_layout_arrive_as_they_were(tmp_path: Path) -> None:
    log = logging.getLogger("test")
    model = Workload(Named, cross_entropy, [(torch.zeros(4), 0)])
    [theirs], [ours] = stages_of(model, [0, 1]), stages_of(model, [0, 1])
    with torch.no_grad():
        for _, _, tensor in tensors_of(ours):
            fill(tensor, torch.zeros(tensor.shape).to(tensor.dtype))
    store = CheckpointStore(tmp_path / "checkpoints", 2, log)
    with closing(Keeper(store, Replica(whole(model), "sgd"), log)) as keeper:
        save(keeper, state_frames(theirs, 1, STATE.step, PIECE_NBYTES))
        loader = loader_of(ours)
        for wanted in loader.wanted():
            for frame in keeper.frames(wanted, PIECE_NBYTES):
                message, payload = state_piece(frame)
                loader.take(message, bytearray(payload))
    assert loader.is_whole
    for (_, name, one), (*_, other) in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other))), name


def test_a_tensor_that_no_file_holds_is_named() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"model: wave is torch\.complex128"):
        Layout(Replica(model, "sgd"))


def state_piece(frame: Frame) -> tuple[StageState, memoryview]:
    message, payload = opened(frame)
    assert isinstance(message, StageState)
    return message, memoryview(payload)


def save(keeper: Keeper, frames: Iterable[Frame]) -> None:
    keeper.begin(1, STATE)
    for message, payload in map(state_piece, frames):
        keeper.take(message, payload)
    keeper.finish()
    keeper.settle(wait=True)


def num_open_files() -> int:
    return len([*Path("/dev/fd").iterdir()])


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (CheckpointStore, "begin", CheckpointError("no folder")),
        (os, "ftruncate", FULL),
        (PieceWriter, "write", FULL),
        (CheckpointStore, "finish", CheckpointError("no name")),
    ],
    ids=["begin", "files", "pieces", "end"],
)
def test_a_step_that_is_not_saved_is_told_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: Exception,
) -> None:
    """And it leaves no file open."""
    log, own, told = logging.getLogger("test"), stage(), list[tuple[int, Exception]]()
    store, num_open = CheckpointStore(tmp_path / "checkpoints", 2, log), num_open_files()
    with closing(Keeper(store, own.replica, log)) as keeper:
        keeper.on_not_saved = lambda *it: told.append(it)
        with monkeypatch.context() as disk:
            disk.setattr(owner, name, Mock(side_effect=error))
            save(keeper, state_frames(own, 1, STATE.step, PIECE_NBYTES))
        assert told == [(STATE.step, error)]
        assert num_open_files() == num_open


def test_a_disk_that_takes_a_part_at_a_time_gets_all_of_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, own, write = logging.getLogger("test"), stage(), os.pwrite

    def write_a_part(descriptor: int, data: memoryview, offset: int) -> int:
        return write(descriptor, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", write_a_part)
    store = CheckpointStore(tmp_path / "checkpoints", 2, log)
    with closing(Keeper(store, own.replica, log)) as keeper:
        save(keeper, state_frames(own, 1, STATE.step, PIECE_NBYTES))
    saved = store.newest_good()
    assert saved is not None
    for name, tensor in own.replica.saved_parameters().items():
        assert torch.equal(saved.model[name], tensor.detach())
