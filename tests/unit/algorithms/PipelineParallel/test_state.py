"""A stage's state in pieces: what has come whole is what was sent, and nothing else is taken."""

import pytest
import torch

from peers import opened
from pipelines import gpt, stages_of
from smolcluster.algorithms.PipelineParallel.execution import OwnStage
from smolcluster.algorithms.PipelineParallel.state import StateLoader, state_frames, tensors_of
from smolcluster.errors import ProtocolError
from smolcluster.wire.messages import Planned, StageState

PIECE_NBYTES = 100


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
