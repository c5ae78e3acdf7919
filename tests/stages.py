"""A server of an algorithm in the test's own hands: its loop is the test."""

from contextlib import ExitStack
from typing import Generic, TypeVar

import torch
from torch import Tensor

from peers import HandledHub, Parts
from smolcluster.algorithms.EDP import server as edp
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.data.permutation import Range
from smolcluster.data.pytree import encode
from smolcluster.server.assignment import ServedBatch
from smolcluster.server.feed import Deliver, NoFeed
from smolcluster.training.build import build
from smolcluster.training.replica import Replica
from smolcluster.wire.inbox import Event

S = TypeVar("S", bound=edp.Server | syncps.Server)


class SlowFeed(NoFeed):
    """One whose batches take as long as the test says."""

    def __init__(self) -> None:
        self._waiting: list[Deliver] = []

    def deliver(self, _samples: Range, _indices: Tensor, deliver: Deliver) -> None:
        """Keep it."""
        self._waiting.append(deliver)

    def arrived(self) -> None:
        """All batches have been loaded: each is two bytes here."""
        waiting, self._waiting = self._waiting, []
        for deliver in waiting:
            deliver(ServedBatch(encode(torch.zeros(2, dtype=torch.uint8)), 1024))


class Stage(Generic[S]):
    """A server whose loop is the test, and workers that do what the test says."""

    def __init__(self, server: S, parts: Parts, rooms: ExitStack) -> None:
        self.parts = parts
        self.server = server
        rooms.enter_context(server.pool)
        rooms.enter_context(server.evaluator)
        self.house = HandledHub(server.pool, parts.port, parts.dataset)
        self.house.on_event = self.handle
        rooms.callback(self.house.close)

    def handle(self, event: Event) -> None:
        """Note an event, and let the server handle it."""
        self.house.events.append(event)
        self.server.handle(event)

    @property
    def weights(self) -> Tensor:
        """A copy of what the server has come to."""
        return self.server.replica.snapshot()

    def count(self, kind: type[Event]) -> int:
        """How many events of that kind there have been."""
        return sum(isinstance(event, kind) for event in self.house.events)

    def workers_replica(self) -> Replica:
        """What a worker of this server has, with other weights."""
        settings, bucket_bytes = self.parts.context.settings, self.server.replica.bucket_bytes
        places, cpu = settings.node.dataset, torch.device("cpu")
        return build(settings.train, 1, places, cpu, bucket_bytes=bucket_bytes).replica
