"""The life of a worker process: it takes part, comes back after every loss, and knows when to stop."""

import builtins
import io
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from connection_pairs import push, tensor
from harness import local_settings
from lives import LEASE, Life, end, run_config
from peers import DEADLINE_S, Echo, HandledDoor, hello, knock
from smolcluster.cluster.link import Link, measure_speed
from smolcluster.configs.schema import DatasetPlace, NodeConfig
from smolcluster.errors import (
    ConfigError,
    ConnectTimeout,
    DataError,
    NonFiniteLoss,
    ProtocolError,
    Rejected,
    RunFailed,
    SmolclusterError,
    TryAgain,
)
from smolcluster.net.inbox import MessageReceived
from smolcluster.net.session import Receiver
from smolcluster.training.build import TrainingContext, build
from smolcluster.transport.handshake import refuse
from smolcluster.transport.messages import (
    Ack,
    End,
    Fault,
    Goodbye,
    LeaseKey,
    Message,
    Pull,
    Push,
    Ready,
    Reject,
    State,
    Welcome,
    frame_of,
)


class Helper:
    """A participant that pulls, and then waits for what comes."""

    def __init__(
        self, _: Welcome, training: TrainingContext, error: BaseException | None = None
    ) -> None:
        self.unacknowledged: LeaseKey | None = None
        self.training = training
        self._error = error

    def new_receiver(self) -> Receiver:
        return Echo()

    def take_part(self, link: Link) -> None:
        self.unacknowledged = LEASE
        link.send(Pull())
        if self._error:
            link.flush()
            raise self._error
        while True:
            link.next_event(DEADLINE_S)


@pytest.fixture
def life(door: HandledDoor) -> Life[Helper]:
    return Life(door, Helper)


def test_a_worker_says_what_it_has_and_ends_well_with_the_run(life: Life[Helper]) -> None:
    worker = life.begin()
    hand, ready = life.taken_part()
    training = life.made[0].training
    assert ready.dataset_fingerprint == training.workload.fingerprint
    assert ready.model_fingerprint == training.replica.fingerprint
    assert ready.samples_per_s > 0
    assert ready.unacknowledged is None
    end(hand)
    worker.finish()
    assert life.runs == ["run-1"]
    assert "the run is over: every sample has been applied" in life.lines[-1]


def test_a_worker_whose_connection_breaks_comes_back_with_what_it_had(life: Life[Helper]) -> None:
    worker = life.begin()
    hand, _ = life.taken_part()
    hand.leave()
    hand, ready = life.taken_part()
    assert ready.unacknowledged == LEASE, "the push whose fate it does not know"
    assert len(life.made) == 1, "model, data and residuals are kept"
    assert sum("trying to reconnect" in line for line in life.lines) == 1
    end(hand)
    worker.finish()


def test_another_run_behind_the_same_address_is_begun_afresh(life: Life[Helper]) -> None:
    worker = life.begin()
    life.taken_part()[0].leave()
    hand, ready = life.taken_part(run_config("run-2", "seed=7"))
    assert ready.unacknowledged is None
    assert len(life.made) == 2
    assert life.runs == ["run-1", "run-2"]
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
        (KeyboardInterrupt(), "it was stopped"),
    ],
)
def test_a_worker_that_cannot_go_on_says_goodbye_and_why(
    life: Life[Helper], error: BaseException, words: str
) -> None:
    worker = life.begin(partial(Helper, error=error))
    hand, _ = life.taken_part()
    assert hand.hear_a(Goodbye).reason == words
    hand.hear_the_end()
    hand.leave()
    assert worker.failure() is error


def test_a_loss_that_is_not_finite_is_everybodys_affair(life: Life[Helper]) -> None:
    worker = life.begin(partial(Helper, error=NonFiniteLoss("step 3: loss is nan at layer fc1")))
    hand, _ = life.taken_part()
    fault = hand.hear_a(Fault)
    assert (fault.code, fault.sentence) == ("non-finite", "step 3: loss is nan at layer fc1")
    hand.leave()
    assert isinstance(worker.failure(), NonFiniteLoss)


def test_a_machine_without_the_data_says_so_before_it_is_ready(
    life: Life[Helper], tmp_path: Path
) -> None:
    node = NodeConfig(device="cpu", dataset=DatasetPlace(root=tmp_path, download=False))
    worker = life.begin(node=node)
    hand = life.door.admit(run_config("run-1", "dataset.name=MNIST", "model.input_dim=784"))
    assert "it cannot go on" in hand.hear_a(Goodbye).reason
    hand.leave()
    assert isinstance(worker.failure(), DataError)


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
        worker = pool.submit(knock, door.port, hello())
        door.open().talk.say(
            Welcome.model_construct(
                run_id="run-1",
                incarnation="0123abcd",
                run=run.model_copy(update={"train": train}),
                model_fingerprint="m",
                bucket_bytes=1024,
                codec="fp32",
                heartbeat_timeout_s=DEADLINE_S,
            )
        )
        with pytest.raises(ProtocolError, match="cannot travel") as refused:
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


def test_no_server_at_the_start_is_given_up(life: Life[Helper]) -> None:
    life.door.close()
    failure = life.begin(start_timeout_s=0.2).failure()
    assert isinstance(failure, ConnectTimeout)


def test_news_of_the_server_is_raised_wherever_a_participant_waits(life: Life[Helper]) -> None:
    """Also when it only looks for events in between."""
    seen: list[object] = []

    class Looking(Helper):
        def take_part(self, link: Link) -> None:
            link.send(Pull())
            while True:
                event = link.next_event(0.001)
                seen.extend([event] if event else [])

    worker = life.begin(Looking)
    hand, _ = life.taken_part()
    hand.say(_ack())
    end(hand)
    worker.finish()
    assert seen == [MessageReceived(0, _ack())]


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


def test_what_is_sent_is_what_it_was_before_the_flush(life: Life[Helper]) -> None:
    worker = life.begin(Sending)
    hand, _ = life.taken_part()
    for _ in range(NUM_FRAMES):
        message, payload = hand.hear()
        assert isinstance(message, Push)
        assert payload == b"g" * NBYTES
    end(hand)
    worker.finish()


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


def test_weights_are_written_where_the_participants_receiver_wants_them(life: Life[Helper]) -> None:
    memory = bytearray(64)

    class Placing(Echo):
        def place_for(self, message: Message) -> memoryview | None:
            return memoryview(memory) if isinstance(message, State) else None

    class Following(Helper):
        def new_receiver(self) -> Receiver:
            return Placing()

    worker = life.begin(Following)
    hand, _ = life.taken_part()
    weights = bytes(range(64))
    state = State(incarnation="here", version=3, bucket=0, num_buckets=1, tensor=tensor(64))
    hand.say(state, weights)
    end(hand)
    worker.finish()
    assert memory == weights


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


def test_a_server_that_cuts_every_session_is_given_up_and_not_flooded(life: Life[Helper]) -> None:
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
