"""Which device a worker has, what its loss is known by, and what becomes of a process that dies."""

import functools
import gc
import logging
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Lines, Outcome
from smolcluster.algorithms import supervision
from smolcluster.api import network_worker
from smolcluster.api.config import DistributedConfig
from smolcluster.api.losses import code_digest, loss_name, loss_of, named_loss
from smolcluster.api.network_worker import device_of, living, run_workers
from smolcluster.errors import ConfigError, DataError
from smolcluster.server.joining import RunOver
from smolcluster.server.link import WorkerSetup
from smolcluster.utils.bugs import EXIT_CODE as BUG


class Net(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class OtherNet(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 1


class HuberLoss(nn.Module):
    """Has the name of one of PyTorch's, and takes an argument that has no default."""

    def __init__(self, delta: float) -> None:
        super().__init__()
        self.delta = delta


def twice(output: Tensor, target: Tensor) -> Tensor:
    return 2 * functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("count", "gpu_id", "device"), [(0, 0, None), (0, 5, None), (2, 0, "cuda:0"), (2, 1, "cuda:1")]
)
def test_a_gpu_s_number_is_its_device(
    monkeypatch: pytest.MonkeyPatch, count: int, gpu_id: int, device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert device_of(gpu_id) == device


@pytest.mark.parametrize(("count", "gpu_id"), [(2, 2), (2, -1), (0, -1)])
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, gpu_id: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"gpu_id is {gpu_id}"):
        device_of(gpu_id)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (None, "default"),
        (functional.mse_loss, "mse_loss"),
        (nn.MSELoss(), "MSELoss"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), None),
        (nn.CrossEntropyLoss(weight=torch.ones(2)), None),
        (twice, None),
        (functional.relu, None),
        (nn.AdaptiveLogSoftmaxWithLoss(8, 6, [3]), None),
        (HuberLoss(2.0), None),
    ],
)
def test_only_a_loss_of_pytorch_s_has_a_name(loss_fn: Any, name: str | None) -> None:
    assert loss_name(loss_fn, None) == name
    assert loss_name(None, lambda _model, _batch: torch.tensor(0.0)) is None


def test_a_named_loss_is_the_same_on_another_machine() -> None:
    batch = torch.randn(4, 3), torch.randn(4, 3)
    for loss_fn in (nn.L1Loss(), functional.l1_loss):
        there = named_loss(loss_name(loss_fn, None))
        assert there(Net(), batch) == loss_of(loss_fn, None)(Net(), batch)
        assert code_digest(Net(), there) == code_digest(Net(), loss_of(loss_fn, None))


def test_by_default_it_is_of_the_logits_whatever_methods_a_model_of_ones_own_has() -> None:
    class WithLoss(Net):
        def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(inputs, targets)

    batch = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    total, count = loss_of(None, None)(WithLoss(), batch)
    assert float(total) / float(count) == pytest.approx(functional.cross_entropy(*batch).item())


@pytest.mark.parametrize("name", [None, "relu", "Linear", "os.system", 3, ["mse_loss"]])
def test_a_server_names_no_other_code(name: object) -> None:
    with pytest.raises(ConfigError, match="loss_fn"):
        named_loss(name)


def test_a_batch_that_is_no_pair_is_named() -> None:
    with pytest.raises(DataError, match="dict"):
        loss_of(twice, None)(Net(), {"x": torch.ones(1)})


def test_code_is_compared_by_its_source() -> None:
    digest = code_digest(Net(), twice)
    assert code_digest(Net(), twice) == digest
    assert code_digest(OtherNet(), twice) != digest
    assert code_digest(Net(), functools.partial(twice)) == digest
    assert code_digest(Net(), functional.mse_loss) != digest


def test_several_workers_of_one_process_read_their_source_at_the_same_time(
    request: pytest.FixtureRequest,
) -> None:
    def lets_others_run(*_: object) -> None:
        time.sleep(0)

    request.addfinalizer(functools.partial(gc.set_threshold, *gc.get_threshold()))
    request.addfinalizer(functools.partial(gc.callbacks.remove, lets_others_run))
    gc.callbacks.append(lets_others_run)  # it is called in the middle of parsing
    gc.set_threshold(100)
    with ThreadPoolExecutor(4) as threads:
        digests = set(threads.map(lambda _: code_digest(Net(), twice), range(60)))
    assert digests == {code_digest(Net(), twice)}


class Process(BaseProcess):
    """One whose exit code is the test's."""

    code: int | None = None

    @property
    def exitcode(self) -> int | None:
        return self.code

    def join(self, timeout: float | None = None) -> None:
        pass


@pytest.mark.parametrize(
    ("codes", "result"),
    [([0], 0), ([77], 77), ([-signal.SIGKILL, 0], 0), ([BUG, -signal.SIGSEGV, BUG], BUG)],
)
def test_a_process_that_died_is_started_again_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], result: int
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.01)
    started: list[Process] = []
    lines: list[str] = []
    log = logging.Logger("test")
    log.addHandler(Lines(lines))

    def start() -> Process:
        started.append(Process())
        return started[-1]

    life = living("worker", start, 2, log)
    next(life)
    for number, code in enumerate(codes[:-1], 1):
        started[-1].code = code
        next(life)
        assert "started again in" in lines[-1]
        assert len(started) == number, "not before its delay is over"
        while len(started) == number:
            next(life)
    started[-1].code = codes[-1]
    with pytest.raises(StopIteration) as ended:
        next(life)
    assert (ended.value.value, len(started)) == (result, len(codes))


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_worker, "END_S", 0.01)
    told: list[str] = []

    class Deaf(Process):
        def terminate(self) -> None:
            told.append("terminate")

        def kill(self) -> None:
            told.append("kill")
            self.code = -signal.SIGKILL

        def join(self, timeout: float | None = None) -> None:
            assert timeout is not None or self.code is not None, "it would wait for ever"

    life = living("worker", Deaf, 2, logging.Logger("test"))
    next(life)
    life.close()
    assert told == ["terminate", "kill"]


def test_the_same_gpu_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_ids"):
        run_workers([0, 0], DistributedConfig(), Net)
    split = DistributedConfig(tensor_parallel=True, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel is True"):  # once, not by each process
        run_workers([0, 1], split, Net)


def test_a_worker_computes_with_its_threads_and_asks_as_it_encrypts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, str]] = []

    def ask(place: WorkerSetup) -> None:
        other = threading.Thread(target=torch.set_num_threads, args=(1,))  # as a session's reader
        other.start()
        other.join()
        asked.append((torch.get_num_threads(), place.encryption))
        raise RunOver("it has ended")

    monkeypatch.setattr(WorkerSetup, "ask", ask)
    config = DistributedConfig(overrides=["encryption=on"], master_ip="127.0.0.1")
    config.secret_file = tmp_path / "secret"

    def work() -> None:
        worker = network_worker.NetworkWorker(0, config, Net, name="w1", threads=3)
        worker.connect_and_train()

    before = torch.get_num_threads()
    try:
        Outcome("worker", work).finish()
    finally:
        torch.set_num_threads(before)
    assert asked == [(3, "on")]
