"""Often at first, rarely later."""

from smolcluster.utils.cadence import Cadence


def test_often_at_first_and_rarely_later() -> None:
    now = [0.0]
    cadence = Cadence(3, 10.0, lambda: now[0])
    taken = []
    for _ in range(40):
        now[0] += 1.0
        assert cadence.is_due == cadence.is_due
        if cadence.take():
            taken.append(now[0])
    assert taken == [1.0, 2.0, 3.0, 13.0, 23.0, 33.0]


def test_asking_is_not_taking() -> None:
    cadence = Cadence(0, 10.0, lambda: 5.0)
    assert [cadence.is_due for _ in range(3)] == [True, True, True]
    assert [cadence.take() for _ in range(3)] == [True, False, False]
    assert [cadence.is_due for _ in range(2)] == [False, False]
