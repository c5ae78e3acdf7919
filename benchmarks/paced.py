"""Machines of a stated speed and link: processes in network namespaces, whose batches take a stated time.

A batch lasts max(what it really takes, `batch_s`), so that a few cores can play several machines as long
as the real time stays below: whoever computes sleeps for the rest. What its thread has computed between two
batches, such as an optimizer's step or encoding, is part of that time; waiting is not. Each machine writes
what it has computed to a file, which also says where the real time was too long.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

from common import free_port
from exchange import Host
from smolcluster.algorithms import process
from smolcluster.algorithms.entry import guarded, server_parser, worker_parser
from smolcluster.configs.spec import get_algorithm
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.compute import BatchLoss, Microbatch
from smolcluster.wire.security import ensure_secret


@dataclass(frozen=True)
class Machine:
    """A host, and the seconds that it takes for a whole batch."""

    name: str
    host: Host
    batch_s: float

    def enter(self, folder: Path) -> None:
        """Be a process of this machine, whose runs, secret and output lie in `folder`."""
        with (folder / f"output-{self.name}.txt").open("wb") as output:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(output.fileno(), stream.fileno())
        os.environ |= {
            "XDG_CONFIG_HOME": str(folder / "config"),
            "SMOLCLUSTER_RUNS_DIR": str(folder / "runs"),
            "WANDB_MODE": "disabled",
        }
        self.host.enter()

    def pace(self, batch_size: int, folder: Path) -> "Pace":
        return Pace(self.batch_s / batch_size, computed_file(folder, self.name))


@dataclass(frozen=True)
class Computed:
    """Samples that a machine has computed, at a time since 1970, and the seconds that it had and took."""

    at: float
    num_samples: int
    due_s: float
    real_s: float


def computed_file(folder: Path, machine: str) -> Path:
    return folder / f"computed-{machine}.jsonl"


def read_computed(folder: Path, machine: str) -> list[Computed]:
    """What a machine has computed so far."""
    file = computed_file(folder, machine)
    lines = file.read_text().splitlines() if file.exists() else []
    return [Computed(*json.loads(line)) for line in lines if line.endswith("]")]


def share_broken(folder: Path, machines: Sequence[Machine]) -> float:
    """The share of batches that took longer than their machine's pace, of all but each one's first."""
    done = [each for machine in machines for each in read_computed(folder, machine.name)[1:]]
    return sum(each.real_s > each.due_s for each in done) / max(1, len(done))


def write_files(
    folder: Path,
    machines: Sequence[Machine],
    cluster: Mapping[str, object],
    train: Mapping[str, object],
    node: Mapping[str, object] = MappingProxyType({}),
) -> list[str]:
    """Write the configuration of a run on these machines, the server first; `node` is each worker's.

    Returns:
        The server's arguments, of which a worker takes the first two.
    """
    server, *workers = machines
    ensure_secret(folder / "secret")
    own = {"threads": 1, "secret_file": str(folder / "secret"), **node}
    shared = {
        "host_ip": {each.name: server.host.address for each in machines},
        "bind": [server.host.address],
        "port": free_port(),
        "server": server.name,
        "workers": [each.name for each in workers],
        "num_workers": len(workers),
        "min_workers": len(workers),
        "nodes": dict.fromkeys((each.name for each in workers), own),
        "heartbeat_timeout_s": 30.0,
        "metrics_port": None,
    }
    for name, content in (("cluster", {**shared, **cluster}), ("train", dict(train))):
        (folder / f"{name}.yaml").write_text(json.dumps(content))
    named = ["--config", str(folder / "cluster.yaml")]
    return [*named, "--train-config", str(folder / "train.yaml")]


@dataclass
class Pace:
    """Stretches what one thread computes to `sample_s` seconds a sample, and notes it in `file`."""

    sample_s: float
    file: Path
    thread_s: float = field(default_factory=time.thread_time)
    is_rehearsal: bool = False

    @contextmanager
    def stretching(self, num_samples: int) -> Iterator[None]:
        """What is done in the block is the computing of so many samples."""
        between_s = 0.0 if self.is_rehearsal else time.thread_time() - self.thread_s
        at, started = time.time(), time.monotonic()
        yield
        real_s = time.monotonic() - started + between_s
        due_s = self.sample_s * num_samples
        time.sleep(max(0.0, due_s - real_s))
        self.thread_s = time.thread_time()
        if not self.is_rehearsal:
            with self.file.open("a") as sink:
                sink.write(f"{json.dumps([at, num_samples, due_s, real_s])}\n")


@dataclass(frozen=True)
class Paced(TrainingContext):
    """What a machine trains with."""

    pace: Pace = field(kw_only=True)

    def rehearse(self, num_samples: int) -> bool:
        """As ever, at the machine's pace."""
        self.pace.is_rehearsal = True
        done = super().rehearse(num_samples)
        self.pace.is_rehearsal = False
        return done

    def _compute(
        self, num_samples: int, epoch: int, cut: Callable[[int], list[Microbatch]]
    ) -> BatchLoss:
        with self.pace.stretching(num_samples):
            return super()._compute(num_samples, epoch, cut)


def serve(
    _pipe: Pipe, machine: Machine, folder: Path, algorithm: str, arguments: Sequence[str]
) -> None:
    """Be an algorithm's server with the usual command line."""
    machine.enter(folder)
    spec = get_algorithm(algorithm)
    args = server_parser(spec).parse_args(["--no-progress", *arguments])
    serve_run = spec.module("server").serve
    sys.exit(guarded(lambda: process.serve(algorithm, args, serve_run)))


def work(
    _pipe: Pipe,
    machine: Machine,
    folder: Path,
    algorithm: str,
    batch_size: int,
    arguments: Sequence[str],
) -> None:
    """Be an algorithm's worker with the usual command line, at the machine's pace."""
    machine.enter(folder)
    spec = get_algorithm(algorithm)
    args = worker_parser(spec).parse_args(arguments)
    participant = spec.module("worker").Worker
    pace = machine.pace(batch_size, folder)

    def build_paced(*given: object, **options: object) -> TrainingContext:
        made = build(*given, **options)  # type: ignore[arg-type]
        parts = {each.name: getattr(made, each.name) for each in fields(made)}
        return Paced(**parts, pace=pace)

    with patch("smolcluster.server.link.build", build_paced):
        sys.exit(guarded(lambda: process.work(algorithm, args, participant)))
