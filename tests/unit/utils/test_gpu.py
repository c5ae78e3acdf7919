"""What a GPU is asked, with an NVML and an `ioreg` of the test's own."""

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exporting import GPU
from smolcluster.utils.gpu import (
    STALE_S,
    NoReadings,
    Readings,
    Watch,
    nvml_reader,
    parse_ioreg,
    read_ioreg,
    watched,
)

TIMEOUT_S = 90.0
UUID = "8f1c2d3e-0000-1111-2222-333344445555"
BEGINNING = (
    "+-o {0}  <class {0}, id 0x100000a01, registered, matched, active, busy 0 (0 ms)>\n    {{\n"
)
M_SERIES = (
    BEGINNING.format("AGXAcceleratorG14X")
    + '      "IOReportLegend" = ({"IOReportChannels"=((1,2,"In use system memory"))})\n'
    '      "PerformanceStatistics" = {"In use system memory (driver)"=0,'
    '"Alloc system memory"=2374844416,"Tiler Utilization %"=18,"recoveryCount"=0,'
    '"lastRecoveryTime"=0,"Renderer Utilization %"=18,"TiledSceneBytes"=1671168,'
    '"Device Utilization %"=20,"SplitSceneCount"=0,"In use system memory"=633618432}\n'
    '      "model" = "Apple M2 Max"\n    }\n\n'
)
"""As Apple silicon prints it; written down from what others have published."""
TWO_GPUS = (
    BEGINNING.format("IntelAccelerator")
    + '      "PerformanceStatistics" = {"Device Utilization %"=3,"In use system memory"=100000000}\n    }\n'
    + BEGINNING.format("AMDRadeonX6000_AMDNavi14GraphicsAccelerator")
    + '      "PerformanceStatistics" = {"vramUsedBytes"=1500000000,"Device Utilization %"=64,'
    '"In use system memory"=7}\n    }\n'
)


class NVMLError(Exception):
    pass


class Nvml(SimpleNamespace):
    """What `pynvml` is; `missing` functions do not answer for this GPU."""

    def __init__(self, *missing: str) -> None:
        threads: set[str] = set()
        memory = SimpleNamespace(used=12_500_000_000, total=80_000_000_000)
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87.5, memory=12),
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 240_500,
        }
        asked_with = {
            **dict.fromkeys(answers, ("handle",)),
            "nvmlInit": (),
            "nvmlDeviceGetHandleByUUID": (f"GPU-{UUID}",),
            "nvmlDeviceGetTemperature": ("handle", 0),
        }

        def answer(name: str, *arguments: object) -> Any:
            threads.add(threading.current_thread().name)
            if name in missing or arguments != asked_with[name]:
                raise NVMLError("Not Supported")
            return answers[name]

        functions = {name: partial(answer, name) for name in answers}
        super().__init__(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, threads=threads, **functions)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nvml]:
    """Install an NVML, which does not answer some questions."""

    def put(*missing: str) -> Nvml:
        nvml = Nvml(*missing)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def test_nvml_tells_all_of_a_gpu(install: Callable[..., Nvml]) -> None:
    install()
    assert nvml_reader(UUID)() == GPU


def test_what_a_gpu_does_not_tell_is_left_out(install: Callable[..., Nvml]) -> None:
    install("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates")
    known = {"memory_bytes", "memory_size_bytes", "temperature_c"}
    assert nvml_reader(UUID)() == {name: value for name, value in GPU.items() if name in known}


@pytest.mark.parametrize(
    ("missing", "uuid"), [("nvmlInit", UUID), ("nvmlDeviceGetHandleByUUID", UUID), ("", "another")]
)
def test_without_nvmls_driver_and_for_an_unknown_gpu_there_are_no_readings(
    install: Callable[..., Nvml], missing: str, uuid: str
) -> None:
    install(missing)
    with pytest.raises(NoReadings):
        nvml_reader(uuid)


def test_without_nvmls_library_there_are_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoReadings):
        nvml_reader(UUID)


def read_once(open_reader: Callable[[], Callable[[], Readings]]) -> Watch:
    """A watch that has read, or has given up."""
    has_read = threading.Event()

    def opened() -> Callable[[], Readings]:
        read = open_reader()

        def read_and_tell() -> Readings:
            try:
                return read()
            finally:
                has_read.set()

        return read_and_tell

    watch = Watch(opened, every_s=3600.0)
    while watch._thread.is_alive() and not has_read.wait(0.01):
        pass
    watch.close()
    return watch


def test_the_driver_is_asked_by_no_thread_that_trains(install: Callable[..., Nvml]) -> None:
    nvml = install()
    assert read_once(lambda: nvml_reader(UUID)).newest() == GPU
    assert nvml.threads == {"gpu"}


def test_a_watch_without_a_gpu_ends_and_tells_nothing(install: Callable[..., Nvml]) -> None:
    install("nvmlInit")
    assert read_once(lambda: nvml_reader(UUID)).newest() == {}


def test_what_no_gpu_can_have_is_left_out() -> None:
    """Drivers say -1 or 2^64 - 1 where they know nothing, which no report could carry."""
    read: Readings = {
        "utilization": 0.5,
        "memory_bytes": 18446744071562067968.0,
        "temperature_c": -1.0,
        "power_w": float("nan"),
    }
    assert read_once(lambda: lambda: read).newest() == {"utilization": 0.5}


def test_old_readings_are_none() -> None:
    now = [0.0]
    release, asked = threading.Event(), threading.Event()

    def read() -> Readings:
        if asked.is_set():
            release.wait(TIMEOUT_S)  # the driver hangs
        asked.set()
        return GPU

    watch = Watch(lambda: read, every_s=0.0, clock=lambda: now[0])
    assert asked.wait(TIMEOUT_S)
    while not watch.newest():
        pass
    now[0] = STALE_S + 1.0
    assert watch.newest() == {}
    release.set()
    watch.close()


def test_a_processor_is_no_gpu_and_needs_no_thread() -> None:
    before = threading.active_count()
    assert watched(torch.device("cpu"))() == {}
    assert threading.active_count() == before


def test_of_a_mac_utilization_and_memory_are_known() -> None:
    assert parse_ioreg(M_SERIES) == {"utilization": 0.2, "memory_bytes": 633618432}


def test_of_two_gpus_of_a_mac_the_busier_one_counts() -> None:
    assert parse_ioreg(TWO_GPUS) == {"utilization": 0.64, "memory_bytes": 1.5e9}


@pytest.mark.parametrize("said", ["", "no such class", '"PerformanceStatistics" = {}', "{" * 1000])
def test_an_ioreg_that_tells_nothing_is_no_reading(said: str) -> None:
    assert parse_ioreg(said) == {}


def test_ioreg_is_run_without_root_and_may_be_missing_or_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, ...]] = []
    answer: list[bytes | Exception] = [
        M_SERIES.encode() + b"\xff",
        subprocess.TimeoutExpired("ioreg", 1.0),
        FileNotFoundError("ioreg"),
    ]

    def run(argv: tuple[str, ...], **_: object) -> SimpleNamespace:
        ran.append(argv)
        said = answer.pop(0)
        if isinstance(said, Exception):
            raise said
        return SimpleNamespace(stdout=said)

    monkeypatch.setattr(subprocess, "run", run)
    assert read_ioreg()["utilization"] == 0.2
    assert read_ioreg() == {}
    with pytest.raises(NoReadings):
        read_ioreg()
    assert ran[0][0] == "/usr/sbin/ioreg"
    assert "sudo" not in ran[0]
