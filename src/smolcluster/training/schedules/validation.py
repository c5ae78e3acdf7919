"""Whether a schedule can be executed, and what it holds in memory meanwhile."""

from collections.abc import Iterator

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


def validate(schedule: Schedule, num_microbatches: int) -> tuple[int, ...]:
    """The most microbatch activations that each rank holds at once, counted once for each of its stages.

    An activation is held from FORWARD until the weight gradients are made.

    Raises:
        ConfigError: an instruction is missing, there twice, on two ranks, or can never be executed.
    """
    _check_complete(schedule, num_microbatches)
    for _ in execution_order(schedule):
        pass
    return tuple(_peak(instructions) for instructions in schedule)


def _check_complete(schedule: Schedule, num_microbatches: int) -> None:
    """Each stage on one rank, with one forward and one backward, whole or in two parts, a microbatch."""
    rank_of, seen = dict[int, int](), set[Instruction]()
    for rank, instructions in enumerate(schedule):
        for each in instructions:
            if rank_of.setdefault(each.stage, rank) != rank:
                raise ConfigError(
                    f"schedule: {each} is on rank {rank}, but stage {each.stage} on "
                    f"rank {rank_of[each.stage]}"
                )
            if each in seen:
                raise ConfigError(f"schedule: rank {rank} has {each} twice")
            seen.add(each)
    whole = {Op.FORWARD, Op.BACKWARD}
    parts = {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}
    for stage in range(max(rank_of, default=-1) + 1):
        for microbatch in range(num_microbatches):
            ops = {op for op in Op if Instruction(op, microbatch, stage) in seen}
            if ops not in (whole, parts):
                found = "+".join(sorted(ops)) or "nothing"
                raise ConfigError(
                    f"schedule: rank {rank_of.get(stage, 'unknown')} has {found} "
                    f"of microbatch {microbatch} at stage {stage}, not F+B or F+I+W"
                )
    if len(seen) and max(each.microbatch for each in seen) >= num_microbatches:
        raise ConfigError(f"schedule: it is of more than {num_microbatches} microbatches")


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


def graphs_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The most microbatches of each stage that are in their backward at once, in the order of stages.

    Of these a stage that computes its layers again has all activations, of others the input alone.
    """
    return tuple(
        _most_in_backward(tuple(each for each in schedule[rank] if each.stage == stage))
        for stage, rank in enumerate(stage_ranks(schedule))
    )


def _most_in_backward(instructions: tuple[Instruction, ...]) -> int:
    begun = most = 0
    for each in instructions:
        if each.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            most = max(most, begun + 1)
        begun += {Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: -1}.get(each.op, 0)
    return most


def _peak(instructions: tuple[Instruction, ...]) -> int:
    held = peak = 0
    for each in instructions:
        if each.op is Op.FORWARD:
            held += 1
            peak = max(peak, held)
        elif each.op is not Op.BACKWARD_INPUT:
            held -= 1
    return peak


def peak_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The most microbatches whose activations each stage holds at once, in the order of stages."""
    return tuple(
        _peak(tuple(each for each in schedule[rank] if each.stage == stage))
        for stage, rank in enumerate(stage_ranks(schedule))
    )
