"""A worker whose server was started again: the same run goes on with what the machine has built."""

from collections.abc import Callable

import pytest
import torch

from lives import LEASE, Life, end, run_config
from peers import DEADLINE_S, Echo, HandledDoor
from smolcluster.cluster import link as room
from smolcluster.cluster.link import Link
from smolcluster.net.session import Receiver
from smolcluster.training.build import TrainingContext, build
from smolcluster.transport.messages import LeaseKey, Pull, Welcome


class Helper:
    """A participant that learns something, owes a push, and then waits for what comes."""

    def __init__(self, welcome: Welcome, training: TrainingContext) -> None:
        self.unacknowledged: LeaseKey | None = None
        self.welcome = welcome
        self.training = training
        self.num_sessions = 0
        self.state_at_start = {
            name: tensor.clone() for name, tensor in training.replica.optimizer.state.items()
        }

    def new_receiver(self) -> Receiver:
        self.num_sessions += 1
        return Echo()

    def take_part(self, link: Link) -> None:
        incarnation = self.welcome.incarnation
        self.unacknowledged = LEASE.model_copy(update={"incarnation": incarnation})
        self.training.compute(torch.arange(8))
        self.training.replica.step(0.1)
        link.send(Pull())
        while True:
            link.next_event(DEADLINE_S)


@pytest.fixture
def life(door: HandledDoor) -> Life[Helper]:
    return Life(door, Helper)


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
    life: Life[Helper], num_built: Callable[[], int]
) -> None:
    worker, run = life.begin(), run_config()
    life.taken_part(run, "aaaa")[0].leave()
    hand, ready = life.taken_part(run, "aaaa")
    assert ready.unacknowledged == LEASE.model_copy(update={"incarnation": "aaaa"})
    end(hand)
    worker.finish()
    (only,) = life.made
    assert only.num_sessions == 2
    assert num_built() == 1
    assert float(only.training.replica.optimizer.state["step"]) == 2, "and nothing was reset"
    assert any("back in run run-1" in line for line in life.lines)


def test_a_server_that_was_started_again_finds_what_was_built_but_nothing_learned(
    life: Life[Helper], num_built: Callable[[], int]
) -> None:
    worker, run = life.begin(), run_config()
    hand, first = life.taken_part(run, "aaaa")
    hand.leave()
    hand, second = life.taken_part(run, "bbbb")
    assert second.unacknowledged is None, "the new server knows nothing of that push"
    assert second.dataset_fingerprint == first.dataset_fingerprint
    assert second.samples_per_s == first.samples_per_s, "it need not be measured again"
    end(hand)
    worker.finish()
    assert num_built() == 1
    before, after = life.made
    assert after.training is before.training
    assert after.welcome.incarnation == "bbbb"
    assert after.state_at_start.keys() == {"step", "exp_avg", "exp_avg_sq"}
    for name, tensor in after.state_at_start.items():
        assert not bool(tensor.any()), f"{name} is reset"
    assert (before.num_sessions, after.num_sessions) == (1, 1)
    assert sum("the server was started again" in line for line in life.lines) == 1
    assert life.runs == ["run-1", "run-1"]


def test_every_start_of_the_server_is_a_new_one(
    life: Life[Helper], num_built: Callable[[], int]
) -> None:
    """Also one that comes back to an earlier incarnation's name, after a session with each."""
    worker, run = life.begin(), run_config()
    for incarnation in ("aaaa", "bbbb", "bbbb", "cccc"):
        life.taken_part(run, incarnation)[0].leave()
    end(life.taken_part(run, "aaaa")[0])
    worker.finish()
    starts = [(made.welcome.incarnation, made.num_sessions) for made in life.made]
    assert starts == [("aaaa", 1), ("bbbb", 2), ("cccc", 1), ("aaaa", 1)]
    assert num_built() == 1


@pytest.mark.parametrize(
    "overrides",
    [("seed=7",), ("learning_rate=0.5",), ("model.hidden=9",), ("num_epochs=99",)],
    ids=lambda overrides: overrides[0],
)
def test_a_server_with_another_configuration_is_begun_afresh(
    life: Life[Helper], num_built: Callable[[], int], overrides: tuple[str, ...]
) -> None:
    worker = life.begin()
    life.taken_part(run_config(), "aaaa")[0].leave()
    end(life.taken_part(run_config("run-1", *overrides), "bbbb")[0])
    worker.finish()
    before, after = life.made
    assert after.training is not before.training
    assert num_built() == 2
    assert not any("the server was started again" in line for line in life.lines)


def test_another_run_of_the_same_configuration_is_begun_afresh(
    life: Life[Helper], num_built: Callable[[], int]
) -> None:
    worker = life.begin()
    life.taken_part(run_config("run-1"), "aaaa")[0].leave()
    end(life.taken_part(run_config("run-2"), "bbbb")[0])
    worker.finish()
    assert len(life.made) == num_built() == 2
    assert life.runs == ["run-1", "run-2"]


def test_other_buckets_are_built_anew(life: Life[Helper], num_built: Callable[[], int]) -> None:
    worker, run = life.begin(), run_config()
    life.taken_part(run, "aaaa")[0].leave()
    end(life.taken_part(run, "bbbb", bucket_bytes=1 << 12)[0])
    worker.finish()
    assert num_built() == 2
    assert life.made[1].training.replica.bucket_bytes == 1 << 12


def test_a_worker_that_was_cut_off_by_both_starts_still_comes_back(
    life: Life[Helper], num_built: Callable[[], int]
) -> None:
    """A session that ends before it has begun to work leaves nothing half done."""
    worker, run = life.begin(), run_config()
    life.taken_part(run, "aaaa")[0].leave()
    life.door.admit(run, incarnation="bbbb").leave()
    hand, ready = life.taken_part(run, "bbbb")
    owed = ready.unacknowledged
    assert owed is None or owed.incarnation == "bbbb"
    end(hand)
    worker.finish()
    assert [made.welcome.incarnation for made in life.made] == ["aaaa", "bbbb"]
    for tensor in life.made[1].state_at_start.values():
        assert not bool(tensor.any())
    assert num_built() == 1
