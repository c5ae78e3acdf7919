"""Error feedback: what was applied tracks what was encoded."""

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

PUSHES = st.lists(
    st.tuples(st.integers(1, 500), st.booleans(), st.sampled_from([1e-3, 1.0, 50.0])),
    min_size=1,
    max_size=12,
)

LOSSY = pytest.mark.parametrize("name", [name for name in CODECS if not CODECS[name].lossless])
LOSSES = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254}
"""The most that one push may lose of a value, as a part of the largest value."""


class Sender:
    """A sender whose pushes are decoded at once, as a server would."""

    def __init__(self, name: str, *, numel: int = NUMEL) -> None:
        self.codec = get_codec(name)
        self.feedback = ErrorFeedback(self.codec, numel)

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


def gradients(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(derandomize=True, deadline=None, database=None)
@given(name=st.sampled_from(sorted(CODECS)), pushes=PUSHES, seed=st.integers(0, 2**32 - 1))
def test_applied_sum_plus_residual_is_the_encoded_sum(
    name: str, pushes: list[tuple[int, bool, float]], seed: int
) -> None:
    sender = Sender(name)
    generator = gradients(seed)
    encoded_sum = torch.zeros(NUMEL, dtype=torch.float64)
    applied_sum = torch.zeros(NUMEL, dtype=torch.float64)
    magnitude = 0.0
    for num_samples, applied, size in pushes:
        gradient = torch.randn(NUMEL, generator=generator, dtype=sender.codec.dtype) * size
        received = sender.push(gradient, num_samples)
        if not applied:
            sender.feedback.rollback()
            continue
        sender.feedback.commit()
        encoded_sum += num_samples * gradient.to(torch.float64)
        applied_sum += num_samples * received.to(torch.float64)
        magnitude += num_samples * float(gradient.abs().max())
    difference = encoded_sum - applied_sum - sender.feedback.residual().to(torch.float64)
    assert float(difference.abs().max()) <= 1e-6 * magnitude


@LOSSY
def test_the_residual_does_not_grow_with_the_number_of_pushes(name: str) -> None:
    sender = Sender(name)
    generator = gradients(1)
    for _ in range(300):
        sender.push(torch.randn(NUMEL, generator=generator), 8)
        sender.feedback.commit()
    assert float(sender.feedback.residual().abs().max()) <= 8 * 5.5 * LOSSES[name]


@pytest.mark.parametrize(
    ("name", "value", "outlier", "first"),
    [("int8", 1e-3, 1.0, 0.0), ("fp16", 1e-3, 2e9, 0.0), ("bf16", 1.001, 1.0, 1.0)],
)
def test_what_one_push_cannot_say_arrives_over_many(
    name: str, value: float, outlier: float, first: float
) -> None:
    gradient = torch.full((NUMEL,), value)
    gradient[[0, 300, 600, 950]] = outlier
    sender = Sender(name)
    assert float(sender.push(gradient, 1)[5]) == first
    sender.feedback.commit()
    applied = torch.zeros(NUMEL)
    for _ in range(400):
        applied += sender.push(gradient, 1)
        sender.feedback.commit()
    assert torch.allclose(applied / 400, gradient, atol=2e-5)


@LOSSY
def test_a_rolled_back_push_leaves_no_trace(name: str) -> None:
    generator = gradients(2)
    steady, unlucky = Sender(name), Sender(name)
    for step in range(10):
        gradient = torch.randn(NUMEL, generator=generator)
        unlucky.push(torch.randn(NUMEL, generator=generator) * 100, 7 + step)
        unlucky.feedback.rollback()
        unlucky.push(torch.randn(NUMEL, generator=generator), 3, BUCKETS[1:])
        unlucky.feedback.rollback()
        unlucky.feedback.commit()
        assert torch.equal(steady.push(gradient, 32), unlucky.push(gradient, 32))
        steady.feedback.commit()
        unlucky.feedback.commit()
        assert torch.equal(steady.feedback.residual(), unlucky.feedback.residual())


@LOSSY
def test_what_is_owed_shrinks_in_a_push_of_more_samples(name: str) -> None:
    sender = Sender(name)
    gradient = torch.randn(NUMEL, generator=gradients(3))
    sender.push(gradient, 10)
    sender.feedback.commit()
    owed = sender.feedback.residual()
    received = sender.push(torch.zeros(NUMEL), 1000)
    assert float((received * 1000 - owed).abs().max()) <= float(owed.abs().max()) / 250
    sender.feedback.rollback()
    assert torch.equal(sender.feedback.residual(), owed)


@LOSSY
def test_a_bucket_that_is_encoded_again_counts_once(name: str) -> None:
    once, twice = Sender(name), Sender(name)
    gradient = torch.randn(NUMEL, generator=gradients(4))
    once.push(gradient, 5)
    twice.push(gradient * 3, 9, BUCKETS[:2])
    twice.push(gradient, 5)
    once.feedback.commit()
    twice.feedback.commit()
    assert torch.equal(once.feedback.residual(), twice.feedback.residual())


@LOSSY
def test_buckets_that_a_push_leaves_out_keep_what_they_owe(name: str) -> None:
    sender = Sender(name)
    generator = gradients(5)
    sender.push(torch.randn(NUMEL, generator=generator), 4)
    sender.feedback.commit()
    before = sender.feedback.residual()
    sender.push(torch.randn(NUMEL, generator=generator), 9, BUCKETS[1:2])
    sender.feedback.commit()
    after = sender.feedback.residual()
    assert torch.equal(before[:512], after[:512])
    assert torch.equal(before[900:], after[900:])
    assert not torch.equal(before[512:900], after[512:900])
    sender.feedback.commit()
    assert torch.equal(sender.feedback.residual(), after)


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_a_lossless_codec_owes_nothing(name: str) -> None:
    sender = Sender(name)
    generator = gradients(6)
    for num_samples in (1, 32, 7):
        gradient = torch.randn(NUMEL, generator=generator, dtype=sender.codec.dtype)
        assert torch.equal(sender.push(gradient, num_samples), gradient)
        sender.feedback.commit()
        assert not bool(sender.feedback.residual().any())


@LOSSY
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_refused_and_changes_nothing(name: str, bad: float) -> None:
    sender = Sender(name)
    generator = gradients(7)
    gradient = torch.randn(NUMEL, generator=generator)
    sender.push(gradient, 4)
    sender.feedback.commit()
    before = sender.feedback.residual()
    broken = gradient.clone()
    broken[520] = bad
    with pytest.raises(NonFiniteValue) as caught:
        sender.push(broken, 4)
    assert caught.value.index == 520 - BUCKETS[1].start
    sender.feedback.rollback()
    assert torch.equal(sender.feedback.residual(), before)


@LOSSY
def test_the_gradient_is_left_alone(name: str) -> None:
    sender = Sender(name)
    gradient = torch.randn(NUMEL, generator=gradients(8))
    kept = gradient.clone()
    sender.push(gradient, 4)
    assert torch.equal(gradient, kept)


def test_a_push_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 loss term, not 0"):
        Sender("int8").push(torch.ones(NUMEL), 0)
