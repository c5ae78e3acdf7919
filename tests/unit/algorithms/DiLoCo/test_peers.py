"""What the server makes of a worker's times: who is slow, who is late, and who is only far away."""

from types import SimpleNamespace

import pytest

from smolcluster.algorithms.DiLoCo.peers import LEAST_PATIENCE_S, Peer, share_of
from smolcluster.algorithms.DiLoCo.rounds import MOST_STEP_S
from smolcluster.algorithms.shares import Cost, shared_out
from smolcluster.wire.messages import LeaseKey

STEP_S = 1.0


def key(number: int) -> LeaseKey:
    return LeaseKey(incarnation="a", epoch=0, start=number, stop=number + 1, grant=number)


def peer_with(num_batches: int) -> Peer:
    """A worker that has joined at 0, and was given so many batches then."""
    session = SimpleNamespace(num_gone=num_batches)
    worker = SimpleNamespace(live_session=session, gauge=SimpleNamespace(received_bytes=0))
    peer = Peer(STEP_S, worker=worker, stepped_at=0.0, progressed_at=0.0, num_gone=num_batches)  # type: ignore[arg-type]
    for number in range(num_batches):
        peer.gets(key(number), 0.0)
    return peer


def is_late(peer: Peer, now: float, *, owes_change: bool = False) -> bool:
    return peer.is_late(now, owes_change=owes_change, grace=None)


def cost(peer: Peer, now: float) -> Cost:
    return peer.cost(now, is_streaming=False)


def test_who_freezes_with_batches_in_hand_is_late_whether_asked_or_not() -> None:
    assert not is_late(peer_with(2), LEAST_PATIENCE_S - 1)
    assert is_late(peer_with(2), LEAST_PATIENCE_S)
    assert is_late(peer_with(0), LEAST_PATIENCE_S, owes_change=True)


def test_who_has_nothing_to_do_is_never_late() -> None:
    assert not is_late(peer_with(0), 1e6)


def test_what_is_still_being_sent_or_loaded_is_not_expected_yet() -> None:
    peer = peer_with(2)
    for now in range(0, 1000, 20):
        peer.worker.live_session.num_gone += 1
        assert not is_late(peer, float(now))
    peer.outbox.place()
    assert not is_late(peer, 5000.0)
    peer.outbox.clear()
    assert is_late(peer, 5000.0 + LEAST_PATIENCE_S)


def test_who_still_receives_weights_from_other_hosts_is_not_late() -> None:
    peer = peer_with(2)
    for now in range(0, 1000, 20):
        assert not is_late(peer, float(now))
        peer.worker.gauge.received_bytes += 100_000
    heartbeats = range(0, 60, 5)
    assert not is_late(peer, 1000.0)
    for each in heartbeats:
        peer.worker.gauge.received_bytes += 500
        assert is_late(peer, 1000.0 + each) == (each >= LEAST_PATIENCE_S)


def test_a_change_that_comes_slowly_is_not_late() -> None:
    peer = peer_with(0)
    assert not is_late(peer, 0.0)
    for now in range(20, 1000, 20):
        peer.progressed_at = float(now)
        assert not is_late(peer, float(now), owes_change=True)
    assert is_late(peer, 980.0 + LEAST_PATIENCE_S, owes_change=True)


def test_grace_is_beyond_what_is_expected() -> None:
    peer = peer_with(2)
    assert not peer.is_late(STEP_S + 4.9, owes_change=False, grace=5.0)
    assert peer.is_late(STEP_S + 5.0, owes_change=False, grace=5.0)


def test_who_has_half_of_a_batch_behind_it_is_done_that_much_sooner() -> None:
    assert cost(peer_with(2), 0.5 * STEP_S).fixed_s == pytest.approx(2 * STEP_S)


def test_who_is_silent_loses_its_share_of_the_round() -> None:
    frozen, other = peer_with(2), peer_with(0)
    at_once = shared_out(8, {0: cost(frozen, 0.0), 1: cost(other, 0.0)})
    assert at_once[0] == 3
    later = shared_out(8, {0: cost(frozen, 20.0), 1: cost(other, 20.0)})
    assert later[0] == 0


@pytest.mark.parametrize(
    ("claimed_s", "least", "most"), [(1e-6, 8.0, 10.1), (1e9, 1e5, MOST_STEP_S)]
)
def test_a_step_is_as_slow_as_it_says_or_as_it_is_seen_to_be(
    claimed_s: float, least: float, most: float
) -> None:
    peer = peer_with(20)
    for number in range(19):
        peer.unanswered.discard(key(number))
        peer.stepped(claimed_s, 10.0 * (number + 1))
    assert least < peer.step_s <= most


def test_one_long_step_says_nothing_of_the_next_ones_and_several_do() -> None:
    peer = peer_with(20)
    for number, took_s in enumerate([1.0, 1.0, 60.0, 1.0, 1.0]):
        peer.unanswered.discard(key(number))
        peer.stepped(took_s, 0.0)
    assert peer.step_s == pytest.approx(1.0)
    for _ in range(5, 15):
        peer.stepped(60.0, 0.0)
    assert peer.step_s > 50.0


def test_who_was_too_slow_is_tried_again_after_16_32_and_64_rounds() -> None:
    peer, tried = peer_with(1), []
    peer.begin()
    for number in range(1, 129):
        peer.begin()
        if peer.is_tried_again:
            tried.append(number)
    assert tried == [16, 32, 64, 128]
    peer.step_s = 1000.0
    peer.recent_s.extend([1000.0] * 3)
    peer.gets(key(1), 0.0)
    assert not peer.is_tried_again
    peer.stepped(2.0, 2.0)
    assert peer.step_s == pytest.approx(2.0)


def test_how_long_a_change_is_on_its_way_counts_from_the_last_step_that_it_holds() -> None:
    peer = peer_with(2)
    peer.asked(0, 10.0, waits=True)
    peer.gets(key(7), 10.5)  # it is not of this change
    for now in (11.0, 12.0, 13.0):
        peer.stepped(1.0, now)
    peer.answered(0, 14.5)
    assert peer.on_way_s == {0: 2.5}
    idle = peer_with(0)
    idle.asked(1, 10.0, waits=True)
    idle.answered(1, 11.0)
    assert idle.on_way_s == {1: 1.0}


def test_an_upload_that_is_hidden_gives_nobody_less_to_compute() -> None:
    far = peer_with(0)
    far.upload_s = 5.0
    assert far.cost(0.0, is_streaming=False).fixed_s == 5.0
    assert far.cost(0.0, is_streaming=True).fixed_s == 0.0


def test_shares_are_by_loss_terms_a_second_and_come_to_one() -> None:
    fast, slow, new = peer_with(0), peer_with(0), peer_with(0)
    fast.step_s, fast.step_terms, slow.step_terms = STEP_S / 4, 10.0, 20.0
    assert share_of(fast, []) == 1.0
    assert share_of(fast, [slow]) == pytest.approx(40 / 60)
    assert share_of(slow, [fast]) == pytest.approx(20 / 60)
    assert share_of(fast, [new]) == pytest.approx(40 / 50), (
        "who has sent nothing has terms like others"
    )
    slow.step_terms = 0.0
    assert share_of(slow, [fast]) == 0.0
