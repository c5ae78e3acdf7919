import pytest
import torch

from smolcluster.errors import ConfigError
from smolcluster.utils.device import describe, pick_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> "Machine":
    return Machine(monkeypatch)


class Machine:
    """Makes PyTorch believe that it runs on another machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def has(self, *, num_cuda: int = 0, mps: bool = False) -> None:
        self._monkeypatch.setattr(torch.cuda, "is_available", lambda: num_cuda > 0)
        self._monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cuda)
        self._monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_cuda_comes_before_mps_before_the_cpu(machine: Machine) -> None:
    machine.has(num_cuda=1, mps=True)
    assert pick_device(None).type == "cuda"
    machine.has(mps=True)
    assert pick_device(None).type == "mps"
    machine.has()
    assert pick_device(None).type == "cpu"


def test_a_named_device_wins_over_a_better_one(machine: Machine) -> None:
    machine.has(num_cuda=2)
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "cpu:1"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    machine: Machine, name: str
) -> None:
    machine.has()
    with pytest.raises(ConfigError, match=f"device is '{name}', but .* it sees cpu$"):
        pick_device(name)


def test_an_index_beyond_the_last_device_is_refused(machine: Machine) -> None:
    machine.has(num_cuda=2)
    with pytest.raises(ConfigError, match="'cuda:2', but"):
        pick_device("cuda:2")


@pytest.mark.parametrize(
    "name", ["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:one", "cuda:²", "cuda:٣"]
)
def test_a_name_that_is_no_device_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be null .*, cuda, cuda:N, mps or cpu"):
        pick_device(name)


def test_a_device_is_described_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert describe(torch.device("cpu")) == "cpu (1 thread)"
    assert describe(torch.device("mps")) == "mps"
    assert describe(torch.device("cuda", 0)) == "cuda:0 (NVIDIA H200)"
