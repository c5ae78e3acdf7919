"""How tensors are described and laid out: what one side says is what the other expects."""

import pytest
import torch
from torch import Tensor

from smolcluster.codec.registry import CODECS, get_codec
from smolcluster.errors import ProtocolError
from smolcluster.ps.assignment import Assigned, work_payload
from smolcluster.ps.push import bucket_spec, bytes_of
from smolcluster.transport.messages import Assignment, LeaseKey


def lease(start: int, stop: int) -> LeaseKey:
    return LeaseKey(incarnation="here", epoch=0, start=start, stop=stop, grant=1)


def assignment(indices: Tensor, key: LeaseKey) -> tuple[Assignment, memoryview]:
    """An assignment as it arrives: the payload is a copy, as from a socket."""
    spec, _, payload = work_payload(indices)
    message = Assignment(lease=key, version=7, learning_rate=1e-3, tensor=spec)
    return message, memoryview(bytearray(payload))


def test_an_assignment_holds_its_lease_s_indices() -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    message, payload = assignment(order[64:96], lease(64, 96))
    event = Assigned(message, payload)
    assert (event.lease, event.assignment) == (lease(64, 96), message)
    payload[:] = bytes(len(payload))
    assert event.indices.tolist() == order[64:96].tolist(), "a copy: the payload's memory is reused"


def test_fewer_indices_than_the_lease_has_are_refused() -> None:
    with pytest.raises(ProtocolError, match="its lease's indices"):
        Assigned(*assignment(torch.arange(31, dtype=torch.int32), lease(0, 32)))


@pytest.mark.parametrize(
    "change",
    [{"dtype": "int64"}, {"codec": "fp32"}, {"shape": (32, 1)}, {"nbytes": 256}],
    ids=["type", "codec", "shape", "size"],
)
def test_indices_of_another_kind_are_refused(change: dict[str, object]) -> None:
    message, payload = assignment(torch.arange(32, dtype=torch.int32), lease(0, 32))
    odd = message.tensor.model_copy(update=change)
    with pytest.raises(ProtocolError, match="its lease's indices"):
        Assigned(message.model_copy(update={"tensor": odd}), payload)


@pytest.mark.parametrize("name", CODECS)
def test_a_bucket_is_described_as_what_its_codec_makes_of_it(name: str) -> None:
    codec = get_codec(name)
    spec = bucket_spec(codec, slice(100, 350))
    values = torch.linspace(-1, 1, 250, dtype=codec.dtype)
    encoded = torch.empty(spec.nbytes, dtype=torch.uint8)
    codec.encode(values, encoded)
    assert (spec.codec, spec.shape) == (name, (250,))
    assert getattr(torch, spec.dtype) is values.dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.float64])
def test_a_tensors_bytes_are_its_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(8).to(dtype)
    view = bytes_of(tensor[2:6])
    assert view.nbytes == 4 * dtype.itemsize
    tensor[2:6] = 9
    assert torch.frombuffer(view, dtype=dtype).tolist() == [9, 9, 9, 9]
    view[:] = bytes(view.nbytes)
    assert tensor.tolist() == [0, 1, 0, 0, 0, 0, 6, 7]
