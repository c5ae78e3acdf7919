"""SyncPS whose gradients are added up on several hosts: what the table of `test_several_hosts` lacks."""

from functools import partial
from pathlib import Path

import pytest
import torch

import own_workloads
import several_hosts
from harness import Outcome
from several_hosts import after_step, cut_store, many_buckets  # noqa: F401 - a fixture
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.algorithms.SynchronousPS.worker import Worker
from smolcluster.server.assignment import Assigned

start = partial(several_hosts.start, algorithm="syncps")
run = partial(own_workloads.run, algorithm="syncps")
settings_for = partial(several_hosts.settings_for, "syncps")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("many_buckets")]


EXACT = ("optimizer=adamw", "weight_decay=0.1", "gradient_clipping.max_norm=0.5")


def test_several_workers_end_where_one_host_ends_and_the_server_moves_less(tmp_path: Path) -> None:
    """Of each gradient it gets a third, and the rest of the mean; of the mean it sends a third."""
    one, three = (
        run(settings_for(hosts, *EXACT, workers=3), tmp_path / str(hosts)) for hosts in (1, 3)
    )
    summaries = one.server.summary, three.server.summary
    assert summaries[0] is not None
    assert summaries[1] is not None
    assert summaries[1].bytes.sent < 0.6 * summaries[0].bytes.sent
    torch.testing.assert_close(
        three.training.replica.params, one.training.replica.params, rtol=1e-4, atol=1e-5
    )


def test_a_store_that_is_lost_costs_the_open_step_alone(tmp_path: Path) -> None:
    whole = run(settings_for(1, *EXACT), tmp_path / "whole")
    cluster, stores = start(settings_for(3, *EXACT), tmp_path / "lost")
    after_step(cluster, 7, lambda: cut_store(cluster, "worker1"))
    cluster.finish(cluster.worker(1), *stores)
    assert torch.equal(cluster.training.replica.params, whole.training.replica.params)


class Unplugged(Worker):
    """Loses its server, or a store, when it has pushed, once each."""

    num_computed_in_all = 0

    def work_on(self, task: Assigned) -> None:
        super().work_on(task)
        self.num_computed_in_all += 1
        if self.num_computed_in_all in (3, 6):
            last = self.client.session_of(len(self.replica.buckets) - 1)
            assert last is not self.link
            (self.link if self.num_computed_in_all == 3 else last).cut("the cable was pulled")


@pytest.mark.nightly
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_worker_that_is_lost_in_the_middle_of_a_push_costs_no_sample(
    tmp_path: Path, codec: str
) -> None:
    settings = settings_for(3, f"codec={codec}", workers=2)
    cluster, stores = start(settings, tmp_path)
    cluster.finish(cluster.worker(1), cluster.worker(2, make=Unplugged), *stores)


def test_a_late_worker_joins_a_running_step(tmp_path: Path) -> None:
    settings = settings_for(2, "num_epochs=4", "min_workers=1", workers=2)
    cluster, stores = start(settings, tmp_path)
    late: list[Outcome] = []
    after_step(cluster, 5, lambda: late.append(cluster.worker(2)))
    summary = cluster.finish(cluster.worker(1), *late, *stores)
    assert len(summary.workers) == 2
    for each in late:
        each.finish()


def test_slices_are_as_large_as_their_shares(tmp_path: Path) -> None:
    cluster = run(settings_for(3, "store_shares=[1, 4, 1]"), tmp_path)
    assert isinstance(cluster.core, Server)
    sizes = cluster.core.links.others
    assert sizes["worker1"] > 2 * sizes["worker2"]
