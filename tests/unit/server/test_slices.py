"""Weights cut into slices, and a slice on the wire."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.server.slices import by_name, place_of, slice_frames, slice_pieces, spans
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import ALL_KINDS, State, decode
from smolcluster.wire.streams import Assembler

BUCKETS = [slice(0, 4), slice(4, 8), slice(8, 10)]
NAMES = ("weights", "exp_avg")


def parsed(frame: Frame) -> tuple[State, memoryview]:
    message = decode(State.KIND, bytes(frame.head[20:-4]), ALL_KINDS)
    assert isinstance(message, State)
    return message, memoryview(bytearray(frame.payload))


@given(st.integers(1, 60), st.integers(1, 9))
def test_every_bucket_is_in_one_span_and_no_span_is_empty(buckets: int, hosts: int) -> None:
    cut = spans(buckets, [1] * hosts)
    assert [number for span in cut for number in span] == list(range(buckets))
    assert len(cut) == min(buckets, hosts)
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize(
    ("buckets", "shares", "sizes"),
    [
        (12, (2, 1, 1), [6, 3, 3]),
        (4, (0.97, 0.01, 0.01, 0.01), [1, 1, 1, 1]),
        (10, (0.01, 0.98, 0.01), [1, 8, 1]),
        (2, (1, 1, 8), [1, 1]),
    ],
)
def test_a_host_has_about_its_share_and_at_least_a_bucket(
    buckets: int, shares: tuple[float, ...], sizes: list[int]
) -> None:
    assert list(map(len, spans(buckets, shares))) == sizes


def frames_of(version: int = 7) -> tuple[dict[str, torch.Tensor], list[tuple[State, memoryview]]]:
    span = range(1, 3)
    place = place_of(BUCKETS, span)
    values = {name: torch.randn(place.stop - place.start) for name in NAMES}
    frames = slice_frames(values, BUCKETS, span, incarnation="here", version=version)
    return values, [parsed(frame) for frame in frames]


def test_a_slice_comes_through_whole() -> None:
    values, frames = frames_of()
    assembler = Assembler[State](
        "slice", lambda _: slice_pieces(BUCKETS, range(1, 3), NAMES, torch.float32)
    )
    *others, whole = [assembler.take(*frame)[1] for frame in frames]
    assert others == [None, None, None]
    assert whole is not None
    for name, collected in by_name(NAMES, whole).items():
        assert torch.equal(collected, values[name])


def test_frames_keep_the_values_of_their_moment() -> None:
    values = {"weights": torch.zeros(6)}
    frames = slice_frames(values, BUCKETS, range(1, 3), incarnation="here", version=0)
    values["weights"].fill_(1.0)
    assert not torch.frombuffer(bytearray(frames[0].payload), dtype=torch.float32).any()
