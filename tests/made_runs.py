"""Folders of runs that never were, made with the real writers."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reading import status_of
from smolcluster.configs.resolve import load_settings, save_resolved
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import JsonlSink
from smolcluster.runs.events import (
    Event,
    EventLog,
    LeaseReturned,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
)
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import RankStatus, RunState, WorkerStatus, instant, write_status
from smolcluster.runs.summary import (
    Final,
    Pushes,
    Summary,
    Traffic,
    WorkerShare,
    write_summary,
)

BEGAN = 1_790_000_000.0
"""When made runs began: 2026-09-21 14:13:20 UTC."""
BATCH = 32
NODES = ("pi5", "win", "macbook")


class MadeRun:
    """A run's folder, whose clock goes as the test says: `now` is in seconds since it began."""

    def __init__(self, folder: Path, run_id: str = "edp-1", incarnation: str = "a1") -> None:
        self.paths = RunPaths(folder / run_id)
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        self.now = 0.0
        self._incarnation = incarnation
        self._algorithm = "edp"

    def config(self, *overrides: str, train: str = "digits") -> None:
        settings = load_settings("edp", train, None, overrides, environ={}, local=True)
        save_resolved(settings, self.paths.config)

    def event(self, *events: Event) -> None:
        log = EventLog(self.paths.events, self._incarnation, warn=pytest.fail, now=self._seconds)
        for event in events:
            log.write(event)
        log.close()

    def metric(self, *records: MetricRecord) -> None:
        sink = JsonlSink(self.paths.metrics, self._incarnation, warn=pytest.fail, now=self._seconds)
        for record in records:
            sink.log(record)
        sink.close()

    def _seconds(self) -> float:
        return BEGAN + self.now

    def started(self, **changes: object) -> None:
        values: dict[str, object] = {
            "run_id": self.paths.run_id,
            "algorithm": "edp",
            "node": "mini1",
            "num_workers": 3,
            "num_epochs": 2,
            "train_samples": 1600,
            "batch_size": BATCH,
            "codec": "fp32",
            "dataset": "digits",
            "model": "SimpleNN",
            "num_params": 9610,
        }
        self._algorithm = str(changes.get("algorithm", self._algorithm))
        self.event(RunStarted.model_validate(values | changes))

    def joined(self, rank: int, node: str | None = None, *, rejoined: bool = False) -> None:
        name = node or NODES[rank]
        self.event(
            WorkerJoined(rank=rank, node=name, device="cpu", samples_per_s=9.0, rejoined=rejoined)
        )

    def lost(self, rank: int, reason: str = "closed the connection") -> None:
        self.event(WorkerLost(rank=rank, node=NODES[rank], reason=reason))
        self.event(
            LeaseReturned(
                rank=rank, node=NODES[rank], epoch=0, start=0, stop=BATCH, reason="it has gone"
            )
        )

    def steps(self, first: int, last: int, **more: float) -> None:
        """One a tenth of a second."""
        for number in range(first, last + 1):
            self.now += 0.1
            values = {"loss": 2.0 / number, "lr": 1e-3, "samples_applied": float(BATCH * number)}
            values |= {"samples_per_s": 320.0, "staleness": float(number % 3)}
            rank = number % 3
            self.metric(MetricRecord("step", number, 0, values | more, rank=rank, node=NODES[rank]))

    def says(
        self,
        component: str,
        node: str,
        rank: int | None,
        *lines: tuple[str, str],
        exception: BaseException | None = None,
        off_s: float = 0.0,
        **fields: object,
    ) -> None:
        """Lines of a process's log, a level and a message each; its clock is `off_s` ahead."""
        log = NodeLog(component, node, rank, console=Console(file=io.StringIO()))
        log.file_logs_to(self.paths.log_file(component, node, rank), self.paths.run_id)
        for level, message in lines:
            number = logging.getLevelNamesMapping()[level]
            entry = {"levelno": number, "levelname": level, "msg": message, **fields}
            if exception is not None:
                entry["exc_info"] = (type(exception), exception, None)
            record = logging.makeLogRecord(entry)
            record.created = BEGAN + self.now + off_s
            log.logger.handle(record)
        log.close()

    def status(
        self,
        state: RunState = "ended",
        reason: str | None = None,
        *workers: WorkerStatus,
        ranks: Sequence[RankStatus] = (),
    ) -> None:
        status = status_of(state, now=BEGAN + self.now, age_s=0.0, reason=reason)
        write_status(
            self.paths.status,
            status.model_copy(
                update={
                    "workers": list(workers),
                    "ranks": list(ranks),
                    "run_id": self.paths.run_id,
                    "algorithm": self._algorithm,
                }
            ),
        )

    def summary(self, **changes: Any) -> Summary:
        summary = summary_of(self.paths.run_id, **changes)
        write_summary(self.paths.summary, summary)
        return summary

    def ended(self, reason: str = "every sample has been applied", *, ok: bool = True) -> None:
        self.event(RunEnded(ok=ok, reason=reason, wall_s=10.0, steps=100, samples_applied=3200))


def summary_of(run_id: str = "edp-1", *, epochs: int = 2, **changes: object) -> Summary:
    """A summary of 100 steps of three workers, which were so many epochs."""
    shares = [
        WorkerShare(rank=rank, node=node, samples=samples, mean_staleness=tau, share=share)
        for rank, node, samples, tau, share in (
            *((0, "pi5", 1600, 0.5, 0.5), (1, "win", 320, 1.25, 0.1)),
            (2, "macbook", 1280, 0.75, 0.4),
        )
    ]
    return Summary(
        algorithm="edp",
        run_id=run_id,
        wall_s=10.0,
        epochs=epochs,
        steps=100,
        train_samples=1600,
        samples_applied=1600 * epochs,
        codec="fp32",
        pushes=Pushes(applied=100, stale=7),
        leases_returned=1,
        final=Final(train_loss=0.0213, val_loss=0.0345, val_accuracy=0.975),
        bytes=Traffic(sent=1_234_000, received=5_678_000),
        workers=shares,
    ).model_copy(update=changes)


def worker_status(rank: int, **changes: object) -> WorkerStatus:
    """A worker that is there."""
    values: dict[str, object] = {
        "rank": rank,
        "node": NODES[rank],
        "state": "joined",
        "device": "cpu (1 thread)",
        "step": 99,
        "samples": 640,
        "samples_per_s": 64.0,
        "last_seen": instant(BEGAN + 9),
    }
    return WorkerStatus.model_validate(values | changes)


def rank_status(rank: int, node: str = "a", **process_stats: float) -> RankStatus:
    """A rank of a mesh that has reported."""
    seen = instant(BEGAN + 9)
    return RankStatus(rank=rank, node=node, process_stats=process_stats, last_seen=seen)


def killed_run(folder: Path, run_id: str = "edp-1") -> MadeRun:
    """A complete run with three workers, of which the second was lost in the middle."""
    run = MadeRun(folder, run_id)
    run.config("num_epochs=2", "learning_rate=0.003")
    run.started()
    run.says("server", "mini1", None, ("INFO", "listening"))
    for rank, node in enumerate(NODES):
        run.joined(rank)
        run.says("worker", node, rank, ("INFO", f"joined run {run_id}"))
    run.steps(1, 50)
    run.says("server", "mini1", None, ("WARNING", "worker 2 (win) is lost: it was cut"))
    run.lost(1, "it was cut")
    run.steps(51, 100)
    run.metric(MetricRecord("eval", 100, 1, {"val_loss": 0.0345, "val_accuracy": 0.975}))
    run.summary()
    run.status("ended", "every sample has been applied", *map(worker_status, range(3)))
    run.ended()
    return run
