"""Whether a schedule can be executed, and what it holds in memory meanwhile."""

from collections.abc import Iterator, Sequence

from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import Instruction, Op, Schedule, stage_ranks

Key = tuple[Op, int, int]
"""Operation, microbatch, stage. BACKWARD counts as BACKWARD_INPUT where others depend on it."""


def key_of(instruction: Instruction) -> Key:
    op = Op.BACKWARD_INPUT if instruction.op is Op.BACKWARD else instruction.op
    return op, instruction.microbatch, instruction.stage


def dependencies(instruction: Instruction, last_stage: int) -> Iterator[Key]:
    """What must have been done before, here or elsewhere."""
    op, microbatch, stage = key_of(instruction)
    if op is not Op.FORWARD:
        before = Op.FORWARD if op is Op.BACKWARD_INPUT else Op.BACKWARD_INPUT
        yield before, microbatch, stage
    if 0 <= instruction.source <= last_stage:
        yield op, microbatch, instruction.source


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Instruction]]:
    """Rank and instruction, in an order in which everything that one depends on came before it.

    Raises:
        ConfigError: all ranks wait for each other; names the first that does, and for what.
    """
    last_stage = max((each.stage for one in schedule for each in one), default=-1)
    done, place = set[Key](), [0] * len(schedule)
    waiting = dict[Key, list[int]]()
    ready = list(range(len(schedule)))
    while ready:
        rank = ready.pop()
        instructions = schedule[rank]
        while place[rank] < len(instructions):
            instruction = instructions[place[rank]]
            missing = next(
                (k for k in dependencies(instruction, last_stage) if k not in done), None
            )
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, instruction
            key = key_of(instruction)
            done.add(key)
            ready += waiting.pop(key, [])
            place[rank] += 1
    for rank, instructions in enumerate(schedule):
        if place[rank] < len(instructions):
            stuck = instructions[place[rank]]
            op, microbatch, stage = next(
                key for key in dependencies(stuck, last_stage) if key not in done
            )
            raise ConfigError(
                f"schedule: deadlock: rank {rank} waits at {stuck} for {Instruction(op, microbatch, stage)}"
            )


def most_held(instructions: Sequence[Instruction]) -> tuple[int, int]:
    """The most microbatches whose activations are held at once, and of which the graphs are.

    An activation is held from FORWARD until the weight gradients are made; of a stage that computes its
    layers again the graph is held in the backward alone.
    """
    held = begun = most = most_begun = 0
    for each in instructions:
        if each.op is Op.FORWARD:
            held += 1
        elif each.op is not Op.BACKWARD_WEIGHT:
            begun += 1
        most, most_begun = max(most, held), max(most_begun, begun)
        if each.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            held, begun = held - 1, begun - 1
    return most, most_begun


def held_by_stage(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """What `most_held` says of each stage, in the order of stages."""
    return tuple(
        most_held([each for each in schedule[rank] if each.stage == stage])
        for stage, rank in enumerate(stage_ranks(schedule))
    )
