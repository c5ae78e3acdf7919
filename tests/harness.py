"""A whole cluster in one process: server and workers as threads, talking over 127.0.0.1."""

import itertools
import logging
import os
import random
import secrets
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.DiLoCo import server as diloco
from smolcluster.algorithms.DiLoCo.worker import Worker as DiLoCoWorker
from smolcluster.algorithms.EDP import server as edp
from smolcluster.algorithms.EDP.worker import Worker as EDPWorker
from smolcluster.algorithms.PipelineParallel import server as pipeline
from smolcluster.algorithms.PipelineParallel.worker import Worker as PipelineWorker
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.algorithms.SynchronousPS.worker import Worker as SyncPSWorker
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import (
    AlgorithmName,
    DatasetConfig,
    Settings,
    SimpleNNConfig,
    TrainConfig,
)
from smolcluster.configs.spec import get_algorithm, spec_of
from smolcluster.data.permutation import global_batches
from smolcluster.observability.metrics import MetricRecord, Metrics
from smolcluster.observability.sinks.jsonl import MetricLine, follow_metrics
from smolcluster.runs.events import Event, EventLog, read_events
from smolcluster.runs.summary import Summary
from smolcluster.server.link import Participant, WorkerSetup, follow
from smolcluster.server.records import Records
from smolcluster.server.store_host import StoreSetup, hold
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.checkpoint import CheckpointStore, TrainingState
from smolcluster.training.workload import Workload
from smolcluster.utils.stopping import StopRequest
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import SESSION, STORE, Welcome
from smolcluster.wire.security import Secret

SECRET = Secret(Path("the-test's-secret"), b"0123456789abcdef0123456789abcdef")
DEADLINE_S, START_TIMEOUT_S = 180.0, 90.0
FIRST_PORT, NUM_PORTS = 12_000, 2000

E = TypeVar("E", bound=Event)
Server = diloco.Server | edp.Server | pipeline.Server | syncps.Server
MakeParticipant = Callable[[Welcome, TrainingContext], Participant]
SERVERS: Mapping[str, type[Server]] = MappingProxyType(
    {
        "diloco": diloco.Server,
        "edp": edp.Server,
        "pipeline": pipeline.Server,
        "syncps": syncps.Server,
    }
)
WORKERS: Mapping[str, MakeParticipant] = MappingProxyType(
    {
        "diloco": DiLoCoWorker,
        "edp": EDPWorker,
        "pipeline": PipelineWorker,
        "syncps": SyncPSWorker,
    }
)


_offset = random.SystemRandom().randrange(NUM_PORTS)
_offsets = itertools.chain(range(_offset, NUM_PORTS), itertools.cycle(range(NUM_PORTS)))


def free_port() -> int:
    """A port that nobody listens on now, and that is given to no connection and to no other test.

    Systems give connections ports from 32768 on; each process of pytest has some below that.
    """
    first = FIRST_PORT + NUM_PORTS * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = first + next(_offsets)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def local_settings(
    *overrides: str, workers: int = 3, train: str = "digits", algorithm: AlgorithmName = "edp"
) -> Settings:
    """What `--local` uses, on a free port."""
    defaults = [f"port={free_port()}", "heartbeat_timeout_s=60", "empty_cluster_timeout_s=20"]
    return load_settings(
        algorithm,
        train,
        None,
        [*defaults, *overrides],
        environ={},
        local=True,
        local_workers=workers,
    )


def digits_config(**changes: object) -> TrainConfig:
    """Two epochs of the digits, in steps of 100 samples."""
    values: dict[str, object] = {
        "batch_size": 100,
        "num_epochs": 2,
        "eval_steps": 10,
        "model": SimpleNNConfig(input_dim=None, hidden=16),
        "dataset": DatasetConfig(name="digits"),
    }
    return TrainConfig.model_validate(values | changes)


@dataclass
class Recorder:
    """A metrics sink that keeps every record."""

    records: list[MetricRecord] = field(default_factory=list)

    def log(self, record: MetricRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        """Nothing to close."""

    @property
    def steps(self) -> list[MetricRecord]:
        """One record an optimizer step of the server, in order."""
        return [record for record in self.records if record.kind == "step"]

    @property
    def evaluations(self) -> list[MetricRecord]:
        """One record an evaluation of the run's weights, in order."""
        return [record for record in self.records if record.kind == "eval"]


class Outcome(threading.Thread):
    """A thread whose result or error can be had."""

    def __init__(self, name: str, body: Callable[[], Summary | None]) -> None:
        super().__init__(name=name, daemon=True)
        self._body = body
        self.summary: Summary | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self.summary = self._body()
        except BaseException as error:
            self.error = error
            logging.getLogger("outcome").warning("%s ended with %r", self.name, error)

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            AssertionError: it does not come.
            BaseException: what the thread raised.
        """
        self.join(DEADLINE_S)
        assert not self.is_alive(), f"{self.name} did not end within {DEADLINE_S} s"
        if self.error is not None:
            raise self.error

    def failure(self) -> BaseException:
        """Wait for the end, which must be an error, and return it."""
        self.join(DEADLINE_S)
        assert not self.is_alive(), f"{self.name} did not end within {DEADLINE_S} s"
        assert self.error is not None, f"{self.name} ended well"
        return self.error


def computing_after(event: threading.Event, worker: type[Any]) -> type[Any]:
    """A worker that computes nothing before an event, or it might have taken all samples by then."""

    class Patient(worker):  # type: ignore[misc]
        def compute(self, lease: Any) -> Any:
            assert event.wait(DEADLINE_S)
            return super().compute(lease)

    return Patient


class Cluster:
    """A server in a thread, and as many workers as the test starts."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        server_class: type[Server] | None = None,
        secret: Secret = SECRET,
        *,
        algorithm: AlgorithmName = "edp",
        resume: bool = False,
        workload: Workload | None = None,
    ) -> None:
        """Begin a run in `folder`, or go on from its newest checkpoint, whose files are the same.

        `workload`: what server and workers train; None: what the settings name.
        """
        if workload is not None:
            settings = settings.with_batch_size(workload.batch_size)
        self.settings = settings
        self.algorithm = algorithm
        self.metrics = Recorder()
        self.folder = folder
        self.events_path = folder / "events.jsonl"
        self.log_lines: list[str] = []
        self.log = logging.Logger("test", logging.DEBUG)
        self.log.addHandler(Lines(self.log_lines))
        self._secret = secret
        self._is_resumed = resume
        train, cluster = settings.train, settings.cluster
        self.workload = workload
        self.training = build(
            *(train, cluster.seed, settings.node.dataset, torch.device("cpu")),
            workload=workload,
            is_outline=not spec_of(algorithm).has_whole_model,
        )
        incarnation = secrets.token_hex(4)
        events = self._events = EventLog(self.events_path, incarnation, warn=self.log.warning)
        self.store = CheckpointStore(folder / "checkpoints", cluster.keep_last, self.log)
        self.stop = StopRequest()
        context = ServerContext(
            settings=settings,
            run=settings.run_config("test-run", algorithm),
            training=self.training,
            node=cluster.server,
            secret=secret,
            incarnation=incarnation,
            records=Records(Metrics([self.metrics]), events, incarnation, folder=folder),
            log=self.log,
            store=self.store,
            checkpoint=self.store.newest_good() if resume else None,
            check_stop=self.stop.check,
        )
        self.core = (server_class or SERVERS[algorithm])(context)

        def serve() -> Summary:
            try:
                return self.core.run()
            finally:
                events.close()

        self.server = Outcome("server", serve)

    def worker(
        self,
        worker_id: int,
        *,
        port: int | None = None,
        node: str = "macbook",
        secret: Secret | None = None,
        make: MakeParticipant | None = None,
        settings: Settings | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        workload: str | None = None,
    ) -> Outcome:
        """Start a worker of the server's algorithm, or the one that `make` makes.

        `workload`: the name of a function, as `--workload` has it.
        """
        cluster = self.settings.cluster
        make_participant = make or WORKERS[self.algorithm]
        place = WorkerSetup(
            node=(settings or self.settings).node,
            hello=introduce(node, worker_id),
            address=Address("127.0.0.1", port or cluster.port),
            secret=secret or self._secret,
            start_timeout_s=start_timeout_s,
            encryption=cluster.encryption,
            log=self.log,
            own_folder=lambda run_id: self.folder / run_id / f"worker-{worker_id}",
            workload=workload or self.workload,
        )
        return Outcome(f"worker {worker_id}", lambda: follow(place, make_participant))

    def start_store(self, node: str, *, secret: Secret | None = None) -> Outcome:
        """Start a store, as on a machine of its own."""
        cluster = self.settings.cluster
        setup = StoreSetup(
            hello=introduce(node, sets=(SESSION, STORE)),
            address=Address("127.0.0.1", cluster.port),
            secret=secret or self._secret,
            start_timeout_s=START_TIMEOUT_S,
            encryption=cluster.encryption,
            log=self.log,
            held=get_algorithm(self.algorithm).module("store").Held,
        )
        return Outcome(f"store {node}", lambda: hold(setup))

    @property
    def events(self) -> list[Event]:
        self._events.flush()
        return [record.event for record in read_events(self.events_path)]

    def happened(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def losses(self) -> list[float]:
        """Of each step, in order."""
        return [record.values["loss"] for record in self.metrics.steps]

    def finish(self, *workers: Outcome) -> Summary:
        """The run ends well, for these workers too.

        Every sample has been applied once, unless an earlier life of the server has applied some.
        """
        self.server.finish()
        for worker in workers:
            worker.finish()
        if not self._is_resumed:
            self.assert_every_sample_applied_once()
        assert self.server.summary is not None
        return self.server.summary

    def assert_every_sample_applied_once(self) -> None:
        """Every sample of every epoch, up to the last step, exactly once."""
        num_samples = self.training.num_samples
        train = self.settings.run_config("run", self.algorithm).train
        epochs = global_batches(num_samples, train.total_samples(num_samples), num_samples)
        once = {each.epoch: Counter(range(each.stop)) for each in epochs}
        assert places_applied(self.metrics.records) == once
        summary = self.server.summary
        assert summary is not None
        if self.algorithm != "pipeline":  # whose workers share each sample
            assert sum(each.samples for each in summary.workers) == summary.samples_applied


def state_of(step: int, **fields: Any) -> TrainingState:
    """Where a run stood when a checkpoint was made."""
    known: dict[str, Any] = {
        "run_id": "edp-1",
        "algorithm": "edp",
        "incarnation": "a1",
        "step": step,
        "samples_applied": 32 * step,
        "epoch": 0,
        "dataset_fingerprint": "d" * 64,
        "seed": 42,
        "codec": "fp32",
    }
    return TrainingState.model_validate(known | fields)


def steps_in(metrics: Path) -> list[MetricLine]:
    """The steps in a run's file of metrics."""
    return [line for line in follow_metrics(metrics).poll() if line.record.kind == "step"]


def places_applied(records: Iterable[MetricRecord]) -> dict[int, Counter[int]]:
    """How often each place of an epoch was applied; of a step that was taken again the last record counts."""
    steps = {each.step: each for each in records if each.kind == "step"}
    applied: dict[int, Counter[int]] = defaultdict(Counter)
    for each in steps.values():
        applied[each.epoch].update(range(int(each.values["start"]), int(each.values["stop"])))
    return dict(applied)


def assert_applied_once(records: Iterable[MetricRecord], num_samples: int, num_epochs: int) -> None:
    """Each place of each epoch was applied once."""
    once = Counter(range(num_samples))
    assert places_applied(records) == dict.fromkeys(range(num_epochs), once)


class Lines(logging.Handler):
    """Keeps what is logged in a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")
