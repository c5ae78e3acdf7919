"""DiLoCo's worker without a server."""

from typing import TypeVar, cast

import torch

from harness import local_settings
from peers import welcome_of
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.server.link import Link
from smolcluster.training.build import build
from smolcluster.training.workload import Workload
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import LeaseKey, Message

AnyWorker = TypeVar("AnyWorker", bound=Worker)


def assigned(
    number: int, fragments: list[int] | None = None, *, is_gradient: bool = False
) -> Assigned:
    """Eight samples, as they lie in the dataset."""
    start, stop = 8 * number, 8 * number + 8
    key = LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=number)
    indices = torch.arange(start, stop, dtype=torch.int32)
    message, payload = assignment_of(
        key, indices, version=0, learning_rate=0.1, fragments=fragments, is_gradient=is_gradient
    )
    return Assigned(message, payload)


class Wire:
    """In place of the session: takes all that is sent."""

    def send(self, message: Message) -> None: ...

    def send_frame(self, frame: Frame) -> None: ...


def worker_of(
    kind: type[AnyWorker], *overrides: str, codec: str, workload: Workload | None = None
) -> AnyWorker:
    """A worker of this kind that has the server's weights."""
    settings = local_settings("mode=sync", *overrides, algorithm="diloco")
    train, cluster = settings.train, settings.cluster
    training = build(
        train, cluster.seed, settings.node.dataset, torch.device("cpu"), workload=workload
    )
    told = {"bucket_bytes": training.replica.bucket_bytes, "codec": codec}
    worker = kind(welcome_of(settings.run_config("test-run", "diloco"), **told), training)
    worker.link, worker.is_void = cast(Link, Wire()), False
    worker.hosts.begin(worker.link)
    return worker
