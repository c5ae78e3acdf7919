"""The sum of a step's gradients: whoever brings what when, it is the weighted mean."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from peers import opened
from smolcluster.algorithms.SynchronousPS import reduction as module
from smolcluster.algorithms.SynchronousPS.reduction import (
    MAX_BUFFERS,
    PartReceiver,
    PushArrived,
    Reduction,
)
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.algorithms.SynchronousPS.step_receiver import StepReceiver
from smolcluster.errors import NonFiniteLoss, ProtocolError
from smolcluster.server.push import GradientSender
from smolcluster.training.compute import BatchLoss
from smolcluster.training.replica import Replica
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import LeaseKey, Skip
from unit.algorithms.SynchronousPS.actors import (
    DENSE,
    DTYPES,
    LOSSY,
    add_part,
    committed,
    decoded,
    deliver,
    gradients_of,
    opened_step,
    push_of,
    random_gradient,
    reduce_step,
    reduction_of,
    replica_for,
)

SEAT = 1
DEADLINE_S = 60.0
LOSSLESS = ["fp32", "fp64"]
SIZES = (5, 17, 10, 32)


def weighted_mean(gradients: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """The plain sum that everything is compared with, in float64."""
    parts = zip(gradients, sizes, strict=True)
    return torch.stack([size / sum(sizes) * each.double() for each, size in parts]).sum(0)


def mean_of(reduction: Reduction, version: int) -> Tensor:
    """A copy of what the server applies."""
    return reduction.mean(version).clone()


# What the server sums.


@pytest.mark.parametrize("codec", LOSSLESS)
def test_the_mean_is_the_weighted_sum_whoever_brings_what_when(codec: str) -> None:
    """Four readers at once, step after step."""
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    together = threading.Barrier(len(SIZES))
    with ThreadPoolExecutor(len(SIZES)) as pool:
        for version in range(1, 21):
            step = opened_step(version, SIZES)
            reduction.open(step)
            gradients = gradients_of(replica, len(SIZES), version)

            def bring(number: int, step: Step = step, all_: list[Tensor] = gradients) -> list[bool]:
                together.wait(DEADLINE_S)
                return add_part(reduction, replica, step.assignments[number], all_[number])

            complete = list(pool.map(bring, range(len(SIZES))))
            for number in range(len(replica.buckets)):
                assert [each[number] for each in complete].count(True) == 1, "the last one tells"
            expected = weighted_mean(gradients, SIZES)
            rtol = 1e-12 if codec == "fp64" else 1e-5
            for mean in (
                mean_of(reduction, version),
                torch.cat([values_in(reduction.frame(version, b), codec) for b in range(3)]),
            ):
                torch.testing.assert_close(mean.double(), expected, rtol=rtol, atol=rtol / 10)
            assert reduction.norm() == pytest.approx(float(expected.norm()), rel=1e-5)
            reduction.close()


def values_in(frame: Frame, codec: str) -> Tensor:
    return decoded(frame, codec, DTYPES[codec])


def test_parts_count_by_their_loss_terms_however_many_samples_have_them() -> None:
    replica = replica_for("fp32")
    reduction = reduction_of(replica, "fp32")
    step, all_terms, losses = opened_step(1, (8, 8, 16)), (8, 2, 20), (1.0, 2.0, 4.0)
    gradients = gradients_of(replica, 3)
    reduction.open(step)
    parts = zip(step.assignments, gradients, all_terms, losses, strict=True)
    for assignment, gradient, num_terms, loss in parts:
        for number, bucket in enumerate(replica.buckets):
            push = push_of(assignment.key, number, loss=loss)
            told = push.model_copy(update={"num_terms": float(num_terms)})
            reduction.add(assignment.session_id, told, gradient[bucket], 10.0)
    expected = weighted_mean(gradients, all_terms).float()
    torch.testing.assert_close(mean_of(reduction, 1), expected)
    assert step.loss.num_terms == 30
    assert step.loss.mean == pytest.approx((8 * 1.0 + 2 * 2.0 + 20 * 4.0) / 30)


@pytest.mark.parametrize("codec", DENSE)
def test_a_lossy_mean_is_within_its_codecs_bound_of_the_weighted_sum(codec: str) -> None:
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    gradients = gradients_of(replica, len(SIZES))
    step = opened_step(1, SIZES)
    reduction.open(step)
    for assignment, gradient in zip(step.assignments, gradients, strict=True):
        add_part(reduction, replica, assignment, gradient)
    expected = weighted_mean(gradients, SIZES)
    error = (mean_of(reduction, 1).double() - expected).abs().max()
    largest = float(expected.abs().max())
    assert 0 < error <= largest * DENSE[codec] * 1.001


def test_what_does_not_count_changes_nothing() -> None:
    replica = replica_for("fp32")
    reduction = reduction_of(replica, "fp32")
    gradient, noise = gradients_of(replica, 2)
    step = opened_step(1, [8])
    (assignment,) = step.assignments
    nobodys = push_of(assignment.key.model_copy(update={"grant": 999}), 0)
    first, second = replica.buckets[0], replica.buckets[1]
    assert not reduction.add(SEAT, push_of(assignment.key, 0), noise[first], 1.0), "no step is open"
    reduction.open(step)
    assert not reduction.add(SEAT, nobodys, noise[first], 1.0), "it was not granted"
    assert not reduction.add(SEAT + 1, push_of(assignment.key, 0), noise[first], 1.0), (
        "to somebody else"
    )
    assert reduction.add(SEAT, push_of(assignment.key, 0), gradient[first], 1.0)
    assert not reduction.add(SEAT, push_of(assignment.key, 0), noise[first], 1.0), "it has counted"
    assignment = step.grant(step.parts[0], assignment.holder, 5, 0.0)
    assert reduction.add(SEAT, push_of(assignment.key, 1), gradient[second], 1.0)
    mean = mean_of(reduction, 1)
    assert torch.equal(mean[: second.stop], gradient[: second.stop])


def test_a_large_model_has_two_sums_and_a_small_one_as_many_as_fit() -> None:
    replica = replica_for("fp32")
    assert reduction_of(replica, "fp32").num_buffers == MAX_BUFFERS
    with patch.object(module, "SPARE_BYTES", 5 * replica.params.nbytes):
        assert reduction_of(replica, "fp32").num_buffers == 5
    with patch.object(module, "SPARE_BYTES", replica.params.nbytes):
        assert reduction_of(replica, "fp32").num_buffers == 2


@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY])
def test_frames_of_a_step_stay_as_they_are_while_the_next_one_is_summed(codec: str) -> None:
    """They may be under way to a slow worker; what is sent by then lends its memory to the next but one."""
    replica = replica_for(codec)
    with patch.object(module, "SPARE_BYTES", 0):
        reduction = reduction_of(replica, codec)
    frames, means_then, places = {}, {}, {}
    for version in range(1, 6):
        gradients = gradients_of(replica, 2, version)
        frames[version] = reduce_step(reduction, replica, version, gradients)
        places[version] = place_of(frames[version][0])
        means_then[version] = mean_of(reduction, version)
        if version > 1:
            assert torch.equal(mean_of(reduction, version - 1), means_then[version - 1])
            del frames[version - 1]
        reduction.close()
    assert len(set(places.values())) == 2, "it takes the memory of two, not more"


@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY])
def test_a_frame_that_a_slow_link_is_still_at_keeps_its_memory(codec: str) -> None:
    replica = replica_for(codec)
    with patch.object(module, "SPARE_BYTES", 0):
        reduction = reduction_of(replica, codec)
    frames = {}
    for version in range(1, 6):
        frames[version] = reduce_step(
            reduction, replica, version, gradients_of(replica, 2, version)
        )
        reduction.close()
        if version == 1:
            slow = frames[1][1]
            before = bytes(slow.payload)
        del frames[version]
    assert bytes(slow.payload) == before


def test_a_push_that_ends_early_lets_the_next_one_begin() -> None:
    replica = replica_for("fp32")
    reduction = reduction_of(replica, "fp32")
    step = opened_step(1, [8])
    reduction.open(step)
    receiver = PartReceiver(SEAT, reduction, "fp32", replica.buckets)
    assignment = step.assignments[0]
    frames = pushed(replica, "fp32", assignment.key, random_gradient(610, 1))
    deliver(frames[0], receiver)
    begun = receiver.in_progress
    receiver(Skip(lease=assignment.key, compute_s=0.5), memoryview(b""))
    assert (begun, receiver.in_progress) == (True, False)
    again = step.grant(step.parts[0], assignment.holder, 5, 0.0)
    for frame in pushed(replica, "fp32", again.key, random_gradient(610, 2)):
        deliver(frame, receiver)


def test_a_bucket_is_not_added_if_its_step_is_abandoned_when_it_has_been_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = replica_for("fp32")
    reduction = reduction_of(replica, "fp32")
    step = opened_step(1, [8])
    reduction.open(step)
    claim = step.claim

    def abandoned_then(*what: Any) -> Any:
        claimed = claim(*what)
        reduction.abandon()
        return claimed

    monkeypatch.setattr(step, "claim", abandoned_then)
    gradient = random_gradient(replica.num_params, 1)
    added = add_part(reduction, replica, step.assignments[0], gradient)
    assert added == [False] * len(replica.buckets)


def place_of(frame: Frame) -> int:
    return torch.frombuffer(frame.payload, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY])
def test_the_server_applies_exactly_what_its_workers_receive(codec: str) -> None:
    replica = replica_for(codec)
    reduction, receiver = reduction_of(replica, codec), StepReceiver(replica, codec)
    for version in range(1, 8):
        gradients = gradients_of(replica, 3, version)
        frames = reduce_step(reduction, replica, version, gradients)
        assert [deliver(frame, receiver) for frame in frames] == [None] * 3
        mean = committed(receiver, version)
        assert torch.equal(mean, mean_of(reduction, version)), "bit for bit"
        reduction.close()
        receiver.means.give_back(mean)


@pytest.mark.parametrize("codec", DENSE)
def test_the_sum_of_what_was_applied_tracks_the_sum_of_the_means(codec: str) -> None:
    """Each mean is a step of its own, of whatever number of samples."""
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    wanted = torch.zeros(replica.num_params, dtype=torch.float64)
    applied = torch.zeros_like(wanted)

    def step(version: int, gradient: Tensor, num_samples: int) -> None:
        step = opened_step(version, [num_samples])
        reduction.open(step)
        add_part(reduction, replica, step.assignments[0], gradient)
        wanted.add_(gradient.double())
        applied.add_(mean_of(reduction, version).double())
        reduction.close()

    for version in range(1, 61):
        gradient = random_gradient(replica.num_params, version)
        step(version, gradient, [32, 32, 1][version % 3])
        most = 6.0 * max(DENSE[codec], 1 / 250)
        assert (wanted - applied).abs().max() <= most, "it does not grow with the steps"
    for version in range(61, 69):
        step(version, torch.zeros(replica.num_params), 1)
    torch.testing.assert_close(applied, wanted, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("codec", ["fp32", "fp64", *LOSSY])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_and_does_not_count(codec: str, value: float) -> None:
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    (gradient,) = gradients_of(replica, 1)
    gradient[replica.buckets[2].start + 3] = value
    step = opened_step(7, [8])
    reduction.open(step)
    with pytest.raises(ProtocolError, match="bucket 2"):
        add_part(reduction, replica, step.assignments[0], gradient)
    assert step.parts[0].num_counted == 2


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_sum_that_overflows_names_step_layer_and_the_worker_of_the_largest_part(
    codec: str,
) -> None:
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    gradient = torch.ones(replica.num_params)
    gradient[replica.buckets[2].start :] = torch.finfo(torch.float32).max
    step = opened_step(7, [8, 12, 8, 8, 8])  # the shares' rounding makes them more than 1
    reduction.open(step)
    for assignment in step.assignments:
        add_part(reduction, replica, assignment, gradient)
    reduction.frame(7, 0)
    layer = replica.parameter_at(replica.buckets[2].start)
    with pytest.raises(NonFiniteLoss, match=rf"step 7: .* layer {layer} .* worker 2 \(macbook\)"):
        reduction.frame(7, 2)


def test_large_means_are_finite_though_their_squares_are_not() -> None:
    replica = replica_for("fp32")
    reduction = reduction_of(replica, "fp32")
    reduce_step(reduction, replica, 1, [torch.full((replica.num_params,), 1e30)])
    assert reduction.norm() == pytest.approx(1e30 * replica.num_params**0.5)


# What the server takes from a worker.


def pushed(
    replica: Replica, codec: str, key: LeaseKey, gradient: Tensor, first_bucket: int | None = None
) -> list[Frame]:
    """A push as a worker sends it; with `first_bucket` as a backup."""
    replica.grads.copy_(gradient)
    sender = GradientSender(codec, replica, in_place=True)
    loss = BatchLoss(0.5, key.stop - key.start)
    return list(sender.frames(key, 0, loss, 0.25, backup_from=first_bucket))


def receiver_in(
    codec: str, sizes: tuple[int, ...] = (8,)
) -> tuple[Replica, Step, Reduction, PartReceiver]:
    """The receiver of seat 1 in an open step."""
    replica = replica_for(codec)
    reduction = reduction_of(replica, codec)
    step = opened_step(1, sizes)
    reduction.open(step)
    return replica, step, reduction, PartReceiver(SEAT, reduction, codec, replica.buckets)


@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY])
def test_a_push_is_added_as_it_comes(codec: str) -> None:
    replica, step, reduction, receiver = receiver_in(codec)
    gradient = random_gradient(replica.num_params, 1, replica.params.dtype)
    frames = pushed(replica, codec, step.assignments[0].key, gradient)
    expected = torch.cat([values_in(frame, codec) for frame in frames])
    events = []
    for number, frame in enumerate(frames):
        assert receiver.in_progress == (number > 0)
        events.append(deliver(frame, receiver))
    assert not receiver.in_progress
    assert [
        (event.session_id, event.push.bucket, event.reduced, event.whole)
        for event in events
        if isinstance(event, PushArrived)
    ] == [(SEAT, 0, True, False), (SEAT, 1, True, False), (SEAT, 2, True, True)]
    if codec in LOSSLESS:
        assert torch.equal(mean_of(reduction, 1), expected)
    else:
        largest = float(gradient.abs().max())
        torch.testing.assert_close(
            mean_of(reduction, 1), expected, rtol=0, atol=largest / 250, msg=codec
        )


def test_of_a_push_that_completes_nothing_only_its_end_is_told() -> None:
    replica, step, _, receiver = receiver_in("fp32", (8, 8))
    frames = pushed(replica, "fp32", step.assignments[0].key, random_gradient(610, 1))
    events = [deliver(frame, receiver) for frame in frames]
    assert events[:2] == [None, None]
    assert isinstance(events[2], PushArrived)
    assert (events[2].reduced, events[2].whole) == (False, True)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_backup_is_lossless_and_begins_where_it_is_wanted(codec: str) -> None:
    replica, step, _, receiver = receiver_in(codec, (8, 8))
    gradient = random_gradient(replica.num_params, 1)
    first = step.assignments[0]
    backup = step.grant(step.parts[1], first.holder, 50, 0.0)
    mine = step.assignments[1]
    step.claim(mine.session_id, push_of(mine.key, 0))
    frames = pushed(replica, codec, backup.key, gradient, first_bucket=1)
    events = [deliver(frame, receiver) for frame in frames]
    assert [isinstance(event, PushArrived) for event in events] == [False, True]
    assert step.parts[1].finished_by is backup


def test_a_push_of_another_shape_is_refused_and_nothing_of_it_counts() -> None:
    replica, step, _, receiver = receiver_in("fp32")
    frames = pushed(replica, "fp32", step.assignments[0].key, random_gradient(610, 1))
    message, payload = opened(frames[2])
    with pytest.raises(ProtocolError, match="not the fp32 tensor agreed on"):
        receiver(message.model_copy(update={"bucket": 0}), payload)
    assert step.parts[0].num_counted == 0


def test_the_lossless_frames_are_the_sum_itself() -> None:
    """Nothing is copied for the workers, however many there are."""
    replica = replica_for("fp32")
    reduction = reduction_of(replica, "fp32")
    frames = reduce_step(reduction, replica, 1, gradients_of(replica, 1))
    first = reduction.mean(1)
    for frame, bucket in zip(frames, replica.buckets, strict=True):
        address = torch.frombuffer(frame.payload, dtype=torch.uint8).data_ptr()
        assert address == first.data_ptr() + 4 * bucket.start
