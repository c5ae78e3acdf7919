"""A process of the project on an accelerator that is not there, which notes who computes on it.

    python pretend_device.py NOTES edp server|worker … ;  python pretend_device.py NOTES train …

Its tensors are PyTorch's, of a device of their own, with memory on the CPU; every operation on one comes
by `_run`, in whatever thread. PyTorch's own thread for the backward pass, while which the caller waits, is
none of Python's, and does not count. Each pair of process and thread is a line of the file NOTES.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
notes: Path
noted: set[str] = set()


class Pretend(torch.Tensor):
    """A tensor of the device; what it holds is `held`, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Pretend":
        made: Pretend = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=torch.device(NAME, 0)
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        assert isinstance(other, Pretend)
        self.held = other.held

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = Pretend(self.held.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation on the CPU."""
    note(str(func))
    inner_args, inner_kwargs = tree_map(
        lambda each: each.held if isinstance(each, Pretend) else each, (args, kwargs)
    )
    device = kwargs.get("device")
    if device is not None:
        inner_kwargs["device"] = "cpu"
    result = func(*inner_args, **inner_kwargs)
    if func._schema.name.endswith("_"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    if device is not None and torch.device(device).type == "cpu":
        return result
    return tree_map(lambda each: Pretend(each) if isinstance(each, torch.Tensor) else each, result)


def note(what: str) -> None:
    """The calling thread does something on the device."""
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread) or thread.name in noted:
        return
    noted.add(thread.name)
    with notes.open("a") as sink:
        sink.write(f"{os.getpid()} {thread.name} {what}\n")


def install() -> torch.library.Library:
    """Let there be the device; it is the only one that is ever picked."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def empty(size: list[int], *, dtype: torch.dtype | None = None, **_: object) -> Pretend:
        note("empty")
        return Pretend(torch.empty(size, dtype=dtype))

    def empty_strided(
        size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **_: object
    ) -> Pretend:
        note("empty_strided")
        return Pretend(torch.empty_strided(size, stride, dtype=dtype))

    library.impl("empty.memory_format", empty, "PrivateUse1")  # type: ignore[no-untyped-call]
    library.impl("empty_strided", empty_strided, "PrivateUse1")  # type: ignore[no-untyped-call]

    from smolcluster.utils import device  # before anybody takes its names

    vars(device)["pick_device"] = lambda _: torch.device(NAME, 0)
    device.ONE_THREAD_ONLY = frozenset({NAME})
    return library


def main() -> int:
    """Be the process that the arguments name."""
    global notes
    notes, what = Path(sys.argv[1]), sys.argv[2]
    library = install()
    assert library
    if what == "train":
        from smolcluster.cli import main as command

        return command(sys.argv[2:])
    from smolcluster.algorithms.entry import main as process

    algorithm, role = sys.argv[2:4]
    del sys.argv[1:4]
    return process(algorithm, role)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
