"""What stages of a mesh hand each other, as far as one process sees it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.links import MeshLinks
from smolcluster.data.dataset import Place
from smolcluster.errors import ConfigError
from smolcluster.training.compute import Microbatch
from smolcluster.training.schedules.instructions import Instruction, Op

NUM_SAMPLES = 2


class OneOf(SimpleNamespace):
    """The rank of three along pp that has stage 1, and what it tells of itself."""

    device = torch.device("cpu")

    def __getitem__(self, _dimension: str) -> int:
        return 1

    def rank_at(self, pp: int) -> int:
        return pp

    def note(self, doing: str, *, waits: bool = False) -> None:
        self.notes.append((doing, waits))


@pytest.fixture
def groups() -> Any:
    return OneOf(notes=[])


@pytest.fixture
def links(groups: Any) -> MeshLinks:
    made = MeshLinks(groups, (0, 1, 2, 1), 1)
    made.begin_step([Microbatch.of(None, NUM_SAMPLES, Place(0, 0, 0))])
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor]]:
    """Rank and tensor of all that was sent."""
    found: list[tuple[int, Tensor]] = []

    def send(tensor: Tensor, dst: int, **_: object) -> object:
        found.append((dst, tensor))
        return object()

    monkeypatch.setattr(dist, "isend", send)
    return found


def instruction(op: Op, stage: int = 1) -> Instruction:
    return Instruction(op, 0, stage)


def test_layers_that_return_more_than_a_tensor_are_named(links: MeshLinks) -> None:
    with pytest.raises(ConfigError, match=r"stage 1 returns a tuple.*mesh\.pp to 1"):
        links.send(instruction(Op.FORWARD), (torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize("output", [torch.zeros(3, dtype=torch.int64), torch.zeros([1] * 9)])
def test_what_no_stage_can_receive_is_refused(links: MeshLinks, output: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"of stage 1 returns a tensor of torch\..*mesh\.pp to 1"):
        links.send(instruction(Op.FORWARD), output)


def test_outputs_of_as_many_samples_must_have_one_shape(
    links: MeshLinks, sent: list[tuple[int, Tensor]]
) -> None:
    links.send(instruction(Op.FORWARD), torch.ones(NUM_SAMPLES, 3))
    assert [rank for rank, _ in sent] == [2, 2]  # the shape, and the tensor
    assert torch.equal(sent[1][1], torch.ones(NUM_SAMPLES, 3))
    with pytest.raises(ConfigError, match=r"\[2, 4\], and returned \[2, 3\].*pad samples"):
        links.send(instruction(Op.FORWARD), torch.ones(NUM_SAMPLES, 4))


def test_an_input_on_which_nothing_depends_has_a_gradient_of_zeros(
    links: MeshLinks, sent: list[tuple[int, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it would wait for ever."""

    def tell_shape(header: Tensor, **_: object) -> None:
        header[:4] = torch.tensor([2, 2, NUM_SAMPLES, 3])  # bfloat16, two dimensions

    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "recv", tell_shape)
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: work)
    assert links.receive(instruction(Op.FORWARD)).shape == (NUM_SAMPLES, 3)
    links.send(instruction(Op.BACKWARD), [None])
    [(rank, gradient)] = sent
    assert (rank, gradient.dtype) == (0, torch.bfloat16)
    assert torch.equal(gradient, torch.zeros(NUM_SAMPLES, 3, dtype=torch.bfloat16))


def test_stages_of_one_rank_hand_over_without_sending(
    groups: Any, sent: list[tuple[int, Tensor]]
) -> None:
    links, value = MeshLinks(groups, (1, 1), 1), torch.ones(1)
    links.begin_step([Microbatch.of(None, NUM_SAMPLES, Place(0, 0, 0))])
    links.send(instruction(Op.FORWARD, 0), value)
    links.expect([instruction(Op.FORWARD, 1)])
    assert links.receive(instruction(Op.FORWARD, 1)) is value
    links.send(instruction(Op.BACKWARD_INPUT, 1), [None])
    assert links.receive(instruction(Op.BACKWARD, 0)) == [None]
    assert not sent


def test_a_rank_tells_what_it_does_and_for_what_it_waits(groups: Any, links: MeshLinks) -> None:
    links.send(instruction(Op.FORWARD, 0), torch.ones(1))
    for each in (instruction(Op.FORWARD), instruction(Op.BACKWARD_WEIGHT)):
        links.expect([each])
        if each.op is Op.FORWARD:
            links.receive(each)
    links.finish()
    assert groups.notes == [
        ("waiting for what F0 of stage 1 takes", True),
        ("F0 of stage 1", False),
        ("W0 of stage 1", False),
        ("waiting until all is sent", True),
    ]
