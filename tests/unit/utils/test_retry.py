import itertools
import math
import random

import pytest

from smolcluster.utils.retry import Deadline, backoff_delays
from waiting import Clock


def test_a_deadline_counts_down_to_zero_and_stays_there() -> None:
    clock = Clock(100.0)
    deadline = Deadline(5.0, clock)
    clock.now += 3.0
    assert (deadline.remaining(), deadline.expired) == (2.0, False)
    clock.now += 2.0
    assert (deadline.remaining(), deadline.expired) == (0.0, True)
    clock.now += 10.0
    assert deadline.remaining() == 0.0
    assert Deadline(0.0, clock).expired
    endless = Deadline(math.inf, clock)
    clock.now += 1e12
    assert endless.remaining() == math.inf


def test_delays_double_up_to_the_cap_and_never_end() -> None:
    delays = itertools.islice(backoff_delays(first_s=0.1, cap_s=0.5), 6)
    assert list(delays) == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5, 0.5])
    assert next(backoff_delays(first_s=3.0, cap_s=1.0)) == 1.0


def test_jitter_spreads_each_delay_over_its_upper_half() -> None:
    plain = backoff_delays()
    spread = backoff_delays(jitter=random.Random(7))  # noqa: S311
    pairs = list(itertools.islice(zip(plain, spread, strict=False), 200))
    assert all(delay / 2 <= jittered <= delay for delay, jittered in pairs)
    assert len({jittered for _, jittered in pairs}) == 200
