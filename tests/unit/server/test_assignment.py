"""Samples that are handed out: what arrives is what the server has, or is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from peers import opened
from smolcluster.configs.schema import DatasetConfig, GPTConfig, TrainConfig
from smolcluster.data.dataset import Batch, Dataset, Sent
from smolcluster.data.pytree import encode
from smolcluster.data.tokens import TokenBlocks
from smolcluster.errors import OutOfMemory, ProtocolError
from smolcluster.server.assignment import (
    Assigned,
    AssignmentReceiver,
    HeldOut,
    ServedBatch,
    assignment_of,
)
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import builtin_workload
from smolcluster.utils.meter import Computed
from smolcluster.wire.frames import Frame
from smolcluster.wire.messages import (
    Assignment,
    EvaluateStages,
    LeaseKey,
    Served,
    TensorSpec,
    frame_of,
)

LENGTH, VOCAB = 8, 13
INDICES = torch.tensor([3, 0, 5], dtype=torch.int32)


def assigned(batch: Batch = None, indices: torch.Tensor = INDICES) -> Assigned:
    """An assignment as it arrives: each payload is a copy, as from a socket."""
    *served, last = frames_of(batch, indices)
    receiver = AssignmentReceiver()
    for frame in served:
        take(receiver, frame)
    message, payload = opened(last)
    assert isinstance(message, Assignment)
    return receiver.assigned(message, payload)


def frames_of(
    batch: Batch = None, indices: torch.Tensor = INDICES, piece_nbytes: int = 100
) -> list[Frame]:
    key = LeaseKey(incarnation="here", epoch=2, start=8, stop=8 + len(indices), grant=1)
    served = None if batch is None else ServedBatch(encode(batch), piece_nbytes)
    sent = assignment_of(key, indices, served, version=7, learning_rate=0.1)
    return [*(served.frames(key) if served else []), frame_of(*sent)]


def take(receiver: AssignmentReceiver, frame: Frame, **change: object) -> None:
    message, payload = opened(frame)
    assert isinstance(message, Served)
    place = receiver.place_for(message.model_copy(update=change))
    assert place is not None
    place[:] = payload


def message_of(indices: torch.Tensor = INDICES) -> tuple[Assignment, memoryview]:
    message, payload = opened(frames_of(None, indices)[0])
    assert isinstance(message, Assignment)
    return message, payload


def rows_of(dtype: type = np.uint16) -> torch.Tensor:
    return blocks(dtype).to_send(INDICES)


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
        "text",
        num_samples=6,
        input_dim=LENGTH,
        num_classes=VOCAB,
        measure="perplexity",
        fingerprint="f",
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
    loss, expected = assigned(rows_of()).compute(there), assigned().compute(here)
    assert loss == expected
    assert torch.equal(there.replica.grads, here.replica.grads)


def test_what_has_been_computed_last_is_noted() -> None:
    here, _ = benches(dropout=0.0)
    loss = assigned().compute(here)
    assert here.replica.meter.newest == Computed(
        epoch=2, stop=8 + len(INDICES), epoch_size=here.num_samples, loss=loss.mean
    )


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32])
def test_tokens_arrive_as_they_are_whatever_their_type(dtype: type) -> None:
    event = assigned(rows_of(dtype))
    assert torch.equal(event.batch, rows_of(dtype))
    assert event.indices.tolist() == INDICES.tolist()


def test_the_payloads_memory_may_be_used_again() -> None:
    message, payload = message_of()
    event = Assigned(message, payload)
    payload[:] = bytes(len(payload))
    assert (event.lease, event.assignment) == (message.lease, message)
    assert event.indices.tolist() == INDICES.tolist()


@pytest.mark.parametrize(
    "change",
    [{"dtype": "int64"}, {"codec": "fp32"}, {"shape": (3, 1)}, {"nbytes": 24}],
    ids=["type", "codec", "shape", "size"],
)
def test_indices_of_another_kind_are_refused(change: dict[str, object]) -> None:
    message, payload = message_of()
    odd = message.tensor.model_copy(update=change)
    with pytest.raises(ProtocolError, match="its lease's indices"):
        Assigned(message.model_copy(update={"tensor": odd}), payload)


def test_fewer_indices_than_the_lease_has_are_refused() -> None:
    message, _ = message_of()
    fewer, payload = message_of(INDICES[:2])
    with pytest.raises(ProtocolError, match="its lease's indices"):
        Assigned(fewer.model_copy(update={"lease": message.lease}), payload)


@pytest.mark.parametrize("piece_nbytes", [1, 64, 100, 1 << 20])
def test_a_batch_larger_than_a_bucket_comes_in_pieces(piece_nbytes: int) -> None:
    batch = {"image": torch.randn(3, 5), "label": torch.tensor([1, 2, 3])}
    *served, last = frames_of(batch, piece_nbytes=piece_nbytes)
    assert max(frame.payload.nbytes for frame in served) <= piece_nbytes
    receiver = AssignmentReceiver()
    for frame in served:
        take(receiver, frame)
    message, payload = opened(last)
    assert isinstance(message, Assignment)
    event = receiver.assigned(message, payload)
    assert torch.equal(event.batch["image"], batch["image"])
    assert torch.equal(event.batch["label"], batch["label"])


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 99},
        {"offset": 101},
        {"nbytes": 10_000},
        {"nbytes": 150},
        {"lease": LeaseKey(incarnation="here", epoch=2, start=8, stop=11, grant=2)},
        {"tensor": TensorSpec(codec="raw", dtype="int8", shape=(100,), nbytes=100)},
        {"tensor": TensorSpec(codec="raw", dtype="uint8", shape=(99,), nbytes=100)},
    ],
    ids=["before", "behind", "longer", "shorter", "lease", "type", "shape"],
)
def test_a_piece_that_does_not_follow_is_refused(change: dict[str, object]) -> None:
    first, second, *_ = frames_of(torch.zeros(100))
    receiver = AssignmentReceiver()
    take(receiver, first)
    with pytest.raises(ProtocolError):
        take(receiver, second, **change)


def test_an_assignment_without_its_whole_batch_is_refused() -> None:
    *served, last = frames_of(torch.zeros(100))
    message, payload = opened(last)
    assert isinstance(message, Assignment)
    receiver = AssignmentReceiver()
    for frame in served[:-1]:
        take(receiver, frame)
    with pytest.raises(ProtocolError, match="without its whole batch"):
        receiver.assigned(message, payload)
    take(receiver, served[-1])
    receiver.assigned(message, payload)
    with pytest.raises(ProtocolError, match="without its whole batch"):
        receiver.assigned(message, payload)


def test_a_batch_that_was_given_up_makes_room_for_another_one() -> None:
    receiver = AssignmentReceiver()
    take(receiver, frames_of(torch.zeros(100))[0])
    *served, last = frames_of(torch.ones(50))
    for frame in served:
        take(receiver, frame)
    message, payload = opened(last)
    assert isinstance(message, Assignment)
    assert torch.equal(receiver.assigned(message, payload).batch, torch.ones(50))


def test_what_is_announced_costs_nothing() -> None:
    first = frames_of(torch.zeros(100))[0]
    message, _ = opened(first)
    assert isinstance(message, Served)
    before = psutil.Process().memory_info().rss
    place = AssignmentReceiver().place_for(message.model_copy(update={"nbytes": 1 << 30}))
    assert place is None or place.nbytes == message.tensor.nbytes
    assert psutil.Process().memory_info().rss - before < 1 << 29


@pytest.mark.parametrize("is_late", [False, True])
def test_a_batch_that_no_memory_is_left_for_ends_the_worker(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    if is_late:
        monkeypatch.setattr("smolcluster.server.assignment.decode", fail)
    else:
        monkeypatch.setattr(
            "smolcluster.server.assignment.virtual_memory", lambda: SimpleNamespace(available=511)
        )
    *served, last = frames_of(torch.zeros(100))
    receiver = AssignmentReceiver()
    for frame in served:
        message, _ = opened(frame)
        assert isinstance(message, Served)
        assert (receiver.place_for(message) is None) is not is_late
    message, payload = opened(last)
    assert isinstance(message, Assignment)
    event = receiver.assigned(message, payload)
    with pytest.raises(OutOfMemory, match="no memory for a batch of 512 bytes"):
        event.compute(benches()[1])


@pytest.mark.parametrize("width", [0, 1, LENGTH, LENGTH + 2, 2 * (LENGTH + 1)])
def test_samples_of_another_length_than_the_model_s_are_refused(width: int) -> None:
    _, there = benches()
    event = assigned(torch.zeros(3, width, dtype=torch.uint16))
    with pytest.raises(ProtocolError, match="not 8 of 13 tokens, as it had said"):
        event.compute(there)


@pytest.mark.parametrize(
    ("token", "dtype"), [(VOCAB, np.uint16), (65_535, np.uint16), (-1, np.int32), (-100, np.int32)]
)
def test_a_token_outside_of_the_vocabulary_is_refused(token: int, dtype: type) -> None:
    _, there = benches()
    rows = rows_of(dtype).numpy()
    rows[1, 4] = token
    with pytest.raises(ProtocolError, match="not 8 of 13 tokens, as it had said"):
        assigned(torch.from_numpy(rows)).compute(there)


def evaluation(batches: Batch, told: Batch, num_samples: int = 5) -> HeldOut:
    """What arrives where `batches` were sent, and `told` were said to be, in batches of two."""
    key = LeaseKey(incarnation="here", epoch=0, start=4, stop=4 + num_samples, grant=1)
    receiver = AssignmentReceiver()
    for frame in ServedBatch(encode(batches), 100).frames(key):
        take(receiver, frame)
    nbytes = encode(told).nbytes
    message = EvaluateStages(attempt=1, turn=2, lease=key, batch_size=2, batch_nbytes=nbytes)
    return receiver.held_out(message)


def test_samples_to_evaluate_arrive_as_the_batches_that_they_were() -> None:
    batches = [torch.arange(4.0).view(2, 2), torch.ones(2, 2), torch.zeros(1, 2)]
    sent = evaluation(batches, batches).samples
    assert isinstance(sent, Sent)
    found = [sent.batch(each) for each in torch.split(torch.arange(sent.num_samples), 2)]
    assert all(map(torch.equal, found, batches))


@pytest.mark.parametrize(
    ("told", "num_samples"),
    [([torch.ones(2)] * 3, 7), (torch.ones(6), 6), ([torch.ones(99)] * 3, 6)],
    ids=["too few batches", "no list", "not all of it"],
)
def test_samples_to_evaluate_that_are_others_than_said_are_refused(
    told: Batch, num_samples: int
) -> None:
    batches = [torch.ones(2)] * 3 if isinstance(told, list) else told
    with pytest.raises(ProtocolError):
        evaluation(batches, told, num_samples)
