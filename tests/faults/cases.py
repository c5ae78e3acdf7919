"""One case of the fault matrix: a short run of two workers, of which one has a faulty connection.

`play` runs it; the `check_…` functions say whether it went as it must. The run is held back half-way until
the fault has struck and the struck worker is back, so that nothing depends on who is faster.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import pytest
import torch
from torch import Tensor

import harness
from faults.proxy import HANDSHAKE, HARMLESS, POINTS, SILENT, Fault, FaultProxy
from harness import Cluster, MakeParticipant, Outcome, Server, local_settings
from pipelines import share_generator
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.DiLoCo import server as diloco
from smolcluster.algorithms.DiLoCo.config import Mode
from smolcluster.algorithms.EDP import server as edp
from smolcluster.algorithms.PipelineParallel import server as pipeline
from smolcluster.algorithms.PipelineParallel.crew import Crew, Questions
from smolcluster.algorithms.shares import Cost
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.configs.schema import Settings
from smolcluster.runs.events import LeaseReturned, WorkerJoined, WorkerLost
from smolcluster.runs.summary import Summary
from smolcluster.training.build import build
from smolcluster.utils.retry import Deadline
from smolcluster.wire import acceptor, node

Algorithm = Literal["edp", "syncps", "diloco", "pipeline", "mesh"]
ALGORITHMS: tuple[Algorithm, ...] = ("edp", "syncps", "diloco", "pipeline", "mesh")
EPOCHS = 2
SYNCHRONOUS: frozenset[Algorithm] = frozenset({"syncps", "pipeline"})
"""Those whose every step is that of one process, whoever computes it."""
KEPT_STEPS = 2
"""A pipeline, a mesh: what stages and ranks have is kept after so many steps each."""
LOCAL_STEPS = 4
"""DiLoCo: two rounds are over when the run is held."""
BATCH: Mapping[Algorithm, int] = MappingProxyType(
    {"edp": 32, "syncps": 128, "diloco": 32, "pipeline": 128, "mesh": 128}
)
NUM_STEPS: Mapping[Algorithm, int] = MappingProxyType(
    {
        "edp": EPOCHS * 45,
        "syncps": EPOCHS * 12,
        "diloco": EPOCHS * 45,
        "pipeline": EPOCHS * 12,
        "mesh": EPOCHS * 12,
    }
)
SMALL_BUCKET = 8192
"""Bytes: five buckets."""
HOLD_AT = 6
"""The step before which the run waits for the struck worker."""
LATE_AT = 3
"""The step after which a joiner comes."""
STRUCK = 2
"""The worker id behind the proxy."""
NODES = ("pi5", "win")
STRUCK_NAME = f"worker {STRUCK} ({NODES[STRUCK - 1]})"
QUICK_S = 1.0
"""How soon silence is noticed where a case is about silence, seconds."""
UNHURRIED_S = 30.0
"""The same in all other cases: no case waits for it."""
RECONNECT_S = 6.0
"""How long a worker tries to come back, seconds: twice as long as a server lingers at the end."""
PATIENCE_S = 45.0
"""How long the run is held back at most, seconds."""
LOSS_REL = 1e-6
WEIGHTS_REL = 1e-5
"""Relative to the largest weight: Adam enlarges what float32 rounds off."""
VAL_LOSS_SPREAD: Mapping[tuple[Algorithm, Mode], float] = MappingProxyType(
    {("edp", "sync"): 0.5, ("diloco", "sync"): 0.05, ("diloco", "async"): 0.5}
)
"""By how much the validation losses of runs without a fault differ, because nobody chooses who computes what.

They ended at 0.43 to 0.72, at 0.75 or 0.79, and at 0.64 to 1.00. They begin at 2.3; one that learns nothing
after the fault has struck ends at 2.1 or 2.2.
"""


class Ending(StrEnum):
    """What a fault leads to."""

    UNNOTICED = "unnoticed"
    """Nobody is lost."""
    TURNED_AWAY = "turned away"
    """The server drops a connection whose worker never took part; the worker tries again."""
    LOST = "lost"
    """The server loses a worker; it comes back by itself."""
    ENDED = "ended"
    """All ranks of a mesh end; started again, they go on from the last checkpoint."""
    OVER = "over"
    """The run is over already: the worker comes back to hear that."""


@dataclass(frozen=True)
class Case:
    """A cell of the matrix."""

    algorithm: Algorithm
    point: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.algorithm}-{self.point}-{self.fault}"

    @property
    def ending(self) -> Ending:
        """What the fault must lead to."""
        if self.fault in HARMLESS or self._repeats_something_idempotent:
            return Ending.UNNOTICED
        if self.point == "end":
            return Ending.UNNOTICED if self.algorithm == "mesh" else Ending.OVER
        if self.point in HANDSHAKE:
            return Ending.TURNED_AWAY
        return Ending.ENDED if self.algorithm == "mesh" else Ending.LOST

    @property
    def _repeats_something_idempotent(self) -> bool:
        """A second Ack, End or last bucket of a SyncPS push changes nothing.

        Nor does what a stage of a pipeline says, or is told, twice of a step.
        """
        points = {
            "edp": {"before_commit", "end"},
            "syncps": {"push_to_ack", "end"},
            "diloco": {"end"},
            "pipeline": {"header", "payload", "push_to_ack", "broadcast", "before_commit", "end"},
            "mesh": set(),
        }
        return self.fault == Fault.DUPLICATE and self.point in points[self.algorithm]


UNSEEN_BY_GLOO = frozenset({Fault.DUPLICATE, Fault.CORRUPT})
"""TCP lets neither through; of Gloo a flipped bit is another gradient, and a repeated frame ends the rank."""
ALL_CASES = tuple(
    Case(algorithm, point, fault)
    for algorithm in ALGORITHMS
    for point in POINTS[algorithm]
    for fault in Fault
    if not (POINTS[algorithm][point].group and fault in UNSEEN_BY_GLOO)
)


class Timeline(logging.Handler):
    """Log lines with the time of each, on the monotonic clock."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))

    def first(self, *texts: str, after: float = 0.0) -> float | None:
        """When a line with any of these texts came first, from `after` on."""
        for at, line in list(self.lines):
            if at >= after and any(text in line for text in texts):
                return at
        return None


NOTICED: Mapping[Ending, tuple[str, ...]] = MappingProxyType(
    {
        Ending.UNNOTICED: (),
        Ending.TURNED_AWAY: ("not let in", "never took part", "is lost: "),
        Ending.LOST: (f"{STRUCK_NAME} is lost: ",),
        Ending.OVER: ("the server is lost: ",),
    }
)
"""The lines by which a fault is found out."""


@dataclass
class Played:
    """A case that has been played."""

    algorithm: Algorithm
    cluster: Cluster
    workers: list[Outcome]
    timeline: Timeline
    struck: bool = False
    struck_at: float = 0.0
    connections: int = 0
    mode: Mode = "sync"
    """DiLoCo's."""

    @property
    def summary(self) -> Summary:
        assert self.cluster.server.summary is not None
        return self.cluster.server.summary

    @property
    def losses(self) -> list[float]:
        """By step; of one that a pipeline has taken again the last one."""
        losses = {each.step: each.values["loss"] for each in self.cluster.metrics.steps}
        return [losses[step] for step in sorted(losses)]

    @property
    def weights(self) -> Tensor:
        if self.algorithm != "pipeline":
            return self.cluster.training.replica.params
        checkpoint = self.cluster.store.newest_good()
        assert checkpoint is not None
        assert checkpoint.state.step == NUM_STEPS[self.algorithm]
        return torch.cat([each.flatten() for _, each in sorted(checkpoint.model.items())])

    def noticed_after_s(self, ending: Ending) -> float | None:
        """Seconds from the strike until somebody said that something was wrong."""
        return self._seconds_until(*NOTICED[ending])

    @property
    def back_after_s(self) -> float | None:
        """Seconds from the strike until the struck worker took part again."""
        return self._seconds_until(f"{STRUCK_NAME} joined", f"{STRUCK_NAME} is back")

    def _seconds_until(self, *texts: str) -> float | None:
        at = self.timeline.first(*texts, after=self.struck_at) if self.struck else None
        return None if at is None else at - self.struck_at


Reference = Callable[..., Played]
"""The run without a fault of an algorithm, and in DiLoCo's mode: `reference("diloco", "async")`."""


def settings_for(
    algorithm: Algorithm, fault: Fault | None, mode: Mode, *, joins_late: bool
) -> Settings:
    timeout_s = QUICK_S if fault in SILENT else UNHURRIED_S
    checkpoint_steps = KEPT_STEPS if algorithm == "pipeline" else "null"
    overrides = [
        f"checkpoint_steps={checkpoint_steps}",
        f"num_epochs={EPOCHS}",
        f"batch_size={BATCH[algorithm]}",
        f"global_batch_size={BATCH[algorithm]}",
        f"heartbeat_timeout_s={timeout_s}",
        "worker_update_interval=2",
        f"reconnect_timeout_s={RECONNECT_S}",
        "track_gradients=false",
        "codec=fp32",
    ]
    if algorithm == "edp":
        overrides.append("learning_rate=0.003")  # so that it learns in so short a run
    elif algorithm == "diloco":
        overrides += [f"mode={mode}", "learning_rate=0.003", f"local_steps={LOCAL_STEPS}"]
        overrides += ["codec_up=fp32", "codec_down=fp32", "outer_lr=1", "outer_momentum=0"]
    elif algorithm == "pipeline":
        overrides += ["shard_plan=even", "microbatches=2"]
    else:
        overrides += [f"batch_share.{node}=0.5" for node in NODES]
    workers = len(NODES)
    if algorithm == "pipeline" and joins_late:  # it begins when all are there
        workers -= 1
    return local_settings(*overrides, workers=workers, algorithm=algorithm)


def gated(
    algorithm: Algorithm, may_begin: Callable[[], bool], may_go_on: Callable[[], bool]
) -> type[Server]:
    """A server that hands out nothing before it may begin, and waits at `HOLD_AT` until it may go on."""

    def is_open(version: int) -> bool:
        return may_begin() and (version < HOLD_AT or may_go_on())

    class EDP(edp.Server):
        def hand_out(self) -> None:
            if is_open(self.version):
                super().hand_out()

    class SyncPS(syncps.Server):
        def open_step(self, now: float) -> Step | None:
            return super().open_step(now) if is_open(self.version) else None

    class DiLoCo(diloco.Server):
        def hand_out(self, now: float) -> None:
            if is_open(self.version):
                super().hand_out(now)

    class Pipeline(pipeline.Server):
        def step(self, crew: Crew) -> Questions[None]:
            while not is_open(self.version):
                yield None
            yield from super().step(crew)

        def plan(self) -> Crew | None:
            return super().plan() if is_open(self.version) else None

    servers: Mapping[Algorithm, type[Server]] = {
        "edp": EDP,
        "syncps": SyncPS,
        "diloco": DiLoCo,
        "pipeline": Pipeline,
    }
    return servers[algorithm]


def play(
    algorithm: Algorithm,
    folder: Path,
    case: Case | None = None,
    *,
    make: MakeParticipant | None = None,
    patience_s: float = PATIENCE_S,
    mode: Mode = "sync",
) -> Played:
    """Play a case, or without one a run without any fault.

    `make` makes the struck worker's part; the run is held back for `patience_s` seconds at most. `mode`:
    DiLoCo's.
    """
    point = POINTS[case.algorithm][case.point] if case else None
    fault = case.fault if case else None
    ending = case.ending if case else Ending.UNNOTICED
    joins_late = case is not None and case.point == "state_transfer"
    timeline = Timeline()
    patience = Deadline(patience_s)
    is_made = threading.Event()

    def may_begin() -> bool:
        # the server is asked while the cluster is still being made
        if not is_made.is_set():
            return False
        version = cluster.core.version
        has_begun = version < LATE_AT or proxy.struck.is_set() if joins_late else version > 0
        return has_begun or all_there(cluster.core)

    def may_go_on() -> bool:
        if case is None or case.point == "end" or patience.expired:
            return True
        if not proxy.struck.is_set():
            return False
        told = not NOTICED[ending] or timeline.first(*NOTICED[ending], after=proxy.struck_at)
        return bool(told) and all_there(cluster.core)

    with _patches(case, algorithm):
        settings = settings_for(algorithm, fault, mode, joins_late=joins_late)
        proxy = FaultProxy(settings.cluster.port, point, fault)
        try:
            cluster = Cluster(
                settings, folder, gated(algorithm, may_begin, may_go_on), algorithm=algorithm
            )
            is_made.set()
            cluster.log.addHandler(timeline)
            played = Played(algorithm, cluster, [], timeline, mode=mode)
            played.workers.append(cluster.worker(1, node=NODES[0], start_timeout_s=PATIENCE_S))
            while joins_late and cluster.core.version < LATE_AT and cluster.server.is_alive():
                time.sleep(0.01)
            played.workers.append(
                cluster.worker(
                    STRUCK,
                    port=proxy.port,
                    node=NODES[STRUCK - 1],
                    start_timeout_s=PATIENCE_S,
                    make=make,
                )
            )
            deadline = Deadline(harness.DEADLINE_S)
            for each in (cluster.server, *played.workers):
                each.join(deadline.remaining())
        finally:
            proxy.close()
    played.struck, played.struck_at = proxy.struck.is_set(), proxy.struck_at
    played.connections = proxy.connections
    return played


def all_there(core: Server) -> bool:
    if isinstance(core, pipeline.Server):
        return len(core.dealer.ready) == len(NODES)  # before, no layers are dealt to them
    present = core.members.free if isinstance(core, syncps.Server) else core.pool.workers
    return len(present) == len(NODES)


def in_equal_parts(budget: int, workers: Mapping[int, Cost]) -> dict[int, int]:
    """DiLoCo's plan of a round in which nobody is too slow to take part."""
    return {id_: (budget + number) // len(workers) for number, id_ in enumerate(workers)}


@contextmanager
def _patches(case: Case | None, algorithm: Algorithm) -> Iterator[None]:
    """Small buckets, workers that never wait in async; and short handshakes where one falls silent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "build", partial(build, bucket_bytes=SMALL_BUCKET))
        if algorithm == "pipeline":
            share_generator(patch)
        patch.setattr(rounds, "shared_out", in_equal_parts)
        patch.setattr(rounds, "SYNCHRONOUS_ROUNDS", 0)
        if case is not None and case.point in HANDSHAKE and case.fault in SILENT:
            patch.setattr(node, "HANDSHAKE_TIMEOUT_S", QUICK_S)
            patch.setattr(acceptor, "HANDSHAKE_TIMEOUT_S", QUICK_S)
        yield


# What must hold.


def check(case: Case, played: Played, reference: Played) -> None:
    check_everybody_ended_well(played)
    check_applied_once(played)
    check_same_result(played, reference)
    check_traces(case, played)


def check_everybody_ended_well(played: Played) -> None:
    """Server and workers have ended, within the deadline and without an error."""
    for each in (played.cluster.server, *played.workers):
        assert not each.is_alive(), f"{each.name} has not ended; {played.timeline.lines}"
        assert each.error is None, f"{each.name}: {each.error!r}; {played.timeline.lines}"


def check_applied_once(played: Played) -> None:
    """Every sample of every epoch, and every push, counted exactly once."""
    played.cluster.assert_every_sample_applied_once()
    summary = played.summary
    assert summary.steps == NUM_STEPS[played.algorithm] == len(played.losses)
    assert summary.samples_applied == EPOCHS * played.cluster.training.num_samples
    num_taken = len(played.cluster.metrics.steps)
    if played.algorithm == "pipeline":
        num_lost = len(played.cluster.happened(WorkerLost))
        assert num_taken <= summary.steps + num_lost * KEPT_STEPS, (
            "a step that was kept is done again"
        )
        return
    assert num_taken == summary.steps
    assert summary.pushes.applied == summary.steps or played.algorithm == "syncps"


def check_same_result(played: Played, reference: Played) -> None:
    """In SyncPS and pipelines: losses and weights are those of a run without a fault.

    The others learn as well, or more: a worker that is away leaves the other alone for a while, whose changes
    are less stale then.
    """
    mine, theirs = played.summary.final.val_loss, reference.summary.final.val_loss
    assert mine is not None
    assert theirs is not None
    if played.algorithm in SYNCHRONOUS:
        mine_all, theirs_all = [*played.losses, mine], [*reference.losses, theirs]
        check_same_training(mine_all, theirs_all, played.weights, reference.weights)
        return
    assert bool(torch.isfinite(played.weights).all())
    assert played.mode == reference.mode
    assert mine <= theirs + VAL_LOSS_SPREAD[played.algorithm, played.mode]


def check_same_training(
    losses: Sequence[float], expected: Sequence[float], weights: Tensor, expected_weights: Tensor
) -> None:
    assert losses == pytest.approx(expected, rel=LOSS_REL)
    largest = float(expected_weights.abs().max())
    assert float((weights - expected_weights).abs().max()) <= WEIGHTS_REL * largest


def check_traces(case: Case, played: Played) -> None:
    """What happened is told and counted; where nothing happened, nothing is told."""
    assert played.struck, "the point was never reached"
    lost = played.cluster.happened(WorkerLost)
    joined = played.cluster.happened(WorkerJoined)
    back = [event for event in joined if event.rejoined]
    returned = played.cluster.happened(LeaseReturned)
    assert len(returned) == played.summary.leases_returned
    pushes = played.summary.pushes
    assert pushes.stale == pushes.late == 0
    match case.ending:
        case Ending.UNNOTICED:
            assert (lost, back, played.connections) == ([], [], 1)
            assert played.summary.leases_returned == 0
            # The second copy of a last bucket is a push that nobody waits for.
            is_spare = case.fault == Fault.DUPLICATE and case.point == "push_to_ack"
            assert pushes.lost == (is_spare and case.algorithm != "pipeline")
            assert played.timeline.first("not let in", "never took part", "server is lost") is None
        case Ending.TURNED_AWAY:
            assert played.noticed_after_s(case.ending) is not None
            assert played.connections >= 2
            assert (pushes.lost, {event.rank for event in joined}) == (0, {0, 1})
        case Ending.LOST:
            check_lost_and_back(case, played)
        case Ending.OVER:
            assert (lost, back) == ([], [])
            assert pushes.lost == 0


def check_lost_and_back(case: Case, played: Played) -> None:
    """The server lost the struck worker, says why, took back what it held, and let it in again."""
    lost = played.cluster.happened(WorkerLost)
    back = [event for event in played.cluster.happened(WorkerJoined) if event.rejoined]
    assert lost, "nobody was lost"
    assert back, "the worker never came back"
    assert played.connections >= 2
    if case.fault not in SILENT:
        assert [event.rank for event in lost] == [event.rank for event in back] == [STRUCK - 1]
        assert played.connections == 2
    assert all(re.search(reason_pattern(case), event.reason) for event in lost)
    assert played.timeline.first("trying to reconnect", after=played.struck_at) is not None
    if case.fault == Fault.CORRUPT:
        assert played.timeline.first("checksum does not match", after=played.struck_at) is not None
    core = played.cluster.core
    if isinstance(core, pipeline.Server):
        *_, layers = (line for line in played.cluster.log_lines if "layers: " in line)
        assert all(node in layers for node in NODES), "the worker that is back has no layers"
    elif case.point in {"header", "payload"}:
        assert played.summary.pushes.lost >= 1
        assert played.summary.leases_returned >= 1


def reason_pattern(case: Case) -> str:
    """By which words the server says why it lost the worker."""
    ended = "closed the connection|connection lost"
    if not POINTS[case.algorithm][case.point].upward and case.fault not in SILENT:
        return ended  # it is the worker that has noticed
    patterns = {
        Fault.TRUNCATE: ended,
        Fault.RESET: ended,
        Fault.STALL: "silent for|has connected again",
        Fault.HALF_OPEN: "silent for|has connected again",
        Fault.DUPLICATE: "it sent bucket|it pushed again|it sent fragment",
        Fault.CORRUPT: "checksum does not match",
    }
    return patterns[case.fault]
