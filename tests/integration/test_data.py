"""Any data, on machines that have it and on machines that are sent it."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import own_workloads
from harness import WORKERS, Cluster, MakeParticipant
from own_workloads import ALGORITHMS, CPU, NODES
from several_hosts import after_step
from smolcluster.configs.schema import AlgorithmName, DatasetPlace, Settings
from smolcluster.data.dataset import Batch
from smolcluster.data.loading import Data
from smolcluster.errors import DataError, Rejected, RunFailed
from smolcluster.server import feed
from smolcluster.server.link import Participant
from smolcluster.training import first_loss
from smolcluster.training import workload as workload_module
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.compute import BatchLoss
from smolcluster.training.loop import training_steps
from smolcluster.training.workload import Terms, Workload
from smolcluster.utils.retry import Deadline
from smolcluster.utils.stopping import Interrupted
from smolcluster.wire.messages import Welcome

NUM_SAMPLES = 90
BATCH = 16


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return inputs, torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)


class Stream(IterableDataset[Any]):
    """Samples that can only be read in order; counts how often it was begun."""

    def __init__(self) -> None:
        self.num_begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_begun += 1
        yield from zip(*tensors(), strict=True)


class Unreachable:
    """Data that a worker must not touch."""

    def __len__(self) -> int:
        raise AssertionError("the worker asked for the length")

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the worker asked for a sample")


def loss(model: nn.Module, batch: Batch) -> Terms:
    inputs, targets = batch["input"], batch["target"]
    assert batch["name"][0].startswith("sample"), "text travels too"
    total = functional.cross_entropy(model(inputs), targets, reduction="sum")
    return total, len(targets)


def as_dict(samples: list[Any]) -> Batch:
    inputs, targets = zip(*samples, strict=True)
    return {
        "input": torch.stack(inputs),
        "target": torch.stack(targets),
        "name": [f"sample {int(target)}" for target in targets],
    }


def workload(train: Data) -> Workload:
    return Workload(lambda: nn.Linear(8, 4), loss, train, name="own", collate=as_dict)


def settings_for(algorithm: AlgorithmName, num_workers: int, *overrides: str) -> Settings:
    sizes = (f"batch_size={BATCH}", f"global_batch_size={BATCH}")
    served = (*sizes, "dataset.source=server", *overrides)
    return own_workloads.settings_for(algorithm, num_workers, *served)


def run(settings: Settings, folder: Path, algorithm: AlgorithmName, train: Data) -> Sequence[float]:
    """The losses of a run whose workers have no data."""
    cluster = Cluster(settings, folder, algorithm=algorithm, workload=workload(train))
    cluster.workload = workload(Unreachable())
    num_workers = settings.cluster.num_workers
    cluster.finish(*(cluster.worker(i + 1, node=NODES[i]) for i in range(num_workers)))
    return cluster.losses


def alone(settings: Settings, train: Data) -> Sequence[float]:
    return own_workloads.alone(settings, workload(train))[0]


@pytest.mark.parametrize(
    ("algorithm", "num_workers"), [("edp", 1), ("syncps", 1), ("syncps", 2), ("syncps", 3)]
)
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_whoever_is_sent_the_samples_computes_what_one_process_does(
    tmp_path: Path, algorithm: AlgorithmName, num_workers: int, kind: str
) -> None:
    settings = settings_for(algorithm, num_workers)
    data: list[Data] = [
        Stream() if kind == "stream" else TensorDataset(*tensors()) for _ in range(2)
    ]
    expected = alone(settings, data[0])
    assert len(expected) == 2 * -(-NUM_SAMPLES // BATCH)
    assert run(settings, tmp_path, algorithm, data[1]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_workers_are_sent_batches_of_the_loaders_size(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = settings_for(algorithm, 2, "global_batch_size=null")
    loader = DataLoader(TensorDataset(*tensors()), batch_size=9, shuffle=True)
    num_steps = len(run(settings, tmp_path, algorithm, loader))
    assert num_steps == (20 if algorithm == "edp" else 10)


class Seen:
    """Which samples came to whom for which places of an epoch."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int, int], set[tuple[int, ...]]] = {}
        self.one_died = threading.Event()

    def of(self, make: MakeParticipant, *, mortal: bool) -> MakeParticipant:
        """The same worker, watched. A mortal one dies in its second lease, in which others wait for that."""

        def watched(welcome: Welcome, training: TrainingContext) -> Participant:
            compute_batch, num_computed = training.compute_batch, 0

            def compute(batch: Batch, num: int, epoch: int = 0, start: int = 0) -> BatchLoss:
                nonlocal num_computed
                numbers = tuple(batch["number"].tolist())
                self.numbers.setdefault((epoch, start, start + num), set()).add(numbers)
                num_computed += 1
                if num_computed == 2:
                    if mortal:
                        self.one_died.set()
                        raise Rejected("the test ends it", "test")
                    assert self.one_died.wait(60)
                return compute_batch(batch, num, epoch, start)

            object.__setattr__(training, "compute_batch", compute)
            return make(welcome, training)

        return watched


class Numbered(IterableDataset[Any]):
    """A stream of numbered samples, which are other ones each epoch."""

    def __init__(self) -> None:
        self.epoch = -1
        self.num_begun = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.num_begun += 1
        for number in range(NUM_SAMPLES):
            yield {"number": number + 1000 * self.epoch, "input": torch.full((3,), number / 100)}


def squares(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(batch["input"])
    return output.square().mean()


def test_a_stream_is_read_once_an_epoch_though_memory_runs_out() -> None:
    """Its samples are gathered again in smaller parts, also by who takes fields from them."""

    def taken_apart(samples: list[Any]) -> Batch:
        return {
            name: torch.stack([torch.as_tensor(sample.pop(name)) for sample in samples])
            for name in ("number", "input")
        }

    def tight(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch["input"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.extend(batch["number"].tolist())
        return squares(model, batch)

    seen: list[int] = []
    stream, config = Numbered(), settings_for("syncps", 1).run_config("alone", "syncps").train
    own = Workload(
        lambda: nn.Linear(3, 1), tight, stream, collate=taken_apart, samples_per_epoch=NUM_SAMPLES
    )
    training = build(config, 3, DatasetPlace(), CPU, workload=own)
    num_steps = len(list(training_steps(training, config)))
    training.close()
    assert num_steps == 2 * -(-NUM_SAMPLES // BATCH)
    assert stream.num_begun == 2
    assert sorted(seen) == [
        number + 1000 * epoch for epoch in (0, 1) for number in range(NUM_SAMPLES)
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_lost_worker_s_samples_of_a_stream_go_to_another_one(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = settings_for(algorithm, 2, "empty_cluster_timeout_s=30")
    stream = Numbered()
    own = Workload(lambda: nn.Linear(3, 1), squares, stream, samples_per_epoch=NUM_SAMPLES)
    cluster, seen = Cluster(settings, tmp_path, algorithm=algorithm, workload=own), Seen()
    mortal = cluster.worker(1, make=seen.of(WORKERS[algorithm], mortal=True))
    other = cluster.worker(2, node="win", make=seen.of(WORKERS[algorithm], mortal=False))
    assert isinstance(mortal.failure(), Rejected)
    cluster.finish(other)
    for (epoch, start, stop), batches in seen.numbers.items():
        assert batches == {tuple(range(1000 * epoch + start, 1000 * epoch + stop))}
    covered = Counter(
        (epoch, place) for epoch, start, stop in seen.numbers for place in range(start, stop)
    )
    assert stream.num_begun == 2, "each epoch is read once"
    assert set(covered) == {(epoch, place) for epoch in (0, 1) for place in range(NUM_SAMPLES)}


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_a_run_that_is_resumed_goes_on_with_the_samples_that_come_next(
    tmp_path: Path, kind: str
) -> None:
    def data() -> Data:
        if kind == "stream":
            return Stream()
        return DataLoader(Noisy(), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]

    settings = settings_for("edp", 1, "checkpoint_steps=4")
    expected = alone(settings, data())
    cluster = Cluster(settings, tmp_path, workload=workload(data()))
    after_step(cluster, 5, lambda: cluster.stop.note(signal.SIGTERM))
    worker = cluster.worker(1)
    assert isinstance(cluster.server.failure(), Interrupted)
    assert cluster.core.version == 5
    again = Cluster(
        settings_for("edp", 1, f"port={settings.cluster.port}", "checkpoint_steps=4"),
        tmp_path,
        resume=True,
        workload=workload(data()),
    )
    again.finish(worker)
    losses = again.losses
    assert 0 < len(losses) < len(expected)
    assert losses == pytest.approx(expected[-len(losses) :], rel=1e-5)


class Noisy:
    """Samples to which chance adds something, which must not depend on who loads them, and when."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = tensors()
        return inputs[index] + torch.rand(8), targets[index]


@pytest.mark.parametrize(("algorithm", "num_workers"), [("edp", 1), ("syncps", 2)])
@pytest.mark.parametrize("source", ["local", "server"])
def test_what_chance_draws_for_a_sample_is_the_same_wherever_it_is_loaded(
    tmp_path: Path, algorithm: AlgorithmName, num_workers: int, source: str
) -> None:
    settings = settings_for(algorithm, num_workers, f"dataset.source={source}")
    cluster = Cluster(settings, tmp_path, algorithm=algorithm, workload=workload(Noisy()))
    cluster.finish(*(cluster.worker(number + 1) for number in range(num_workers)))
    losses = cluster.losses
    assert losses == pytest.approx(alone(settings, Noisy()), rel=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_worker_loads_the_next_samples_while_it_computes(
    tmp_path: Path, algorithm: AlgorithmName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who computes step n goes on only when somebody has asked for a sample of step n + 1."""
    monkeypatch.setattr(first_loss, "PATIENCE_S", -1.0)  # no loss is compared before
    told = threading.Condition()
    asked: set[int] = set()
    num_rehearsed, num_computed = 2, 0

    class Watched(Noisy):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            with told:
                asked.add(index)
                told.notify_all()
            return super().__getitem__(index)

    def loss_in_time(model: nn.Module, batch: Batch) -> Terms:
        nonlocal num_computed
        num_computed += 1
        wanted = min(NUM_SAMPLES, BATCH * (num_computed - num_rehearsed) + 1)
        with told:
            assert told.wait_for(lambda: len(asked) >= wanted, 60)
        return loss(model, batch)

    settings = settings_for(algorithm, 1, "dataset.source=local", "num_epochs=1")
    own = Workload(lambda: nn.Linear(8, 4), loss_in_time, Watched(), collate=as_dict)
    cluster = Cluster(settings, tmp_path, algorithm=algorithm, workload=own)
    cluster.finish(cluster.worker(1))
    assert num_computed == num_rehearsed + -(-NUM_SAMPLES // BATCH)


def test_a_worker_loads_no_more_when_its_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TrainingContext] = []

    def close(training: TrainingContext) -> None:
        closed.append(training)

    monkeypatch.setattr(TrainingContext, "close", close)
    settings = settings_for("edp", 1, "dataset.source=local", "num_epochs=1")
    cluster = Cluster(settings, tmp_path, workload=workload(TensorDataset(*tensors())))
    cluster.finish(cluster.worker(1))
    assert [training is not cluster.training for training in closed] == [True]


def test_data_that_take_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they do: the first samples come when the line has."""
    monkeypatch.setattr(feed, "SLOW_S", 0.0)
    monkeypatch.setattr(workload_module, "chosen", lambda _: [])  # compared before they are loaded
    slow: list[str] = []

    class Slow(Noisy):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            deadline = Deadline(60)
            while not slow and not deadline.expired:
                slow.extend(
                    line for line in cluster.log_lines if "the data of own are slow" in line
                )
                time.sleep(0.001)
            return super().__getitem__(index)

    settings = settings_for("syncps", 1, "num_epochs=1")
    cluster = Cluster(settings, tmp_path, algorithm="syncps", workload=workload(Slow()))
    cluster.finish(cluster.worker(1))
    assert "has been loading" in slow[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_cannot_be_sent_ends_the_run_with_its_path(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    def with_object(samples: list[Any]) -> Batch:
        return as_dict(samples) | {"meta": [object()]}

    own = Workload(lambda: nn.Linear(8, 4), loss, TensorDataset(*tensors()), collate=with_object)
    cluster = Cluster(settings_for(algorithm, 1), tmp_path, algorithm=algorithm, workload=own)
    worker = cluster.worker(1)
    told = r'batch\["meta"\]\[0\] is a object, which cannot be sent'
    with pytest.raises(DataError, match=told):
        cluster.server.finish()
    assert isinstance(worker.failure(), RunFailed)
