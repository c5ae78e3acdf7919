"""SyncPS over a restart: the next batch, and what a lossy codec owes, are those that would have been."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness import local_settings, state_of
from peers import Parts, logger, server_parts, small_replica
from smolcluster.algorithms.SynchronousPS.reduction import RESIDUAL, Reduction
from smolcluster.algorithms.SynchronousPS.server import Server
from smolcluster.data.permutation import Range, global_batches
from smolcluster.errors import CheckpointError
from smolcluster.runs.events import RunResumed
from smolcluster.server.store import Store
from smolcluster.training.checkpoint import (
    Checkpoint,
    CheckpointStore,
    Snapshot,
    restore,
)
from smolcluster.training.loop import StepTaken
from smolcluster.training.replica import Replica
from unit.algorithms.SynchronousPS.actors import (
    LOSSY,
    add_part,
    opened_step,
    random_gradient,
    reduction_of,
    replica_for,
)

LOSSLESS = ["fp32", "fp64"]

# The next batch

EPOCHS_AND_SIZES: dict[str, st.SearchStrategy[Any]] = {
    "num_samples": st.integers(1, 60),
    "num_epochs": st.integers(1, 4),
    "batch_size": st.integers(1, 70),
    "data": st.data(),
}


@settings(max_examples=200)
@given(**EPOCHS_AND_SIZES)
def test_after_any_step_the_batches_are_those_that_would_have_come(
    num_samples: int, num_epochs: int, batch_size: int, data: st.DataObject
) -> None:
    whole = list(global_batches(num_samples, num_epochs * num_samples, batch_size))
    taken = data.draw(st.integers(0, len(whole)))
    first = sum(batch.num_samples for batch in whole[:taken])
    assert (
        list(global_batches(num_samples, num_epochs * num_samples, batch_size, first=first))
        == whole[taken:]
    )


@settings(max_examples=200)
@given(**EPOCHS_AND_SIZES)
def test_from_any_sample_on_every_position_comes_once_and_in_order(
    num_samples: int, num_epochs: int, batch_size: int, data: st.DataObject
) -> None:
    """The batches before may have been of another size."""
    first = data.draw(st.integers(0, num_samples * num_epochs))
    batches = list(global_batches(num_samples, num_epochs * num_samples, batch_size, first=first))
    positions = [
        batch.epoch * num_samples + place
        for batch in batches
        for place in range(batch.start, batch.stop)
    ]
    assert positions == list(range(first, num_samples * num_epochs))
    assert all(0 < batch.num_samples <= batch_size for batch in batches)
    assert all(batch.stop <= num_samples for batch in batches)


# What the codec owes


def train(replica: Replica, reduction: Reduction, versions: range) -> list[Tensor]:
    """Steps of one part each, of changing sizes; returns what was applied in each."""
    means = []
    for version in versions:
        size = [8, 3, 32][version % 3]
        step = opened_step(version, [size])
        reduction.open(step)
        gradient = random_gradient(replica.num_params, version, replica.params.dtype)
        add_part(reduction, replica, step.assignments[0], gradient)
        means.append(reduction.mean(version).clone())
        reduction.close()
        stores = Store.of(replica)
        stores.take(reduction.mean(version))
        stores.step(0.5, 0.1)
    return means


def saved(folder: Path, replica: Replica, reduction: Reduction, step: int) -> Checkpoint:
    """What a checkpoint on the disk makes of a server."""
    store = CheckpointStore(folder / "checkpoints", 9, logger([]))
    store.save(Snapshot.of(replica, state_of(step, algorithm="syncps"), reduction.contents()))
    found = store.newest_good()
    assert found is not None
    return found


def resumed(checkpoint: Checkpoint, codec: str) -> tuple[Replica, Reduction]:
    replica = replica_for(codec, "adam")
    replica.params.fill_(7.0)
    reduction = reduction_of(replica, codec)
    restore(replica, checkpoint, reduction.contents())
    reduction.resume()
    return replica, reduction


@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY])
@pytest.mark.parametrize("num_before", [0, 1, 2, 7])
def test_a_server_that_goes_on_applies_bit_for_bit_what_it_would_have(
    tmp_path: Path, codec: str, num_before: int
) -> None:
    replica = replica_for(codec, "adam")
    reduction = reduction_of(replica, codec)
    train(replica, reduction, range(1, num_before + 1))
    again, other = resumed(saved(tmp_path, replica, reduction, num_before), codec)
    versions = range(num_before + 1, num_before + 8)
    means, expected = train(again, other, versions), train(replica, reduction, versions)
    assert all(torch.equal(mean, each) for mean, each in zip(means, expected, strict=True))
    assert torch.equal(again.params, replica.params)
    for name, tensor in replica.optimizer.state.items():
        assert torch.equal(again.optimizer.state[name], tensor), name
    for name, tensor in reduction.contents().items():
        assert torch.equal(other.contents()[name], tensor)


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_owed_is_of_the_steps_that_are_closed(codec: str) -> None:
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    assert not bool(reduction.contents()[RESIDUAL].any())
    train(replica, reduction, range(1, 3))
    owed = reduction.contents()[RESIDUAL].clone()
    assert bool(owed.any())
    step = opened_step(3, [5])
    reduction.open(step)
    add_part(reduction, replica, step.assignments[0], random_gradient(replica.num_params, 99))
    assert torch.equal(reduction.contents()[RESIDUAL], owed), "not before the step is taken"
    reduction.close()
    assert not torch.equal(reduction.contents()[RESIDUAL], owed)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_a_lossless_codec_keeps_nothing(codec: str) -> None:
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    train(replica, reduction, range(1, 3))
    assert reduction.contents() == {}
    reduction.resume()
    assert reduction.contents() == {}


@pytest.mark.parametrize("codec", LOSSY)
def test_a_run_does_not_go_on_with_a_codec_that_would_forget_the_debt(
    tmp_path: Path, codec: str
) -> None:
    replica = small_replica("adam")
    reduction = reduction_of(replica, codec)
    train(replica, reduction, range(1, 3))
    with pytest.raises(CheckpointError, match="holds residual"):
        resumed(saved(tmp_path, replica, reduction, 2), "fp32")


def test_a_lossy_run_does_not_go_on_from_a_lossless_one(tmp_path: Path) -> None:
    replica = small_replica("adam")
    reduction = reduction_of(replica, "fp32")
    with pytest.raises(CheckpointError, match="lacks residual"):
        resumed(saved(tmp_path, replica, reduction, 2), "int8")


# The whole server


@pytest.fixture(autouse=True)
def no_door_stays_open(closed_doors: None) -> None:
    """Servers are made here that never serve."""


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    overrides = ("num_epochs=3", "codec=bf16", "checkpoint_steps=null", "batch_size=10")
    settings = local_settings(*overrides, algorithm="syncps")
    with server_parts(settings, tmp_path, algorithm="syncps") as parts:
        yield parts


def batches_of(parts: Parts) -> list[Range]:
    train = parts.context.run.train
    num_samples = parts.context.training.num_samples
    return list(
        global_batches(num_samples, train.total_samples(num_samples), train.samples_per_step)
    )


def checkpoint_of(parts: Parts, folder: Path, step: int = 4, **changes: Any) -> Checkpoint:
    """A checkpoint of a server like that of `parts`, after so many steps, with some changes."""
    server = Server(replace(parts.context))
    try:
        batches = batches_of(parts)[:step]
        for version, batch in enumerate(batches, start=1):
            server.report.step_taken(StepTaken(version, batch, 0.5, 1e-3, 1.0, {}, 1))
        replica = parts.context.training.replica
        replica.params.fill_(0.25)
        owed = server.reduction.contents()
        owed[RESIDUAL].fill_(0.125)
        state = server.report.training_state({}).model_copy(update=changes)
        store = CheckpointStore(folder / "checkpoints", 9, logger([]))
        store.save(Snapshot.of(replica, state, owed))
        replica.params.fill_(0.5)
        found = store.newest_good()
        assert found is not None
        return found
    finally:
        with server.pool:
            pass


def resumed_server(parts: Parts, checkpoint: Checkpoint | None) -> Server:
    server = Server(replace(parts.context, checkpoint=checkpoint))
    with server.pool:
        pass
    return server


def test_a_server_stands_where_its_checkpoint_stood(parts: Parts, tmp_path: Path) -> None:
    fresh = batches_of(parts)
    checkpoint = checkpoint_of(parts, tmp_path)
    server = resumed_server(parts, checkpoint)
    count = checkpoint.state.samples_applied
    assert count == 4 * 30
    assert (server.version, server.samples_applied) == (4, count)
    assert (server.report.counts.version, server.report.counts.samples_applied) == (4, count)
    assert server.next_batch(1) == fresh[4]
    replica = parts.context.training.replica
    assert torch.equal(replica.params, torch.full_like(replica.params, 0.25))
    (owed,) = server.reduction.contents().values()
    assert torch.equal(owed, torch.full_like(owed, 0.125))
    assert parts.happened(RunResumed) == [RunResumed(step=4, samples_applied=count)]


def test_a_server_without_a_checkpoint_begins(parts: Parts) -> None:
    server = resumed_server(parts, None)
    assert (server.version, server.samples_applied) == (0, 0)
    assert server.next_batch(1) == Range(0, 0, 30)
    assert parts.happened(RunResumed) == []
