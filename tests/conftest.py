"""What holds for all tests."""

import socket
from collections.abc import Iterator, Sequence

import pytest
import torch

from smolcluster.algorithms import context
from smolcluster.transport.connection import listen


@pytest.fixture
def closed_doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For servers that listen and never serve: a process would end then, and its sockets with it."""
    opened: list[socket.socket] = []

    def recorded(addresses: Sequence[str], port: int) -> list[socket.socket]:
        opened.extend(listeners := listen(addresses, port))
        return listeners

    monkeypatch.setattr(context, "listen", recorded)
    yield
    for listener in opened:
        listener.close()


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Small models are slower on several threads, and far slower where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
