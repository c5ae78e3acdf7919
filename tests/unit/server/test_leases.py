"""Leases: every sample of every epoch exactly once, whoever loses, repeats or delays a lease."""

import sys

import pytest
import torch

from smolcluster.server.leases import Dispatcher, Lease

A, B = 1, 2


def dispatcher(
    num_samples: int = 10, num_epochs: int = 2, batch_size: int = 4, floor_s: float = 30.0
) -> Dispatcher:
    return Dispatcher(
        incarnation="here",
        num_samples=num_samples,
        total_samples=num_epochs * num_samples,
        batch_size=batch_size,
        permutation=lambda epoch: (
            (torch.arange(num_samples, dtype=torch.int32) + epoch) % num_samples
        ),
        floor_s=floor_s,
    )


def must(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def test_one_holder_gets_every_epoch_in_order() -> None:
    leases = dispatcher()
    seen = []
    while (lease := leases.grant(A, now=0.0)) is not None:
        leases.commit(lease.key, A, now=1.0)
        seen.append((lease.key.epoch, lease.indices.tolist()))
    assert seen == [
        (0, [0, 1, 2, 3]),
        (0, [4, 5, 6, 7]),
        (0, [8, 9]),
        (1, [1, 2, 3, 4]),
        (1, [5, 6, 7, 8]),
        (1, [9, 0]),
    ]
    assert leases.done
    assert leases.samples_applied == leases.total_samples == 20


def test_the_next_epoch_begins_while_the_last_one_is_open() -> None:
    leases = dispatcher(batch_size=10)
    first = must(leases.grant(A, now=0.0))
    second = must(leases.grant(B, now=0.0))
    assert (first.key.epoch, second.key.epoch) == (0, 1)
    leases.commit(second.key, B, now=1.0)
    resumed = dispatcher(batch_size=10)
    resumed.resume(leases.state, leases.samples_applied)
    assert leases.epoch == resumed.epoch == 0


def test_a_lost_holders_leases_go_to_others_first() -> None:
    leases = dispatcher()
    lost = must(leases.grant(A, now=0.0))
    assert [returned.holder for returned in leases.release_all(A)] == [A]
    again = must(leases.grant(B, now=1.0))
    assert again.indices.tolist() == lost.indices.tolist()
    assert again.key.grant != lost.key.grant
    assert leases.judge(lost.key, A) == "late"
    leases.commit(again.key, B, now=2.0)
    assert leases.judge(lost.key, A) == "duplicate"


def test_one_lease_goes_back_alone() -> None:
    leases = dispatcher()
    first, second = (must(leases.grant(A, now=0.0)) for _ in range(2))
    assert leases.release(first.key, B) == []
    assert leases.release(first.key, A) == [first]
    assert (leases.judge(first.key, A), leases.judge(second.key, A)) == ("late", "open")


def test_a_lease_counts_only_for_its_holder_and_this_incarnation() -> None:
    leases = dispatcher()
    lease = must(leases.grant(A, now=0.0))
    assert leases.judge(lease.key, A) == "open"
    assert leases.judge(lease.key, B) == "late"
    other = lease.key.model_copy(update={"incarnation": "before"})
    assert leases.judge(other, A) == "late"
    invented = lease.key.model_copy(update={"epoch": 7})
    assert leases.judge(invented, A) == "late"
    with pytest.raises(ValueError, match="not open"):
        leases.commit(lease.key, B, now=0.0)


def test_the_time_of_a_lease_begins_when_it_is_sent() -> None:
    """Its data may take long to load, which is no fault of its holder."""
    leases = dispatcher()
    lease = must(leases.grant(A, now=0.0, is_sent=False))
    assert leases.expire(now=1000.0) == []
    assert leases.sent(lease.key, A, now=1000.0)
    assert leases.expire(now=1029.9) == []
    (returned,) = leases.expire(now=1030.0)
    assert returned.key == lease.key
    assert not leases.sent(lease.key, A, now=1031.0), "it is no longer A's"


def test_loading_is_not_counted_among_what_a_holder_needs() -> None:
    leases = dispatcher(num_epochs=9)
    for start in range(0, 5000, 1000):
        lease = must(leases.grant(A, now=start, is_sent=False))
        leases.sent(lease.key, A, now=start + 900)
        leases.commit(lease.key, A, now=start + 902)
    lease = must(leases.grant(A, now=6000.0))
    assert lease.deadline == 6030.0, "4 x 2 s are less than the floor"


def test_the_time_in_which_nobody_was_heard_is_not_a_holders() -> None:
    leases = dispatcher(num_samples=8, num_epochs=1)
    leases.grant(A, now=0.0)
    late = must(leases.grant(A, now=0.0, is_sent=False))
    leases.sent(late.key, A, now=25.0)
    leases.was_away(20.0, now=40.0)
    assert leases.expire(now=49.9) == []
    assert len(leases.expire(now=50.0)) == 1
    assert leases.expire(now=69.9) == [], "it was sent meanwhile, and 15 s of these were its own"
    assert len(leases.expire(now=70.0)) == 1


def test_an_expired_lease_goes_back_and_its_holder_gets_twice_the_time() -> None:
    leases = dispatcher(floor_s=30.0)
    slow = must(leases.grant(A, now=0.0))
    assert leases.expire(now=29.9) == []
    assert [returned.range.start for returned in leases.expire(now=30.0)] == [0]
    assert leases.judge(slow.key, A) == "late"
    assert must(leases.grant(A, now=30.0)).deadline == pytest.approx(90.0)


def test_a_lease_lasts_as_long_as_its_holder_usually_needs() -> None:
    leases = dispatcher(num_samples=100, floor_s=30.0)
    leases.expect(A, lease_s=100.0)
    assert must(leases.grant(A, now=0.0)).deadline == pytest.approx(400.0)


def test_an_idle_holder_gets_a_copy_of_an_overdue_lease_and_the_first_commit_wins() -> None:
    leases = dispatcher(num_epochs=1, batch_size=10)
    leases.expect(A, lease_s=5.0)
    leases.expect(B, lease_s=6.0)
    original = must(leases.grant(A, now=0.0))
    assert leases.grant(B, now=9.9) is None
    copy = must(leases.grant(B, now=10.0))
    assert copy.indices.tolist() == original.indices.tolist()
    assert leases.grant(B, now=11.0) is None
    assert leases.grant(3, now=19.9) is None, "the second one has just begun"
    assert leases.grant(3, now=99.0) is not None, "who hangs does not count"
    leases.commit(copy.key, B, now=12.0)
    assert leases.judge(original.key, A) == "duplicate"
    assert leases.done


def test_a_claim_is_believed_only_until_something_was_measured() -> None:
    leases = dispatcher(num_samples=12, num_epochs=1)
    leases.expect(A, lease_s=600.0)
    slow = must(leases.grant(A, now=0.0))
    assert slow.deadline == pytest.approx(2400.0)
    quick = must(leases.grant(B, now=0.0))
    leases.commit(quick.key, B, now=2.0)
    assert leases.expire(now=79.9) == []
    assert [returned.range.start for returned in leases.expire(now=80.0)] == [0], "4 x 10 x 2 s"


def test_the_end_waits_for_a_straggler_no_longer_than_another_one_needs() -> None:
    leases = dispatcher(num_samples=12, num_epochs=1)
    leases.expect(A, lease_s=600.0)
    straggler = must(leases.grant(A, now=0.0))
    for start in (0.0, 2.0):
        leases.commit(must(leases.grant(B, now=start)).key, B, now=start + 2.0)
    copy = must(leases.grant(B, now=4.0))
    assert (copy.indices.tolist(), copy.copied_from) == (straggler.indices.tolist(), A)
    leases.commit(copy.key, B, now=6.0)
    assert leases.done


def test_a_holder_that_was_measured_to_be_slow_has_the_time_it_needs() -> None:
    leases = dispatcher(num_samples=100, num_epochs=1)
    for holder, took_s in ((A, 300.0), (B, 1.0), (B, 1.0)):
        leases.commit(must(leases.grant(holder, now=0.0)).key, holder, now=took_s)
    assert must(leases.grant(A, now=0.0)).deadline == pytest.approx(1200.0)


def test_a_lease_with_a_copy_goes_back_only_when_both_holders_are_gone() -> None:
    leases = dispatcher(num_epochs=1, batch_size=10)
    must(leases.grant(A, now=0.0))
    must(leases.grant(B, now=0.0))
    leases.release_all(A)
    assert [returned.holder for returned in leases.release_all(B)] == [B]
    assert must(leases.grant(3, now=1.0)).key.start == 0


def test_the_last_batch_of_an_old_epoch_is_a_duplicate_after_the_epoch_is_forgotten() -> None:
    leases = dispatcher(num_epochs=3, batch_size=10)
    first = must(leases.grant(A, now=0.0))
    leases.commit(first.key, A, now=0.0)
    second = must(leases.grant(A, now=0.0))
    leases.commit(second.key, A, now=0.0)
    must(leases.grant(A, now=0.0))
    assert leases.judge(first.key, A) == "duplicate"


def num_calls_of_a_push(num_open: int) -> int:
    """To commit it and to know the epoch, at the edge of two with so many leases each open."""
    leases = dispatcher(num_samples=num_open, batch_size=1)
    *_, newest = (must(leases.grant(A, now=0.0)) for _ in range(2 * num_open))
    num_calls = 0

    def note(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(note)
    try:
        leases.commit(newest.key, A, now=1.0)
        epoch = leases.epoch
    finally:
        sys.setprofile(None)
    assert epoch == 0
    return num_calls


def test_a_push_costs_the_same_however_many_leases_are_open() -> None:
    assert num_calls_of_a_push(10) == num_calls_of_a_push(1000)
