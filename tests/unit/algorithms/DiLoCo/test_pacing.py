"""Who gets how many batches of a round."""

from smolcluster.algorithms.DiLoCo.pacing import Timing, shared_out
from smolcluster.algorithms.DiLoCo.round import Round


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
