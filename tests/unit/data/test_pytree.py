"""Batches on the wire: what is sent arrives, and nothing else is accepted."""

import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.data.pytree import ALIGNMENT, MAX_DEPTH, decode, encode, sliced
from smolcluster.errors import DataError, ProtocolError

Pair = namedtuple("Pair", "image label")

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)


def sent(batch: Any, piece_nbytes: int = 1000, codec: str = "fp32") -> Any:
    encoded = encode(batch, codec)
    data = b"".join(encoded.cut(piece_nbytes))
    assert len(data) == encoded.nbytes
    return decode(memoryview(bytearray(data)))


@pytest.mark.parametrize("nbytes", [64, 1000, 70_000, 10**6])
def test_slices_are_the_same_bytes_and_refer_to_what_is_large(nbytes: int) -> None:
    large = torch.arange(50_000, dtype=torch.float32)
    encoded = encode([torch.arange(9), large, "x", torch.ones(3)])
    slices = list(encoded.slices(nbytes))
    assert max(each.nbytes for each in slices) <= nbytes
    assert b"".join(slices) == b"".join(encoded.cut(nbytes))
    large[-1] = 7
    assert torch.equal(decode(memoryview(bytearray(b"".join(slices))))[1], large)


def as_bytes(skeleton: Any, data: bytes = b"") -> memoryview:
    head = orjson.dumps(skeleton)
    packed = struct.pack("!I", len(head)) + head
    return memoryview(bytearray(packed + bytes(-len(packed) % ALIGNMENT) + data))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_a_tensor_arrives_as_it_is(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    arrived = sent(tensor)
    assert (arrived.dtype, arrived.shape) == (dtype, shape)
    assert torch.equal(arrived, tensor)
    if arrived.numel():
        arrived.reshape(-1)[0] = 1  # it can be written to, as a batch of one's own


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ab'\""), inner) | st.tuples(inner),
        max_leaves=10,
    )
)
def test_plain_values_arrive_as_they_are(batch: Any) -> None:
    arrived = sent(batch)
    assert arrived == batch
    assert type(arrived) is type(batch)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_whole_numbers_of_any_size_arrive(values: list[int]) -> None:
    assert sent(torch.tensor(values, dtype=torch.int64)).tolist() == values


def test_labels_travel_as_bytes() -> None:
    assert encode(torch.arange(200).repeat(100)).nbytes < 21_000


@pytest.mark.parametrize(("codec", "bound"), [("fp32", 0.0), ("bf16", 0.02), ("int8", 0.02)])
def test_a_codec_writes_rows_of_floats_and_nothing_else(codec: str, bound: float) -> None:
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    array = np.array([[0.3, 7]], dtype=np.float32)
    rest: list[Any] = [torch.tensor([[True, False]]), torch.tensor(0.25), array, 0.3, None]
    found, others = sent((hidden, rest), codec=codec)
    assert torch.equal(found, hidden) == (codec == "fp32")
    torch.testing.assert_close(found, hidden, rtol=bound, atol=bound)
    assert torch.equal(others[0], rest[0])
    assert others[1:2] + others[3:] == rest[1:2] + rest[3:]
    assert np.array_equal(others[2], rest[2])
    assert torch.equal(sent(hidden.double(), codec=codec), found.double())


def test_containers_keep_their_kind() -> None:
    batch = {
        "pair": Pair(torch.ones(2, 3), [1, "a"]),
        "both": (torch.zeros(1), None),
        3: np.arange(4, dtype=np.int16),
        "number": np.float32(0.5),
        "ordered": OrderedDict(a=1),
        "nan": float("nan"),
    }
    arrived = sent(batch, piece_nbytes=7)
    assert list(arrived) == list(batch)
    assert arrived["pair"]._fields == Pair._fields
    assert torch.equal(arrived["pair"].image, torch.ones(2, 3))
    assert arrived["pair"].label == [1, "a"]
    assert isinstance(arrived["both"], tuple)
    assert (arrived[3].dtype, arrived[3].tolist()) == (np.int16, [0, 1, 2, 3])
    assert arrived["number"] == 0.5
    assert arrived["ordered"] == {"a": 1}
    assert math.isnan(arrived["nan"])


def test_a_tensor_that_is_a_view_or_has_a_gradient_arrives_by_its_values() -> None:
    whole = torch.randn(4, 6, requires_grad=True)
    assert torch.equal(sent(whole.T[1:3]), whole.detach().T[1:3])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_cannot_be_sent() -> None:
    batch = {"image": torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)])}
    with pytest.raises(DataError, match=r'batch\["image"\] is a tensor.*make it dense'):
        encode(batch)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"meta": [object()]}, 'batch["meta"][0] is a object'),
        ([torch.ones(1), (1, {2})], "batch[1][1] is a set"),
        ({"image": torch.eye(2).to_sparse()}, 'batch["image"] is a tensor'),
        ({"id": 2**70}, 'batch["id"] is 1180591620717411303424'),
        ({(1, 2): 1}, "batch has the key (1, 2)"),
        ({"when": np.array(["2020"], dtype="datetime64[D]")}, 'batch["when"] is a ndarray'),
        ([np.zeros(2, np.longdouble)], "batch[0] is a ndarray"),
        ({"raw": b"abc"}, 'batch["raw"] is a bytes'),
        ({"text": "\ud800"}, 'batch["text"] is'),
        (torch.empty(2, device="meta"), "batch is a tensor without values"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(batch: Any, told: str) -> None:
    with pytest.raises(DataError) as caught:
        encode(batch)
    assert str(caught.value).startswith(told)


def test_a_tree_that_is_too_deep_is_refused_on_both_sides() -> None:
    tree: Any = 1
    for _ in range(MAX_DEPTH + 1):
        tree = [tree]
    with pytest.raises(DataError, match="deeper than"):
        encode(tree)
    with pytest.raises(ProtocolError, match="deeper than"):
        decode(as_bytes(tree))
    with pytest.raises(ProtocolError):
        decode(memoryview(bytearray(struct.pack("!I", 60_000) + b"[" * 60_000)))


@pytest.mark.parametrize(
    ("skeleton", "data"),
    [
        ({"tensor": ["float32", "float32", [4]]}, bytes(0)),
        ({"tensor": ["float32", "float32", [4]]}, bytes(128)),
        ({"tensor": ["float32", "float32", [2**40, 2**40]]}, bytes(64)),
        ({"tensor": ["float32", "float32", [0, 2**40, 2**40]]}, b""),
        ({"tensor": ["float32", "float32", [-1, -4]]}, bytes(64)),
        ({"tensor": ["float32", "float32", [True]]}, bytes(64)),
        ({"tensor": ["float32", "float32", [1] * 17]}, bytes(64)),
        ({"tensor": ["float32", "float32", 4]}, bytes(64)),
        ({"tensor": ["float32", "uint8", [4]]}, bytes(64)),
        ({"tensor": ["int32", "uint8", [4]]}, bytes(64)),
        ({"tensor": ["int64", "float32", [4]]}, bytes(64)),
        ({"tensor": ["object", "object", [4]]}, bytes(64)),
        ({"tensor": ["float32", "int8", [2, 2]]}, b""),
        ({"tensor": ["float32", "int8", [4]]}, bytes(64)),
        ({"tensor": ["float32", "int8", [2, 0]]}, b""),
        ({"tensor": ["float32", "int8", [2, 2**60]]}, bytes(64)),
        ({"tensor": ["float32", "zip", [2, 2]]}, bytes(64)),
        ({"tensor": ["int32", "bf16", [2, 2]]}, bytes(64)),
        ({"tensor": ["bool", "bool", [64]]}, bytes([2]) * 64),
        ({"tensor": ["uint8", "uint8", [1]], "dict": []}, bytes(64)),
        ({"array": ["bfloat16", "bfloat16", [1]]}, bytes(64)),
        ({"dict": [["a", 1], ["a", 2]]}, b""),
        ({"dict": [["a"]]}, b""),
        ({"dict": [[None, 1]]}, b""),
        ({"dict": {"a": 1}}, b""),
        ({"named": [["a"], [1, 2]]}, b""),
        ({"named": [["a", "a"], [1, 2]]}, b""),
        ({"named": [["import"], [1]]}, b""),
        ({"named": [["_x"], [1]]}, b""),
        ({"named": [["a)", "b"], [1, 2]]}, b""),
        ({"float": "1e5"}, b""),
        ({"class": "os.system"}, b""),
        ({}, b""),
    ],
)
def test_what_is_no_batch_is_refused(skeleton: Any, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(as_bytes(skeleton, data))


@pytest.mark.parametrize(
    "data", [b"", b"abc", b"\xff\xff\xff\xff", b"\0\0\0\x02[", b"\0\0\0\x02[x"]
)
def test_bytes_that_are_no_skeleton_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(memoryview(bytearray(data)))


@given(st.binary(max_size=200), st.integers(0, 300))
def test_a_batch_that_was_changed_is_a_batch_or_refused(noise: bytes, start: int) -> None:
    data = bytearray(b"".join(encode({"a": torch.arange(9), "b": [1, "x"]}).cut(10_000)))
    data[start : start + len(noise)] = noise
    try:
        decode(memoryview(data))
    except ProtocolError:
        return


def test_a_batch_is_cut_by_its_samples() -> None:
    batch = {
        "image": torch.arange(10).reshape(5, 2),
        "names": list("abcde"),
        "pair": [torch.arange(5), torch.tensor(0.1)],
        "scale": 0.5,
    }
    first, second, third = sliced(batch, 5, 2)
    assert second["image"].tolist() == [[4, 5], [6, 7]]
    assert (first["names"], third["names"]) == (["a", "b"], ["e"])
    assert second["pair"][0].tolist() == [2, 3]
    assert second["pair"][1] == torch.tensor(0.1)
    assert {each["scale"] for each in (first, second, third)} == {0.5}


def test_fields_are_not_taken_for_samples_where_there_are_as_many() -> None:
    first, second = sliced([torch.tensor([1.0, 2.0]), torch.tensor([3, 4])], 2, 1)
    assert ([each.tolist() for each in first], [each.tolist() for each in second]) == (
        [[1], [3]],
        [[2], [4]],
    )


def test_the_size_of_a_tensor_is_not_cut() -> None:
    inputs = torch.zeros(2, 3)
    assert [each["size"] for each in sliced({"x": inputs, "size": inputs.shape}, 2, 1)] == [
        (2, 3)
    ] * 2


def boxes(*numbers: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.zeros(number, 4)} for number in numbers]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(4, 3), boxes(1, 4, 2, 3)),
        (torch.zeros(4, 3), boxes(4, 4, 4, 4)),
        tuple(zip(*zip(torch.zeros(4, 3, 8, 8), boxes(1, 4, 2, 3), strict=True), strict=True)),
        list(torch.zeros(4, 4, 8)),
        {"image": torch.zeros(4, 3), "boxes": torch.zeros(9, 4)},
    ],
    ids=["boxes", "as many boxes", "detection", "samples", "all boxes"],
)
def test_what_is_not_one_row_a_sample_is_one_piece(batch: Any) -> None:
    assert sliced(batch, 4, 2) == [batch]


def test_what_has_no_samples_to_be_seen_is_not_cut() -> None:
    assert len(sliced({"a": torch.zeros(3), "n": [1, 2, 3, 4]}, 4, 1)) == 1


def test_named_tuples_of_the_same_fields_are_of_one_type_in_all_batches() -> None:
    batch = Pair(torch.zeros(1), 1)
    assert type(sent(batch)) is type(sent(batch))


def test_names_of_a_named_tuple_are_bounded() -> None:
    """The class that is made of them is kept."""
    long = as_bytes({"named": [["a" * 101], [1]]})
    with pytest.raises(ProtocolError, match="named tuple"):
        decode(long)


def test_a_batch_of_too_many_plain_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = as_bytes([[]] * 100)
    encode([1] * 100)
    decode(many)
    monkeypatch.setattr("smolcluster.data.pytree.MAX_NODES", 100)
    with pytest.raises(DataError, match="101 values"):
        encode([1] * 100)
    with pytest.raises(ProtocolError, match="101 nodes"):
        decode(many)
