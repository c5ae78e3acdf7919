"""Trees of tensors on the wire of a pipeline."""

from collections import namedtuple

import pytest
import torch
from torch import Tensor

from smolcluster.algorithms.PipelineParallel.transfers import decode, encode, on_cpu
from smolcluster.data import pytree
from smolcluster.data.dataset import Batch
from smolcluster.data.pytree import Encoded
from smolcluster.errors import ProtocolError

Output = namedtuple("Output", ["hidden", "router_loss"])


def whole(encoded: Encoded) -> memoryview:
    return memoryview(bytearray(b"".join(encoded.cut(1000))))


def tree() -> Batch:
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, False, True]])
    return {"out": Output(hidden, torch.tensor(0.25)), "rest": [mask, (torch.arange(3), None, 7)]}


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_any_tree_comes_back(codec: str) -> None:
    sent = tree()
    got = decode(whole(encode(sent, codec)))
    assert torch.equal(got["out"].router_loss, sent["out"].router_loss)
    assert torch.equal(got["rest"][0], sent["rest"][0])
    assert torch.equal(got["rest"][1][0], torch.arange(3))
    assert got["rest"][1][1:] == (None, 7)
    loss = 0.0 if codec == "fp32" else 0.02
    torch.testing.assert_close(got["out"].hidden, sent["out"].hidden, rtol=loss, atol=loss)


def test_fp32_keeps_other_floats_bit_for_bit() -> None:
    values = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(decode(whole(encode(values, "fp32"))), values)


def test_int8_takes_a_quarter() -> None:
    values = torch.randn(64, 768)
    assert encode(values, "int8").nbytes < values.nbytes / 3.9


def test_what_leaves_has_no_graph() -> None:
    leaf = torch.ones(2, 2, requires_grad=True)
    assert not on_cpu([leaf * 2])[0].requires_grad


@pytest.mark.parametrize(
    "content",
    [
        "text",
        [[None], torch.ones(1), 3],
        [[], torch.ones(1)],
        [[None, None], torch.ones(1)],
        [[["int8", "float32", [2, 2]]], torch.ones(2, 2)],
        [[["int8", "int32", [2, 2]]], torch.zeros(12, dtype=torch.uint8)],
        [[["zip", "float32", [2, 2]]], torch.zeros(12, dtype=torch.uint8)],
        [[["int8", "float32", [2, True]]], torch.zeros(12, dtype=torch.uint8)],
        [[["int8", "float32", [2, 2**60]]], torch.zeros(12, dtype=torch.uint8)],
    ],
)
def test_what_is_no_tree_is_refused(content: Batch) -> None:
    with pytest.raises(ProtocolError):
        decode(whole(pytree.encode(content)))


def test_gradients_of_a_view_are_sent_whole() -> None:
    values: Tensor = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(decode(whole(encode(values, "fp32"))), values)
