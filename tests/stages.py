"""A server of an algorithm in the test's own hands: its loop is the test."""

from contextlib import ExitStack
from typing import Generic, TypeVar

import torch
from torch import Tensor

from peers import HandledHub, Parts
from smolcluster.algorithms.EDP import server as edp
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.net.inbox import Event
from smolcluster.training.build import build
from smolcluster.training.replica import Replica

S = TypeVar("S", bound=edp.Server | syncps.Server)


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


class EDPStage(Stage[edp.Server]):
    """A server of EDP."""

    def hand_out(self) -> None:
        """What the loop does between two events."""
        list(self.server.pool.next_events(0.0))
        self.server.hand_out()
