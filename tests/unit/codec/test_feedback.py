"""Error feedback: what was applied tracks what was encoded, over a restart too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smolcluster.codec.base import NonFiniteValue
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import CODECS, get_codec

NUMEL = 1000
BUCKETS = (slice(0, 512), slice(512, 900), slice(900, 1000))
NAMES = sorted(CODECS)
NUMS_SAMPLES = st.lists(st.integers(1, 500), min_size=1, max_size=5)
PUSHES = st.lists(
    st.tuples(st.integers(1, 500), st.booleans(), st.sampled_from([1e-3, 1.0, 50.0])),
    min_size=1,
    max_size=12,
)
LOSSY = pytest.mark.parametrize("name", [name for name in NAMES if not CODECS[name].lossless])
LOSSES = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254, "int4": 1 / 13, "topk": 2.0}
"""The most that may be lost of a value, as a part of the largest value: by one push, or by as many as
leave it out, which with `topk` are about 64."""
DENSE = pytest.mark.parametrize("name", [name for name in LOSSES if name != "topk"])


class Sender:
    """A sender whose pushes are decoded at once, as a server would."""

    def __init__(self, name: str) -> None:
        self.codec = get_codec(name)
        self.feedback = ErrorFeedback(self.codec, NUMEL)

    def gradient(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(NUMEL, generator=generator, dtype=self.codec.dtype)

    def push(
        self, gradient: Tensor, num_samples: int, buckets: tuple[slice, ...] = BUCKETS
    ) -> Tensor:
        """Encode all buckets; return what the receiver decodes, zero where nothing was sent."""
        received = torch.zeros_like(gradient)
        for bucket in buckets:
            part = gradient[bucket]
            out = torch.empty(self.codec.encoded_nbytes(part.numel()), dtype=torch.uint8)
            self.feedback.encode(bucket, part, num_samples, out)
            self.codec.decode(out, received[bucket])
        return received

    def apply(
        self, gradient: Tensor, num_samples: int, buckets: tuple[slice, ...] = BUCKETS
    ) -> Tensor:
        """A push that is applied."""
        received = self.push(gradient, num_samples, buckets)
        self.feedback.commit()
        return received

    def started_again(self, num_samples: int) -> "Sender":
        """A new sender with what this one owes, after a last push of so many samples."""
        new = Sender(self.codec.name)
        new.feedback.committed.copy_(self.feedback.committed.clone())
        new.feedback.resume(BUCKETS, num_samples)
        return new


def owes(sender: Sender) -> Tensor:
    return sender.feedback.residual()


def assert_close(one: Tensor, other: Tensor) -> None:
    largest = max(float(one.abs().max()), 1e-30)
    assert float((one.double() - other.double()).abs().max()) <= 1e-6 * largest


@settings(derandomize=True, deadline=None, database=None)
@given(name=st.sampled_from(NAMES), pushes=PUSHES, seed=st.integers(0, 2**31))
def test_applied_sum_plus_residual_is_the_encoded_sum(
    name: str, pushes: list[tuple[int, bool, float]], seed: int
) -> None:
    sender = Sender(name)
    encoded_sum = torch.zeros(NUMEL, dtype=torch.float64)
    applied_sum = torch.zeros(NUMEL, dtype=torch.float64)
    magnitude = 0.0
    for number, (num_samples, is_applied, size) in enumerate(pushes):
        gradient = sender.gradient(seed + number) * size
        kept = gradient.clone()
        received = sender.push(gradient, num_samples)
        assert torch.equal(gradient, kept), "the gradient is left alone"
        if not is_applied:
            sender.feedback.rollback()
            continue
        sender.feedback.commit()
        encoded_sum += num_samples * gradient.to(torch.float64)
        applied_sum += num_samples * received.to(torch.float64)
        magnitude += num_samples * float(gradient.abs().max())
    difference = encoded_sum - applied_sum - owes(sender).to(torch.float64)
    assert float(difference.abs().max()) <= 1e-6 * magnitude
    assert sender.codec.lossless is False or not bool(owes(sender).any())


@LOSSY
def test_what_is_owed_does_not_grow_over_many_pushes_and_starts(name: str) -> None:
    sender = Sender(name)
    wanted = torch.zeros(NUMEL, dtype=torch.float64)
    applied = torch.zeros_like(wanted)
    for step in range(300):
        gradient, num_samples = sender.gradient(step), [32, 7, 100][step % 3]
        applied += num_samples * sender.apply(gradient, num_samples).double()
        wanted += num_samples * gradient.double()
        if step % 4 == 0:
            sender = sender.started_again(num_samples)
        assert float((wanted - applied - owes(sender).double()).abs().max()) <= 5e-2
    assert float((wanted - applied).abs().max()) <= 100 * 5.5 * LOSSES[name]


@pytest.mark.parametrize(
    ("name", "value", "outlier", "first", "atol"),
    [
        ("int8", 1e-3, 1.0, 0.0, 2e-5),
        ("fp16", 1e-3, 2e9, 0.0, 2e-5),
        ("bf16", 1.001, 1.0, 1.0, 2e-5),
        ("int4", 1e-3, 1.0, 0.0, 2e-4),
        ("topk", 1e-3, 1.0, 0.0, 4e-4),
    ],
)
def test_what_one_push_cannot_say_arrives_over_many(
    name: str, value: float, outlier: float, first: float, atol: float
) -> None:
    gradient = torch.full((NUMEL,), value)
    gradient[[0, 300, 600, 950]] = outlier
    sender = Sender(name)
    assert float(sender.apply(gradient, 1)[5]) == first
    applied = sum((sender.apply(gradient, 1) for _ in range(400)), torch.zeros(NUMEL))
    assert torch.allclose(applied / 400, gradient, atol=atol)


@LOSSY
def test_a_rolled_back_push_leaves_no_trace(name: str) -> None:
    steady, unlucky = Sender(name), Sender(name)
    for step in range(10):
        before = unlucky.feedback.committed.clone()
        unlucky.push(steady.gradient(100 + step) * 100, 7 + step)
        assert torch.equal(unlucky.feedback.committed, before), "what is open is no part of it"
        unlucky.feedback.rollback()
        unlucky.push(steady.gradient(200 + step), 3, BUCKETS[1:])
        unlucky.feedback.rollback()
        unlucky.feedback.commit()
        gradient = steady.gradient(step)
        assert torch.equal(steady.apply(gradient, 32), unlucky.apply(gradient, 32))
        assert torch.equal(owes(steady), owes(unlucky))


@DENSE
def test_what_is_owed_shrinks_in_a_push_of_more_samples(name: str) -> None:
    sender = Sender(name)
    sender.apply(sender.gradient(3), 10)
    owed = owes(sender)
    received = sender.push(torch.zeros(NUMEL), 1000)
    assert float((received * 1000 - owed).abs().max()) <= float(owed.abs().max()) * LOSSES[name]
    sender.feedback.rollback()
    assert torch.equal(owes(sender), owed)


@LOSSY
def test_a_bucket_that_is_encoded_again_counts_once(name: str) -> None:
    once, twice = Sender(name), Sender(name)
    gradient = once.gradient(4)
    once.apply(gradient, 5)
    twice.push(gradient * 3, 9, BUCKETS[:2])
    twice.apply(gradient, 5)
    assert torch.equal(owes(once), owes(twice))


@LOSSY
def test_buckets_that_a_push_leaves_out_keep_what_they_owe(name: str) -> None:
    sender = Sender(name)
    sender.apply(sender.gradient(5), 4)
    before = owes(sender)
    sender.apply(sender.gradient(6), 9, BUCKETS[1:2])
    after = owes(sender)
    assert torch.equal(before[:512], after[:512])
    assert torch.equal(before[900:], after[900:])
    assert not torch.equal(before[512:900], after[512:900])
    sender.feedback.commit()
    assert torch.equal(owes(sender), after)


@LOSSY
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_refused_and_changes_nothing(name: str, bad: float) -> None:
    sender = Sender(name)
    gradient = sender.gradient(7)
    sender.apply(gradient, 4)
    before = owes(sender)
    gradient[520] = bad
    with pytest.raises(NonFiniteValue) as caught:
        sender.push(gradient, 4)
    assert caught.value.index == 520 - BUCKETS[1].start
    sender.feedback.rollback()
    assert torch.equal(owes(sender), before)


def test_a_push_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 loss term, not 0"):
        Sender("int8").push(torch.ones(NUMEL), 0)


# It is kept over a restart.


@settings(derandomize=True, deadline=None, database=None)
@given(
    name=st.sampled_from(NAMES), before=NUMS_SAMPLES, after=NUMS_SAMPLES, seed=st.integers(0, 2**31)
)
def test_a_sender_that_starts_again_owes_and_pays_the_same(
    name: str, before: list[int], after: list[int], seed: int
) -> None:
    steady = Sender(name)
    for number, num_samples in enumerate(before):
        steady.apply(steady.gradient(seed + number), num_samples)
    again = steady.started_again(before[-1])
    assert_close(owes(steady), owes(again))
    again.push(steady.gradient(seed), 16)
    again.feedback.rollback()
    for number, num_samples in enumerate(after, start=len(before)):
        gradient = steady.gradient(seed + number)
        assert_close(steady.apply(gradient, num_samples), again.apply(gradient, num_samples))
        assert_close(owes(steady), owes(again))


@LOSSY
def test_without_the_samples_it_would_owe_something_else(name: str) -> None:
    """What is stored is the error of a mean; only with its samples it is a part of the sum."""
    steady = Sender(name)
    steady.apply(steady.gradient(1), 50)
    owed = owes(steady)
    assert bool(owed.any())
    torch.testing.assert_close(steady.feedback.committed * 50, owed)
    torch.testing.assert_close(owes(steady.started_again(5)) * 10, owed)


@pytest.mark.parametrize("name", NAMES)
def test_before_the_first_push_nothing_is_owed(name: str) -> None:
    again = Sender(name).started_again(0)
    assert not bool(owes(again).any())
    gradient = again.gradient(1)
    assert torch.equal(again.push(gradient, 8), Sender(name).push(gradient, 8))


def test_what_was_owed_before_is_forgotten() -> None:
    """Filled and resumed, a feedback that was in use owes the new debt only."""
    used, other = Sender("int8"), Sender("int8")
    used.apply(used.gradient(1), 8)
    other.apply(other.gradient(2), 30)
    used.feedback.committed.copy_(other.feedback.committed)
    used.feedback.resume(BUCKETS, 30)
    assert torch.equal(owes(used), owes(other))
