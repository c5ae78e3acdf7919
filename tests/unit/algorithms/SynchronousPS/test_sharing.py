"""Who gets how much: the sizes are the best there are, and estimates follow what is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.algorithms.shares import Cost
from smolcluster.algorithms.SynchronousPS.sharing import (
    EARLY_PROBE,
    FIRST_PROBE,
    Pace,
    all_to_one,
    patience_s,
    rest_after,
    sizes_by_cost,
    sizes_by_share,
    with_probes,
)
from smolcluster.algorithms.SynchronousPS.step_receiver import PACE


@pytest.mark.parametrize(
    ("shares", "total", "sizes"),
    [
        ([0.5, 0.3, 0.2], 10, [5, 3, 2]),
        ([0.5, 0.3, 0.2], 9, [4, 3, 2]),  # 4.5, 2.7 and 1.8: the two largest remainders gain
        ([0.5, 0.3, 0.2], 11, [6, 3, 2]),  # 5.5, 3.3 and 2.2
        ([1 / 3, 1 / 3, 1 / 3], 128, [43, 43, 42]),
        ([0.9, 0.1, 0.0], 5, [5, 0, 0]),  # 4.5 and 0.5: the first one gains
        ([0.5, 0.25], 12, [8, 4]),  # those who are there share all of it
        ([0.0, 0.0], 7, [4, 3]),
    ],
)
def test_stated_shares_are_rounded_by_largest_remainder(
    shares: list[float], total: int, sizes: list[int]
) -> None:
    assert sizes_by_share(shares, total) == sizes


@settings(max_examples=100)
@given(shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), total=st.integers(1, 5000))
def test_stated_shares_add_up_and_are_kept_to_a_sample(shares: list[float], total: int) -> None:
    sizes = sizes_by_share(shares, total)
    assert sum(sizes) == total
    whole = sum(shares)
    for share, size in zip(shares, sizes, strict=True):
        exact = total * share / whole if whole else total / len(shares)
        assert abs(size - exact) < 1 + 1e-6


def test_a_pace_begins_with_what_the_worker_measured_itself() -> None:
    assert Pace(500.0).cost == Cost(0.0, 0.002)


@pytest.mark.parametrize("samples_per_s", [0.0, 10.0, 1e6])
def test_a_pace_learns_what_parts_cost(samples_per_s: float) -> None:
    """32 samples of 2 ms, and 30 ms on the way, whatever was thought at first."""
    pace = Pace(samples_per_s)
    for _ in range(60):
        pace.measured(32, 0.064, 0.094)
    assert pace.cost.fixed_s == pytest.approx(0.03, rel=0.01)
    assert pace.cost.each_s == pytest.approx(0.002, rel=0.01)


def test_a_pace_does_not_follow_a_single_measurement_far() -> None:
    pace = Pace(1000.0)
    for _ in range(20):
        pace.measured(10, 0.01, 0.02)
    before = pace.cost
    pace.measured(10, 20.0, 20.01)  # it was stopped while it computed
    assert before.each_s < pace.cost.each_s < 2 * before.each_s
    assert pace.cost.fixed_s == pytest.approx(before.fixed_s, rel=0.01)


def test_no_time_at_all_is_measured_as_almost_none() -> None:
    pace = Pace(1000.0)
    for _ in range(100):
        pace.measured(10, 1e-12, 0.0)
    assert 0 < pace.cost.each_s < 1e-3
    assert pace.cost.fixed_s == 0


def probes(pace: Pace, num_steps: int) -> list[int]:
    """After which of so many steps without a part it is measured again."""
    return [step for step in range(1, num_steps + 1) if pace.wants_probe(0)]


def test_who_has_no_part_is_measured_ever_more_seldom() -> None:
    first, second = FIRST_PROBE, 3 * FIRST_PROBE
    assert probes(Pace(1.0), 8 * FIRST_PROBE) == [first, second, 7 * FIRST_PROBE]


def test_a_part_lets_the_probes_begin_anew() -> None:
    pace = Pace(1.0)
    assert probes(pace, 2 * FIRST_PROBE) == [FIRST_PROBE]
    assert not pace.wants_probe(5)
    assert probes(pace, 2 * FIRST_PROBE) == [FIRST_PROBE]


def test_who_was_measured_but_once_is_measured_again_soon() -> None:
    """Its first push may have waited for the state of another that joined."""
    pace = Pace(1.0)
    pace.measured(8, 0.1, 5.0)
    assert probes(pace, EARLY_PROBE) == [EARLY_PROBE]
    pace.measured(1, 0.1, 0.3)
    assert pace.cost.fixed_s == pytest.approx(0.2), "the first one no longer counts"
    assert probes(pace, 2 * FIRST_PROBE) == [FIRST_PROBE]


@pytest.mark.parametrize("claimed", [0.0, 1e-320, 1e-6, 1e15])
def test_no_claim_of_a_worker_can_stop_the_sharing(claimed: float) -> None:
    paces = [Pace(claimed), Pace(1000.0)]
    paces[1].measured(8, 1e9, 0.01)
    assert sum(sizes_by_cost([pace.cost for pace in paces], 96)) == 96
    assert paces[1].cost.seconds(8) <= 0.01 + 1e-9, "only this side's clock is believed"


def test_a_probe_never_takes_the_only_sample() -> None:
    paces = [Pace(1.0) for _ in range(2)]
    assert [with_probes(paces, [1, 0]) for _ in range(2 * FIRST_PROBE)] == [[1, 0]] * (
        2 * FIRST_PROBE
    )


def simulate(paces: Sequence[Pace], num_steps: int) -> list[int]:
    """So many steps in which all are equally fast: 2 ms on the way, 0.1 ms a sample; the last sizes."""
    sizes: list[int] = []
    for _ in range(num_steps):
        sizes = with_probes(paces, sizes_by_cost([pace.cost for pace in paces], 96))
        for pace, size in zip(paces, sizes, strict=True):
            if size:
                pace.measured(size, 1e-4 * size, 2e-3 + 1e-4 * size)
    return sizes


def test_equally_fast_members_come_to_equal_parts() -> None:
    """Whatever they measured themselves while they were joining."""
    sizes = simulate([Pace(2e3), Pace(1e5), Pace(0.0)], 200)
    assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize("stopped_s", [1.0, 20.0])
def test_who_was_stopped_while_it_computed_keeps_its_share(stopped_s: float) -> None:
    paces = [Pace(1e4) for _ in range(3)]
    simulate(paces, 50)
    paces[1].measured(32, stopped_s, stopped_s + 2e-3)
    assert simulate(paces, 50)[1] >= 24


def test_who_was_busy_while_it_joined_gets_its_share() -> None:
    """Its own measurement was a hundred times too slow."""
    assert simulate([Pace(100.0), Pace(1e4), Pace(1e4)], 1500)[0] >= 24


@pytest.mark.parametrize("held_up_s", [1.0, 20.0])
def test_who_was_held_up_before_or_after_it_computed_gets_its_share_back(held_up_s: float) -> None:
    paces = [Pace(1e4) for _ in range(3)]
    simulate(paces, 50)
    paces[1].measured(32, 3.2e-3, held_up_s)
    assert simulate(paces, 1500)[1] >= 24


@dataclass
class Flow:
    """A member behind a link of its own, on which a push takes `link_s` seconds."""

    link_s: float
    pace: Pace
    arrivals: list[float] = field(default_factory=list)
    held_s: float = 0.0

    def send(self, means: Sequence[float], compute_s: float) -> None:
        """The next bucket, which waits for the mean if that has begun to come (`StepReceiver.hold`)."""
        number = len(self.arrivals)
        free_at = self.arrivals[-1] if self.arrivals else compute_s
        begun = bool(means) and means[0] <= free_at
        may_go_at = max(free_at, means[number - PACE]) if begun and number >= PACE else free_at
        self.held_s += may_go_at - free_at
        self.arrivals.append(may_go_at + self.link_s / NUM_BUCKETS)


NUM_BUCKETS = 40
PER_SAMPLE_S = 2.0 / 256


def paced_step(flows: Sequence[Flow], *, knows_waiting: bool) -> tuple[list[int], float]:
    """A step of 256 samples, 2 s of computing for one: the sizes of the parts, and how long it took."""
    sizes = with_probes(
        [flow.pace for flow in flows], sizes_by_cost([flow.pace.cost for flow in flows], 256)
    )
    taking = [(flow, size) for flow, size in zip(flows, sizes, strict=True) if size]
    means: list[float] = []
    for flow, _ in taking:
        flow.arrivals, flow.held_s = [], 0.0
    for _ in range(NUM_BUCKETS):
        for flow, size in taking:
            flow.send(means, PER_SAMPLE_S * size)
        means.append(max(flow.arrivals[-1] for flow, _ in taking))
    for flow, size in taking:
        held_s = flow.held_s if knows_waiting else 0.0
        flow.pace.measured(size, PER_SAMPLE_S * size, flow.arrivals[-1], held_s)
    return sizes, means[-1]


def test_a_fast_link_is_not_blamed_for_waiting_for_a_slow_one() -> None:
    """Pushes of 0.56 and 5.6 s. What it waits would otherwise look like a way as long as the slow one's."""
    for knows_waiting in (True, False):
        flows = [Flow(0.56, Pace(128.0)), Flow(5.6, Pace(128.0))]
        for _ in range(10):
            sizes, took_s = paced_step(flows, knows_waiting=knows_waiting)
        if knows_waiting:
            assert sizes == [256, 0]
            assert took_s == pytest.approx(2.56)
        else:
            assert took_s > 5.0, "this would prove nothing"


def test_a_push_that_was_called_off_tells_only_what_it_costs_at_least() -> None:
    pace = Pace(1000.0)
    pace.measured(10, 0.01, 2.01, whole=False)
    assert pace.cost.fixed_s == pytest.approx(2.0)
    pace.measured(10, 0.01, 6.01)
    assert pace.cost.fixed_s == pytest.approx(6.0), "the first whole one counts in full"
    pace.measured(10, 0.01, 1.01, whole=False)
    assert pace.cost.fixed_s == pytest.approx(6.0)


def test_who_is_often_overdue_rests_ever_longer_up_to_a_bound() -> None:
    assert [rest_after(count) for count in (1, 2, 3, 4, 7, 8, 10_000)] == [0, 1, 3, 7, 63, 64, 64]


@pytest.mark.parametrize(
    ("least_s", "expected_s", "allowed_s"),
    [(10.0, 0.0, 10.0), (10.0, 2.0, 18.0), (10.0, 1e9, 610.0), (0.1, 2.0, 9.0)],
)
def test_patience_grows_with_what_is_expected_up_to_a_bound(
    least_s: float, expected_s: float, allowed_s: float
) -> None:
    assert patience_s(expected_s, least_s) == allowed_s


def test_a_batch_that_stays_whole_goes_to_who_has_it_done_first() -> None:
    costs = [Cost(0.0, 0.01), Cost(0.5, 0.001), Cost(0.0, 0.02)]
    assert all_to_one(costs, 32) == [32, 0, 0]
    assert all_to_one(costs, 320) == [0, 320, 0]
