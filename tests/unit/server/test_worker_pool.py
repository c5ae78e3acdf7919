"""The hub seats, checks, fences, counts and sees out the workers of a run."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from harness import free_port, local_settings
from peers import (
    DEADLINE_S,
    Echo,
    Hand,
    HandledHub,
    Parts,
    follower,
    hello,
    knock,
    server_parts,
    wait_for_threads,
)
from smolcluster.configs.schema import Settings
from smolcluster.data.loading import MapSamples
from smolcluster.errors import (
    ClusterEmpty,
    NonFiniteLoss,
    Rejected,
    RunFailed,
    UserCodeError,
)
from smolcluster.runs.events import (
    RunEnded,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRejected,
)
from smolcluster.server import worker_pool as room
from smolcluster.server.joining import RunOver
from smolcluster.server.process_stats import ProcessStats
from smolcluster.server.store_links import StoreLinks
from smolcluster.server.worker_pool import Departed, Joined
from smolcluster.training.first_loss import FirstLosses
from smolcluster.utils.meter import Meter
from smolcluster.utils.retry import Deadline
from smolcluster.wire import acceptor
from smolcluster.wire.acceptor import Acceptor, LetIn, SessionOpened
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce, refuse
from smolcluster.wire.inbox import Call, MessageReceived, fail
from smolcluster.wire.messages import (
    SESSION,
    STORE,
    Accepted,
    End,
    Goodbye,
    Hello,
    Message,
    Pull,
    Reject,
    State,
    Welcome,
)
from smolcluster.wire.streams import spec_of
from waiting import Clock

pytestmark = pytest.mark.usefixtures("short_farewell")
INSTANCE = "0123456789abcdef"
M = TypeVar("M", bound=Message)


@pytest.fixture
def parts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Parts]:
    overrides = getattr(request, "param", ())
    with server_parts(settings_of(*overrides), tmp_path) as parts:
        yield parts


def settings_of(*overrides: str) -> Settings:
    defaults = (f"heartbeat_timeout_s={DEADLINE_S}", f"port={free_port()}")
    return local_settings(*defaults, *overrides, workers=2)


@pytest.fixture
def rooms() -> Iterator[ExitStack]:
    with ExitStack() as rooms:
        yield rooms
    wait_for_threads()


@pytest.fixture
def clock() -> Clock:
    """The pool waits for workers by it."""
    return Clock()


class AnyStores:
    """Lets every store in."""

    def admit(self, session_id: int, _hello: Hello) -> LetIn:
        return Accepted(bucket_bytes=4096, heartbeat_timeout_s=DEADLINE_S), Echo(session_id)


@contextmanager
def opened(
    parts: Parts, rooms: ExitStack, clock: Callable[[], float] = time.monotonic
) -> Iterator[HandledHub]:
    """A pool until the end of the block; the hands of its workers stay open until that of `rooms`."""
    stores = cast("StoreLinks[Any]", AnyStores())
    with parts.context.open_pool(Echo, stores, clock=clock) as pool:
        house = HandledHub(pool, parts.port, parts.dataset)
        rooms.callback(house.close)
        yield house


@pytest.fixture
def house(parts: Parts, rooms: ExitStack, clock: Clock) -> Iterator[HandledHub]:
    with opened(parts, rooms, clock) as house:
        yield house
        house.leave()  # the pool would wait for it


def said(house: HandledHub) -> list[MessageReceived]:
    return [event for event in house.events if isinstance(event, MessageReceived)]


def departed(house: HandledHub) -> list[int]:
    return [e.worker.member.session_id for e in house.events if isinstance(e, Departed)]


def joined_seats(house: HandledHub) -> list[int]:
    return [e.worker.member.session_id for e in house.events if isinstance(e, Joined)]


def test_a_worker_takes_part_from_its_ready_on(house: HandledHub, parts: Parts) -> None:
    hand = house.enter(hello(node="pi5"))
    assert house.pool.workers == [], "let in, but not ready"
    hand.ready(dataset=parts.dataset)
    house.until(lambda: house.num_joined == 1)
    (worker,) = house.pool.workers
    assert (worker.rank, worker.name) == (0, "worker 1 (pi5)")
    assert parts.happened(WorkerJoined) == [
        WorkerJoined(rank=0, node="pi5", device="cpu", samples_per_s=0.0, rejoined=False)
    ]


def test_a_worker_that_says_goodbye_has_left(house: HandledHub, parts: Parts) -> None:
    hand = house.join(hello())
    hand.say(Goodbye(reason="it was stopped"))
    hand.leave()
    house.until(lambda: departed(house) == joined_seats(house))
    assert parts.happened(WorkerLeft) == [
        WorkerLeft(rank=0, node="macbook", reason="it was stopped")
    ]
    assert parts.happened(WorkerLost) == []
    assert house.pool.workers == []


def test_when_all_workers_fault_at_once_the_run_has_failed(house: HandledHub) -> None:
    hands = [house.join(hello(number)) for number in (1, 2)]
    for hand in hands:  # both are still connected when the second one is heard
        hand.say(Goodbye(reason="its loss is nan", fault="non-finite"))
    with pytest.raises(NonFiniteLoss, match="loss is nan"):
        house.until(lambda: bool(departed(house)))


def test_an_error_in_the_user_s_code_ends_the_run_whoever_else_is_there(house: HandledHub) -> None:
    first, _ = (house.join(hello(number)) for number in (1, 2))
    first.say(Goodbye(reason="loss (train.py:17): KeyError: 'y'", fault="user-code"))
    with pytest.raises(
        UserCodeError, match=r"worker 1 \(macbook\): loss \(train.py:17\): KeyError"
    ):
        house.until(lambda: bool(departed(house)))


def test_before_it_takes_part_it_is_that_machine_s_where_others_train(
    house: HandledHub, parts: Parts
) -> None:
    house.join(hello(1))
    late = house.enter(hello(2))
    late.say(Goodbye(reason="data (train.py:3): FileNotFoundError", fault="user-code"))
    late.leave()
    house.until(lambda: any("never took part" in line for line in parts.log_lines))
    assert len(house.pool.workers) == 1


def test_a_worker_that_breaks_off_is_lost_after_all_that_it_said(
    house: HandledHub, parts: Parts
) -> None:
    hand = house.join(hello())
    for _ in range(5):
        hand.say(Pull())
    hand.leave()
    house.until(lambda: bool(departed(house)))
    assert [type(event) for event in house.events] == [Joined, *[MessageReceived] * 5, Departed]
    (lost,) = parts.happened(WorkerLost)
    assert isinstance(lost, WorkerLost)
    assert "closed the connection" in lost.reason


def test_the_same_process_that_connects_again_takes_its_old_sessions_place(
    house: HandledHub, parts: Parts
) -> None:
    old = house.join(hello(instance=INSTANCE))
    new = house.join(hello(instance=INSTANCE))
    first, second = joined_seats(house)
    assert departed(house) == [first], "so that its leases go back before it gets new ones"
    old.hear_the_end()
    assert [worker.member.session_id for worker in house.pool.workers] == [second]
    new.say(Pull())
    house.until(lambda: bool(said(house)))
    assert said(house) == [MessageReceived(second, Pull())]
    assert departed(house) == [first], "the end of the old session changes nothing"
    events = parts.happened(WorkerJoined)
    assert [getattr(event, "rejoined", None) for event in events] == [False, True]


def test_what_an_old_session_still_says_is_ignored(house: HandledHub, parts: Parts) -> None:
    house.join(hello(instance=INSTANCE))
    house.join(hello(instance=INSTANCE))
    first, second = joined_seats(house)
    inbox = parts.context.inbox
    inbox.put(MessageReceived(first, Goodbye(reason="too late")))
    worker = next(e.worker for e in house.events if isinstance(e, Joined))
    assert worker.ready is not None
    inbox.put(MessageReceived(first, worker.ready))
    inbox.put(MessageReceived(second, Pull()))
    house.until(lambda: bool(said(house)))
    assert joined_seats(house) == [first, second]
    assert departed(house) == [first]
    assert [worker.member.session_id for worker in house.pool.workers] == [second]
    assert parts.happened(WorkerLeft) == []


def test_ready_said_twice_counts_once(house: HandledHub, parts: Parts) -> None:
    hand = house.join(hello())
    hand.ready(dataset=parts.dataset)
    hand.say(Pull())
    house.until(lambda: bool(said(house)))
    assert house.num_joined == 1


def test_another_process_under_a_live_id_waits_until_the_first_has_gone(
    house: HandledHub, parts: Parts
) -> None:
    first = house.join(hello(node="pi5"))
    with pytest.raises(Rejected, match=r"worker id 1.*pi5") as caught:
        house.enter(hello(node="win"))
    assert caught.value.code == "busy"
    assert caught.value.retry_after_s is not None
    (rejected,) = parts.happened(WorkerRejected)
    assert isinstance(rejected, WorkerRejected)
    assert (rejected.node, rejected.worker_id, rejected.code) == ("win", 1, "busy")
    assert sum("refused" in line for line in parts.log_lines) == 1, "said once"
    first.leave()
    house.until(lambda: bool(departed(house)))
    house.join(hello(node="win"))
    assert [worker.name for worker in house.pool.workers] == ["worker 1 (win)"]


def test_who_asks_for_a_number_is_given_one_and_gets_no_seat(house: HandledHub) -> None:
    house.join(hello(1, "win"))
    first, second = (house.enter(hello(0, node)) for node in ("toaster", "kettle"))
    assert [each.welcome and each.welcome.worker_id for each in (first, second)] == [3, 4]
    first.hear_the_end()
    again = house.enter(hello(0, "toaster"))
    assert again.welcome is not None
    assert again.welcome.worker_id == 3
    assert [worker.name for worker in house.pool.workers] == ["worker 1 (win)"]
    with pytest.raises(Rejected, match="win") as caught:
        house.enter(hello(0, "win"))
    assert caught.value.code == "busy"


def numbers_of(house: HandledHub, *nodes: str) -> list[int | None]:
    """The worker ids that nodes are given, which ask one after the other."""
    return [house.enter(hello(0, node)).welcome.worker_id for node in nodes]


def test_a_number_is_free_again_when_its_worker_leaves_before_it_took_part(
    house: HandledHub,
) -> None:
    assert numbers_of(house, "toaster", "kettle") == [3, 4]
    hand = house.enter(hello(3, "toaster"))
    assert numbers_of(house, "oven") == [5], "it is toaster's while that prepares"
    hand.say(Goodbye(reason="it was stopped"))
    hand.leave()
    house.until(lambda: not house.pool.is_preparing)
    assert numbers_of(house, "fridge", "oven") == [3, 5]


def test_a_number_stays_that_of_a_node_whose_connection_breaks_while_it_prepares(
    house: HandledHub, parts: Parts
) -> None:
    assert numbers_of(house, "toaster") == [3]
    house.enter(hello(3, "toaster")).leave()
    house.until(lambda: not house.pool.is_preparing)
    assert numbers_of(house, "kettle", "toaster") == [4, 3]
    house.enter(hello(3, "toaster")).ready(dataset="cd" * 32)
    house.until(lambda: bool(parts.happened(WorkerRejected)))
    assert numbers_of(house, "fridge") == [3], "who is refused does not come back"


@pytest.mark.parametrize("parts", [("prepare_timeout_s=10",)], indirect=True)
def test_a_number_whose_node_does_not_come_is_free_again(house: HandledHub, clock: Clock) -> None:
    assert numbers_of(house, "toaster") == [3]
    clock.now = 9.0
    assert numbers_of(house, "kettle") == [4]
    clock.now = 10.0
    assert numbers_of(house, "oven") == [3]


@pytest.mark.parametrize("parts", [("elastic=false",)], indirect=True)
def test_an_unlisted_node_is_refused_for_good(house: HandledHub) -> None:
    with pytest.raises(Rejected, match="toaster") as caught:
        house.enter(hello(node="toaster"))
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize(
    ("told", "code", "words"),
    [
        ({"dataset": "cd" * 32}, "dataset", ["fingerprint cdcdcdcdcdcd, server", "dataset.root"]),
        ({"samples": (("a", "b"), ("a", "x"))}, "dataset", ["sample 4 of this worker's training"]),
        ({"order": "x"}, "dataset", ["sampler gives another order"]),
        ({"model": "ef" * 32}, "model", ["versions of smolcluster and torch"]),
    ],
)
def test_what_differs_is_refused_in_a_sentence_that_says_where_to_mend_it(
    house: HandledHub, parts: Parts, told: dict[str, Any], code: str, words: list[str]
) -> None:
    workload = parts.context.training.workload
    workload.train = MapSamples(list(range(9)))
    workload.sample_marks = (("a", "b"), ("a", "c"))
    hand = house.enter(hello())
    hand.ready(**{"dataset": parts.dataset, **told})
    house.until(lambda: bool(parts.happened(WorkerRejected)))
    refusal = hand.hear_a(Reject)
    assert refusal.code == code
    assert all(each in refusal.sentence for each in words)
    hand.hear_the_end()
    assert house.pool.workers == []


@pytest.mark.parametrize(("loss", "is_refused"), [(0.7, True), (2.3, False)])
def test_a_model_with_another_first_loss_is_refused_by_both_losses(
    house: HandledHub, parts: Parts, loss: float, is_refused: bool
) -> None:
    ours = FirstLosses("1.0:0.5", (0, 4, 8), (None, 2.3, 2.5))
    training = replace(parts.context.training, first_losses=ours)
    house.pool._training = training
    hand = house.enter(hello())
    hand.ready(dataset=parts.dataset, first_weights="1.0:0.5", first_losses=(1.1, loss, None))
    if not is_refused:
        house.until(lambda: house.num_joined == 1)
        return
    house.until(lambda: bool(parts.happened(WorkerRejected)))
    refusal = hand.hear_a(Reject)
    assert refusal.code == "model"
    assert "the loss 0.7 on training sample 4, the server's with 2.3" in refusal.sentence


def test_why_a_worker_never_took_part_is_in_the_servers_log(
    house: HandledHub, parts: Parts
) -> None:
    hand = house.enter(hello(node="pi5"))
    hand.say(Goodbye(reason="it cannot go on: no MNIST in /data"))
    hand.leave()
    enter_when_free(house)
    assert departed(house) == [], "the algorithm never heard of it"
    (line,) = [line for line in parts.log_lines if "never took part" in line]
    assert "worker 1 (pi5)" in line
    assert "no MNIST in /data" in line


def enter_when_free(house: HandledHub) -> Hand:
    """Get in under an id whose last holder is about to go."""
    deadline = Deadline(DEADLINE_S)
    while True:
        try:
            return house.enter(hello())
        except Rejected as error:
            assert error.code == "busy"
            assert not deadline.expired, "its id is in use for ever"


@pytest.mark.parametrize("parts", [("start_timeout_s=10",)], indirect=True)
def test_a_hub_that_nobody_joins_gives_up(house: HandledHub, clock: Clock) -> None:
    clock.now = 9.0
    list(house.pool.next_events(0.0))
    clock.now = 10.0
    with pytest.raises(ClusterEmpty, match="start_timeout_s") as caught:
        house.until(lambda: False)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("parts", [("prepare_timeout_s=10",)], indirect=True)
def test_a_worker_that_is_never_ready_is_cut_and_frees_its_id_while_the_others_go_on(
    house: HandledHub, parts: Parts, clock: Clock
) -> None:
    house.join(hello(2))
    stuck = house.enter(hello(1, node="pi5"))
    house.until(lambda: all(worker.session for worker in house.pool._workers.values()))
    clock.now = 10.0
    house.until(lambda: bool(parts.happened(WorkerRejected)))
    stuck.hear_the_end()
    enter_when_free(house).ready(dataset=parts.dataset)
    house.until(lambda: house.num_joined == 2)
    (rejected,) = [event for event in rejections(parts) if event.code != "busy"]
    assert (rejected.node, rejected.worker_id, rejected.code) == ("pi5", 1, "not-ready")
    assert any("worker 1 (pi5)" in line and "prepare_timeout_s" in line for line in parts.log_lines)
    assert house.pool.started


@pytest.mark.parametrize("parts", [("start_timeout_s=2", "prepare_timeout_s=10")], indirect=True)
def test_processes_that_come_and_are_never_ready_keep_nobody_waiting_without_end(
    house: HandledHub, clock: Clock
) -> None:
    hands: list[Hand] = []
    with pytest.raises(ClusterEmpty):
        for clock.now in range(1, 20):  # the same process, again and again
            hands.append(house.enter(hello(instance=INSTANCE)))
    assert len(hands) > 8


@pytest.mark.parametrize("parts", [("prepare_timeout_s=90",)], indirect=True)
def test_who_has_not_been_ready_for_long_is_named_once(
    house: HandledHub, parts: Parts, clock: Clock
) -> None:
    house.enter(hello(node="pi5"))
    clock.now = room.LONG_PREPARED_S
    house.until(lambda: bool(slow(parts)))
    list(house.pool.next_events(0.0))
    (line,) = slow(parts)
    assert "worker 1 (pi5)" in line
    assert "1 min 30 s" in line


def slow(parts: Parts) -> list[str]:
    return [line for line in parts.log_lines if "prepare_timeout_s" in line]


def rejections(parts: Parts) -> list[WorkerRejected]:
    return [event for event in parts.happened(WorkerRejected) if isinstance(event, WorkerRejected)]


@pytest.mark.parametrize("parts", [("empty_cluster_timeout_s=10",)], indirect=True)
def test_a_hub_whose_workers_have_all_gone_says_so_and_gives_up(
    house: HandledHub, parts: Parts, clock: Clock
) -> None:
    hand, other = house.join(hello()), house.join(hello(2))
    list(house.pool.next_events(0.0))
    assert house.pool.started
    clock.now = 100.0
    list(house.pool.next_events(0.0))
    other.leave()
    house.until(lambda: len(departed(house)) == 1)
    assert not any("have gone" in line for line in parts.log_lines), "one is there"
    hand.leave()
    house.until(lambda: len(departed(house)) == 2)
    assert "WARNING all workers have gone; waiting up to 10 s for one" in parts.log_lines
    clock.now = 109.0
    list(house.pool.next_events(0.0))
    clock.now = 110.0
    with pytest.raises(ClusterEmpty, match="empty_cluster_timeout_s"):
        house.until(lambda: False)


@pytest.mark.parametrize("parts", [("min_workers=2",)], indirect=True)
def test_before_training_has_started_nobody_is_missed(house: HandledHub, parts: Parts) -> None:
    hand = house.join(hello())
    hand.leave()
    house.until(lambda: bool(departed(house)))
    assert not house.pool.started
    assert not any("have gone" in line for line in parts.log_lines)


def test_the_failure_of_another_thread_ends_the_run(house: HandledHub, parts: Parts) -> None:
    failure = NonFiniteLoss("weights hold nan at layer fc1")
    parts.context.inbox.put(Call(partial(fail, failure)))
    with pytest.raises(NonFiniteLoss, match="nan at layer fc1"):
        house.until(lambda: False)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the run waits long for workers to close their connections."""
    monkeypatch.setattr(room, "PRESENT_S", DEADLINE_S)
    monkeypatch.setattr(room, "GOODBYE_S", DEADLINE_S)


def hear_a_last(kind: type[M], hand: Hand) -> M:
    """A worker that waits for such a message, and leaves when it has come."""
    try:
        return hand.hear_a(kind)
    finally:
        hand.leave()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "every sample of every epoch has been applied"),
        (NonFiniteLoss("loss is nan at layer fc1"), "the run failed: loss is nan at layer fc1"),
    ],
)
def test_everybody_hears_of_the_end_and_why(
    parts: Parts, rooms: ExitStack, error: Exception | None, words: str
) -> None:
    threads = rooms.enter_context(ThreadPoolExecutor(3))
    with pytest.raises(type(error)) if error else nullcontext(), opened(parts, rooms) as house:
        ready, unready = house.join(hello(1)), house.enter(hello(2))
        store = knock(parts.port, introduce("win", sets=(SESSION, STORE)), answer=Accepted)
        house.until(lambda: any(isinstance(event, SessionOpened) for event in house.events))
        news = [threads.submit(hear_a_last, End, hand) for hand in (ready, unready, store)]
        epochs = parts.context.run.train.num_epochs
        house.pool.listener.counts.samples_applied = epochs * parts.context.training.num_samples
        if error:
            raise error
    ends = [future.result(DEADLINE_S) for future in news]
    (ended,) = parts.happened(RunEnded)
    assert isinstance(ended, RunEnded)
    for end in ends:
        assert (end.ok, end.sentence) == (ended.ok, ended.reason) == (error is None, words)


def test_a_loop_of_a_user_s_own_hears_of_the_end_behind_the_weights_that_wait_for_it(
    parts: Parts, rooms: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its link takes for them."""
    monkeypatch.setattr(type(parts.context), "is_attached", True)
    monkeypatch.setattr(room, "PRESENT_S", 0.0)
    drain, is_over, nbytes = room.WorkerPool.drain, threading.Event(), 2**22

    def drain_and_tell(*args: Any) -> None:
        is_over.set()
        drain(*args)

    def hear_all(hand: Hand) -> list[Message]:
        assert is_over.wait(DEADLINE_S)
        heard = [hand.hear()[0] for _ in range(5)]
        hand.leave()
        return heard

    monkeypatch.setattr(room.WorkerPool, "drain", drain_and_tell)
    threads = rooms.enter_context(ThreadPoolExecutor(1))
    with opened(parts, rooms) as house:
        hand = house.join(hello())
        hand.connection.max_payload = nbytes
        [worker] = house.pool.workers
        spec = spec_of("raw", "uint8", nbytes, nbytes)
        for bucket in range(4):
            state = State(incarnation="here", version=7, bucket=bucket, num_buckets=4, tensor=spec)
            worker.live_session.send(state, bytes(nbytes))
        news = threads.submit(hear_all, hand)
    *weights, end = news.result(DEADLINE_S)
    assert [type(each) for each in weights] == [State] * 4
    assert isinstance(end, End)


@pytest.mark.usefixtures("patient")
def test_after_a_signal_workers_hear_that_the_server_leaves_and_not_that_the_run_is_over(
    parts: Parts, rooms: ExitStack
) -> None:
    """The server may be started again, and they look for it."""
    threads = rooms.enter_context(ThreadPoolExecutor(1))
    with pytest.raises(KeyboardInterrupt), opened(parts, rooms) as house:
        last = threads.submit(hear_a_last, Goodbye, house.join(hello()))
        raise KeyboardInterrupt
    assert last.result(DEADLINE_S).reason == "it was stopped"
    (ended,) = parts.happened(RunEnded)
    assert isinstance(ended, RunEnded)
    assert (ended.ok, ended.reason) == (False, "it was stopped")


@pytest.mark.parametrize(("ok", "news"), [(True, RunOver), (False, RunFailed)])
def test_a_worker_that_returns_at_the_end_hears_how_it_went(
    parts: Parts,
    rooms: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    ok: bool,
    news: type[Exception],
) -> None:
    """The hub stays until the returning worker has been told, and not a moment longer."""
    monkeypatch.setattr(room, "SHUTDOWN_TIMEOUT_S", DEADLINE_S)
    threads = rooms.enter_context(ThreadPoolExecutor(1))
    farewell = Deadline(DEADLINE_S)
    try:
        with opened(parts, rooms) as house:
            house.join(hello(1)).leave()
            house.until(lambda: bool(departed(house)))
            address = Address("127.0.0.1", parts.port)
            # One attempt: the first answer must be the news.
            future = threads.submit(follower(address).join, Welcome, 0.0)
            if not ok:
                raise NonFiniteLoss("loss is nan")  # noqa: TRY301 - the run's end
    except NonFiniteLoss:
        assert not ok
    with pytest.raises(news):
        future.result(DEADLINE_S)
    assert not farewell.expired


def test_the_door_is_not_closed_on_a_worker_that_is_being_told_of_the_end(
    parts: Parts, rooms: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()
    close = Acceptor.close

    def close_and_tell(door: Acceptor) -> None:
        close(door)
        closed.set()

    def tell_slowly(*args: Any) -> None:
        closed.wait(0.5)
        refuse(*args)

    monkeypatch.setattr(room, "SHUTDOWN_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(Acceptor, "close", close_and_tell)
    monkeypatch.setattr(acceptor, "refuse", tell_slowly)
    threads = rooms.enter_context(ThreadPoolExecutor(1))
    with opened(parts, rooms) as house:
        house.join(hello(1)).leave()
        house.until(lambda: bool(departed(house)))
        future = threads.submit(knock, parts.port, hello(1))
    with pytest.raises(Rejected) as caught:
        future.result(DEADLINE_S)
    assert caught.value.code == "over"


def test_a_worker_that_was_let_in_a_moment_before_the_end_hears_of_it(
    parts: Parts, rooms: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SHUTDOWN_TIMEOUT_S", DEADLINE_S)
    threads = rooms.enter_context(ThreadPoolExecutor(1))

    def come_and_listen() -> End:
        hand = knock(parts.port, hello())
        try:
            return hand.hear_a(End)
        finally:
            hand.leave()

    with parts.context.open_pool(Echo) as pool:
        future = threads.submit(come_and_listen)
        deadline = Deadline(DEADLINE_S)
        while not pool._workers:  # its session is not there yet: that is the next event
            list(pool.next_events(0.01))
            assert not deadline.expired
    assert future.result(DEADLINE_S).ok


def test_who_took_part_before_a_resume_that_had_nothing_left_to_do_hears_of_the_end(
    parts: Parts, rooms: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SHUTDOWN_TIMEOUT_S", DEADLINE_S)
    threads = rooms.enter_context(ThreadPoolExecutor(1))
    farewell = Deadline(DEADLINE_S)
    with opened(parts, rooms) as house:
        house.pool.listener.counts.tally.worker(1, "macbook")  # as the checkpoint has it
        future = threads.submit(knock, parts.port, hello(1))
    with pytest.raises(Rejected) as caught:
        future.result(DEADLINE_S)
    assert caught.value.code == "over"
    assert not farewell.expired


def test_nobody_is_waited_for_when_all_have_said_goodbye(
    parts: Parts, rooms: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SHUTDOWN_TIMEOUT_S", DEADLINE_S)
    farewell = Deadline(DEADLINE_S)
    with opened(parts, rooms) as house:
        hand = house.join(hello())
        hand.say(Goodbye(reason="it was stopped"))
        hand.leave()
        house.until(lambda: bool(departed(house)))
    assert not farewell.expired


def test_a_worker_that_never_answers_cannot_keep_the_server(
    parts: Parts, rooms: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of the end but does not close: after the farewell it is cut."""
    close = Acceptor.close

    def close_when_it_has_heard(door: Acceptor) -> None:
        assert hand.hear_a(End).ok
        close(door)

    monkeypatch.setattr(room, "PRESENT_S", 0.05)
    monkeypatch.setattr(Acceptor, "close", close_when_it_has_heard)
    with opened(parts, rooms) as house:
        hand = house.join(hello())
    hand.hear_the_end()
    wait_for_threads()


def test_what_workers_report_of_themselves_makes_nobody_look_at_all_of_them(
    house: HandledHub,
) -> None:
    """One call brings the next event that matters, however many reports stand before it."""
    house.join(hello())
    (seat,) = joined_seats(house)
    clock = iter(range(10)).__next__
    stats = ProcessStats(Meter(), clock=clock)
    reports = [stats.report() for _ in range(3)]
    for message in (*reports, Pull()):
        house.pool._inbox.put(MessageReceived(seat, message))
    assert list(house.pool.next_events(DEADLINE_S)) == [MessageReceived(seat, Pull())]
    assert house.pool.workers[0].gauge._last == reports[-1]
