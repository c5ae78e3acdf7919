"""A batch that is computed again for some fragments changes nothing else."""

import torch

from own_workloads import buffers_of, normed
from smolcluster.algorithms.DiLoCo.worker import Worker
from smolcluster.server.assignment import Assigned, assignment_of
from smolcluster.wire.messages import LeaseKey
from unit.algorithms.DiLoCo.actors import worker_of


def assigned(number: int, fragments: list[int] | None) -> Assigned:
    start, stop = 8 * number, 8 * number + 8
    key = LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=number)
    indices = torch.arange(start, stop, dtype=torch.int32)
    message, payload = assignment_of(
        key, indices, version=0, learning_rate=0.1, fragments=fragments
    )
    return Assigned(message, payload)


def test_other_fragments_and_the_buffers_stay_as_they_were() -> None:
    what = "mode=streaming", "fragments=3"
    worker = worker_of(Worker, *what, codec="fp32", workload=normed())
    worker.step(assigned(0, None))
    model, params = worker.replica.model, worker.replica.params
    before = [worker.layout.gather(number, params) for number in range(3)]
    buffers = buffers_of(model)
    worker.step(assigned(1, [1]))
    same = [torch.equal(worker.layout.gather(n, params), before[n]) for n in range(3)]
    assert same == [True, False, True]
    assert all(torch.equal(each, buffers[name]) for name, each in buffers_of(model).items())
    assert worker.num_terms == [8, 16, 8]
