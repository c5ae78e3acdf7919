"""The matrix's checks find the bugs that they are there for: each is planted once, and must fail a check."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from faults.cases import (
    HOLD_AT,
    Algorithm,
    Case,
    Reference,
    check_applied_once,
    check_everybody_ended_well,
    check_same_result,
    check_traces,
    play,
)
from faults.proxy import Fault
from harness import places_applied
from smolcluster.algorithms.DiLoCo.config import Mode
from smolcluster.algorithms.EDP.worker import Worker as EDPWorker
from smolcluster.algorithms.leasing import LeasingServer
from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.errors import ConnectTimeout
from smolcluster.server.joining import Follower
from smolcluster.server.leases import Dispatcher, Lease, Verdict
from smolcluster.training.build import TrainingContext
from smolcluster.training.compute import BatchLoss
from smolcluster.wire import connection
from smolcluster.wire.frames import Frame
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import LeaseKey, Push, Welcome

HURRIED_S = 1.0
"""How long a run waits for what will not come, seconds."""


class Repeating(EDPWorker):
    """Sends its first push a second time, whole, when it has been acknowledged."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        super().__init__(welcome, training)
        self.copies: list[Frame] = []
        self.repeated: LeaseKey | None = None

    def frames(
        self, lease: LeaseKey, base_version: int, loss: BatchLoss, compute_s: float
    ) -> list[Frame]:
        frames = super().frames(lease, base_version, loss, compute_s)
        if self.repeated is None:
            self.repeated, self.copies = lease, frames
        return frames

    def handle(self, event: Event) -> None:
        super().handle(event)
        if self.copies and self.unacknowledged is None:
            self.unacknowledged = self.repeated
            for frame in self.copies:
                self.link.send_frame(frame)
            self.copies = []


def test_a_push_that_comes_twice_counts_once(tmp_path: Path, reference: Reference) -> None:
    played = play("edp", tmp_path, make=Repeating)
    check_everybody_ended_well(played)
    check_applied_once(played)
    check_same_result(played, reference("edp"))
    assert played.summary.pushes.duplicate >= 1


def test_a_push_that_counts_twice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, commit = Dispatcher.judge, Dispatcher.commit

    def lenient(self: Dispatcher, key: LeaseKey, holder: int) -> Verdict:
        verdict = judge(self, key, holder)
        return "open" if verdict == "duplicate" else verdict

    def commit_once(self: Dispatcher, key: LeaseKey, holder: int, now: float) -> None:
        if judge(self, key, holder) != "duplicate":
            commit(self, key, holder, now)

    monkeypatch.setattr(Dispatcher, "judge", lenient)
    monkeypatch.setattr(Dispatcher, "commit", commit_once)
    played = play("edp", tmp_path, make=Repeating)
    check_everybody_ended_well(played)
    with pytest.raises(AssertionError):
        check_applied_once(played)
    applied = places_applied(played.cluster.metrics.records)
    assert any(2 in counts.values() for counts in applied.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "mode"), [("edp", "sync"), ("diloco", "sync"), ("diloco", "async")]
)
def test_a_run_that_learns_nothing_more_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: Reference,
    algorithm: Algorithm,
    mode: Mode,
) -> None:
    expected = reference(algorithm, mode)
    rate_after = LeasingServer.rate_after
    monkeypatch.setattr(
        LeasingServer,
        "rate_after",
        lambda it, num: rate_after(it, num) if it.version < HOLD_AT else 0.0,
    )
    played = play(algorithm, tmp_path, mode=mode)
    check_everybody_ended_well(played)
    check_applied_once(played)
    with pytest.raises(AssertionError):
        check_same_result(played, expected)


@pytest.mark.nightly
def test_a_lease_that_is_taken_for_applied_when_it_returns_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_all = Dispatcher.release_all

    def forgetful(self: Dispatcher, holder: int) -> list[Lease]:
        returned = release_all(self, holder)
        for each in returned:
            self._waiting.remove(each.range)
            self.samples_applied += each.range.num_samples
        return returned

    monkeypatch.setattr(Dispatcher, "release_all", forgetful)
    played = play("edp", tmp_path, Case("edp", "payload", Fault.RESET))
    check_everybody_ended_well(played)
    with pytest.raises(AssertionError):
        check_applied_once(played)


@pytest.mark.nightly
def test_a_bucket_that_is_added_twice_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    expected = reference("syncps")
    add = Reduction.add
    planted: list[int] = []

    def add_twice(
        self: Reduction, session_id: int, push: Push, gradient: Tensor, largest: float
    ) -> bool:
        if push.base_version == 3 and push.bucket == 2 and not planted:
            planted.append(session_id)
            gradient = gradient + gradient
        return add(self, session_id, push, gradient, largest)

    monkeypatch.setattr(Reduction, "add", add_twice)
    played = play("syncps", tmp_path)
    check_everybody_ended_well(played)
    assert planted
    assert played.losses[:4] == pytest.approx(expected.losses[:4], rel=1e-6), "not yet"
    with pytest.raises(AssertionError):
        check_same_result(played, expected)


def test_a_payload_that_is_not_verified_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    expected = reference("syncps")
    monkeypatch.setattr(connection, "check_payload", lambda *_: None)
    case = Case("syncps", "payload", Fault.CORRUPT)
    played = play("syncps", tmp_path, case, patience_s=HURRIED_S)
    check_everybody_ended_well(played)
    with pytest.raises(AssertionError):
        check_same_result(played, expected)
    with pytest.raises(AssertionError, match="nobody was lost"):
        check_traces(case, played)


@pytest.mark.nightly
def test_a_worker_that_does_not_come_back_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: set[str] = set()

    join = Follower.join

    def join_once(follower: Follower, *args: Any) -> object:
        instance = follower.hello.instance
        if instance in known:
            raise ConnectTimeout("it does not try again")
        known.add(instance)
        return join(follower, *args)

    monkeypatch.setattr(Follower, "join", join_once)
    case = Case("edp", "payload", Fault.RESET)
    played = play("edp", tmp_path, case, patience_s=HURRIED_S)
    check_applied_once(played)
    with pytest.raises(AssertionError, match="does not try again"):
        check_everybody_ended_well(played)
    with pytest.raises(AssertionError, match="never came back"):
        check_traces(case, played)


@pytest.mark.nightly
def test_a_loss_where_nobody_may_be_lost_is_found(tmp_path: Path) -> None:
    played = play("edp", tmp_path, Case("edp", "payload", Fault.RESET))
    check_traces(Case("edp", "payload", Fault.RESET), played)
    with pytest.raises(AssertionError):
        check_traces(Case("edp", "payload", Fault.DELAY), played)
