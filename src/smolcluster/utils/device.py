"""The device that a process computes on."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from smolcluster.errors import ConfigError
from smolcluster.utils.units import format_count

if TYPE_CHECKING:
    import torch

_ALLOWED = "null (the best there is), cuda, cuda:N, mps or cpu"
ONE_THREAD_ONLY = frozenset({"mps"})
"""Kinds of device whose use from two threads aborts the process (pytorch#197805)."""


def pick_device(name: str | None) -> "torch.device":
    """The device called `name`; without a name CUDA before MPS before the CPU.

    Raises:
        ConfigError: no such kind of device, or this machine has none.
    """
    import torch  # noqa: PLC0415  (nothing at the foot of the house imports torch by being imported)

    present = _present()
    if name is None:
        return torch.device(present[0])
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "mps", "cpu") or (
        ":" in name and not (index.isascii() and index.isdecimal())
    ):
        raise ConfigError(f"device is {name!r}, must be {_ALLOWED}")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if kind not in present or (index and int(index) >= count):
        raise ConfigError(
            f"device is {name!r}, but PyTorch sees no such device here; it sees {', '.join(present)}"
        )
    return torch.device(name)


def describe(device: "torch.device") -> str:
    """The device's name for people: `cuda:0 (NVIDIA H200)`, `mps`, `cpu (4 threads)`."""
    import torch  # noqa: PLC0415

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({format_count(threads, 'thread')})"
    return str(device)


def _present() -> list[str]:
    """Kinds of device that PyTorch can use here, best first."""
    import torch  # noqa: PLC0415

    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [*(kind for kind, there in kinds.items() if there), "cpu"]


def use_threads(num_threads: int | None) -> None:
    """Compute with so many threads (None: PyTorch's choice) in the calling thread.

    Call it before any other thread computes: a thread that has not said so itself takes over the number
    that another one set last.
    """
    import torch  # noqa: PLC0415 - as above

    default = torch.get_num_threads()  # ask first: a thread's first question undoes what it has set
    torch.set_num_threads(num_threads or default)


def executor_beside(device: "torch.device", name: str) -> Executor:
    """What computes on `device` beside the calling thread: one thread of this name, with one torch thread.

    On a device for one thread only `submit` does the work itself, and returns when it is done; what is
    no `Exception`, such as an interrupt, passes through it.
    """
    import torch  # noqa: PLC0415 - as above

    if device.type in ONE_THREAD_ONLY:
        return _AtOnce()
    return ThreadPoolExecutor(1, name, torch.set_num_threads, (1,))


class _AtOnce(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
