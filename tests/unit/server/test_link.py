"""The life of a worker process: it takes part, comes back after every loss, and knows when to stop."""

import builtins
import gc
import io
import math
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import pytest
import torch

from connection_pairs import push
from harness import SECRET, Outcome, local_settings
from peers import DEADLINE_S, Echo, Hand, HandledDoor, follower, hello, logger
from smolcluster.configs.schema import NodeConfig, RunConfig
from smolcluster.errors import (
    ConfigError,
    ConnectTimeout,
    DataError,
    NonFiniteLoss,
    PeerLost,
    Rejected,
    RunFailed,
    SmolclusterError,
    TryAgain,
    UserCodeError,
    VersionDiffers,
)
from smolcluster.server import link as room
from smolcluster.server.link import Link, Participant, WorkerSetup, follow, measure_speed
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.first_loss import first_losses
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import refuse
from smolcluster.wire.messages import (
    Ack,
    End,
    Goodbye,
    Heartbeat,
    LeaseKey,
    Pull,
    Ready,
    Reject,
    Welcome,
    frame_of,
)
from smolcluster.wire.session import Receiver

P = TypeVar("P", bound=Participant)

LEASE = LeaseKey(incarnation="0123abcd", epoch=0, start=0, stop=32, grant=1)


@dataclass
class Life(Generic[P]):
    """A worker that follows a door, and what it made."""

    door: HandledDoor
    participant: Callable[[Welcome, TrainingContext], P]
    lines: list[str] = field(default_factory=list)
    made: list[P] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    def begin(
        self,
        participant: Callable[[Welcome, TrainingContext], P] | None = None,
        *,
        node: NodeConfig | None = None,
        start_timeout_s: float = DEADLINE_S,
        whom: str = "the server",
    ) -> Outcome:

        def make(welcome: Welcome, training: TrainingContext) -> P:
            self.made.append((participant or self.participant)(welcome, training))
            return self.made[-1]

        place = WorkerSetup(
            node=node or NodeConfig(device="cpu"),
            hello=hello(),
            address=Address("127.0.0.1", self.door.port),
            secret=SECRET,
            start_timeout_s=start_timeout_s,
            log=logger(self.lines),
            whom=whom,
            on_run_known=lambda run: self.runs.append(run.run_id),
        )
        return Outcome("worker", lambda: follow(place, make))

    def taken_part(
        self,
        run: RunConfig | None = None,
        incarnation: str = LEASE.incarnation,
        bucket_bytes: int = 1 << 20,
    ) -> tuple[Hand, Ready]:
        """The next session: the worker is let in, and works."""
        run = run or run_config()
        hand = self.door.admit(run, incarnation=incarnation, bucket_bytes=bucket_bytes)
        ready = hand.hear_a(Ready)
        hand.hear_a(Pull)
        return hand, ready


def run_config(run_id: str = "run-1", *overrides: str) -> RunConfig:
    """A run whose workers have time to come back."""
    settings = local_settings(f"reconnect_timeout_s={DEADLINE_S}", *overrides)
    return settings.run_config(run_id, "edp")


def end(hand: Hand, ok: bool = True, sentence: str = "every sample has been applied") -> None:
    """Say that the run is over, and wait until the worker has closed."""
    hand.say(End(ok=ok, sentence=sentence))
    hand.hear_a(Goodbye)
    hand.hear_the_end()
    hand.leave()


class Helper:
    """A participant that pulls, and then waits for what comes."""

    def __init__(
        self, welcome: Welcome, training: TrainingContext, error: BaseException | None = None
    ) -> None:
        self.unacknowledged: LeaseKey | None = None
        self.training = training
        self._incarnation = welcome.incarnation
        self._error = error

    def new_receiver(self) -> Receiver:
        return Echo()

    def take_part(self, link: Link) -> None:
        self.unacknowledged = LEASE.model_copy(update={"incarnation": self._incarnation})
        link.send(Pull())
        if self._error:
            link.flush()
            raise self._error
        while True:
            link.next_event(DEADLINE_S)


@pytest.fixture
def life(door: HandledDoor) -> Life[Helper]:
    return Life(door, Helper)


def test_a_worker_says_what_it_has_and_ends_well_with_the_run(
    life: Life[Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.training.first_loss.PATIENCE_S", math.inf)
    worker = life.begin()
    hand, ready = life.taken_part()
    training = life.made[0].training
    assert ready.dataset_fingerprint == training.workload.fingerprint
    assert ready.model_fingerprint == training.replica.fingerprint
    assert ready.samples_per_s > 0
    assert ready.unacknowledged is None
    first = first_losses(training.workload, training.replica)
    assert (ready.first_weights, ready.first_losses) == (first.weights, first.losses)
    assert None not in first.losses
    end(hand)
    worker.finish()
    assert life.runs == ["run-1"]
    assert "the run is over: every sample has been applied" in life.lines[-1]


def test_what_the_server_cannot_save_is_in_the_worker_s_log_once(life: Life[Helper]) -> None:
    worker = life.begin()
    hand, _ = life.taken_part()
    for trouble in ("nothing is saved", "nothing is saved", "step 3 is not saved", ""):
        hand.say(Heartbeat(sent_at=1.0, trouble=trouble))
    end(hand)
    worker.finish()
    assert [line for line in life.lines if "save" in line] == [
        "WARNING the server says: nothing is saved",
        "WARNING the server says: step 3 is not saved",
        "INFO the server can save again",
    ]


@pytest.mark.parametrize(("algorithm", "says"), [("diloco", True), ("edp", False)])
def test_only_a_worker_with_steps_of_its_own_says_which_weights_it_has(
    life: Life[Helper], algorithm: str, says: bool
) -> None:
    worker = life.begin()
    hand, ready = life.taken_part(local_settings().run_config("run-1", algorithm))
    assert ready.weights == (life.made[0].training.replica.digest() if says else None)
    end(hand)
    worker.finish()


def test_a_worker_that_comes_back_after_the_end_hears_of_it_and_ends_well(
    life: Life[Helper],
) -> None:
    worker = life.begin()
    life.taken_part()[0].leave()
    client = life.door.open()
    refuse(client, "over", "every sample has been applied")
    worker.finish()
    assert len(life.made) == 1
    assert "the run is over" in life.lines[-1]
    assert "every sample has been applied" in life.lines[-1]


def test_who_follows_another_worker_speaks_of_that(life: Life[Helper]) -> None:
    worker = life.begin(whom="its worker")
    life.taken_part()[0].leave()
    hand, _ = life.taken_part()
    hand.say(Goodbye(reason="it was stopped"))
    hand.leave()
    end(life.taken_part()[0])
    worker.finish()
    assert any("its worker is lost: " in line for line in life.lines)
    assert any("its worker has left: it was stopped" in line for line in life.lines)
    assert not any("the server" in line for line in life.lines)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_what_took_messages_in_a_lost_session_is_freed_before_the_next_one(
    life: Life[Helper],
) -> None:
    class Circular(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.itself = self

    class Receiving(Helper):
        link: Link

        def new_receiver(self) -> Receiver:
            there.append(any(each() is not None for each in made))
            receiver = Circular()
            made.append(weakref.ref(receiver))
            return receiver

        def take_part(self, link: Link) -> None:
            self.link = link
            super().take_part(link)

    made: list[weakref.ref[Receiver]] = []
    there: list[bool] = []
    worker = life.begin(Receiving)
    life.taken_part()[0].leave()
    hand, _ = life.taken_part()
    end(hand)
    worker.finish()
    assert there == [False, False]


def test_a_server_that_does_not_come_back_is_given_up(life: Life[Helper]) -> None:
    worker = life.begin()
    hand, _ = life.taken_part(run_config("run-1", "reconnect_timeout_s=0.2"))
    hand.say(_ack())
    hand.leave()
    life.door.close()
    failure = worker.failure()
    assert isinstance(failure, ConnectTimeout)
    assert failure.exit_code == 75


def test_a_run_that_ended_badly_is_an_error_with_its_reason(life: Life[Helper]) -> None:
    worker = life.begin()
    hand, _ = life.taken_part()
    end(hand, ok=False, sentence="the run failed: loss is nan")
    failure = worker.failure()
    assert isinstance(failure, RunFailed)
    assert "loss is nan" in str(failure)


def test_a_refusal_after_ready_is_final(life: Life[Helper]) -> None:
    worker = life.begin()
    hand = life.door.admit(run_config())
    hand.hear_a(Ready)
    hand.say(Reject(code="dataset", sentence="this worker's dataset differs"))
    hand.leave()
    failure = worker.failure()
    assert isinstance(failure, Rejected)
    assert failure.code == "dataset"
    assert "dataset differs" in str(failure)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("sample 5 does not exist"), "it cannot go on: sample 5 does not exist"),
        (ZeroDivisionError("a bug"), "it cannot go on: internal error: ZeroDivisionError('a bug')"),
        (
            RuntimeError("CUDA error: device-side assert triggered\nmore"),
            "it cannot go on: the device failed: CUDA error: device-side assert triggered",
        ),
        (KeyboardInterrupt(), "it was stopped"),
    ],
)
def test_a_worker_that_cannot_go_on_says_goodbye_and_why(
    life: Life[Helper], error: BaseException, words: str
) -> None:
    worker = life.begin(partial(Helper, error=error))
    hand, _ = life.taken_part()
    goodbye = hand.hear_a(Goodbye)
    assert goodbye.reason == words
    assert goodbye.fault == (None if isinstance(error, KeyboardInterrupt) else "own")
    hand.hear_the_end()
    hand.leave()
    assert worker.failure() is error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NonFiniteLoss("step 3: loss is nan at layer fc1"), "non-finite"),
        (UserCodeError("loss (train.py:17): KeyError: 'y'"), "user-code"),
    ],
)
def test_what_may_be_the_run_s_fault_is_everybodys_affair(
    life: Life[Helper], error: SmolclusterError, code: str
) -> None:
    worker = life.begin(partial(Helper, error=error))
    hand, _ = life.taken_part()
    assert hand.hear_a(Goodbye) == Goodbye.model_validate({"reason": str(error), "fault": code})
    hand.leave()
    assert worker.failure() is error


@pytest.mark.parametrize("tokenizer", ["/etc/passwd", "/etc/nothing", "./pair"])
def test_a_welcome_that_names_a_path_is_refused_and_nothing_is_looked_at(
    door: HandledDoor, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends it learns nothing of this machine's files."""
    asked: list[str] = []
    for place, name in (
        (os, "stat"),
        (os, "lstat"),
        (os, "open"),
        (io, "open"),
        (builtins, "open"),
    ):
        theirs = getattr(place, name)

        def spied(path: Any, *args: Any, theirs: Any = theirs, **kwargs: Any) -> Any:
            asked.append(str(path))
            return theirs(path, *args, **kwargs)

        monkeypatch.setattr(place, name, spied)
    run = run_config()
    dataset = run.train.dataset.model_copy(update={"name": "text", "tokenizer": tokenizer})
    train = run.train.model_copy(update={"dataset": dataset})
    with ThreadPoolExecutor(1) as pool:
        address = Address("127.0.0.1", door.port)
        worker = pool.submit(follower(address).join, Welcome, DEADLINE_S)
        door.admit(run, settings=run.model_copy(update={"train": train}).model_dump(mode="json"))
        with pytest.raises(VersionDiffers, match="cannot travel") as refused:
            worker.result(DEADLINE_S)
    assert tokenizer not in str(refused.value)
    assert [path for path in asked if tokenizer.strip("./") in path] == []


def test_a_machine_that_cannot_keep_a_run_says_so_and_leaves_nothing_open(
    life: Life[Helper],
) -> None:
    """The folder of runs cannot be written: an error of this worker only."""
    error = ConfigError("cannot make the run's folder")

    class ReadOnly(list[str]):
        def append(self, _: str) -> None:
            raise error

    life.runs = ReadOnly()
    worker = life.begin()
    hand = life.door.admit(run_config())
    assert "cannot make the run's folder" in hand.hear_a(Goodbye).reason
    hand.hear_the_end()
    hand.leave()
    assert worker.failure() is error


NUM_FRAMES = 100
NBYTES = 1 << 20


class Sending(Helper):
    """Sends a lot from one memory, and uses that for something else as soon as it has been sent."""

    def take_part(self, link: Link) -> None:
        memory = bytearray(b"g" * NBYTES)
        frame = frame_of(push(NBYTES), memory)
        link.send(Pull())
        for _ in range(NUM_FRAMES):
            link.send_frame(frame)
        link.flush()
        memory[:] = b"." * NBYTES
        while True:
            link.next_event(DEADLINE_S)


def test_a_worker_that_waits_to_send_comes_back_when_the_server_has_gone(
    life: Life[Helper],
) -> None:
    worker = life.begin(Sending)
    life.taken_part()[0].leave()
    hand = life.door.admit(run_config())
    hand.hear_a(Ready)
    hand.say(End(ok=True, sentence="every sample has been applied"))
    hand.leave()
    worker.finish()
    assert len(life.made) == 1


def test_a_machine_computes_no_more_samples_at_once_than_it_is_told(life: Life[Helper]) -> None:
    worker = life.begin(node=NodeConfig(device="cpu", microbatch=5))
    hand, _ = life.taken_part()
    training = life.made[0].training
    sizes: list[int] = []
    training.replica.model.register_forward_pre_hook(
        lambda _model, inputs: sizes.append(len(inputs[0]))
    )
    training.compute(torch.arange(12))
    assert sizes == [5, 5, 2]
    end(hand)
    worker.finish()


def _ack() -> Ack:
    return Ack(lease=LEASE, outcome="applied", version=1)


def test_speed_is_measured_on_this_machine() -> None:
    settings = local_settings()
    training = build(settings.train, 42, settings.node.dataset, torch.device("cpu"))
    before = training.replica.snapshot()
    assert measure_speed(training, batch_size=32) > 0
    assert torch.equal(training.replica.params, before), "nothing is learned by it"


def test_a_server_that_cuts_every_session_is_given_up_and_not_flooded(
    life: Life[Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.wire.node.LAST_TRY_S", DEADLINE_S)
    run = run_config().model_copy(update={"reconnect_timeout_s": 1.0})
    life.door.patience_s = 0.5
    worker = life.begin(start_timeout_s=1.0)
    sessions = 0
    while worker.is_alive():
        try:
            life.door.admit(run).leave()
        except (AssertionError, SmolclusterError):
            continue
        sessions += 1
    failure = worker.failure()
    assert isinstance(failure, TryAgain)
    assert failure.exit_code == 75
    assert 2 <= sessions < 20


# A server that was started again: the same run goes on with what the machine has built.


class Learning(Helper):
    """It learns something, owes a push, and then waits for what comes."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        super().__init__(welcome, training)
        self.welcome = welcome
        self.num_sessions = 0
        self.state_at_start = {
            name: tensor.clone() for name, tensor in training.replica.optimizer.state.items()
        }

    def new_receiver(self) -> Receiver:
        self.num_sessions += 1
        return Echo()

    def take_part(self, link: Link) -> None:
        self.training.compute(torch.arange(8))
        self.training.replica.step(0.1)
        super().take_part(link)


@pytest.fixture
def learning(door: HandledDoor) -> Life[Learning]:
    return Life(door, Learning)


@pytest.fixture
def num_built(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often dataset and model were built."""
    count = 0

    def counted(*args: object, **options: object) -> TrainingContext:
        nonlocal count
        count += 1
        return build(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "build", counted)
    return lambda: count


def test_the_same_server_finds_the_same_participant(
    learning: Life[Learning], num_built: Callable[[], int]
) -> None:
    worker, run = learning.begin(), run_config()
    learning.taken_part(run, "aaaa")[0].leave()
    hand, ready = learning.taken_part(run, "aaaa")
    assert ready.unacknowledged == LEASE.model_copy(update={"incarnation": "aaaa"})
    end(hand)
    worker.finish()
    (only,) = learning.made
    assert only.num_sessions == 2
    assert num_built() == 1
    assert float(only.training.replica.optimizer.state["step"]) == 2, "and nothing was reset"
    assert any("back in run run-1" in line for line in learning.lines)
    assert sum("trying to reconnect" in line for line in learning.lines) == 1


def test_a_server_that_was_started_again_finds_what_was_built_but_nothing_learned(
    learning: Life[Learning], num_built: Callable[[], int]
) -> None:
    worker, run = learning.begin(), run_config()
    hand, first = learning.taken_part(run, "aaaa")
    hand.leave()
    hand, second = learning.taken_part(run, "bbbb")
    assert second.unacknowledged is None, "the new server knows nothing of that push"
    assert second.dataset_fingerprint == first.dataset_fingerprint
    assert second.samples_per_s == first.samples_per_s, "it need not be measured again"
    end(hand)
    worker.finish()
    assert num_built() == 1
    before, after = learning.made
    assert after.training is before.training
    assert after.welcome.incarnation == "bbbb"
    assert after.state_at_start.keys() == {"step", "exp_avg", "exp_avg_sq"}
    for name, each in after.state_at_start.items():
        assert not bool(each.any()), f"{name} is reset"
    assert (before.num_sessions, after.num_sessions) == (1, 1)
    assert sum("the server was started again" in line for line in learning.lines) == 1
    assert learning.runs == ["run-1", "run-1"]


@pytest.mark.usefixtures("uncollected")
def test_a_participant_is_freed_before_that_for_another_start_of_the_server(
    life: Life[Helper],
) -> None:
    """It may have several copies of the weights."""

    class Circular(Helper):
        def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
            super().__init__(welcome, training)
            self.itself = self
            there.append(any(each() is not None for each in made))
            made.append(weakref.ref(self))

    made: list[weakref.ref[Helper]] = []
    there: list[bool] = []
    worker, run = life.begin(Circular), run_config()
    hand, _ = life.taken_part(run, "aaaa")
    life.made.clear()
    hand.leave()
    hand, _ = life.taken_part(run, "bbbb")
    end(hand)
    worker.finish()
    assert there == [False, False]


def test_what_was_built_stays_when_a_peer_is_lost_before_the_participant_is_there(
    learning: Life[Learning], num_built: Callable[[], int]
) -> None:
    lost = [PeerLost("a stage is gone")]

    def make(welcome: Welcome, training: TrainingContext) -> Learning:
        if lost:
            raise lost.pop()
        return Learning(welcome, training)

    worker, run = learning.begin(make), run_config()
    learning.door.admit(run, incarnation="aaaa").leave()
    end(learning.taken_part(run, "aaaa")[0])
    worker.finish()
    assert len(learning.made) == 1
    assert num_built() == 1
    assert any("a stage is gone; trying to reconnect" in line for line in learning.lines)


class Incomplete(TrainingContext):
    """What waits for others, which do not come."""

    def wait_until_ready(self, check: Callable[[], None] = lambda: None) -> None:
        while True:
            check()


@pytest.mark.parametrize("ok", [True, False])
def test_a_worker_that_waits_for_others_hears_how_the_run_ends(
    life: Life[Helper], monkeypatch: pytest.MonkeyPatch, ok: bool
) -> None:
    def incomplete(*args: Any, **options: Any) -> TrainingContext:
        made = build(*args, **options)
        return Incomplete(made.workload, made.replica, made.seed)

    monkeypatch.setattr(room, "build", incomplete)
    worker = life.begin()
    end(life.door.admit(run_config()), ok=ok)
    if ok:
        worker.finish()
    else:
        assert isinstance(worker.failure(), RunFailed)
    assert not life.made


@pytest.mark.parametrize(
    ("other", "bucket_bytes"),
    [
        (("run-1", "seed=7"), 1 << 20),
        (("run-1", "learning_rate=0.5"), 1 << 20),
        (("run-1", "model.hidden=9"), 1 << 20),
        (("run-1", "num_epochs=99"), 1 << 20),
        (("run-1",), 1 << 12),
        (("run-2",), 1 << 20),
    ],
    ids=str,
)
def test_a_server_of_another_run_or_configuration_is_begun_afresh(
    learning: Life[Learning],
    num_built: Callable[[], int],
    other: tuple[str, ...],
    bucket_bytes: int,
) -> None:
    worker = learning.begin()
    learning.taken_part(run_config("run-1"), "aaaa")[0].leave()
    end(learning.taken_part(run_config(*other), "bbbb", bucket_bytes)[0])
    worker.finish()
    before, after = learning.made
    assert after.training is not before.training
    assert after.training.replica.bucket_bytes == bucket_bytes
    assert num_built() == 2
    assert learning.runs == ["run-1", other[0]]
    assert not any("the server was started again" in line for line in learning.lines)


def test_a_worker_that_was_cut_off_by_both_starts_still_comes_back(
    learning: Life[Learning], num_built: Callable[[], int]
) -> None:
    """A session that ends before it has begun to work leaves nothing half done."""
    worker, run = learning.begin(), run_config()
    learning.taken_part(run, "aaaa")[0].leave()
    learning.door.admit(run, incarnation="bbbb").leave()
    hand, ready = learning.taken_part(run, "bbbb")
    owed = ready.unacknowledged
    assert owed is None or owed.incarnation == "bbbb"
    end(hand)
    worker.finish()
    assert [made.welcome.incarnation for made in learning.made] == ["aaaa", "bbbb"]
    for each in learning.made[1].state_at_start.values():
        assert not bool(each.any())
    assert num_built() == 1
