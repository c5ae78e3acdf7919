"""The board: who takes part in a run, and how each of them does."""

from types import SimpleNamespace
from typing import Any

import pytest

from smolcluster.runs.status import instant
from smolcluster.server.board import StatusBoard
from smolcluster.server.rates import PACE_WINDOW_S, SteadyRate
from smolcluster.server.tally import Tally
from smolcluster.server.worker import Worker
from smolcluster.wire.clocks import Sample
from smolcluster.wire.membership import Member

SINCE_1970 = 1_700_000_000.0
"""What the wall clock shows when the other one shows 0."""


class Setting:
    """A board whose clocks, tally and connections are the test's."""

    def __init__(self) -> None:
        self.clock = 1000.0
        self.tally = Tally.empty()
        self.board = StatusBoard(
            self.tally, now=lambda: SINCE_1970 + self.clock, clock=lambda: self.clock
        )

    def worker(self, worker_id: int = 1, node: str = "pi5", session_id: int = 5) -> Worker:
        connection = SimpleNamespace(
            last_byte_at=self.clock, address="10.10.0.2", bytes_sent=30, bytes_received=70
        )
        session: Any = SimpleNamespace(connection=connection, clocks=SimpleNamespace(best=None))
        return Worker(Member(session_id, worker_id, node, "abcdef01"), session)

    def join(self, worker_id: int = 1, node: str = "pi5", device: str = "cpu") -> Worker:
        worker = self.worker(worker_id, node)
        self.board.joined(worker, device)
        return worker

    def hear(self, worker: Worker) -> None:
        """A byte comes from it now."""
        worker.live_session.connection.last_byte_at = self.clock

    def apply(self, worker: Worker, num_samples: int, step: int) -> None:
        member = worker.member
        self.tally.applied(member.worker_id, member.node, num_samples, 0)
        self.board.contributed(worker, step, loss=step / 10)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_who_joined_is_on_the_board_by_rank(setting: Setting) -> None:
    setting.join(3, "win", "cuda")
    setting.join(1, "pi5")
    first, second = setting.board.workers()
    assert (first.rank, first.node, first.device, first.state) == (0, "pi5", "cpu", "joined")
    assert (second.rank, second.node, second.device) == (2, "win", "cuda")
    assert (first.step, first.samples, first.samples_per_s) == (None, 0, 0.0)


def test_what_a_worker_did_is_told_of_it_alone(setting: Setting) -> None:
    one, other = setting.join(1), setting.join(2, "win")
    setting.clock += 2.0
    setting.apply(one, 64, step=7)
    setting.apply(one, 64, step=9)
    setting.apply(other, 32, step=8)
    first, second = setting.board.workers()
    assert (first.step, first.samples, first.samples_per_s) == (9, 128, 64.0)
    assert (second.step, second.samples, second.samples_per_s) == (8, 32, 16.0)
    assert (first.loss, second.loss) == (0.9, 0.8)


def test_what_was_measured_of_a_worker_last_stands_beside_its_own_report(setting: Setting) -> None:
    one, other = setting.join(1), setting.join(2, "win")
    setting.board.measured(one, local_steps=4, drift=0.5)
    setting.board.measured(one, local_steps=8, drift=0.25)
    first, second = setting.board.workers()
    assert first.process_stats == {"local_steps": 8, "drift": 0.25}
    assert second.process_stats == {}
    setting.board.departed(one, "left")
    setting.board.measured(one, local_steps=9)
    assert setting.board.workers()[0].process_stats == {}
    assert other.rank == 1


def test_how_far_a_worker_is_and_its_clock_stand_beside_its_own_report(setting: Setting) -> None:
    clocks: Any = setting.join().live_session.clocks
    clocks.best = Sample(round_trip_s=0.5, offset_s=2.0)
    [status] = setting.board.workers()
    assert status.process_stats == {"rtt_s": 0.5, "clock_offset_s": 2.0}


def test_a_worker_was_last_seen_when_the_last_byte_came_from_it(setting: Setting) -> None:
    worker = setting.join()
    setting.clock += 5.0
    setting.hear(worker)
    heard_at = setting.clock
    setting.clock += 3.0
    assert setting.board.workers()[0].last_seen == instant(SINCE_1970 + heard_at)


@pytest.mark.parametrize("state", ["left", "lost"])
def test_who_has_gone_stays_on_the_board_as_it_was_last_seen(setting: Setting, state: Any) -> None:
    worker = setting.join()
    setting.apply(worker, 64, step=3)
    setting.clock += 2.0
    seen = setting.board.workers()[0]
    setting.board.departed(worker, state)
    setting.clock += 100.0
    setting.hear(worker)  # its connection is nobody's business any more
    expected = seen.model_copy(update={"state": state, "samples_per_s": 0.0})
    assert setting.board.workers() == [expected]


def test_who_comes_back_takes_its_old_place_and_keeps_what_it_did(setting: Setting) -> None:
    old = setting.join()
    setting.apply(old, 64, step=3)
    setting.board.departed(old, "lost")
    setting.clock += 60.0
    setting.join(node="win", device="mps")
    (back,) = setting.board.workers()
    assert (back.state, back.node, back.device) == ("joined", "win", "mps")
    assert (back.step, back.samples, back.samples_per_s) == (3, 64, 0.0)
    assert back.last_seen == instant(SINCE_1970 + setting.clock)


def test_a_setting_of_the_wall_clock_does_not_make_a_worker_silent() -> None:
    wall = [SINCE_1970]
    board = StatusBoard(Tally.empty(), now=lambda: wall[0], clock=lambda: 1000.0)
    worker = Setting().worker()
    board.joined(worker, "cpu")
    wall[0] += 3600.0
    assert board.workers()[0].last_seen == instant(wall[0])


class Counter:
    """A clock and a count that the test moves."""

    def __init__(self) -> None:
        self.now, self.count = 0.0, 0
        self.pace = SteadyRate(lambda: self.count, lambda: self.now)

    def after(self, seconds: float, count: int) -> float:
        self.now += seconds
        self.count += count
        return self.pace()


def test_a_pace_of_the_first_window_is_that_of_all_so_far() -> None:
    counter = Counter()
    assert counter.pace() == 0.0
    assert counter.after(2.0, 10) == 5.0
    assert counter.after(2.0, 30) == 10.0


def test_a_pace_follows_within_a_window() -> None:
    counter = Counter()
    counter.after(PACE_WINDOW_S, 100)
    assert counter.after(1.0, 1000) == 100 / PACE_WINDOW_S, "not yet"
    assert counter.after(PACE_WINDOW_S - 1.0, 0) == 1000 / PACE_WINDOW_S


def test_a_pace_is_steady_between_rare_steps_and_fades_when_none_comes() -> None:
    counter = Counter()
    counter.after(30.0, 60)
    for _ in range(29):
        assert counter.after(1.0, 0) == 2.0
    assert counter.after(1.0, 60) == 2.0
    assert counter.after(60.0, 0) == 1.0
    assert counter.after(540.0, 0) == 0.1
