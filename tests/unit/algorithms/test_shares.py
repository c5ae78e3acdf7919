"""Work is shared out as well as it can be; plans are compared with all there are."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.algorithms.shares import Cost, shared_out

REPEATABLE = settings(derandomize=True, database=None, max_examples=60)
COSTS = st.builds(Cost, fixed_s=st.floats(-5, 40), each_s=st.floats(1e-3, 10))
WILD_COSTS = st.builds(Cost, fixed_s=st.floats(0.0, 1e9), each_s=st.floats(1e-7, 1e3))


def last_done(plan: dict[int, int], workers: dict[int, Cost]) -> float:
    """When the last is done; who has nothing is not waited for."""
    return max(workers[worker].seconds(number) for worker, number in plan.items() if number)


@REPEATABLE
@given(st.integers(1, 6), st.lists(COSTS, min_size=1, max_size=4))
def test_no_other_plan_lets_the_last_be_done_earlier(total: int, costs: list[Cost]) -> None:
    workers = dict(enumerate(costs))
    plan = shared_out(total, workers)
    others = (
        dict(enumerate(numbers))
        for numbers in itertools.product(range(total + 1), repeat=len(costs))
        if sum(numbers) == total
    )
    best = min(last_done(other, workers) for other in others)
    assert sum(plan.values()) == total
    assert last_done(plan, workers) == pytest.approx(best, rel=1e-9, abs=1e-9)


@REPEATABLE
@given(st.integers(0, 10_000), st.dictionaries(st.integers(), COSTS, min_size=1, max_size=30))
def test_all_are_done_within_a_unit_of_each_other(total: int, workers: dict[int, Cost]) -> None:
    plan = shared_out(total, workers)
    assert sum(plan.values()) == total
    assert plan.keys() == workers.keys()
    if total:
        last = last_done(plan, workers)
        for worker, cost in workers.items():
            assert cost.seconds(plan[worker] + 1) >= last - 1e-5


@REPEATABLE
@given(st.lists(WILD_COSTS, min_size=1, max_size=6), st.integers(1, 5000))
def test_plans_add_up_whatever_the_costs_are(costs: list[Cost], total: int) -> None:
    plan = shared_out(total, dict(enumerate(costs)))
    assert sum(plan.values()) == total
    assert min(plan.values()) >= 0


def own(each_s: float, fixed_s: float = 0.0) -> Cost:
    return Cost(fixed_s, each_s)


@pytest.mark.parametrize(
    ("total", "costs", "plan"),
    [
        (100, [own(0.35), own(0.9)], [72, 28]),
        (130, [own(1e-3), own(4e-3), own(1e-3), own(1e-3)], [40, 10, 40, 40]),
        (4, [own(1e-3)] * 3, [2, 1, 1]),
        (2, [own(1e-3)] * 4, [1, 1, 0, 0]),
        (100, [own(1.0), own(1.0, 20)], [60, 40]),  # a slow link is made up for
        (100, [own(0.5, 2), own(0.5, 20)], [68, 32]),
        (100, [own(1e-3), own(1e-3, 10.0), own(1e-3)], [50, 0, 50]),  # who is too far has none
        (100, [own(1e3, 1e6)], [100]),  # unless it is alone
        (56, [own(1.0, 22), own(10.0, 40)], [53, 3]),  # anew, when the second has slowed down
        (44, [own(1.0), own(0.1)], [4, 40]),
        (0, [own(1.0)], [0]),
        (-3, [own(1.0)], [0]),
        (5, [], []),
    ],
)
def test_plans_in_figures(total: int, costs: list[Cost], plan: list[int]) -> None:
    assert list(shared_out(total, dict(enumerate(costs))).values()) == plan


def test_units_within_is_the_inverse_of_seconds() -> None:
    cost = Cost(4.0, 0.5)
    assert cost.seconds(4) == 6
    assert [cost.units_within(each) for each in (2, 4, 4.4, 6)] == [0, 0, 0, 4]
