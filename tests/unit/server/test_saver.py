"""When a server saves: at the right steps, what was there at the step, and in nobody's way."""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness import local_settings
from peers import DEADLINE_S, Parts, logger, report_of, server_parts, step_taken
from smolcluster.data.permutation import Range
from smolcluster.errors import (
    CheckpointError,
    ClusterEmpty,
    NonFiniteLoss,
    RunFailed,
    SmolclusterError,
)
from smolcluster.server.saver import CheckpointSource, Saver
from smolcluster.training.checkpoint import (
    Checkpoint,
    CheckpointStore,
    Progress,
    Snapshot,
)
from smolcluster.training.evaluate import Evaluation
from smolcluster.training.replica import Replica
from smolcluster.utils.retry import Deadline
from smolcluster.utils.stopping import Interrupted
from waiting import eventually

pytestmark = pytest.mark.usefixtures("no_flushing")
COPY_S = 0.05
"""How long a slow copy takes: longer than what must not overtake it."""


@pytest.fixture(scope="module")
def shared_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    overrides = ("num_epochs=50", "checkpoint_steps=2")
    with server_parts(local_settings(*overrides), tmp_path_factory.mktemp("server")) as parts:
        yield parts


class Shelf(CheckpointStore):
    """A store without a disk, from which the test takes what was saved.

    It copies, as a disk does: the memory of what was saved is used again.
    """

    def __init__(self) -> None:
        super().__init__(Path("nowhere"), 99, logger([]))
        self.saved: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()

    def save(self, snapshot: Snapshot) -> Path:
        """Keep a snapshot."""
        model, optimizer = (
            {name: tensor.clone() for name, tensor in tensors.items()}
            for tensors in (snapshot.model, snapshot.optimizer)
        )
        self.saved.put(replace(snapshot, model=model, optimizer=optimizer))
        return self.folder

    def next(self) -> Snapshot:
        """The next one that is saved."""
        return self.saved.get(timeout=DEADLINE_S)

    def rest(self) -> list[Snapshot]:
        """All others; to be asked for when nothing is saved any more."""
        return [self.saved.get_nowait() for _ in range(self.saved.qsize())]


class Training:
    """A server whose steps the test takes: the weights are the step's number."""

    def __init__(
        self,
        parts: Parts,
        store: CheckpointStore | None,
        every: int | None,
        first: int = 0,
        fill: Callable[[], None] = lambda: None,
    ) -> None:
        self.lines: list[str] = []
        self.replica: Replica = parts.context.training.replica
        self.owed = torch.zeros(5)
        self.report = report_of(parts, moved=(0, 0))
        self.report.counts.version = first
        self._set(first)
        subject = CheckpointSource(self.replica, self.progress, self.extra, fill)
        self.saver = Saver(store, every, subject, self.report, logger(self.lines))

    def progress(self) -> Progress:
        """Where the algorithm stands."""
        return {"place": [self.report.counts.version]}

    def extra(self) -> Mapping[str, Tensor]:
        """What the algorithm keeps besides."""
        return {"owed": self.owed}

    def step(self, *, is_evaluated: bool = False) -> None:
        """Take a step as a server does."""
        self.saver.wait_for_copy()
        version = self.report.counts.version + 1
        self._set(version)
        self.report.step_taken(step_taken(version, Range(0, version - 1, version)))
        self.saver.after_step(is_evaluated=is_evaluated)

    def steps(self, count: int) -> None:
        """Take so many steps."""
        for _ in range(count):
            self.step()

    def evaluate(self, version: int, loss: float) -> None:
        """The validation loss of a step has come."""
        self.report.evaluated(version, 0, Evaluation(loss, {"accuracy": 0.5}))

    def tick_until_saved(self, shelf: Shelf) -> Snapshot:
        """Tick as the server's loop does; the copy is handed over as soon as it is complete."""
        deadline = Deadline(DEADLINE_S)
        while shelf.saved.empty():
            assert not deadline.expired, "it is never saved"
            self.saver.tick()
            time.sleep(0.001)
        return shelf.next()

    def _set(self, version: int) -> None:
        self.replica.params.fill_(version)
        for tensor in self.replica.optimizer.state.values():
            tensor.fill_(version)
        self.owed.fill_(version)


def assert_is_of(snapshot: Snapshot | Checkpoint, step: int) -> None:
    """Everything in it is what it was at that step."""
    state = snapshot.state
    assert (state.step, state.samples_applied, state.run_id) == (step, step, "test-run")
    assert state.progress["place"] == [step]
    assert {"exp_avg", "exp_avg_sq", "owed"} <= snapshot.optimizer.keys()
    for tensor in (*snapshot.model.values(), *snapshot.optimizer.values()):
        assert torch.equal(tensor, torch.full_like(tensor, step))


def slow_copies(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: time.sleep(COPY_S)
) -> None:
    """Let every copy do something else first."""
    copy = Snapshot.of

    def of(*args: Any) -> Snapshot:
        before()
        return copy(*args)

    monkeypatch.setattr(Snapshot, "of", staticmethod(of))


def no_room() -> None:
    raise MemoryError("no room")


# At which steps


@settings(max_examples=40)
@given(
    every=st.one_of(st.none(), st.integers(1, 6)),
    first=st.integers(0, 7),
    num_steps=st.integers(0, 12),
)
def test_every_so_many_steps_and_the_end_are_saved_once(
    shared_parts: Parts, every: int | None, first: int, num_steps: int
) -> None:
    """Also after a resumption from step `first`, which is saved already."""
    shelf, saved = Shelf(), []
    training = Training(shared_parts, shelf, every, first)
    with training.saver:
        for _ in range(num_steps):
            training.step()
            if every and training.report.counts.version % every == 0:
                saved.append(training.tick_until_saved(shelf).state.step)
            assert shelf.saved.empty()
    last = first + num_steps
    multiples = [step for step in range(first + 1, last + 1) if every and step % every == 0]
    assert saved == multiples
    at_end = [snapshot.state.step for snapshot in shelf.rest()]
    assert at_end == ([last] if num_steps and last not in multiples else [])


def test_without_a_store_nothing_is_even_asked_for(
    shared_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[None] = []
    slow_copies(monkeypatch, lambda: copied.append(None))
    training = Training(shared_parts, None, 1)
    training.progress = None  # type: ignore[method-assign, assignment]
    with training.saver:
        training.steps(3)
        training.saver.tick()
        training.saver.wait_for_copy()
    assert copied == []
    assert training.lines == []


def test_a_server_that_fails_before_its_first_step_saves_nothing(shared_parts: Parts) -> None:
    shelf = Shelf()
    with pytest.raises(ClusterEmpty), Training(shared_parts, shelf, 1).saver:
        raise ClusterEmpty
    assert shelf.rest() == []


def test_an_end_that_is_skipped_stays_so_when_the_copy_before_it_fails(
    shared_parts: Parts,
) -> None:
    shelf, failures = Shelf(), [MemoryError("no room")]

    def fill() -> None:
        if failures:
            raise failures.pop()

    training = Training(shared_parts, shelf, 2, fill=fill)
    with training.saver:
        training.steps(2)
        training.saver.skip_end()
    assert shelf.rest() == []
    assert any("step 2 is not saved" in line for line in training.lines)


# What is saved


def test_a_copy_begins_when_the_replica_is_filled(shared_parts: Parts) -> None:
    shelf, is_there = Shelf(), threading.Event()

    def fill() -> None:
        assert is_there.wait(DEADLINE_S)

    training = Training(shared_parts, shelf, 2, fill=fill)
    with training.saver:
        training.steps(2)
        training.saver.tick()
        assert shelf.saved.empty()
        is_there.set()
        training.saver.wait_for_copy()
        training.saver.tick()
        assert_is_of(shelf.next(), 2)


def test_the_weights_of_the_step_are_saved_though_they_change_afterwards(
    shared_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch)
    shelf = Shelf()
    training = Training(shared_parts, shelf, 3)
    with training.saver:
        training.steps(4)
        training.saver.tick()
        assert_is_of(shelf.next(), 3)
        training.steps(3)
        training.saver.tick()
        assert_is_of(shelf.next(), 6)
    (last,) = shelf.rest()
    assert_is_of(last, 7)


def test_nobody_waits_for_a_copy_but_who_changes_the_weights(
    shared_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate: queue.SimpleQueue[None] = queue.SimpleQueue()
    slow_copies(monkeypatch, lambda: gate.get(timeout=DEADLINE_S))
    shelf = Shelf()
    training = Training(shared_parts, shelf, 1)
    with training.saver:
        training.step()
        for _ in range(3):
            training.saver.tick()
        assert shelf.saved.empty(), "and it got here"
        gate.put(None)
        training.saver.wait_for_copy()
        training.saver.wait_for_copy()
        assert_is_of(training.tick_until_saved(shelf), 1)
    assert shelf.rest() == []


def test_memory_that_is_used_again_is_not_used_too_early(shared_parts: Parts) -> None:
    """A slow disk: what is being written stays as it was while later steps are copied."""
    gate: queue.SimpleQueue[None] = queue.SimpleQueue()

    class Slow(Shelf):
        def save(self, snapshot: Snapshot) -> Path:
            gate.get(timeout=DEADLINE_S)
            return super().save(snapshot)

    shelf = Slow()
    training = Training(shared_parts, shelf, 1)
    with training.saver:
        for _ in range(6):
            training.steps(5)
            gate.put(None)
            snapshot = shelf.next()
            assert_is_of(snapshot, snapshot.state.step)
        for _ in range(30):
            gate.put(None)
    rest = shelf.rest()
    assert rest[-1].state.step == 30
    for snapshot in rest:
        assert_is_of(snapshot, snapshot.state.step)


# Its validation loss


def test_the_validation_loss_of_the_very_step_is_in_its_checkpoint(shared_parts: Parts) -> None:
    shelf = Shelf()
    training = Training(shared_parts, shelf, 2)
    with training.saver:
        training.step()
        training.step(is_evaluated=True)
        training.evaluate(1, 0.9)
        for _ in range(3):
            training.saver.wait_for_copy()
            training.saver.tick()
        training.step()
        training.saver.tick()
        training.evaluate(2, 0.25)
        training.saver.tick()
        snapshot = shelf.next()
        assert snapshot.state.val_loss == 0.25, "it was waited for"
        assert_is_of(snapshot, 2)
        assert shelf.rest() == []


def test_a_loss_that_nobody_waited_for_is_added_and_its_checkpoint_kept_as_the_best(
    shared_parts: Parts, tmp_path: Path
) -> None:
    """As of a loop that attaches: it evaluates when its step has been saved."""
    store = CheckpointStore(tmp_path / "checkpoints", 1, logger([]))
    training = Training(shared_parts, store, 1)

    def is_at(link: str, step: int) -> bool:
        training.saver.tick()
        return os.path.realpath(store.folder / link).endswith(f"step-{step:08}")

    with training.saver:
        for version, loss, best in ((1, 0.5, 1), (2, 0.25, 2), (3, 0.75, 2)):
            training.step()
            eventually(lambda step=version: is_at("latest", step))  # type: ignore[misc]
            training.evaluate(version, loss)
            eventually(lambda step=best: is_at("best", step))  # type: ignore[misc]
    assert [(each.step, each.val_loss) for each in store.list()] == [(2, 0.25), (3, 0.75)]


def test_a_loss_that_comes_before_the_copy_is_complete_is_taken_as_well(
    shared_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate: queue.SimpleQueue[None] = queue.SimpleQueue()
    slow_copies(monkeypatch, lambda: gate.get(timeout=DEADLINE_S))
    shelf = Shelf()
    training = Training(shared_parts, shelf, 1)
    with training.saver:
        training.step(is_evaluated=True)
        training.evaluate(1, 0.125)
        training.saver.tick()
        gate.put(None)
        assert training.tick_until_saved(shelf).state.val_loss == 0.125


def test_without_an_evaluation_to_come_nothing_is_waited_for(shared_parts: Parts) -> None:
    shelf = Shelf()
    training = Training(shared_parts, shelf, 1)
    with training.saver:
        training.step(is_evaluated=True)
        training.evaluate(1, 0.5)
        assert training.tick_until_saved(shelf).state.val_loss == 0.5
        training.step(is_evaluated=False)
        snapshot = training.tick_until_saved(shelf)
        assert snapshot.state.step == 2
        assert snapshot.state.val_loss is None, "that of another step is not its own"


def test_a_loss_that_never_comes_holds_it_back_until_the_next_one_at_most(
    shared_parts: Parts,
) -> None:
    shelf = Shelf()
    training = Training(shared_parts, shelf, 2)
    with training.saver:
        training.step()
        training.step(is_evaluated=True)
        training.saver.wait_for_copy()
        training.saver.tick()
        training.step()
        training.saver.tick()
        assert shelf.saved.empty()
        training.step(is_evaluated=True)
        first = shelf.next()
        assert (first.state.step, first.state.val_loss) == (2, None)
        assert_is_of(first, 2)
        training.saver.wait_for_copy()
        training.saver.tick()
        assert shelf.saved.empty()
    (last,) = shelf.rest()
    assert (last.state.step, last.state.val_loss) == (4, None), "or until the end"
    assert_is_of(last, 4)


def test_the_last_evaluation_belongs_to_the_checkpoint_at_the_end(shared_parts: Parts) -> None:
    """The summary evaluates the final weights once more."""
    for every, is_evaluated in ((None, False), (2, True)):
        shelf = Shelf()
        training = Training(shared_parts, shelf, every)
        with training.saver:
            training.step()
            training.step(is_evaluated=is_evaluated)
            training.evaluate(2, 0.75)
        (last,) = shelf.rest()
        assert (last.state.step, last.state.val_loss) == (2, 0.75)


# After which ends


def interrupted(*, is_orderly: bool) -> Interrupted:
    return Interrupted(signal.SIGTERM, is_orderly=is_orderly)


@pytest.mark.parametrize(
    ("error", "is_saved"),
    [
        (None, True),
        (interrupted(is_orderly=True), True),
        (ClusterEmpty("all have gone"), True),
        (RunFailed("a worker has an error"), True),
        (CheckpointError("a disk"), True),
        (SmolclusterError("something known"), True),
        (interrupted(is_orderly=False), False),
        (NonFiniteLoss("loss is nan"), False),
        (ValueError("a bug"), False),
        (ZeroDivisionError(), False),
        (KeyboardInterrupt(), False),
        (SystemExit(1), False),
        (MemoryError(), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("every", [None, 3])
def test_the_end_is_saved_where_the_weights_are_those_of_a_step(
    shared_parts: Parts, error: BaseException | None, is_saved: bool, every: int | None
) -> None:
    shelf = Shelf()
    training = Training(shared_parts, shelf, every)

    @contextmanager
    def expected() -> Iterator[None]:
        if error is None:
            yield
            return
        with pytest.raises(type(error)) as caught:
            yield
        assert caught.value is error, "it is not swallowed"

    with expected(), training.saver:
        training.steps(4)
        if every:
            assert_is_of(training.tick_until_saved(shelf), 3)
        if error is not None:
            raise error
    rest = shelf.rest()
    assert [snapshot.state.step for snapshot in rest] == ([4] if is_saved else [])
    for snapshot in rest:
        assert_is_of(snapshot, 4)


def test_a_copy_that_is_under_way_is_saved_also_when_a_bug_ends_the_server(
    shared_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ValueError("a bug")
    slow_copies(monkeypatch)
    shelf = Shelf()
    training = Training(shared_parts, shelf, 2)
    with pytest.raises(type(error)), training.saver:
        training.step()
        training.step(is_evaluated=True)
        raise error
    (only,) = shelf.rest()
    assert_is_of(only, 2)


# What fails


def test_a_copy_that_fails_is_a_warning_and_the_next_one_is_made(
    shared_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception | None] = [MemoryError("no room"), None]

    def fail() -> None:
        if error := errors.pop(0):
            raise error

    slow_copies(monkeypatch, fail)
    shelf = Shelf()
    training = Training(shared_parts, shelf, 2)
    with training.saver:
        training.steps(3)
        training.saver.tick()
        assert training.lines == ["WARNING step 2 is not saved: MemoryError('no room')"]
        training.step()
        assert_is_of(training.tick_until_saved(shelf), 4)
    assert shelf.rest() == []
    assert len(training.lines) == 1


def test_a_tick_finds_a_copy_that_has_failed(
    shared_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch, no_room)
    training = Training(shared_parts, Shelf(), 1)
    with training.saver:
        training.step()
        deadline = Deadline(DEADLINE_S)
        while not training.lines:
            assert not deadline.expired
            training.saver.tick()
        assert len(training.lines) == 1
    assert len(training.lines) == 2, "the end is tried again"


def test_a_disk_that_fails_stops_nobody(shared_parts: Parts) -> None:
    class Full(Shelf):
        def save(self, snapshot: Snapshot) -> Path:
            super().save(snapshot)
            raise CheckpointError("no space left")

    shelf = Full()
    training = Training(shared_parts, shelf, 1)
    with training.saver:
        training.step()
        assert_is_of(training.tick_until_saved(shelf), 1)
        training.step()
        assert_is_of(training.tick_until_saved(shelf), 2)
    assert any("step 1 is not saved" in line and "no space" in line for line in training.lines)


# As a server has it


def test_the_end_is_on_its_way_to_the_disk_before_it_is_evaluated(
    shared_parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 99, logger([]))
    training = Training(shared_parts, store, None)

    def fails(*_: object, **__: object) -> Evaluation:
        raise NonFiniteLoss("validation loss is nan")

    monkeypatch.setattr(type(shared_parts.context.training), "evaluate", fails)
    with pytest.raises(NonFiniteLoss), training.saver:
        training.steps(3)
        training.saver.summary()
    found = store.newest_good()
    assert found is not None
    assert_is_of(found, 3)
    assert any("the weights of step 3 are saved" in line for line in training.lines)


def test_the_evaluation_of_the_end_is_told_of_what_was_saved_before_it(
    shared_parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 99, logger([]))
    training = Training(shared_parts, store, None)

    def evaluate(*_: object, **__: object) -> Evaluation:
        return Evaluation(0.125)

    monkeypatch.setattr(type(shared_parts.context.training), "evaluate", evaluate)
    with training.saver:
        training.steps(3)
        summary = training.saver.summary()
    found = store.newest_good()
    assert found is not None
    assert summary.final.val_loss == found.state.val_loss == 0.125
