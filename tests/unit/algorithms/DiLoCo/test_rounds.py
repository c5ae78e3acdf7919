"""Rounds are planned from measured times alone; plans are compared with all there are."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolcluster.algorithms.DiLoCo.config import Mode
from smolcluster.algorithms.DiLoCo.rounds import (
    Pacing,
    Round,
    SyncBeginning,
    Timing,
    batches_of,
    choose_local_steps,
    hiding_round_s,
    measured_steps,
    own_steps,
    waiting_round_s,
    warmed_up,
)

REPEATABLE = settings(derandomize=True, database=None, max_examples=40)


@REPEATABLE
@given(st.integers(0, 40), st.integers(1, 2000))
def test_rounds_grow_from_one_step_to_all(round_index: int, local_steps: int) -> None:
    assert warmed_up(0, local_steps) == 1
    assert warmed_up(round_index, local_steps) == min(2**round_index, local_steps)


@REPEATABLE
@given(
    st.floats(0.001, 10),
    st.floats(0, 100),
    st.integers(1, 1_000_000),
    st.integers(1, 64),
)
def test_the_smallest_h_that_computes_enough(
    step_s: float, exchange_s: float, total_batches: int, num_workers: int
) -> None:
    round_s = waiting_round_s(exchange_s)
    chosen = choose_local_steps(step_s, round_s, total_batches, num_workers)

    def computing(local_steps: int) -> float:
        return local_steps * step_s / (local_steps * step_s + exchange_s)

    most = max(1, total_batches // (25 * num_workers))
    assert 1 <= chosen <= most
    assert chosen == most or computing(chosen) >= 0.95 - 1e-9
    assert chosen == 1 or computing(chosen - 1) < 0.95 + 1e-9


def test_chosen_steps_in_figures() -> None:
    """A step of 0.35 s, 1.9 MB in int8 over 50 Mbit/s there and back."""
    round_s = waiting_round_s(0.6)
    assert choose_local_steps(0.35, round_s, 1_000_000, 4) == 33
    assert choose_local_steps(0.35, round_s, 1_000, 4) == 10
    assert choose_local_steps(0.35, math.inf, 1_000, 4) == 10
    assert choose_local_steps(0.35, round_s, 0, 4) == 1
    with pytest.raises(ValueError, match="a step of 0"):
        choose_local_steps(0, 0.6, 4_000, 4)


def test_a_round_hides_its_longest_exchange_and_all_that_a_link_carries() -> None:
    """Four fragments: each is back before its next turn, and the slowest link carries all four."""
    assert hiding_round_s([1.0, 2.6, 1.0, 1.0], [0.1, 0.2]) == pytest.approx(1.5 * 2.6)
    assert hiding_round_s([1.0, 2.6, 1.0, 1.0], [0.1, 2.0]) == pytest.approx(1.5 * 8.0)


def test_unlike_workers_take_as_long_for_their_own_steps() -> None:
    steps_s = [0.35, 0.35, 0.35, 0.9]
    own = [own_steps(10, step_s, steps_s) for step_s in steps_s]
    assert own == [12, 12, 12, 5]
    assert own_steps(1, 100.0, [0.1, 100.0]) == 1


def at_rest(step_s: float) -> Timing:
    return Timing(step_s, progressed_at=0.0, stepped_at=0.0)


def begun(local_steps: int, num_fragments: int) -> Round:
    made = Round(num_fragments)
    made.begin(local_steps)
    return made


def test_a_slow_worker_has_its_part_of_a_round_though_a_fragment_is_over_sooner() -> None:
    """12 batches, 3 before the first fragment: of those the fast one could do all while another does one."""
    timings = {1: at_rest(0.2), 2: at_rest(1.0), 3: at_rest(1.0)}
    plan, at_once = batches_of(begun(4, 4), timings, 3, 0.0, "streaming")
    assert plan == {1: 1, 2: 1, 3: 1}
    assert at_once == plan


def test_who_could_not_finish_one_batch_in_a_round_gets_none() -> None:
    timings = {1: at_rest(0.2), 2: at_rest(100.0)}
    plan, _ = batches_of(begun(4, 4), timings, 2, 0.0, "streaming")
    assert plan == {1: 2, 2: 0}


def test_no_more_is_handed_out_than_belongs_before_a_fragment() -> None:
    timings = {number: at_rest(0.5) for number in range(8)}
    plan, _ = batches_of(begun(1, 4), timings, 8, 0.0, "streaming")
    assert sum(plan.values()) == 2


def held_up(most_steps: int | None, *, num_handed: int = 3) -> Round:
    """A round of 3 batches for each of 2 workers; the first of 2 fragments is on its way since then."""
    round_ = Round(2)
    round_.ask(0, 0.0)
    round_.begin(3, most_steps)
    round_.num_handed = num_handed
    return round_


def test_a_round_that_a_slow_link_holds_up_becomes_longer_within_what_the_run_allows() -> None:
    round_ = held_up(most_steps=4)
    assert round_.budget(2) == 3, "those before the second fragment, which may be asked for first"
    round_.num_handed += 3
    assert round_.is_due(1, 2)
    assert round_.budget(2) == 0
    round_.ask(1, 0.0)
    workers = {id_: at_rest(0.1) for id_ in range(2)}
    _, at_once = batches_of(round_, workers, 2, 0.0, "streaming")
    assert sum(at_once.values()) == 2
    round_.num_handed += 2
    assert round_.budget(2) <= 0, "it has four batches for each now"


def test_a_round_whose_length_the_user_has_said_waits_for_a_slow_link() -> None:
    round_ = held_up(most_steps=None)
    assert round_.budget(2) == 0
    round_.gathered(0, 1.0)
    assert round_.is_due(0, 2)


def test_a_round_that_nothing_holds_up_is_as_long_as_planned() -> None:
    round_ = held_up(most_steps=4, num_handed=6)
    round_.gathered(0, 1.0)
    assert round_.budget(2) <= 0


def test_the_last_exchange_of_the_round_before_holds_nothing_up() -> None:
    """Its turn comes at the end of this round: of 16 batches 4 belong before the first fragment."""
    round_ = Round(4)
    round_.ask(3, 0.0)
    round_.begin(2, most_steps=100)
    assert round_.budget(8) == 4


def test_a_worker_holds_batches_for_as_long_as_changes_and_weights_keep_its_link_busy() -> None:
    worker = at_rest(0.5)
    worker.on_way_s = {0: 1.0, 1: 0.1}
    cases: tuple[tuple[Mode, int], ...] = (("sync", 2), ("streaming", 5), ("async", 5))
    for mode, number in cases:
        _, at_once = batches_of(begun(20, 2), {1: worker}, 1, 0.0, mode)
        assert at_once == {1: number}


def heard(step_s: float, *upload_s: float) -> Timing:
    """A worker whose changes have been so long on their way, one after the other."""
    worker, now = at_rest(step_s), 0.0
    for each in upload_s:
        worker.gets("a batch", now)
        worker.asked(0, now, waits=False)
        worker.unanswered.clear()
        worker.stepped(step_s, now + step_s)
        now += step_s + each
        worker.answered(0, now)
    return worker


def test_the_first_change_says_how_long_one_is_on_its_way_and_the_next_smooth_it() -> None:
    assert heard(0.1, 8.0).upload_s == pytest.approx(8.0)
    assert heard(0.1, 8.0, 4.0).upload_s == pytest.approx(6.0)


def test_who_does_not_wait_computes_for_as_long_as_a_change_and_its_answer_take() -> None:
    workers = [heard(0.01, 3.0), heard(0.01, 0.1)]
    assert measured_steps(begun(16, 1), workers, 100_000, "async") == 902
    assert measured_steps(begun(16, 1), workers, 10_000, "async") == 200, "25 rounds of two"


@pytest.mark.parametrize("mode", ["sync", "streaming", "async"])
def test_what_is_not_measured_stays_as_it_was(mode: Mode) -> None:
    for workers in ([], [at_rest(0.1)]):
        assert measured_steps(begun(7, 4), workers, 100_000, mode) == 7
        assert measured_steps(begun(7, 4), workers, 100, mode) == 4, "25 rounds"


@pytest.mark.parametrize(
    ("mode", "num_outer_steps", "number"),
    [("sync", 9, 9), ("streaming", 9, 2), ("async", 3, 3), ("async", 6, 4), ("async", 10, 6)],
)
def test_an_exchange_is_one_of_all_fragments_with_all_workers(
    mode: Mode, num_outer_steps: int, number: int
) -> None:
    num_fragments = 4 if mode == "streaming" else 1
    assert pacing(mode, num_fragments).num_rounds(num_outer_steps) == number


def pacing(mode: Mode, num_fragments: int = 1, *, num_workers: int = 3) -> Pacing:
    """Of a run past its synchronous beginning, with rounds of two batches a worker."""
    return Pacing(
        mode,
        num_fragments,
        local_steps=2,
        total_batches=1000,
        num_workers=num_workers,
        beginning=SyncBeginning(0, 1000),
    )


def asked(rule: Pacing, workers: dict[int, Timing], **state: bool) -> list[tuple[int, int]]:
    """Who is asked for which fragment, one after the other, as a server does it."""
    all_asked = []
    for id_, number in rule.requests(workers, 1.0, owes_change=lambda _: False, **state):
        workers[id_].asked(number, 1.0, waits=rule.waits)
        all_asked.append((id_, number))
    return all_asked


def hand_out(rule: Pacing, workers: dict[int, Timing]) -> dict[int, int]:
    takers = {id_: each for id_, each in workers.items() if not each.is_asked}
    at_once = rule.batches(takers, len(workers), 0.0)
    for id_, number in at_once.items():
        for batch in range(number):
            workers[id_].gets(batch, 0.0)
            rule.round.given(id_)
    return dict(at_once)


def test_a_round_is_handed_out_then_asked_for_and_is_over_when_all_has_come() -> None:
    workers = {1: at_rest(1.0), 2: at_rest(1.0)}
    rule = pacing("sync")
    rule.begin_round(workers.values(), 0)
    assert asked(rule, workers) == [], "nothing has been handed out"
    assert hand_out(rule, workers) == {1: 2, 2: 2}
    assert asked(rule, workers) == [(1, 0), (2, 0)]
    assert hand_out(rule, workers) == {}, "they wait for new weights"
    assert not rule.is_round_over
    rule.round.gathered(0, 2.0)
    assert rule.is_round_over


def test_h_follows_from_what_was_measured_in_the_round_before() -> None:
    workers = {1: at_rest(0.1), 2: at_rest(0.1)}
    rule = Pacing(
        "sync",
        1,
        local_steps=None,
        total_batches=100_000,
        num_workers=2,
        beginning=SyncBeginning(0, 100_000),
    )
    rule.begin_round(workers.values(), 100)
    assert rule.round.local_steps == 1, "nothing has been measured"
    for waited_s, local_steps in ((1.0, 190), (0.5, 95)):
        for each in workers.values():
            each.waited_s = waited_s
        rule.begin_round(workers.values(), 100)
        assert rule.round.local_steps == local_steps
        assert [each.waited_s for each in workers.values()] == [None, None]


def test_who_gets_no_more_of_a_round_is_asked_before_the_others() -> None:
    workers = {1: at_rest(0.01), 2: at_rest(100.0)}
    rule = pacing("sync")
    rule.begin_round(workers.values(), 0)
    assert hand_out(rule, workers) == {1: 4, 2: 0}
    rule.round.num_handed -= 1  # one is still to be handed out
    rule.round.plan[1] = 1
    assert asked(rule, workers) == [(2, 0)]


def test_streaming_goes_on_before_a_fragment_has_come() -> None:
    workers = {1: at_rest(1.0), 2: at_rest(1.0)}
    rule = pacing("streaming", 2)
    rule.begin_round(workers.values(), 0)
    assert hand_out(rule, workers) == {1: 1, 2: 1}
    assert asked(rule, workers) == [(1, 0), (2, 0)]
    assert hand_out(rule, workers) == {1: 1, 2: 1}
    assert asked(rule, workers) == [(1, 1), (2, 1)]
    assert rule.is_round_over


def test_what_is_left_at_the_end_is_asked_for_though_no_round_is_full() -> None:
    workers = {1: at_rest(1.0)}
    rule = pacing("sync")
    rule.begin_round(workers.values(), 0)
    assert asked(rule, workers, has_more=False, has_open=False) == []
    assert asked(rule, workers, has_more=False) == [(1, 0)]


def test_after_the_first_rounds_an_asynchronous_run_asks_each_by_itself() -> None:
    workers = {1: at_rest(1.0), 2: at_rest(1.0)}
    rule = pacing("async")
    rule.begin_round(workers.values(), 3)
    assert (rule.is_async, rule.waits) == (False, True)
    rule.begin_round(workers.values(), 4)
    assert (rule.is_async, rule.waits) == (True, False)
    workers[2].num_since_asked = 2
    assert asked(rule, workers) == [(2, 0)]
