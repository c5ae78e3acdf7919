import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.errors import ProtocolError
from smolcluster.wire.frames import (
    MAX_HEADER_NBYTES,
    PREFIX_NBYTES,
    Frame,
    Prefix,
    build_frame,
    check_head,
    check_payload,
    parse_prefix,
)

LIMIT = 1024
kinds = st.integers(0, 255)
headers = st.binary(max_size=200)
payloads = st.binary(max_size=200)


def wire(frame: Frame) -> bytes:
    return b"".join(frame.buffers)


def read(data: bytes) -> tuple[int, bytes, bytes]:
    """A plain reference reader of exactly one frame."""
    prefix = parse_prefix(data[:PREFIX_NBYTES], LIMIT, LIMIT)
    if len(data) != prefix.frame_nbytes:
        raise ProtocolError("another length than announced")
    end_of_head = PREFIX_NBYTES + prefix.header_nbytes + 4
    header = check_head(data[:end_of_head])
    payload = data[end_of_head:-8]
    check_payload(xxhash.xxh3_64(payload), data[-8:])
    return prefix.kind, header, payload


@given(kinds, headers, payloads)
def test_what_is_built_is_read_back(kind: int, header: bytes, payload: bytes) -> None:
    frame = build_frame(kind, header, payload)
    assert read(wire(frame)) == (kind, header, payload)
    assert frame.nbytes == len(wire(frame))


def test_layout_is_the_documented_one() -> None:
    data = wire(build_frame(8, b"{}", b"\x01\x02\x03\x04"))
    assert data[:20] == b"SMOL\x02\x08\x00\x00" + struct.pack(">IQ", 2, 4)
    assert data[20:22] == b"{}"
    assert data[22:26] == struct.pack(">I", xxhash.xxh3_64_intdigest(data[:22]) & 0xFFFFFFFF)
    assert data[26:30] == b"\x01\x02\x03\x04"
    assert data[30:] == struct.pack(">Q", xxhash.xxh3_64_intdigest(data[26:30]))
    empty = wire(build_frame(12, b"{}"))
    assert len(empty) == 20 + 2 + 4 + 8
    assert empty[-8:] == struct.pack(">Q", xxhash.xxh3_64_intdigest(b""))


def test_lengths_at_the_limit_are_accepted() -> None:
    prefix = struct.pack(">4sBBHIQ", b"SMOL", 2, 7, 0, LIMIT, LIMIT)
    assert parse_prefix(prefix, LIMIT, LIMIT) == Prefix(7, LIMIT, LIMIT)


def test_reserved_bits_are_refused() -> None:
    prefix = struct.pack(">4sBBHIQ", b"SMOL", 2, 7, 1, 0, 0)
    with pytest.raises(ProtocolError, match="reserved field is 0x0001"):
        parse_prefix(prefix, LIMIT, LIMIT)


def test_the_payload_is_not_copied() -> None:
    memory = bytearray(8)
    frame = build_frame(8, b"{}", memory)
    memory[0] = 1
    assert frame.payload[0] == 1


def test_a_payload_of_any_shape_is_bytes_on_the_wire() -> None:
    grid = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    assert read(wire(build_frame(8, b"{}", grid)))[2] == bytes(range(24))
    floats = memoryview(struct.pack("<2f", 1.0, 2.0)).cast("f")
    assert build_frame(8, b"{}", floats).payload.nbytes == 8  # type: ignore[arg-type]


def test_an_oversize_header_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="65537 bytes exceeds 65536"):
        build_frame(8, b" " * (MAX_HEADER_NBYTES + 1))
