"""What a process counts of its own work."""

from collections.abc import Callable

import pytest

from smolcluster.utils import meter as room
from smolcluster.utils.meter import MAX_SPANS, PHASES, STEP, STEPS_KEPT, WINDOW_S, Meter


class Time:
    """A clock that tests set, in the place of `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(room, "time", clock)
    return clock


def test_seconds_add_up_by_phase(time: Time) -> None:
    meter = Meter()
    for seconds in (0.25, 0.5):
        with meter("forward"):
            time.now += seconds
        time.now += 10.0
        with meter("apply"):
            time.now += 1.0
    assert dict(meter.by_phase) == dict.fromkeys(PHASES, 0.0) | {"forward": 0.75, "apply": 2.0}


def test_a_phase_that_fails_counts_as_well(time: Time) -> None:
    meter = Meter()
    with pytest.raises(ZeroDivisionError), meter("backward"):
        time.now += 2.0
        raise ZeroDivisionError
    assert meter.by_phase["backward"] == 2.0


def test_a_phase_that_goes_on_counts_as_far_as_it_is(time: Time) -> None:
    meter = Meter()
    with meter("backward"):
        time.now += 7.0
        assert meter.by_phase["backward"] == 7.0
        assert meter.seconds == [0.0] * len(PHASES)
    assert meter.by_phase["backward"] == 7.0


class Contended:
    """A lock for which somebody waits, and whom it makes wait in turn: something happens on either side."""

    def __init__(self, *, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = iter([before]), iter([after])

    def __enter__(self) -> None:
        next(self._before, lambda: None)()

    def __exit__(self, *_: object) -> None:
        next(self._after, lambda: None)()


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_reader_never_sees_a_sum_shrink_however_long_threads_wait_for_each_other(
    time: Time, side: str
) -> None:
    meter = Meter()
    seen: list[float] = []

    def nothing() -> None:
        pass

    def read_late() -> None:
        time.now += 1.0
        seen.append(meter.by_phase["wait"])

    def end_early() -> None:
        phase.__exit__()
        time.now += 1.0

    phase = meter("wait")
    phase.__enter__()
    time.now += 1.0
    if side == "before":
        meter.lock = Contended(before=read_late, after=nothing)  # type: ignore[assignment]
        phase.__exit__()
    else:
        meter.lock = Contended(before=nothing, after=end_early)  # type: ignore[assignment]
        seen.append(meter.by_phase["wait"])
    assert seen[0] <= meter.by_phase["wait"]


def test_spans_tell_when_and_lie_within_their_step(time: Time) -> None:
    meter = Meter()
    time.now = 101.0
    with meter("data"):
        time.now = 103.0
    time.now = 104.0
    meter.step_done(32)
    assert meter.take_spans() == [(0, 101.0, 2.0), (STEP, 100.0, 4.0)]
    assert meter.take_spans() == []
    assert (meter.steps, meter.samples) == (1, 32)


def take_steps(meter: Meter, time: Time, count: int, seconds: float) -> None:
    for _ in range(count):
        with meter("forward"):
            time.now += seconds
        meter.step_done(1)


def test_of_each_window_the_first_steps_are_kept(time: Time) -> None:
    meter = Meter()
    take_steps(meter, time, 3 * STEPS_KEPT, 0.001)
    kept = [span for span in meter.take_spans() if span.what == STEP]
    assert STEPS_KEPT <= len(kept) <= STEPS_KEPT + 1
    time.now += WINDOW_S
    take_steps(meter, time, 3 * STEPS_KEPT, 0.001)
    kept = [span for span in meter.take_spans() if span.what == STEP]
    assert STEPS_KEPT - 1 <= len(kept) <= STEPS_KEPT + 1
    assert meter.steps == 6 * STEPS_KEPT


def test_windows_are_those_of_the_servers_clock(time: Time) -> None:
    meter = Meter(clock_offset_s=5.0)  # it is 95 there, and the window ends at 100
    take_steps(meter, time, 2 * STEPS_KEPT, 0.001)
    meter.take_spans()
    time.now = 104.9
    take_steps(meter, time, 2, 0.01)
    assert meter.take_spans() == []
    time.now = 105.1
    take_steps(meter, time, 2, 0.01)
    assert meter.take_spans() != []


def test_spans_that_nobody_takes_take_no_more_memory(time: Time) -> None:
    meter = Meter()
    for _ in range(200):
        take_steps(meter, time, STEPS_KEPT, 0.001)
        time.now += WINDOW_S
    assert len(meter.spans) < MAX_SPANS + 2 * STEPS_KEPT
