"""What a process does of its instruction list, and what it asks its transport for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipelines import parts_of, stages_of
from smolcluster.data.dataset import Batch
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.schedules.instructions import Instruction, Op, generate
from smolcluster.training.schedules.simulation import Span
from smolcluster.training.stages.execution import Transport, execute
from smolcluster.training.workload import Workload
from smolcluster.utils.meter import Meter


class Written(Transport):
    """Gives ones for everything, and writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def expect(self, coming: Sequence[Instruction]) -> None:
        self.lines.append(" ".join(f"{each.op}{each.microbatch}" for each in coming))

    def receive(self, instruction: Instruction) -> Any:
        self.lines.append(f"receive for {instruction.op} of {instruction.source}")
        value = torch.ones(2, 4)
        return value if instruction.op is Op.FORWARD else [value]

    def send(self, instruction: Instruction, result: Batch) -> None:
        (each,) = result if isinstance(result, list) else (result,)
        self.lines.append(f"send {tuple(each.shape)} of {instruction.op} to {instruction.target}")


def lines(stage: int, name: str) -> tuple[list[str], list[Span]]:
    """What the only instructions of one microbatch at a stage of three do."""
    workload = Workload(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)),
        cross_entropy,
        [(torch.zeros(6), 0)],
    )
    made = stages_of(workload, [0, 1, 2, 3])[stage].compute
    transport, spans = Written(), list[Span]()
    execute(
        generate(name, 3, 1)[stage],
        parts_of([(torch.ones(2, 6), torch.zeros(2).long())], [2]),
        stages={stage: made},
        num_stages=3,
        transport=transport,
        meter=Meter(),
        note=spans.append,
    )
    return transport.lines, spans


def test_a_stage_receives_what_it_takes_and_sends_what_others_take() -> None:
    first, *_ = lines(0, "1f1b")
    middle, spans = lines(1, "zero-bubble")
    last, *_ = lines(2, "1f1b")
    assert first == ["F0 B0", "send (2, 4) of F to 1", "B0", "receive for B of 1"]
    assert middle == [
        *("F0 I0 W0", "receive for F of 0", "send (2, 4) of F to 2"),
        *("I0 W0", "receive for I of 2", "send (2, 4) of I to 0"),
        "W0",
    ]
    assert last == ["F0 B0", "receive for F of 1", "B0", "send (2, 4) of B to 1"]
    assert [each.instruction.op for each in spans] == ["F", "I", "W"]
