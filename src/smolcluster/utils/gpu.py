"""What a process's GPU does, read once in a while by a thread of its own: training waits for no driver.

NVIDIA's GPUs are asked through NVML (`nvidia-ml-py`), which knows all of `GpuQuantity`. On a Mac `ioreg`
tells utilization and memory without root; nothing there tells temperature and power. PyTorch's own counters
are not asked, because MPS must not be touched beside the thread that trains. All numbers are of the whole
GPU, whoever uses it. What cannot be read is left out.
"""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

GpuQuantity = Literal[
    "utilization", "memory_bytes", "memory_size_bytes", "temperature_c", "power_w"
]
"""Utilization is a share of 1; memory is what is used of its size."""
Readings = Mapping[GpuQuantity, float]
Read = Callable[[], Readings]

NVML_EVERY_S, IOREG_EVERY_S = 1.0, 5.0
STALE_S = 15.0
"""Older readings are no news: the driver hangs."""
MAX_AMOUNT = 2.0**53
IOREG = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
IOREG_TIMEOUT_S = 10.0
NOTHING: Readings = MappingProxyType({})


class NoReadings(Exception):
    """This GPU cannot be asked."""


def no_gpu() -> Readings:
    return NOTHING


def watched(device: "torch.device") -> Read:
    """What gives the newest readings of a device, which is read from now on as long as the process lives."""
    if device.type == "mps":
        return Watch(lambda: read_ioreg, IOREG_EVERY_S).newest
    if device.type != "cuda":
        return no_gpu
    import torch  # noqa: PLC0415 - takes seconds, and whoever has a device has it

    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return Watch(partial(nvml_reader, uuid), NVML_EVERY_S).newest


class Watch:
    """Reads again and again in a daemon thread; `open_reader` is called there, too."""

    def __init__(
        self,
        open_reader: Callable[[], Read],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_reader = open_reader
        self._every_s = every_s
        self._clock = clock
        self._newest = (clock(), NOTHING)
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
        self._thread.start()

    def newest(self) -> Readings:
        """The newest readings; nothing before there are any, and when they are old. Any thread, at once."""
        at, readings = self._newest
        return readings if self._clock() - at <= STALE_S else NOTHING

    def close(self) -> None:
        """End the thread after the reading that goes on."""
        self._asked.set()
        self._thread.join(STALE_S)

    def _run(self) -> None:
        with suppress(NoReadings):
            read = self._open_reader()
            while not self._asked.is_set():
                self._newest = self._clock(), _credible(read())
                self._asked.wait(self._every_s)


def _credible(readings: Readings) -> Readings:
    """Without what no GPU has, as drivers say it where they know nothing."""
    return {name: value for name, value in readings.items() if 0 <= value < MAX_AMOUNT}


def nvml_reader(uuid: str) -> Read:
    """What reads the NVIDIA GPU of this UUID, as PyTorch says it, without what stands before it.

    Raises:
        NoReadings: NVML or its driver is not installed, or knows no such GPU.
    """
    try:
        import pynvml  # noqa: PLC0415 - only where there is such a GPU
    except ImportError as error:
        raise NoReadings(str(error)) from error
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        raise NoReadings(str(error)) from error
    questions: Mapping[GpuQuantity, Callable[[], float]] = {
        "utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "memory_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "memory_size_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).total,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    }

    def read() -> Readings:
        found: dict[GpuQuantity, float] = {}
        for name, ask in questions.items():
            with suppress(pynvml.NVMLError):  # such as a laptop's power, or a GPU that is lost
                found[name] = float(ask())
        return found

    return read


def read_ioreg() -> Readings:
    """What a Mac's `ioreg` tells of its GPU.

    Raises:
        NoReadings: there is no such program.
    """
    try:
        done = subprocess.run(  # noqa: S603 - a list of our own; without close_fds it needs no fork
            IOREG, capture_output=True, check=False, timeout=IOREG_TIMEOUT_S, close_fds=False
        )
    except subprocess.TimeoutExpired:
        return NOTHING
    except OSError as error:
        raise NoReadings(str(error)) from error
    return parse_ioreg(done.stdout.decode("utf-8", "replace"))


def parse_ioreg(said: str) -> Readings:
    """Utilization and memory of the busiest GPU among the accelerators that `ioreg` lists."""
    busiest: dict[GpuQuantity, float] = {}
    for block in re.findall(r'"PerformanceStatistics" = \{(.*?)\}', said):
        counts = {name: float(value) for name, value in re.findall(r'"([^"]+)"=(\d+)', block)}
        found: dict[GpuQuantity, float] = {}
        if (percent := counts.get("Device Utilization %")) is not None:
            found["utilization"] = min(percent, 100.0) / 100
        used = counts.get("vramUsedBytes", counts.get("In use system memory"))
        if used is not None:
            found["memory_bytes"] = used
        if not busiest or found.get("utilization", 0.0) > busiest.get("utilization", 0.0):
            busiest = found
    return busiest
