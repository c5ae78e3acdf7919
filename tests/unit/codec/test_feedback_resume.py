"""Error feedback over a restart: what is owed is kept, and paid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import CODECS, get_codec

NUMEL = 400
BUCKETS = (slice(0, 150), slice(150, 300), slice(300, 400))
NAMES = sorted(CODECS)
LOSSY = [name for name in NAMES if not CODECS[name].lossless]
SAMPLES = st.lists(st.integers(1, 500), min_size=1, max_size=5)


def gradient(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=generator, dtype=get_codec(name).dtype)


class Sender:
    """A sender whose pushes are decoded at once."""

    def __init__(self, name: str) -> None:
        self.codec = get_codec(name)
        self.feedback = ErrorFeedback(self.codec, NUMEL)

    def push(self, values: Tensor, num_samples: int) -> Tensor:
        """Encode all buckets; return what the receiver decodes."""
        received = torch.zeros_like(values)
        for bucket in BUCKETS:
            part = values[bucket]
            out = torch.empty(self.codec.encoded_nbytes(part.numel()), dtype=torch.uint8)
            self.feedback.encode(bucket, part, num_samples, out)
            self.codec.decode(out, received[bucket])
        return received

    def started_again(self, num_samples: int) -> "Sender":
        """A new sender with what this one owes, after a last push of so many samples."""
        new = Sender(self.codec.name)
        new.feedback.committed.copy_(self.feedback.committed.clone())
        new.feedback.resume(BUCKETS, num_samples)
        return new


def assert_close(one: Tensor, other: Tensor) -> None:
    largest = max(float(one.abs().max()), 1e-30)
    assert float((one.double() - other.double()).abs().max()) <= 1e-6 * largest


@settings(derandomize=True, deadline=None, database=None)
@given(name=st.sampled_from(NAMES), before=SAMPLES, after=SAMPLES, seed=st.integers(0, 2**31))
def test_a_sender_that_starts_again_owes_and_pays_the_same(
    name: str, before: list[int], after: list[int], seed: int
) -> None:
    steady = Sender(name)
    for number, num_samples in enumerate(before):
        steady.push(gradient(name, seed + number), num_samples)
        steady.feedback.commit()
    again = steady.started_again(before[-1])
    assert_close(steady.feedback.residual(), again.feedback.residual())
    for number, num_samples in enumerate(after, start=len(before)):
        values = gradient(name, seed + number)
        assert_close(steady.push(values, num_samples), again.push(values, num_samples))
        steady.feedback.commit()
        again.feedback.commit()
        assert_close(steady.feedback.residual(), again.feedback.residual())


@pytest.mark.parametrize("name", LOSSY)
def test_the_sum_of_what_was_applied_tracks_over_many_starts(name: str) -> None:
    sender = Sender(name)
    wanted = torch.zeros(NUMEL, dtype=torch.float64)
    applied = torch.zeros_like(wanted)
    for step in range(60):
        values, num_samples = gradient(name, step), [32, 7, 100][step % 3]
        applied += num_samples * sender.push(values, num_samples).double()
        wanted += num_samples * values.double()
        sender.feedback.commit()
        if step % 4 == 0:
            sender = sender.started_again(num_samples)
        owed = (wanted - applied - sender.feedback.residual().double()).abs().max()
        assert float(owed) <= 1e-2, "nothing is lost by any of them"
        assert float((wanted - applied).abs().max()) <= 100 * 6.0 / 250


@pytest.mark.parametrize("name", LOSSY)
def test_without_the_samples_it_would_owe_something_else(name: str) -> None:
    """What is stored is the error of a mean; only with its samples it is a part of the sum."""
    steady = Sender(name)
    steady.push(gradient(name, 1), 50)
    steady.feedback.commit()
    owed = steady.feedback.residual()
    assert bool(owed.any())
    torch.testing.assert_close(steady.feedback.committed * 50, owed)
    other = steady.started_again(5)
    torch.testing.assert_close(other.feedback.residual() * 10, owed)


@pytest.mark.parametrize("name", NAMES)
def test_before_the_first_push_nothing_is_owed(name: str) -> None:
    again = Sender(name).started_again(0)
    assert not bool(again.feedback.residual().any())
    values = gradient(name, 1)
    assert torch.equal(again.push(values, 8), Sender(name).push(values, 8))


@pytest.mark.parametrize("name", LOSSY)
def test_a_push_that_is_open_is_no_part_of_it(name: str) -> None:
    sender = Sender(name)
    sender.push(gradient(name, 1), 8)
    sender.feedback.commit()
    owed = sender.feedback.committed.clone()
    sender.push(gradient(name, 2), 16)
    assert torch.equal(sender.feedback.committed, owed)
    sender.feedback.rollback()
    assert torch.equal(sender.feedback.committed, owed)


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_dropped_right_after_the_start_gives_its_mass_back(name: str) -> None:
    sender = Sender(name)
    sender.push(gradient(name, 1), 8)
    sender.feedback.commit()
    again = sender.started_again(8)
    again.push(gradient(name, 2), 16)
    again.feedback.rollback()
    assert_close(sender.feedback.residual(), again.feedback.residual())
    values = gradient(name, 3)
    assert torch.equal(sender.push(values, 4), again.push(values, 4))


def test_what_was_owed_before_is_forgotten() -> None:
    """Filled and resumed, a feedback that was in use owes the new debt only."""
    used, other = Sender("int8"), Sender("int8")
    used.push(gradient("int8", 1), 8)
    used.feedback.commit()
    other.push(gradient("int8", 2), 30)
    other.feedback.commit()
    used.feedback.committed.copy_(other.feedback.committed)
    used.feedback.resume(BUCKETS, 30)
    assert torch.equal(used.feedback.residual(), other.feedback.residual())
