"""What those who are some versions behind are sent: the updates that they lack, or all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smolcluster.algorithms.DiLoCo.outer_store import Update, UpdateHistory
from torch import Tensor

from smolcluster.codec.feedback import ErrorFeedback
from smolcluster.codec.registry import get_codec

NUMEL = 700


def history_of(*sizes: int, whole: int = 100) -> UpdateHistory[str]:
    history: UpdateHistory[str] = UpdateHistory(whole)
    for version, nbytes in enumerate(sizes):
        history.add(Update(version, version + 1, nbytes, f"to {version + 1}"))
    return history


def sent(history: UpdateHistory[str], version: int) -> list[str] | None:
    updates = history.since(version)
    return None if updates is None else [update.encoded for update in updates]


def test_who_is_behind_gets_the_updates_that_it_lacks_in_order() -> None:
    history = history_of(25, 25, 25)
    assert sent(history, 0) == ["to 1", "to 2", "to 3"]
    assert sent(history, 2) == ["to 3"]


def test_who_is_further_behind_than_the_weights_are_large_gets_them_whole() -> None:
    history = history_of(25, 25, 25, 25)
    assert sent(history, 0) is None, "as many bytes as the weights"
    assert sent(history, 1) == ["to 2", "to 3", "to 4"]


def test_an_update_as_large_as_the_weights_is_not_kept() -> None:
    history = history_of(25, 100)
    assert sent(history, 0) is None
    assert sent(history, 1) is None
    history.add(Update(2, 3, 25, "to 3"))
    assert sent(history, 2) == ["to 3"]


@pytest.mark.parametrize("version", [3, 9])
def test_of_what_is_not_known_there_are_no_updates(version: int) -> None:
    assert sent(history_of(25, 25, 25), version) is None
    assert sent(history_of(), version) is None


def test_versions_may_be_far_apart_but_must_follow() -> None:
    history = history_of(25)
    history.add(Update(1, 7, 25, "to 7"))
    assert sent(history, 0) == ["to 1", "to 7"]
    with pytest.raises(ValueError, match="from version 6 does not follow on version 7"):
        history.add(Update(6, 8, 25, "to 8"))


@pytest.mark.parametrize(("codec", "kept"), [("fp32", 0), ("bf16", 1), ("int8", 3), ("int4", 7)])
def test_how_many_versions_are_kept_is_the_codecs_matter(codec: str, kept: int) -> None:
    nbytes = get_codec(codec).encoded_nbytes(100_000)
    history = history_of(*[nbytes] * 9, whole=400_000)
    assert [version for version in range(9) if sent(history, version)] == list(range(9 - kept, 9))


class Replica:
    """Weights of some version, which take updates as they are decoded."""

    def __init__(self, weights: Tensor, codec_name: str) -> None:
        self.weights, self.version = weights.clone(), 0
        self._codec = get_codec(codec_name)

    def take(self, update: Update[Tensor]) -> None:
        assert update.base_version == self.version
        decoded = torch.empty_like(self.weights)
        self._codec.decode(update.encoded, decoded)
        self.weights.sub_(decoded)
        self.version = update.version


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(
    codec_name=st.sampled_from(["bf16", "int8", "int4"]),
    seed=st.integers(0, 2**31),
    catching_up=st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=20),
)
def test_all_who_apply_the_updates_agree_with_the_store_bit_for_bit(
    codec_name: str, seed: int, catching_up: list[set[int]]
) -> None:
    """Whoever catches up when: by updates, or by whole weights when it is too far behind."""
    generator = torch.Generator().manual_seed(seed)
    codec, feedback = get_codec(codec_name), ErrorFeedback(get_codec(codec_name), NUMEL)
    history: UpdateHistory[Tensor] = UpdateHistory(4 * NUMEL)
    beginning = torch.randn(NUMEL, generator=generator)
    store, *others = (Replica(beginning, codec_name) for _ in range(4))
    wanted = beginning.double()
    for behind in catching_up:
        change = torch.randn(NUMEL, generator=generator) * 1e-2
        wanted -= change.double()
        encoded = torch.empty(codec.encoded_nbytes(NUMEL), dtype=torch.uint8)
        feedback.encode(slice(0, NUMEL), change, encoded)
        feedback.commit()
        update = Update(store.version, store.version + 1, len(encoded), encoded)
        store.take(update)
        history.add(update)
        for number in behind:
            other = others[number]
            updates = history.since(other.version)
            if updates is None and other.version != store.version:
                other.weights.copy_(store.weights)
                other.version = store.version
            for each in updates or []:
                other.take(each)
            assert torch.equal(other.weights, store.weights)
    owed = feedback.residual().double()
    assert float((store.weights.double() - owed - wanted).abs().max()) < 1e-5
