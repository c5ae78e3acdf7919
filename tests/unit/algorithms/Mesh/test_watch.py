"""Who of a mesh is named when it ends: by all ranks' beats, and by what they tell each other."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from smolcluster.algorithms.Mesh import watch as watching
from smolcluster.algorithms.Mesh.watch import SETUP_S, Beat, Failure, Judge, Watch
from smolcluster.errors import DataError, PeerLost
from waiting import DEADLINE_S, eventually

LOG = logging.Logger("test")
LOST = Failure(0, "pi5", "its connection to another rank is lost")


def beat(number: int, num_done: int, doing: str = "F0 of stage 0", *, waits: bool = False) -> Beat:
    return Beat(number, num_done, doing, waits, "pi5")


def judge() -> Judge:
    return Judge(silence_s=60, hang_timeout_s=300, now=0, remedy="; raise it")


def test_a_mesh_that_gets_on_is_left_alone() -> None:
    judging = judge()
    for second in range(1000):
        beats = {rank: beat(second, second // 200, waits=rank > 0) for rank in range(3)}
        assert judging.judge(beats, second, None) is None


@pytest.mark.parametrize(("is_lost", "after"), [(False, 60), (True, 5)])
def test_a_rank_that_says_nothing_is_named(is_lost: bool, after: int) -> None:
    judging, found = judge(), None
    for second in range(100):
        beats = {0: beat(second, second), 1: beat(min(second, 10), 3, "W2 of stage 1")}
        found = judging.judge(beats, second, LOST if is_lost and second >= 10 else None)
        if found is not None:
            assert second == 10 + after + 1
            break
    assert found is not None
    assert (found.rank, found.host) == (1, "pi5")
    assert "W2 of stage 1" in found.reason


def test_a_connection_that_breaks_between_ranks_that_live_is_named() -> None:
    judging = judge()
    for second in range(100):
        beats = {rank: beat(second, 3) for rank in range(2)}
        found = judging.judge(beats, second, LOST if second >= 10 else None)
        if found is not None:
            break
    assert found is not None
    assert (found.rank, found.host, second) == (0, "pi5", 10 + 5 + 1)
    assert found.reason.startswith(LOST.reason) and "network" in found.reason


def test_of_a_mesh_that_hangs_the_rank_is_named_that_waits_for_nobody() -> None:
    judging, found = judge(), None
    for second in range(400):
        beats = {
            0: beat(second, min(second, 20), "receiving", waits=True),
            1: beat(second, min(second, 22), "F3 of stage 1"),
            2: beat(second, min(second, 21), "receiving", waits=True),
        }
        if (found := judging.judge(beats, second, None)) is not None:
            break
    assert found is not None
    assert (second, found.rank) == (22 + 301, 1)
    assert all(f"rank {rank}: " in found.reason for rank in range(3))
    assert found.reason.endswith("; raise it")


def test_a_silence_that_is_hardly_longer_than_a_beat_is_one() -> None:
    limit = 1.5 * watching.BEAT_S
    judging, found = Judge(silence_s=limit, hang_timeout_s=limit, now=0), None
    for number in range(1, 20):
        beats = {0: beat(number, number), 1: beat(min(number, 10), 3)}
        found = found or judging.judge(beats, 1.01 * watching.BEAT_S * number, None)
    assert found is not None and found.rank == 1


def test_where_no_rank_gets_on_one_that_says_nothing_is_named_first() -> None:
    judging, found, second = Judge(silence_s=30, hang_timeout_s=30, now=0), None, 0
    while found is None:
        second += 1
        beats = {
            0: beat(second, min(second, 20)),
            1: beat(min(second, 22), min(second, 20), "receiving", waits=True),
        }
        found = judging.judge(beats, second, None)
    assert (second, found.rank) == (20 + 31, 1)
    assert "nothing was heard of it" in found.reason


def test_steps_that_take_long_are_no_hang() -> None:
    judging = judge()
    for second in range(
        0, 9000, 10
    ):  # each step takes as long as the first one, or four times that
        beats = {
            0: beat(second, 1 + second // 250 if second < 2000 else 9 + (second - 2000) // 1000)
        }
        assert judging.judge(beats, second, None) is None


@pytest.mark.parametrize(("took_s", "after_s"), [(2.0, 30), (10.0, 100), (100.0, 300)])
def test_an_order_that_was_done_before_hangs_by_what_it_took(took_s: float, after_s: int) -> None:
    judging, of_another = judge(), judge()
    for each in (judging, of_another):
        each.done("compute", took_s)
        each.done("compute", 1.0)
    judging.ordered("compute")
    of_another.ordered("read")
    for each, allowed_s in ((judging, after_s), (of_another, 300)):
        named = [each.judge({0: beat(s, 1)}, s, None) is not None for s in range(400)]
        assert named.index(True) == allowed_s + 1


def test_before_the_first_step_a_dataset_may_be_downloaded() -> None:
    judging = judge()
    seconds = range(0, int(SETUP_S) + 20, 10)
    named = [judging.judge({0: beat(s, 0)}, s, None) is not None for s in seconds]
    assert named.index(True) * 10 > SETUP_S


def test_what_it_takes_to_begin_is_no_measure_of_a_step() -> None:
    judging = judge()
    seconds = range(0, 600, 10)
    named = [judging.judge({0: beat(s, int(s >= 200))}, s, None) is not None for s in seconds]
    assert named.index(True) * 10 == 200 + 300 + 10


def test_who_was_stopped_himself_judges_nobody() -> None:
    judging = judge()
    assert judging.judge({0: beat(1, 1), 1: beat(1, 1)}, 0, None) is None
    assert judging.judge({0: beat(2, 1), 1: beat(1, 1)}, 1000, None) is None


class Memory:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.answers = threading.Event()
        self.answers.set()
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        self.answers.wait(DEADLINE_S)
        with self._lock:
            self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        assert expected == ""
        with self._lock:
            return self.values.setdefault(key, desired.encode())


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BEAT_S", 0.02)
    monkeypatch.setattr(watching, "END_S", {True: 0.1, False: 0.1})


@contextmanager
def watches(
    store: Any,
    *ranks: int,
    hang_timeout_s: float = DEADLINE_S,
    look: Callable[[], Failure | None] = lambda: None,
    log: logging.Logger = LOG,
) -> Iterator[tuple[list[Watch], list[Failure], list[int]]]:
    """Watches of these ranks, the failures that they report, and the exit codes by which they leave."""
    told: list[Failure] = []
    left: list[int] = []
    made = [
        Watch(
            *(store, rank, 2, log),
            node="a",
            hang_timeout_s=hang_timeout_s,
            look=look,
            on_failure=told.append,
            leave=left.append,
        )
        for rank in ranks
    ]
    try:
        yield made, told, left
    finally:
        for each in made:
            each.close()


def test_the_first_error_is_what_others_say_when_they_lose_a_connection() -> None:
    store = Memory()
    with watches(store, 0, 1) as (made, told, _):
        with pytest.raises(DataError), made[1].watched():
            raise DataError("train.bin is damaged")
        named = r"rank 1 on .* failed first: train.bin is damaged"
        with pytest.raises(PeerLost, match=named), made[0].watched():
            raise PeerLost("connection reset")
    assert {failure.rank for failure in told} == {1}
    assert "in test_the_first_error" in json.loads(store.values["failed"])["stack"]


def test_each_rank_has_stacks_in_its_log_once_but_of_an_error_of_its_own() -> None:
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(vars(record))

    records, log = list[dict[str, Any]](), logging.Logger("test")
    log.addHandler(Kept())
    with watches(Memory(), 0, 1, log=log) as (made, told, _):
        with pytest.raises(DataError), made[1].watched():
            raise DataError("train.bin is damaged")
        eventually(lambda: len(told) == 2)
    assert ["in test_each_rank" in each["stack"] for each in records if "stack" in each] == [True]
    records.clear()
    with watches(Memory(), 0, look=lambda: Failure(1, "a", "it is gone"), log=log) as (_, told, _):
        eventually(lambda: told)
    assert ["eventually" in each["stacks"] for each in records if "stacks" in each] == [True]


def test_an_error_reaches_others_however_late_the_store_answers() -> None:
    asked, answers = threading.Event(), threading.Event()

    class Slow(Memory):
        def check(self, keys: list[str], /) -> bool:
            asked.set()
            answers.wait(DEADLINE_S)
            return super().check(keys)

    store = Slow()
    with watches(store, 1) as (made, _, _):
        assert asked.wait(DEADLINE_S)
        with pytest.raises(DataError), made[0].watched():
            raise DataError("train.bin is damaged")
        answers.set()
        eventually(lambda: "failed" in store.values)


def test_rank_0_hears_the_newest_of_what_other_ranks_have_counted() -> None:
    steps = num_told = 0
    heard: list[tuple[int, Beat]] = []

    def is_heard() -> bool:
        heard.extend(made[0].take_newest())
        return bool(heard) and heard[-1][1].counted["steps"] == steps

    def counted() -> dict[str, int]:
        nonlocal num_told
        num_told += 1
        return {"steps": steps}

    with watches(Memory(), 0, 1) as (made, _, _):
        made[0].tell(lambda: {"steps": 9})  # its own are in its run already
        made[1].tell(counted)
        eventually(is_heard)
        steps = 2
        before = num_told
        eventually(lambda: num_told > before + 3)  # of several that are told one is left
        eventually(is_heard)
    assert {(rank, beat.host) for rank, beat in heard} == {(1, "a")}
    numbers = [beat.number for _, beat in heard]
    assert numbers == sorted(set(numbers)), "each is heard once"


def test_a_rank_that_cannot_end_by_itself_is_ended() -> None:
    store = Memory()
    with watches(store, 0, 1) as (made, told, left):
        with pytest.raises(DataError), made[1].watched():
            raise DataError("x")
        eventually(lambda: left == [PeerLost.exit_code])
        assert told[-1].rank == 1


def test_a_store_that_does_not_answer_ends_the_rank() -> None:
    store = Memory()
    with watches(store, 1, hang_timeout_s=0.5) as (_, told, left):
        store.answers.clear()
        eventually(lambda: left == [PeerLost.exit_code])
        store.answers.set()
        assert (told[0].rank, len(told)) == (0, 1)


def test_a_store_that_is_lost_ends_the_rank_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "GONE_S", 0.1)

    class Lost(Memory):
        def set(self, _key: str, _value: str, /) -> None:
            raise RuntimeError("rank 0, which has the store, is lost")

    with watches(Lost(), 1) as (_, told, left):
        eventually(lambda: left == [PeerLost.exit_code])
        assert [failure.rank for failure in told] == [0]


def test_a_process_that_must_be_there_is_named_when_it_has_ended() -> None:
    ended = Failure(1, "a", "it was ended by SIGKILL")
    with watches(Memory(), 0, 1, look=lambda: ended) as (_, told, left):
        eventually(lambda: left == [PeerLost.exit_code] * 2)
        assert told == [ended, ended]


def test_what_a_rank_has_said_of_its_end_is_told_of_it() -> None:
    store = Memory()
    store.set("failed", json.dumps(asdict(Failure(1, "a", "train.bin is damaged"))))
    with watches(store, 0, look=lambda: Failure(1, "a", "it ended with code 3")) as (_, told, _):
        eventually(lambda: told)
        assert told[0].reason == "train.bin is damaged"


def test_ranks_that_rest_do_not_hang() -> None:
    store = Memory()

    def num_done() -> int:
        told = store.values.get("beat/0")
        return int(json.loads(told)["num_done"]) if told else 0

    with watches(store, 0) as (made, _, _):
        made[0].rest()
        eventually(lambda: num_done() > 5)
        made[0].note("F0 of stage 0")
        eventually(lambda: b"F0" in store.values["beat/0"])
        before = store.values["beat/0"]
        eventually(lambda: store.values["beat/0"] != before)
        assert num_done() == json.loads(before)["num_done"]


def test_ranks_that_hang_at_what_they_have_done_before_are_named_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "LEAST_ORDER_S", 0.1)
    with watches(Memory(), 0, hang_timeout_s=10 * DEADLINE_S) as (made, told, _):
        with made[0].ordered("compute"):
            pass
        with made[0].ordered("compute"):
            eventually(lambda: told)
    assert "no rank has got on" in told[0].reason and "compute" in told[0].reason


def test_a_good_end_is_told_nobody() -> None:
    store = Memory()
    with watches(store, 0, 1) as (made, told, left):
        for each in made:
            with each.watched():
                each.note("F0 of stage 0")
    assert not told and not left and "failed" not in store.values


def test_what_no_rank_says_is_taken_for_silence() -> None:
    assert watching.told_beat(b'{"x": 1}') is None
    assert watching.told_beat(b"[" * 100_000) is None
    assert "cannot be read" in watching.told_failure(b'{"x": 1}').reason
