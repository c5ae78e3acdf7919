"""What is known of machines and links before a run, and what an algorithm predicts from it.

An algorithm's folder holds a module with the functions of `CostModel`, which its spec names. Everything here
is a value or a pure function: bytes, seconds, and bytes a second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import inf
from statistics import fmean
from typing import Any, Protocol, cast

from smolcluster.configs.schema import Settings, TrainConfig
from smolcluster.configs.spec import AlgorithmSpec

FLOAT_NBYTES = 4
VALUE_NBYTES: Mapping[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "int8": 1 + 4 / 256,
    "int4": 1 / 2 + 2 / 64,
    "topk": (1 / 2 + 2 / 64 + 12 / 8) / 64,
}
"""Bytes of an encoded value; scales take 4 bytes for 256 or 2 for 64, the indices of `topk` 12 bits each."""
NUM_MOMENTS = {"sgd": 0, "Adafactor": 0} | dict.fromkeys(
    ("ASGD", "Adagrad", "Muon", "RMSprop", "SGD"), 1
)
"""Copies of the weights in an optimizer's state; 2 of all others."""
HANDLING_S = 1e-3
"""How long an exchange is under way besides its bytes, while both ends go on with something else."""
STEP_HANDLING_S = 3e-3
"""What each end computes for a worker's step besides its tensors: messages, records, metrics.

Measured with EDP and DiLoCo, three workers of a small model and two cores of a server.
"""
BISECTIONS = 50


@dataclass(frozen=True)
class Interface:
    """What all workers that reach the server by one of its interfaces share, bytes a second."""

    in_bytes_s: float = inf
    out_bytes_s: float = inf


@dataclass(frozen=True)
class Worker:
    """A machine that computes, as it was measured.

    Attributes:
        compute_s: forward and backward of `batch_size` samples.
        update_s: clipping and optimizer step, and what else a step costs it (`STEP_HANDLING_S`).
        up_bytes_s: to the server while nobody else sends; infinity: it is the server's own machine.
        down_bytes_s: from the server.
        latency_s: round trip.
        via: the server's interface; empty: it is the server's own machine.
    """

    name: str
    compute_s: float
    update_s: float = 0.0
    up_bytes_s: float = inf
    down_bytes_s: float = inf
    latency_s: float = 0.0
    via: str = ""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.update_s


@dataclass(frozen=True)
class Site:
    """The machines of a run and what connects them.

    Attributes:
        workers: in the order of the cluster file, at least one.
        interfaces: of the server, by name; of those that are missing it is not known that they limit.
        apply_s: what a push costs the server's main thread: clipping and optimizer step.
        num_cores: that all processes share; infinity: each is on a machine of its own.
    """

    workers: tuple[Worker, ...]
    interfaces: Mapping[str, Interface]
    apply_s: float = 0.0
    num_cores: float = inf

    def interface(self, worker: Worker) -> Interface:
        return self.interfaces.get(worker.via, Interface())


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        num_params: weights that are trained.
        num_samples: of an epoch; None: not known.
    """

    num_params: int
    num_samples: int | None = None

    @property
    def model_nbytes(self) -> int:
        return FLOAT_NBYTES * self.num_params

    def encoded_nbytes(self, codec: str) -> int:
        return round(self.num_params * VALUE_NBYTES[codec])


@dataclass(frozen=True)
class Forecast:
    """What an algorithm predicts of a run in its steady state.

    Attributes:
        samples_per_s: by all workers.
        received_bytes_s: by the server, from all workers.
        sent_bytes_s: by the server.
        lost: share of the time in which workers could compute and wait, weighted by their speeds, in 0..1.
        is_exact: whether the result is that of one process with the same samples a step.
        chosen: what the run will choose by itself of what is left open, in words.
    """

    samples_per_s: float
    received_bytes_s: float
    sent_bytes_s: float
    lost: float
    is_exact: bool = False
    chosen: str = ""


class CostModel(Protocol):
    """The functions of an algorithm's module of costs."""

    def step_nbytes(self, job: Job, settings: Settings) -> tuple[int, int]:
        """Bytes of a worker's step to the server and from it."""

    def predict(self, site: Site, job: Job, settings: Settings) -> Forecast:
        """What a run with these settings will be like."""

    def candidates(self, site: Site, job: Job, settings: Settings) -> Iterator[dict[str, Any]]:
        """Keys of the cluster file worth another value, with that: what loses least comes first."""


def costs_of(spec: AlgorithmSpec) -> CostModel | None:
    """An algorithm's own model of its costs; None: it has none."""
    return None if spec.costs is None else cast("CostModel", import_module(spec.costs))


def codec_of(settings: Settings) -> str:
    """How gradients travel, as the cluster file says."""
    return settings.cluster.codec or "fp32"


def samples_alone(site: Site, settings: Settings) -> list[float]:
    """Samples a second that each worker computes if it never waits."""
    return [settings.train.samples_per_push / worker.step_s for worker in site.workers]


def most_steps_s(site: Site) -> float:
    """Steps of all workers a second for which there is time.

    The server's main thread handles one after the other. On one machine all processes share its cores.
    """
    step_s = fmean(worker.step_s for worker in site.workers) + STEP_HANDLING_S
    return min(1 / STEP_HANDLING_S, site.num_cores / step_s)


def lost_share(samples_per_s: float, alone: Sequence[float]) -> float:
    """The share of what machines could compute that waiting costs, in 0..1."""
    return min(1.0, max(0.0, 1 - samples_per_s / sum(alone)))


def up_rates(site: Site, used: Callable[[int, float], float]) -> list[float]:
    """Bytes a second of each worker's way to the server while all send, as `fair_rates`."""
    own = [worker.up_bytes_s for worker in site.workers]
    return fair_rates(site, own, lambda each: each.in_bytes_s, used)


def down_rates(site: Site) -> list[float]:
    """Bytes a second of each worker's way from the server while all receive."""
    own = [worker.down_bytes_s for worker in site.workers]
    return fair_rates(site, own, lambda each: each.out_bytes_s, lambda _, rate: rate)


def fair_rates(
    site: Site,
    own: Sequence[float],
    limit: Callable[[Interface], float],
    used: Callable[[int, float], float],
) -> list[float]:
    """Bytes a second of each worker's flow while it flows: its `own`, or an equal share of an interface.

    `used(place, rate)` is what a worker takes on average if its flow has that rate; it grows with the rate.
    The share is the largest with which all that is used fits the interface, so what one does not need others
    get.
    """
    rates = list(own)
    for via in dict.fromkeys(worker.via for worker in site.workers if worker.via):
        places = [place for place, worker in enumerate(site.workers) if worker.via == via]
        most = limit(site.interfaces.get(via, Interface()))
        if sum(used(place, own[place]) for place in places) <= most:
            continue
        low, high = 0.0, max(own[place] for place in places)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            total = sum(used(place, min(own[place], middle)) for place in places)
            low, high = (middle, high) if total <= most else (low, middle)
        for place in places:
            rates[place] = min(own[place], low)
    return rates


def seconds_of(nbytes: float, bytes_s: float) -> float:
    """How long a transfer takes; infinity where nothing passes."""
    if not nbytes:
        return 0.0
    return nbytes / bytes_s if bytes_s else inf


def num_moments(train: TrainConfig) -> int:
    """Copies of the weights in the state of the optimizer that a training file names."""
    if train.optimizer == "sgd" and train.optimizer_args.get("momentum"):
        return 1
    return NUM_MOMENTS.get(train.optimizer, 2)
