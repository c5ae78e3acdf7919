"""What `status.json` says of a run while it lives and when it is over: a report's and a hub's part in it."""

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from connection_pairs import telemetry
from harness import free_port, local_settings
from peers import DEADLINE_S, Echo, HandledHub, Parts, hello, server_parts, step_taken
from smolcluster.algorithms.context import ServerContext
from smolcluster.configs.schema import MeshSizes
from smolcluster.data.permutation import Range
from smolcluster.errors import CheckpointError, NonFiniteLoss
from smolcluster.runs import status as status_module
from smolcluster.runs.events import RunStarted, read_events
from smolcluster.runs.status import RunStatus, StatusFile, read_status
from smolcluster.server.report import Report
from smolcluster.server.worker import Worker
from smolcluster.server.worker_pool import Departed
from smolcluster.training.evaluate import Evaluation
from smolcluster.wire.messages import Goodbye

pytestmark = pytest.mark.usefixtures("short_farewell")
INSTANCE = "0123456789abcdef"


class Board:
    """A run's status, as a reader of the file sees it."""

    def __init__(self, parts: Parts, path: Path) -> None:
        self.path = path
        self.parts = parts
        self._file = StatusFile(path, warn=parts.context.log.warning, clock=self._leap)
        records = replace(parts.context.records, status=self._file)
        self.context: ServerContext = replace(parts.context, records=records)
        self._leaps = 0.0

    def _leap(self) -> float:
        """A clock by which every tick is due."""
        self._leaps += 10.0
        return self._leaps

    def read(self, report: Report) -> RunStatus:
        """What the file says after a tick of the report."""
        report.tick()
        self._file.flush()
        return read_status(self.path)


@pytest.fixture
def board(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Board]:
    overrides = getattr(request, "param", ())
    defaults = (
        *(f"heartbeat_timeout_s={DEADLINE_S}", f"port={free_port()}"),
        *("num_epochs=2", "track_gradients=false"),
    )
    settings = local_settings(*defaults, *overrides, workers=2)
    with server_parts(settings, tmp_path) as parts:
        yield Board(parts, tmp_path / "status.json")


@pytest.fixture
def house(board: Board) -> Iterator[HandledHub]:
    with board.context.open_pool(Echo) as pool:
        house = HandledHub(pool, board.parts.port, board.parts.dataset)
        yield house
        house.close()


def take_step(report: Report, num_samples: int, loss: float, worker: Worker | None = None) -> None:
    if worker:
        report.contributed(worker, num_samples, loss)
    start = report.counts.samples_applied
    samples = Range(0, start, start + num_samples)
    report.step_taken(step_taken(report.counts.version + 1, samples, worker, loss))


def member(house: HandledHub, rank: int) -> Worker:
    return next(worker for worker in house.pool.workers if worker.rank == rank)


def test_before_the_first_step_nothing_is_measured(board: Board) -> None:
    report = board.context.new_report()
    status = board.read(report)
    train = board.context.run.train
    size = board.context.training.num_samples
    assert (status.run_id, status.algorithm) == ("test-run", "edp")
    assert status.incarnation == board.context.incarnation
    assert (status.state, status.reason, status.workers) == ("training", None, [])
    assert (status.step, status.epoch, status.num_epochs) == (0, 0, 2)
    assert status.total_steps == 2 * -(-size // train.samples_per_step)
    assert (status.samples_applied, status.total_samples) == (0, 2 * size)
    assert (status.loss, status.val_loss, status.val_accuracy) == (None, None, None)
    assert status.samples_per_s == 0.0
    assert status.started_at <= status.updated_at


def test_a_status_tells_the_newest_step_and_evaluation(board: Board) -> None:
    report = board.context.new_report()
    before = board.read(report)
    take_step(report, 64, loss=0.75)
    take_step(report, 32, loss=0.5)
    report.evaluated(1, 0, Evaluation(0.6, {"accuracy": 0.9}))
    status = board.read(report)
    assert (status.step, status.samples_applied, status.loss) == (2, 96, 0.5)
    assert (status.val_loss, status.val_accuracy, status.val_perplexity) == (0.6, 0.9, None)
    assert status.samples_per_s > 0
    assert status.started_at == before.started_at


def test_the_status_of_a_mesh_tells_what_each_rank_has_reported(board: Board) -> None:
    report = board.context.new_report(mesh=MeshSizes(dp=2))
    report.process_heard(1, "win", telemetry(1.0, samples=10))
    report.process_heard(1, "win", telemetry(2.0, samples=30))
    own, other = board.read(report).ranks
    assert (own.rank, other.rank, other.node) == (0, 1, "win")
    assert other.process_stats["samples_per_s"] == 20.0


def test_a_run_without_a_place_for_its_status_just_runs(board: Board) -> None:
    report = board.parts.context.new_report()
    report.tick()
    report.ended()
    assert not board.path.exists()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "ended", "every sample"),
        (KeyboardInterrupt(), "ended", "it was stopped"),
        (NonFiniteLoss("loss is nan at layer fc1"), "failed", "loss is nan at layer fc1"),
        (RuntimeError("out of memory"), "failed", "the run failed: RuntimeError: out of memory"),
        (OSError("cannot read a\udcff"), "failed", "the run failed: OSError: cannot read a\\udcff"),
    ],
)
def test_however_a_run_ends_its_status_says_so_and_why(
    board: Board, error: BaseException | None, state: str, reason: str
) -> None:
    report = board.context.new_report()
    report.tick()
    take_step(report, 32, loss=0.5)
    report.ended(error)
    status = read_status(board.path)
    assert (status.state, status.step) == (state, 1)
    assert status.is_over
    assert reason in (status.reason or "")


def test_who_reads_that_a_run_is_over_finds_its_last_event(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []

    def written(_: StatusFile, status: RunStatus) -> None:
        ends.append(len(read_events(board.parts.events_path)))

    monkeypatch.setattr(StatusFile, "write", written)
    report = board.context.new_report()
    report.ended()
    assert ends == [len(board.parts.happened(RunStarted)) + 1]


def test_a_resumed_run_counts_on_and_knows_who_came_back_by_rank(
    board: Board, house: HandledHub
) -> None:
    house.join(hello(1, "macbook"))
    take_step(house.pool.listener, 64, 0.5, member(house, 0))
    state = house.pool.listener.training_state({})
    records = replace(board.context.records, incarnation="there")
    report = replace(board.context, records=records).new_report()
    report.resume(state.model_copy())
    status = board.read(report)
    assert status.incarnation == "there"
    assert (status.step, status.samples_applied, status.loss) == (1, 64, None)
    assert status.workers == [], "of the start before"
    report.board.joined(member(house, 0), "cpu")
    (worker,) = board.read(report).workers
    assert (worker.state, worker.samples, worker.step) == ("joined", 64, None)
    take_step(report, 32, 0.5, member(house, 0))
    (worker,) = board.read(report).workers
    assert (worker.samples, worker.step) == (96, 2)


@pytest.mark.parametrize("board", [("min_workers=2",)], indirect=True)
def test_a_run_waits_until_enough_workers_are_there(board: Board, house: HandledHub) -> None:
    list(house.pool.next_events(0.0))
    assert board.read(house.pool.listener).state == "waiting"
    house.join(hello(1, "macbook"))
    list(house.pool.next_events(0.0))
    status = board.read(house.pool.listener)
    assert (status.state, [each.state for each in status.workers]) == ("waiting", ["joined"])
    house.join(hello(2, "pi5"))
    list(house.pool.next_events(0.0))
    assert board.read(house.pool.listener).state == "training"


def test_a_run_that_everybody_left_waits_again(board: Board, house: HandledHub) -> None:
    hand = house.join(hello(1))
    list(house.pool.next_events(0.0))
    assert board.read(house.pool.listener).state == "training"
    hand.leave()
    house.until(lambda: any(isinstance(event, Departed) for event in house.events))
    list(house.pool.next_events(0.0))
    assert board.read(house.pool.listener).state == "waiting"
    house.join(hello(1))
    list(house.pool.next_events(0.0))
    assert board.read(house.pool.listener).state == "training"


def test_who_left_and_who_was_lost_is_told_apart(board: Board, house: HandledHub) -> None:
    one, other = house.join(hello(1, "macbook")), house.join(hello(2, "pi5"))
    take_step(house.pool.listener, 64, 0.5, member(house, 1))
    states = [(each.node, each.state) for each in board.read(house.pool.listener).workers]
    assert states == [("macbook", "joined"), ("pi5", "joined")]
    one.say(Goodbye(reason="it was stopped"))
    one.leave()
    other.leave()
    house.until(lambda: not house.pool.workers)
    left, lost = board.read(house.pool.listener).workers
    assert (left.rank, left.state, left.device) == (0, "left", "cpu")
    assert (lost.rank, lost.state, lost.samples, lost.step) == (1, "lost", 64, 1)


def test_who_took_part_to_the_end_is_joined_when_it_is_over(board: Board) -> None:
    with board.context.open_pool(Echo) as pool:
        house = HandledHub(pool, board.parts.port, board.parts.dataset)
        house.join(hello(1, "macbook"))
        house.join(hello(2, "pi5")).leave()
        house.until(lambda: len(pool.workers) == 1)
        house.close()
    status = read_status(board.path)
    assert status.state == "ended"
    assert [(each.node, each.state) for each in status.workers] == [
        ("macbook", "joined"),
        ("pi5", "lost"),
    ]


def full_disk() -> CheckpointError:
    error = CheckpointError("cannot write")
    error.__cause__ = OSError(errno.ENOSPC, "no space")
    return error


def test_what_cannot_be_saved_is_told_until_it_is(
    board: Board, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = board.context.new_report()
    assert (board.read(report).trouble, report.trouble) == (None, "")
    for error, why in (
        (full_disk(), f"no space is left on the disk of {board.context.node}"),
        (CheckpointError("cannot write"), "cannot write"),
        (MemoryError("no\nroom"), r"MemoryError('no\nroom')"),
    ):
        report.not_saved(7, error)
        assert board.read(report).trouble == report.trouble == f"step 7 is not saved: {why}"
    report.not_saved(7, CheckpointError(2000 * "x"))
    assert len(report.trouble) == 1000, "as a heartbeat takes it"
    report.saved(8, tmp_path)
    assert board.read(report).trouble is None

    def is_full(*_: object) -> None:
        raise full_disk()

    with monkeypatch.context() as disk:
        disk.setattr(status_module, "write_status", is_full)
        board.read(report)
        assert report.trouble.startswith("nothing is saved: no space is left")
    board.read(report)
    assert report.trouble == ""
