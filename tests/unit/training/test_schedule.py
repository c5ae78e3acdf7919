import math
from itertools import pairwise

import pytest

from smolcluster.configs.schema import DatasetConfig, LrSchedule, TrainConfig
from smolcluster.training.schedule import learning_rate

TOTAL = 1000


def config(schedule: LrSchedule | None) -> TrainConfig:
    return TrainConfig(
        batch_size=10,
        learning_rate=0.5,
        lr_schedule=schedule,
        dataset=DatasetConfig(name="digits"),
    )


WARM = config(LrSchedule(warmup_iters=20, min_lr=0.1))


@pytest.mark.parametrize("applied", [0, 1, TOTAL - 1, TOTAL, TOTAL + 5])
def test_without_a_schedule_it_is_constant(applied: int) -> None:
    assert learning_rate(config(None), applied, TOTAL) == 0.5


def test_the_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak() -> None:
    rates = [learning_rate(WARM, 10 * step, TOTAL) for step in range(21)]
    rises = [after - before for before, after in pairwise(rates)]

    assert rates[0] == pytest.approx(0.5 / 21)
    assert rates[20] == 0.5
    assert rises == pytest.approx([0.5 / 21] * 20)


def test_the_cosine_is_half_way_down_in_the_middle() -> None:
    assert learning_rate(WARM, 600, TOTAL) == pytest.approx((0.5 + 0.1) / 2)
    assert learning_rate(WARM, 400, TOTAL) == pytest.approx(0.1 + 0.2 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize(
    "other",
    [
        {"global_batch_size": 10},
        {"gradient_accumulation": 5},
        {"global_batch_size": 10, "gradient_accumulation": 3},
    ],
)
def test_a_warm_up_counts_samples_of_whole_steps(other: dict[str, int]) -> None:
    small = WARM.model_copy(update={"batch_size": 2} | other)
    assert small.samples_per_step == 10
    for applied in (0, 10, 190, 200, 600):
        assert learning_rate(small, applied, TOTAL) == learning_rate(WARM, applied, TOTAL)


def test_each_of_several_optimizers_warms_up_in_as_many_steps_as_the_only_one() -> None:
    """Four that take a batch each in turn: the only one takes the four batches at once."""
    of_all = WARM.model_copy(update={"batch_size": 40})
    total = 4 * TOTAL
    only = [learning_rate(of_all, 40 * step, total) for step in range(100)]
    each = [learning_rate(WARM, 40 * step, total, num_optimizers=4) for step in range(100)]
    assert each == only
    assert each.index(0.5) == 20
    among = [learning_rate(WARM, 10 * step, total, num_optimizers=4) for step in range(81)]
    assert among == sorted(among)


def test_it_never_rises_after_the_warm_up_and_ends_at_the_smallest_rate() -> None:
    rates = [learning_rate(WARM, applied, TOTAL) for applied in range(200, TOTAL + 2)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-3:] == [pytest.approx(0.1, abs=1e-5), 0.1, 0.1]


def test_without_a_warm_up_it_begins_at_the_peak() -> None:
    assert learning_rate(config(LrSchedule()), 0, TOTAL) == 0.5


@pytest.mark.parametrize("total", [200, 150])
def test_a_run_no_longer_than_its_warm_up_has_no_cosine(total: int) -> None:
    assert learning_rate(WARM, total - 10, total) < 0.5
    assert learning_rate(WARM, 200, total) == 0.1
