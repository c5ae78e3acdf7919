"""What of a list cannot be executed, and what it holds."""

import pytest

from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import Instruction, Op, one_f_one_b
from smolcluster.training.schedules.validation import execution_order, held_by_stage, most_held


def test_ranks_that_wait_for_each_other_or_for_themselves_are_a_deadlock() -> None:
    first, last = one_f_one_b(2, 2)
    with pytest.raises(ConfigError, match="rank 0 waits at B0 of stage 0 for F0 of stage 0"):
        list(execution_order(((first[2], *first[:2], first[3]), last)))
    crossed = (first[0], first[2], first[1], first[3]), (last[0], last[2], last[1], last[3])
    with pytest.raises(ConfigError, match="deadlock"):
        list(execution_order(crossed))


def test_an_activation_is_held_until_the_weight_gradients() -> None:
    ops = (Op.FORWARD, Op.BACKWARD_INPUT)
    late = [Instruction(op, microbatch, 0) for microbatch in range(3) for op in ops]
    weights = [Instruction(Op.BACKWARD_WEIGHT, microbatch, 0) for microbatch in range(3)]
    assert most_held([*late, *weights]) == (3, 3)
    assert held_by_stage(one_f_one_b(3, 8)) == ((3, 1), (2, 1), (1, 1))
