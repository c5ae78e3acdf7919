"""Round trips and differences of clocks, from heartbeats."""

import pytest

from smolcluster.wire.clocks import NUM_SAMPLES, Clocks
from smolcluster.wire.messages import Heartbeat


class Machines:
    """Two machines whose clocks differ, and a way between them that takes its time."""

    def __init__(self, ahead_s: float) -> None:
        self.true_s = 1e9
        self.one = Clocks(lambda: self.true_s)
        self.other = Clocks(lambda: self.true_s + ahead_s)

    def pair(self, there_s: float, back_s: float, pause_s: float = 0.5) -> None:
        """Each sends a heartbeat to the other; one's takes `there_s` seconds."""
        beat = self.one.beat()
        self.true_s += there_s
        self.other.hear(beat)
        self.true_s += pause_s
        beat = self.other.beat()
        self.true_s += back_s
        self.one.hear(beat)


def test_nothing_is_known_before_a_pair_of_heartbeats() -> None:
    machines = Machines(0.0)
    assert machines.one.best is None
    machines.other.hear(machines.one.beat())
    assert machines.other.best is None


def test_the_pause_of_the_peer_is_no_part_of_the_round_trip() -> None:
    machines = Machines(-3.25)
    machines.pair(0.004, 0.004, pause_s=7.0)
    assert machines.one.best == pytest.approx((0.008, -3.25), abs=1e-6)


def test_what_was_delayed_on_one_way_does_not_count() -> None:
    machines = Machines(1.0)
    machines.pair(0.5, 0.001)
    assert machines.one.best is not None
    assert machines.one.best.offset_s == pytest.approx(1.25, abs=1e-3)
    machines.pair(0.001, 0.001)
    machines.pair(0.3, 0.001)
    assert machines.one.best == pytest.approx((0.002, 1.0), abs=1e-6)


def test_what_is_long_ago_is_forgotten() -> None:
    machines = Machines(0.0)
    machines.pair(0.001, 0.001)
    for _ in range(NUM_SAMPLES):
        machines.pair(0.01, 0.01)
    assert machines.one.best is not None
    assert machines.one.best.round_trip_s == pytest.approx(0.02, abs=1e-6)


def test_a_clock_that_was_set_in_between_tells_nothing() -> None:
    now = [1000.0]
    clocks = Clocks(lambda: now[0])
    clocks.hear(Heartbeat(sent_at=2000.0, heard_sent_at=1000.0, heard_at=1999.0))
    assert clocks.best is None
