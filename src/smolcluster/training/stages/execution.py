"""A process executes its instruction list: what its stages wait for, compute and hand on.

    for instruction in instructions:
        FORWARD          receive the input, compute, send the output
        BACKWARD         receive the output's gradient, compute, send the input's
        BACKWARD_INPUT   the same, without the weights' gradients
        BACKWARD_WEIGHT  these

What is sent leaves in the background, and so does what comes arrive: only what has not come yet is waited
for.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smolcluster.data.dataset import Batch
from smolcluster.training.compute import Microbatch
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.training.schedules.simulation import Span
from smolcluster.training.stages.compute import StageCompute
from smolcluster.utils.meter import Meter

AHEAD = 2
"""Instructions after the one that is done, of which a transport is told."""


class Transport(ABC):
    """Carries what stages hand each other: values (trees of tensors), and lists of their gradients."""

    def expect(  # noqa: B027 - to some all comes unasked
        self, coming: Sequence[Instruction]
    ) -> None:
        """`coming[0]` is done now, the others follow; where what they take must be asked for, it is."""

    @abstractmethod
    def receive(self, instruction: Instruction) -> Any:
        """Wait for what an instruction takes."""

    @abstractmethod
    def send(self, instruction: Instruction, result: Batch) -> None:
        """Begin to send an instruction's result to its target; the tensors must not change any more."""


def execute(
    instructions: Sequence[Instruction],
    parts: Sequence[Microbatch],
    *,
    stages: Mapping[int, StageCompute],
    num_stages: int,
    transport: Transport,
    meter: Meter,
    note: Callable[[Span], None],
) -> None:
    """Compute a step's microbatches `parts`; gradients are in the stages' parameters then.

    Args:
        stages: those of this process, by number, of `num_stages` in all.
        meter: counts where time goes.
        note: hears when each instruction was computed (`time.perf_counter`).

    Raises:
        UserCodeError: model or loss raised an exception.
    """
    for place, instruction in enumerate(instructions):
        stage, part = stages[instruction.stage], parts[instruction.microbatch]
        is_forward = instruction.op is Op.FORWARD
        given, batch = [], None
        transport.expect(instructions[place : place + AHEAD + 1])
        if 0 <= instruction.source < num_stages:
            with meter("wait"):
                given = transport.receive(instruction)
        if is_forward and stage.needs_batch:
            with meter("data"):
                batch = part.gather()
        begin = time.perf_counter()
        with meter("forward" if is_forward else "backward"):
            result = _computed(instruction, stage, part, batch, given)
        note(Span(instruction, begin, time.perf_counter()))
        if 0 <= instruction.target < num_stages:
            transport.send(instruction, result)


def _computed(
    instruction: Instruction, stage: StageCompute, part: Microbatch, batch: Batch, given: Any
) -> Batch:
    """The result of an instruction that has what it takes."""
    number = instruction.microbatch
    match instruction.op:
        case Op.FORWARD:
            return stage.forward(number, part.place, given, batch, part.num_samples)
        case Op.BACKWARD:
            return stage.backward(number, given)
        case Op.BACKWARD_INPUT:
            return stage.backward_input(number, given)
        case Op.BACKWARD_WEIGHT:
            return stage.backward_weight(number)
