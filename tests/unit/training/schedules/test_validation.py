"""What a list that cannot be executed is refused for."""

from dataclasses import replace

import pytest

from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import Instruction, Op, Schedule, one_f_one_b
from smolcluster.training.schedules.validation import peak_by_stage, validate


def swapped(one: int, other: int) -> Schedule:
    """1F1B of two ranks and three microbatches with two instructions of rank 0 exchanged."""
    first, last = one_f_one_b(2, 3)
    changed = list(first)
    changed[one], changed[other] = first[other], first[one]
    return tuple(changed), last


def test_a_backward_before_its_forward_is_a_deadlock() -> None:
    with pytest.raises(ConfigError, match="rank 0 waits at B0 of stage 0 for F0 of stage 0"):
        validate(swapped(0, 2), 3)


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    first, last = one_f_one_b(2, 2)
    crossed = (first[0], first[2], first[1], first[3]), (last[0], last[2], last[1], last[3])
    with pytest.raises(ConfigError, match="deadlock"):
        validate(crossed, 2)


def test_what_is_missing_twice_or_elsewhere_is_named() -> None:
    first, last = one_f_one_b(2, 3)
    with pytest.raises(ConfigError, match=r"rank 0 has F of microbatch 2 at stage 0"):
        validate((first[:-1], last), 3)
    with pytest.raises(ConfigError, match=r"rank 1 has F0 of stage 1 twice"):
        validate((first, (last[0], *last)), 3)
    with pytest.raises(ConfigError, match=r"F0 of stage 0 is on rank 1, but stage 0 on rank 0"):
        validate((first, (first[0], *last)), 3)
    with pytest.raises(ConfigError, match="more than 2 microbatches"):
        validate((first, last), 2)
    half = tuple(
        replace(each, op=Op.BACKWARD_INPUT) if each.op is Op.BACKWARD else each for each in last
    )
    with pytest.raises(ConfigError, match=r"F\+I of microbatch 0 at stage 1, not F\+B or F\+I\+W"):
        validate((first, half), 3)


def test_an_activation_is_held_until_the_weight_gradients() -> None:
    ops = (Op.FORWARD, Op.BACKWARD_INPUT)
    late = tuple(Instruction(op, microbatch, 0) for microbatch in range(3) for op in ops)
    weights = tuple(Instruction(Op.BACKWARD_WEIGHT, microbatch, 0) for microbatch in range(3))
    assert validate(((*late, *weights),), 3) == (3,)
    assert peak_by_stage(one_f_one_b(3, 8)) == (3, 2, 1)
