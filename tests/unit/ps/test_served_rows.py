"""Samples that the server sends along with the work: what arrives is what it has, or is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from smolcluster.configs.schema import DatasetConfig, GPTConfig, TrainConfig
from smolcluster.data.dataset import Dataset
from smolcluster.data.tokens import TokenBlocks
from smolcluster.errors import ProtocolError
from smolcluster.ps.assignment import Assigned, work_payload
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import builtin_workload
from smolcluster.transport.messages import Assignment, LeaseKey, payload_nbytes

LENGTH, VOCAB = 8, 13
INDICES = torch.tensor([3, 0, 5], dtype=torch.int32)


def assigned(rows: NDArray[Any] | None, indices: torch.Tensor = INDICES) -> Assigned:
    """An assignment as it arrives: the payload is a copy, as from a socket."""
    return Assigned(*message_of(rows, indices))


def message_of(
    rows: NDArray[Any] | None, indices: torch.Tensor = INDICES
) -> tuple[Assignment, memoryview]:
    key = LeaseKey(incarnation="here", epoch=2, start=8, stop=8 + len(indices), grant=1)
    spec, rows_spec, payload = work_payload(indices, rows)
    message = Assignment(lease=key, version=7, learning_rate=0.1, tensor=spec, rows=rows_spec)
    assert payload_nbytes(message) == len(payload)
    return message, memoryview(bytearray(payload))


def blocks(dtype: type = np.uint16) -> TokenBlocks:
    stream: NDArray[Any] = np.random.default_rng(0).integers(0, VOCAB, LENGTH * 6 + 1).astype(dtype)
    return TokenBlocks(stream, LENGTH)


def benches(dropout: float = 0.0) -> tuple[TrainingContext, TrainingContext]:
    """A machine that has the text, and one that has not."""
    train = TrainConfig(
        model=GPTConfig(
            model_dim=16,
            num_layers=1,
            num_heads=2,
            ff_dim=32,
            max_seq_len=LENGTH,
            dropout=dropout,
        ),
        dataset=DatasetConfig(name="text", source="server"),
    )
    here = Dataset("text", blocks(), blocks(), LENGTH, VOCAB, "f", "perplexity")
    there = Dataset.elsewhere(
        "text", num_samples=6, length=LENGTH, vocab_size=VOCAB, fingerprint="f"
    )
    cpu = torch.device("cpu")
    first, second = (
        build(train, 42, DatasetConfig(name="text"), cpu, workload=builtin_workload(train, data))
        for data in (here, there)
    )
    return first, second


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_whoever_has_not_the_text_computes_the_same(dropout: float) -> None:
    here, there = benches(dropout)
    rows = blocks().rows(INDICES)
    loss, expected = assigned(rows).compute(there), assigned(None).compute(here)
    assert loss == expected
    assert torch.equal(there.replica.grads, here.replica.grads)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32])
def test_rows_arrive_as_they_are_whatever_their_type(dtype: type) -> None:
    rows = blocks(dtype).rows(INDICES)
    event = assigned(rows)
    assert event.rows is not None
    assert event.rows.dtype == torch.int64
    assert event.rows.tolist() == rows.tolist()
    assert event.indices.tolist() == INDICES.tolist()


def test_the_payloads_memory_may_be_used_again() -> None:
    message, payload = message_of(blocks().rows(INDICES))
    event = Assigned(message, payload)
    payload[:] = bytes(len(payload))
    assert event.rows is not None
    assert event.rows.tolist() == blocks().rows(INDICES).tolist()


def test_large_tokens_come_through() -> None:
    rows = np.full((3, LENGTH + 1), 65_535, np.uint16)
    event = assigned(rows)
    assert event.rows is not None
    assert int(event.rows.min()) == 65_535


ROWS_NBYTES = 2 * 3 * (LENGTH + 1)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int64"},
        {"dtype": "float32"},
        {"shape": (2, LENGTH + 1)},
        {"shape": (3 * (LENGTH + 1),)},
        {"shape": (3, 1, LENGTH + 1)},
        {"shape": (3, LENGTH)},
        {"shape": (3, LENGTH + 2)},
        {"nbytes": ROWS_NBYTES - 1},
        {"nbytes": ROWS_NBYTES + 1},
    ],
    ids=["int64", "float", "fewer", "flat", "deep", "short", "long", "less", "more"],
)
def test_rows_that_are_not_what_they_are_said_to_be_are_refused(change: dict[str, object]) -> None:
    message, payload = message_of(blocks().rows(INDICES))
    assert message.rows is not None
    odd = message.rows.model_copy(update=change)
    with pytest.raises(ProtocolError, match="the server's samples are not"):
        Assigned(message.model_copy(update={"rows": odd}), payload)


@pytest.mark.parametrize("missing", [1, 54])
def test_a_payload_that_is_cut_short_is_refused(missing: int) -> None:
    message, payload = message_of(blocks().rows(INDICES))
    with pytest.raises(ProtocolError, match="not of the size that it says"):
        Assigned(message, payload[:-missing])


@pytest.mark.parametrize("width", [0, 1, LENGTH, LENGTH + 2, 2 * (LENGTH + 1)])
def test_samples_of_another_length_than_the_model_s_are_refused(width: int) -> None:
    _, there = benches()
    event = assigned(np.zeros((3, width), np.uint16))
    with pytest.raises(ProtocolError, match="not 8 of 13 tokens, as it had said"):
        event.compute(there)


@pytest.mark.parametrize(
    ("token", "dtype"), [(VOCAB, np.uint16), (65_535, np.uint16), (-1, np.int32), (-100, np.int32)]
)
def test_a_token_outside_of_the_vocabulary_is_refused(token: int, dtype: type) -> None:
    _, there = benches()
    rows = blocks(dtype).rows(INDICES).copy()
    rows[1, 4] = token
    with pytest.raises(ProtocolError, match="not 8 of 13 tokens, as it had said"):
        assigned(rows).compute(there)
