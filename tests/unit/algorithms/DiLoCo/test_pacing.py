"""Who gets how many batches of a round."""

import pytest

from smolcluster.algorithms.DiLoCo.config import Mode
from smolcluster.algorithms.DiLoCo.pacing import Timing, measured_steps, num_exchanges, shared_out
from smolcluster.algorithms.DiLoCo.rounds import Round


def at_rest(step_s: float) -> Timing:
    return Timing(step_s, progressed_at=0.0, stepped_at=0.0)


def begun(local_steps: int, num_fragments: int) -> Round:
    made = Round(num_fragments)
    made.begin(local_steps)
    return made


def test_a_slow_worker_has_its_part_of_a_round_though_a_fragment_is_over_sooner() -> None:
    """12 batches, 3 before the first fragment: of those the fast one could do all while another does one."""
    timings = {1: at_rest(0.2), 2: at_rest(1.0), 3: at_rest(1.0)}
    plan, at_once = shared_out(begun(4, 4), timings, 3, 0.0, "streaming")
    assert plan == {1: 1, 2: 1, 3: 1}
    assert at_once == plan


def test_who_could_not_finish_one_batch_in_a_round_gets_none() -> None:
    timings = {1: at_rest(0.2), 2: at_rest(100.0)}
    plan, _ = shared_out(begun(4, 4), timings, 2, 0.0, "streaming")
    assert plan == {1: 2, 2: 0}


def test_no_more_is_handed_out_than_belongs_before_a_fragment() -> None:
    timings = {number: at_rest(0.5) for number in range(8)}
    plan, _ = shared_out(begun(1, 4), timings, 8, 0.0, "streaming")
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
    _, at_once = shared_out(round_, workers, 2, 0.0, "streaming")
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
        _, at_once = shared_out(begun(20, 2), {1: worker}, 1, 0.0, mode)
        assert at_once == {1: number}


def heard(step_s: float, *upload_s: float) -> Timing:
    """A worker whose changes have been so long on their way, one after the other."""
    worker, now = at_rest(step_s), 0.0
    for each in upload_s:
        worker.gets("a batch", now)
        worker.asked(0, now)
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
    assert num_exchanges(num_outer_steps, num_fragments, mode, 3) == number
