"""Which buckets of which pushes count at a store, and what the server's links make of a silent one."""

import logging
import time

import pytest

from harness import local_settings
from smolcluster.algorithms.SynchronousPS.reducing_links import ReducingLinks
from smolcluster.algorithms.SynchronousPS.reducing_slice import SliceStep
from smolcluster.algorithms.SynchronousPS.reduction import Reduction
from smolcluster.net.inbox import MessageReceived
from smolcluster.ps.store_links import Patience
from smolcluster.transport.messages import LeaseKey, OpenStep, Push, TensorSpec
from unit.ps.test_store_links import LISTENING, NODES, new_replica, open_session

SPAN = range(2, 4)
OPENED = OpenStep(attempt=5, version=8, epoch=1, start=64, sizes=(16, 32))


def push(grant: int, bucket: int, start: int = 64, stop: int = 80, base_version: int = 7) -> Push:
    lease = LeaseKey(incarnation="here", epoch=1, start=start, stop=stop, grant=grant)
    return Push(
        lease=lease,
        base_version=base_version,
        bucket=bucket,
        num_buckets=4,
        num_samples=stop - start,
        num_terms=stop - start,
        loss=1.0,
        compute_s=0.1,
        tensor=TensorSpec(codec="fp32", dtype="float32", shape=(4,), nbytes=16),
    )


def test_the_next_missing_bucket_counts_from_whoever_brings_it_first() -> None:
    step = SliceStep(OPENED, SPAN)
    assert step.claim(1, push(1, 2)) is not None
    assert step.claim(2, push(2, 2)) is None
    assert step.claim(2, push(2, 3)) is not None
    assert step.claim(1, push(1, 3)) is None
    assert step.counted(push(1, 2).lease) == (1, True)
    assert step.counted(push(2, 2).lease) == (1, True)
    other = push(3, 2, 80, 112)
    assert step.counted(other.lease) == (0, False)


@pytest.mark.parametrize(
    "stray", [push(1, 2, base_version=6), push(1, 2, 64, 81), push(1, 3), push(1, 0)]
)
def test_what_is_of_no_part_of_the_step_does_not_count(stray: Push) -> None:
    assert SliceStep(OPENED, SPAN).claim(1, stray) is None


def test_a_store_that_owes_means_and_says_nothing_is_cut() -> None:
    replica = new_replica()
    links = ReducingLinks(
        replica,
        NODES,
        reduction=Reduction(replica, "fp32"),
        run=local_settings(algorithm="syncps").run_config("test-run", "syncps"),
        codec="fp32",
        incarnation="here",
        patience=Patience(start_s=10.0, lost_s=60.0),
        log=logging.getLogger("test"),
    )
    win, pi5 = (open_session(links, node, 1 + n) for n, node in enumerate(NODES[1:]))
    for each in (win, pi5):
        links.handle(MessageReceived(each.session_id, LISTENING))
    all_of_win = set(range(3, 6))
    assert links.others == {"win": 3, "pi5": 4}
    now = time.monotonic()
    links.cut_silent(all_of_win, now, now + 59.0)
    assert not pi5.is_cut
    links.cut_silent(all_of_win, now, now + 61.0)
    assert pi5.reason == "it does not send the means of its buckets"
    assert not win.is_cut
