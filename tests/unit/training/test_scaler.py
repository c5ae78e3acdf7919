import pytest
from pydantic import TypeAdapter

from smolcluster.training.scaler import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    LEAST_SCALE,
    MOST_SCALE,
    LossScaler,
)
from smolcluster.wire.messages import Scale


def stepped(scaler: LossScaler, times: int) -> float:
    for _ in range(times):
        scaler.stepped()
    return scaler.scale


def test_the_scale_doubles_after_so_many_steps_without_an_overflow() -> None:
    scaler = LossScaler()
    assert stepped(scaler, GROWTH_INTERVAL - 1) == INITIAL_SCALE
    assert stepped(scaler, 1) == 2 * INITIAL_SCALE
    assert stepped(scaler, GROWTH_INTERVAL - 1) == 2 * INITIAL_SCALE
    assert stepped(scaler, 1) == 4 * INITIAL_SCALE


def test_an_overflow_halves_the_scale_and_begins_the_count_anew() -> None:
    scaler = LossScaler()
    stepped(scaler, GROWTH_INTERVAL - 1)
    scaler.overflowed(INITIAL_SCALE)
    assert (scaler.scale, scaler.num_overflows) == (INITIAL_SCALE / 2, 1)
    assert stepped(scaler, GROWTH_INTERVAL - 1) == INITIAL_SCALE / 2
    assert stepped(scaler, 1) == INITIAL_SCALE


def test_the_scale_does_not_fall_below_its_floor() -> None:
    scaler = LossScaler()
    for _ in range(40):
        scaler.overflowed(scaler.scale)
    assert (scaler.scale, scaler.num_overflows) == (LEAST_SCALE, 40)


@pytest.mark.parametrize("restored", [MOST_SCALE, 2.0**110])
def test_the_scale_does_not_rise_above_what_a_message_may_say(restored: float) -> None:
    scaler = LossScaler()
    scaler.state[0] = restored
    assert TypeAdapter(Scale).validate_python(stepped(scaler, 2 * GROWTH_INTERVAL)) == MOST_SCALE
    scaler.overflowed(scaler.scale)
    assert scaler.scale == MOST_SCALE / 2


@pytest.mark.parametrize(
    ("overflowed_with", "scale"),
    [
        (4 * INITIAL_SCALE, INITIAL_SCALE),  # it has fallen since
        (2 * INITIAL_SCALE, INITIAL_SCALE),
        (INITIAL_SCALE / 2, INITIAL_SCALE / 2),  # it has grown since
        (1e-30, INITIAL_SCALE / 2),
        (1e30, INITIAL_SCALE),
    ],
)
def test_what_a_worker_says_halves_the_scale_at_most(overflowed_with: float, scale: float) -> None:
    scaler = LossScaler()
    scaler.overflowed(overflowed_with)
    assert (scaler.scale, scaler.num_overflows) == (scale, 1)
