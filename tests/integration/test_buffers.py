"""Models whose buffers change as they compute, in one process and by both algorithms."""

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness import Cluster
from own_workloads import (
    ALGORITHMS,
    CPU,
    NODES,
    NUM_SAMPLES,
    Normed,
    alone,
    assert_same,
    buffers_of,
    loss,
    normed,
    run,
    settings_for,
)
from peers import next_event
from smolcluster.algorithms.EDP import server as edp
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.algorithms.SynchronousPS.worker import Worker as SyncPSWorker
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.data.permutation import epoch_permutation
from smolcluster.errors import Rejected
from smolcluster.server.assignment import Assigned
from smolcluster.server.evaluator import Evaluator
from smolcluster.server.push import Pushed
from smolcluster.training.batches import placed
from smolcluster.training.build import build
from smolcluster.training.compute import BatchLoss
from smolcluster.training.evaluate import Evaluation
from smolcluster.training.loop import training_steps
from smolcluster.training.schedule import learning_rate
from smolcluster.wire.inbox import Call, Inbox


def test_syncps_takes_the_mean_of_its_parts_buffers_weighted_by_samples(tmp_path: Path) -> None:
    settings = settings_for("syncps", 3)
    cluster = Cluster(settings, tmp_path, algorithm="syncps", workload=normed(double=True))
    core = cluster.core
    assert isinstance(core, syncps.Server)
    open_step, cuts = core.open_step, list[list[int]]()

    def watched(now: float) -> Step | None:
        step = open_step(now)
        cuts.extend([[part.num_samples for part in step.parts]] if step else [])
        return step

    core.open_step = watched  # type: ignore[method-assign]
    cluster.finish(*(cluster.worker(i + 1, node=NODES[i]) for i in range(3)))
    assert [11, 11, 10] in cuts, "not all parts weigh the same"
    expected = by_hand(settings, *cuts)
    assert cluster.losses == pytest.approx([each for each, _ in expected], rel=1e-9)
    found, (_, wanted) = buffers_of(cluster.training.replica.model), expected[-1]
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-8, atol=1e-10)
    assert found["cumulative.num_batches_tracked"] == 10
    [said] = [line for line in cluster.log_lines if "not equal to training in one process" in line]
    assert "norm.running_mean" in said


@pytest.mark.parametrize("rule", ["gradient", "mixing"])
def test_edp_moves_statistics_by_each_worker_s_share_and_adds_up_counts(
    tmp_path: Path, rule: str
) -> None:
    settings = settings_for("edp", 3, f"update_rule={rule}", "worker_update_interval=2")
    begun = buffers_of(Normed())
    applied: list[tuple[int, Mapping[int, Tensor]]] = []
    cluster = Cluster(settings, tmp_path, workload=normed())
    core = cluster.core
    assert isinstance(core, edp.Server)
    apply = core.apply

    def watched(peer: edp.Peer, pushed: Pushed, tau: int) -> None:
        apply(peer, pushed, tau)
        applied.append((len(core.peers), pushed.buffers))

    core.apply = watched  # type: ignore[method-assign]
    cluster.finish(*(cluster.worker(i + 1, node=NODES[i]) for i in range(3)))
    names = cluster.training.replica.buffers.names
    expected = {name: each.double() for name, each in begun.items()}
    for num_workers, added in applied:
        for number, values in added.items():
            name = names[number]
            share = num_workers if begun[name].is_floating_point() else 1
            expected[name] += values.view(expected[name].shape) / share
    assert 3 in {num_workers for num_workers, _ in applied}
    found = buffers_of(cluster.training.replica.model)
    for name, values in expected.items():
        torch.testing.assert_close(found[name].double(), values, rtol=1e-5, atol=1e-6)
    assert len(applied) == 10
    assert found["cumulative.num_batches_tracked"] == 10
    assert found["num_rows"] == 2 * NUM_SAMPLES


def test_the_buffers_that_are_evaluated_are_those_of_the_step() -> None:
    settings = settings_for("syncps", 1)
    train, seed = settings.run_config("alone", "syncps").train, settings.cluster.seed
    training = build(train, seed, settings.node.dataset, CPU, workload=normed(held_out=True))
    inbox, told = Inbox(), list[Evaluation]()
    done = lambda _version, _epoch, evaluation: told.append(evaluation)  # noqa: E731
    log = logging.getLogger("test")
    with Evaluator(training, inbox, done, every=1, log=log) as evaluator:
        for _ in itertools.islice(training_steps(training, train), 3):
            pass
        evaluation = training.evaluate()
        assert evaluator.after_step(3, 0)
        training.compute(torch.arange(32))  # while it evaluates
        next_event(inbox, Call).run()
    assert told == [evaluation]


def test_in_one_process_a_checkpoint_is_copied_before_the_next_batch_changes_buffers() -> None:
    settings = settings_for("syncps", 1)
    train, seed = settings.run_config("alone", "syncps").train, settings.cluster.seed
    training = build(train, seed, settings.node.dataset, CPU, workload=normed())
    seen: list[int] = []

    def copied() -> None:
        seen.append(int(training.replica.model.get_buffer("num_rows")))

    for step, _ in enumerate(training_steps(training, train, before_step=copied)):
        if step > 0:
            assert seen[0] == 32 * step
        seen.clear()


class Dies(SyncPSWorker):
    """Is gone for ever as soon as it has computed a part."""

    def push(self, task: Assigned, loss: BatchLoss, compute_s: float) -> None:  # noqa: ARG002
        raise Rejected("the test ends it", "test")


def test_a_part_that_another_worker_computes_again_changes_no_buffer_twice(tmp_path: Path) -> None:
    settings = settings_for("syncps", 2)
    cluster = Cluster(settings, tmp_path, algorithm="syncps", workload=normed(double=True))
    worker, gone = cluster.worker(1, node=NODES[0]), cluster.worker(2, node=NODES[1], make=Dies)
    gone.failure()
    cluster.finish(worker)
    expected = by_hand(settings, [16, 16], [32])
    assert cluster.losses == pytest.approx([each for each, _ in expected], rel=1e-9)
    found, (_, wanted) = buffers_of(cluster.training.replica.model), expected[-1]
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_sample_alone_is_normalised_by_the_running_statistics(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    workload = normed(num_samples=33)
    settings = settings_for(algorithm, 1)
    cluster = run(settings, tmp_path, algorithm, workload)
    expected, training = alone(settings, workload)
    assert len(expected) == 4
    assert cluster.losses == expected
    model = training.replica.model
    assert_same(buffers_of(cluster.training.replica.model), buffers_of(model))
    assert model.get_buffer("norm.num_batches_tracked") == 2, "those of 32 samples"
    assert model.get_buffer("num_rows") == 66
    assert all(module.training for module in model.modules())


def by_hand(
    settings: Settings, sizes: list[int], *others: list[int]
) -> list[tuple[float, dict[str, Tensor]]]:
    """The loss and the buffers of every step whose batch is cut into parts of these sizes.

    `others`: sizes of the steps after the first ones, of which the last ones stay.
    """
    train, seed = settings.run_config("alone", "syncps").train, settings.cluster.seed
    training = build(train, seed, settings.node.dataset, CPU, workload=normed(double=True))
    replica, rows = training.replica, training.workload.train
    model = replica.model
    steps: list[tuple[float, dict[str, Tensor]]] = []
    applied = 0
    cuts = [sizes, *others]
    for epoch in range(train.num_epochs):
        order = epoch_permutation(seed, epoch, NUM_SAMPLES)
        for batch in torch.split(order, sum(sizes)):
            sizes = cuts[min(len(steps), len(cuts) - 1)]
            before, total = buffers_of(model), 0.0
            sums = {
                name: torch.zeros_like(each, dtype=torch.float64) for name, each in before.items()
            }
            replica.grads.zero_()
            for part in torch.split(batch, sizes):
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
                samples = placed(rows.batch(part), CPU, torch.float64)
                value = loss(model, samples)[0] / len(batch)
                value.backward()  # type: ignore[no-untyped-call]
                total += value.item()
                for name, buffer in model.named_buffers():
                    sums[name] += buffer.double() * len(part) / len(batch)
            for name, buffer in model.named_buffers():
                mean = sums[name]
                buffer.copy_(mean if buffer.is_floating_point() else mean.round())
            replica.clip(train.gradient_clipping)
            replica.step(learning_rate(train, applied, train.num_epochs * NUM_SAMPLES))
            applied += len(batch)
            steps.append((total, buffers_of(model)))
    return steps
