"""A batch that is computed again for some fragments changes nothing else."""

from typing import cast

import torch

from harness import local_settings
from own_workloads import buffers_of, normed
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.cluster.link import Link
from smolcluster.ps.assignment import Assigned, assignment_of
from smolcluster.training.build import build
from smolcluster.transport.messages import LeaseKey, Message, Welcome


class Wire:
    """In place of the session: takes all that is sent."""

    def send(self, message: Message) -> None: ...


def streaming_worker() -> Worker:
    settings = local_settings("mode=streaming", "fragments=3", algorithm="diloco")
    train, cluster = settings.train, settings.cluster
    training = build(
        train, cluster.seed, settings.node.dataset, torch.device("cpu"), workload=normed()
    )
    welcome = Welcome(
        run_id="test-run",
        incarnation="here",
        run=settings.run_config("test-run", "diloco"),
        model_fingerprint="m",
        bucket_bytes=training.replica.bucket_bytes,
        codec="fp32",
        heartbeat_timeout_s=5.0,
    )
    worker = Worker(welcome, training)
    worker.link, worker.is_void = cast(Link, Wire()), False
    return worker


def assigned(number: int, fragments: list[int] | None) -> Assigned:
    start, stop = 8 * number, 8 * number + 8
    key = LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=number)
    indices = torch.arange(start, stop, dtype=torch.int32)
    message, payload = assignment_of(
        key, indices, version=0, learning_rate=0.1, fragments=fragments
    )
    return Assigned(message, payload)


def test_other_fragments_and_the_buffers_stay_as_they_were() -> None:
    worker = streaming_worker()
    worker.step(assigned(0, None))
    model, params = worker.replica.model, worker.replica.params
    before = [worker.layout.gather(number, params) for number in range(3)]
    buffers = buffers_of(model)
    worker.step(assigned(1, [1]))
    same = [torch.equal(worker.layout.gather(n, params), before[n]) for n in range(3)]
    assert same == [True, False, True]
    assert all(torch.equal(each, buffers[name]) for name, each in buffers_of(model).items())
    assert worker.num_terms == [8, 16, 8]
