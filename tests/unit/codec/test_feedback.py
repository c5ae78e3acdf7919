"""Error feedback: what was applied tracks what was encoded, over a restart too."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from smolcluster.codec.base import NonFiniteValue
from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import CODECS, get_codec

NUMEL = 1000
BUCKETS = (slice(0, 512), slice(512, 900), slice(900, 1000))
NAMES = sorted(CODECS)
PUSHES = st.lists(
    st.tuples(st.floats(1e-3, 1.0), st.booleans(), st.sampled_from([1e-3, 1.0, 50.0])),
    min_size=1,
    max_size=12,
)
LOSSY = pytest.mark.parametrize("name", [name for name in NAMES if not CODECS[name].lossless])
LOSSES = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254, "int4": 1 / 13, "topk": 2.0}
"""The most that may be lost of a value, as a part of the largest value: by one push, or by as many as
leave it out, which with `topk` are about 64."""
BOUNDS = LOSSES | {"topk": 64.0}
"""The most that may be owed of a value, as a part of the largest one: a codec that leaves values out owes the
sum of what it has left out, until that is among the largest."""
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
        self, gradient: Tensor, share: float = 1.0, buckets: tuple[slice, ...] = BUCKETS
    ) -> Tensor:
        """Encode all buckets; return what the receiver decodes, zero where nothing was sent."""
        received = torch.zeros_like(gradient)
        for bucket in buckets:
            part = gradient[bucket]
            out = torch.empty(self.codec.encoded_nbytes(part.numel()), dtype=torch.uint8)
            self.feedback.encode(bucket, part, out, share)
            self.codec.decode(out, received[bucket])
        return received

    def apply(
        self, gradient: Tensor, share: float = 1.0, buckets: tuple[slice, ...] = BUCKETS
    ) -> Tensor:
        """A push that is applied."""
        received = self.push(gradient, share, buckets)
        self.feedback.commit()
        return received

    def started_again(self) -> "Sender":
        """A new sender with what this one owes, whose last push was applied as it was."""
        new = Sender(self.codec.name)
        new.feedback.committed.copy_(self.feedback.committed.clone())
        new.feedback.resume(BUCKETS)
        return new


def owes(sender: Sender) -> Tensor:
    return sender.feedback.residual()


def assert_close(one: Tensor, other: Tensor) -> None:
    largest = max(float(one.abs().max()), 1e-30)
    assert float((one.double() - other.double()).abs().max()) <= 1e-6 * largest


@settings(derandomize=True, database=None, max_examples=30)
@given(name=st.sampled_from(NAMES), pushes=PUSHES, seed=st.integers(0, 2**31))
def test_applied_sum_plus_residual_is_the_encoded_sum(
    name: str, pushes: list[tuple[float, bool, float]], seed: int
) -> None:
    sender = Sender(name)
    encoded_sum = torch.zeros(NUMEL, dtype=torch.float64)
    applied_sum = torch.zeros(NUMEL, dtype=torch.float64)
    magnitude = 0.0
    for number, (share, is_applied, size) in enumerate(pushes):
        gradient = sender.gradient(seed + number) * size
        kept = gradient.clone()
        received = sender.push(gradient, share)
        assert torch.equal(gradient, kept), "the gradient is left alone"
        if not is_applied:
            sender.feedback.rollback()
            continue
        sender.feedback.commit()
        encoded_sum += share * gradient.to(torch.float64)
        applied_sum += share * received.to(torch.float64)
        magnitude += share * float(gradient.abs().max())
    difference = encoded_sum - applied_sum - owes(sender).to(torch.float64)
    assert float(difference.abs().max()) <= 1e-6 * magnitude
    assert sender.codec.lossless is False or not bool(owes(sender).any())


@LOSSY
def test_what_is_owed_does_not_grow_over_many_pushes_and_starts(name: str) -> None:
    sender = Sender(name)
    wanted = torch.zeros(NUMEL, dtype=torch.float64)
    applied = torch.zeros_like(wanted)
    for step in range(80):
        gradient = sender.gradient(step)
        applied += sender.apply(gradient).double()
        wanted += gradient.double()
        if step % 4 == 0:
            sender = sender.started_again()
        assert float((wanted - applied - owes(sender).double()).abs().max()) <= 5e-4
    assert float((wanted - applied).abs().max()) <= 5.5 * LOSSES[name]


@pytest.mark.parametrize(
    ("name", "value", "outlier", "first", "atol"),
    [
        ("int8", 1e-3, 1.0, 0.0, 4e-5),
        ("fp16", 1e-3, 2e9, 0.0, 4e-5),
        ("bf16", 1.001, 1.0, 1.0, 4e-5),
        ("int4", 1e-3, 1.0, 0.0, 4e-4),
        ("topk", 1e-3, 1.0, 0.0, 8e-4),
    ],
)
def test_what_one_push_cannot_say_arrives_over_many(
    name: str, value: float, outlier: float, first: float, atol: float
) -> None:
    gradient = torch.full((NUMEL,), value)
    gradient[[0, 300, 600, 950]] = outlier
    sender = Sender(name)
    assert float(sender.apply(gradient, 1)[5]) == first
    applied = sum((sender.apply(gradient, 1) for _ in range(200)), torch.zeros(NUMEL))
    assert torch.allclose(applied / 200, gradient, atol=atol)


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
def test_what_is_owed_is_paid_once_whatever_the_sizes(name: str) -> None:
    sender = Sender(name)
    sender.apply(sender.gradient(3))
    owed = owes(sender)
    received = sender.push(torch.zeros(NUMEL))
    assert float((received - owed).abs().max()) <= float(owed.abs().max()) * LOSSES[name]
    sender.feedback.rollback()
    assert torch.equal(owes(sender), owed)


@DENSE
def test_what_a_small_part_lost_is_a_small_part_of_what_a_large_one_pays(name: str) -> None:
    sender = Sender(name)
    sender.apply(sender.gradient(3), 1 / 64)
    owed = owes(sender)
    received = sender.push(torch.zeros(NUMEL), 1 / 2) / 2
    assert float((received - owed).abs().max()) <= float(owed.abs().max()) * LOSSES[name]


@LOSSY
@settings(derandomize=True, database=None, max_examples=8)
@given(
    sizes=st.lists(st.one_of(st.just(1), st.integers(1, 500)), min_size=1, max_size=20),
    seed=st.integers(0, 2**31),
)
@example(sizes=[500] * 19 + [1], seed=0)
@example(sizes=[500, 1] * 20, seed=0)
def test_what_is_applied_tracks_what_is_encoded_for_batches_of_any_sizes(
    name: str, sizes: list[int], seed: int
) -> None:
    """Each is a step of its own; the mean gradient of a small batch is larger.

    A quarter more, for a debt is encoded with the gradient.
    """
    sender = Sender(name)
    difference = torch.zeros(NUMEL, dtype=torch.float64)
    largest = 0.0
    for number, size in enumerate(sizes):
        gradient = sender.gradient(seed + number) * size**-0.5
        difference += gradient.double() - sender.apply(gradient).double()
        largest = max(largest, float(gradient.abs().max()))
        assert float(difference.abs().max()) <= 1.25 * BOUNDS[name] * largest


@LOSSY
@settings(derandomize=True, database=None, max_examples=8)
@given(
    parts=st.lists(
        st.tuples(
            st.one_of(st.just(1), st.integers(1, 500)),
            st.integers(0, 500),
            st.one_of(st.just(1), st.integers(1, 1000)),
        ),
        min_size=1,
        max_size=20,
    ),
    seed=st.integers(0, 2**31),
)
@example(parts=[(500, 500, 1000)] * 19 + [(1, 999, 1)], seed=0)
def test_what_is_applied_tracks_what_is_encoded_whatever_the_others_bring(
    name: str, parts: list[tuple[int, int, int]], seed: int
) -> None:
    """Of a sum of `own + others` terms, whose number was estimated when the push was encoded."""
    sender = Sender(name)
    difference = torch.zeros(NUMEL, dtype=torch.float64)
    largest = 0.0
    for number, (own, others, estimate) in enumerate(parts):
        gradient, share = sender.gradient(seed + number), own / (own + others)
        received = sender.push(gradient, share * estimate / 500)
        sender.feedback.commit(share=share)
        difference += share * (gradient.double() - received.double())
        largest = max(largest, float((share * received).abs().max()))
        assert float((difference - owes(sender).double()).abs().max()) <= 1e-4 * max(1.0, largest)


@LOSSY
def test_shares_that_are_known_leave_a_debt_that_does_not_grow(name: str) -> None:
    sender = Sender(name)
    difference = torch.zeros(NUMEL, dtype=torch.float64)
    for number in range(80):
        gradient, share = sender.gradient(number), [1 / 64, 1 / 2, 1 / 4, 1.0][number % 4]
        difference += share * (gradient.double() - sender.apply(gradient, share).double())
        assert float(difference.abs().max()) <= 5.5 * BOUNDS[name]


@LOSSY
def test_debts_of_an_unknown_fate_are_given_up(name: str) -> None:
    sender = Sender(name)
    sender.apply(sender.gradient(1))
    sender.push(sender.gradient(2))
    sender.feedback.forget()
    sender.feedback.commit()
    assert not bool(owes(sender).any())
    assert torch.equal(sender.push(sender.gradient(3)), Sender(name).push(sender.gradient(3)))


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


def test_a_push_without_a_share_is_refused() -> None:
    with pytest.raises(ValueError, match="share above 0, not 0"):
        Sender("int8").push(torch.ones(NUMEL), 0)


# It is kept over a restart.


@settings(derandomize=True, database=None, max_examples=20)
@given(
    name=st.sampled_from(NAMES),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_a_sender_that_starts_again_owes_and_pays_the_same(
    name: str, before: int, after: int, seed: int
) -> None:
    steady = Sender(name)
    for number in range(before):
        steady.apply(steady.gradient(seed + number))
    again = steady.started_again()
    assert_close(owes(steady), owes(again))
    again.push(steady.gradient(seed))
    again.feedback.rollback()
    for number in range(before, before + after):
        gradient = steady.gradient(seed + number)
        assert_close(steady.apply(gradient), again.apply(gradient))
        assert_close(owes(steady), owes(again))


@pytest.mark.parametrize("name", NAMES)
def test_before_the_first_push_nothing_is_owed(name: str) -> None:
    again = Sender(name).started_again()
    assert not bool(owes(again).any())
    gradient = again.gradient(1)
    assert torch.equal(again.push(gradient), Sender(name).push(gradient))


def test_what_was_owed_before_is_forgotten() -> None:
    """Filled and resumed, a feedback that was in use owes the new debt only."""
    used, other = Sender("int8"), Sender("int8")
    used.apply(used.gradient(1), 0.25)
    other.apply(other.gradient(2))
    used.feedback.committed.copy_(other.feedback.committed)
    used.feedback.resume(BUCKETS)
    assert torch.equal(owes(used), owes(other))
