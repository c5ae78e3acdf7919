"""What links cost."""

import pytest

from smolcluster.training.schedules.instructions import Op, generate, zb_v
from smolcluster.training.schedules.simulation import Boundary, Costs, simulate

UNIT = Costs(1.0, 1.0, 1.0)


def makespan(name: str, ranks: int, num: int, way: Boundary) -> float:
    schedule = generate(name, ranks, num)
    return simulate(schedule, [UNIT] * ranks, [way] * (ranks - 1)).makespan_s


def test_a_microbatch_alone_takes_all_stages_and_all_transfers() -> None:
    way = Boundary(forward_s=0.25, backward_s=0.5, latency_s=0.125)
    assert makespan("1f1b", 3, 1, way) == pytest.approx(3 * 3 + 2 * (0.25 + 0.5 + 2 * 0.125))


def test_a_link_carries_one_transfer_after_the_other() -> None:
    """Five units a transfer, six forwards: the link and not the stages sets the pace."""
    schedule = generate("gpipe", 2, 6)
    timeline = simulate(schedule, [UNIT] * 2, [Boundary(forward_s=5.0)])
    sent = timeline.links[0, 1]
    assert [span.start_s for span in sent] == [1 + 5 * place for place in range(6)]
    assert timeline.ranks[1][0].start_s == 6.0
    assert timeline.makespan_s == pytest.approx(1 + 6 * 5 + 1 + 6 * 2 + 2)


def test_latency_does_not_occupy_a_link() -> None:
    schedule = generate("gpipe", 2, 6)
    far = simulate(schedule, [UNIT] * 2, [Boundary(latency_s=5.0)])
    near = simulate(schedule, [UNIT] * 2)
    assert far.makespan_s == pytest.approx(near.makespan_s + 10)


def test_sending_overlaps_computing() -> None:
    """As long as a transfer takes no longer than a computation only the first and the last one wait."""
    slow = makespan("eager-1f1b", 4, 32, Boundary(0.9, 0.9))
    assert slow == pytest.approx(makespan("eager-1f1b", 4, 32, Boundary()) + 3 * 2 * 0.9)
    assert makespan("1f1b", 4, 32, Boundary(0.9, 0.9)) > 1.2 * slow


def test_neighbouring_stages_of_one_rank_send_nothing() -> None:
    """Of ZB-V's four stages on two ranks the two in the middle are on one: activations go 0>1 and 2>3."""
    timeline = simulate(zb_v(2, 4), [UNIT] * 4, [Boundary(1.0, 1.0)] * 3)
    sent = {
        (span.instruction.stage, span.instruction.op)
        for spans in timeline.links.values()
        for span in spans
    }
    assert sent == {
        *((stage, Op.FORWARD) for stage in (0, 2)),
        *((stage, Op.BACKWARD_INPUT) for stage in (3, 1)),
    }


def test_the_bubble_is_the_share_of_waiting() -> None:
    timeline = simulate(generate("1f1b", 4, 8), [UNIT] * 4)
    assert timeline.bubble == pytest.approx(3 / 11)
    assert timeline.busy_s(0) == pytest.approx(24)
