"""The frame: how one message and its tensor are laid out in bytes (version 2 of the protocol).

    magic "SMOL" | version u8 | kind u8 | reserved u16 = 0 | header_nbytes u32 | payload_nbytes u64
    | header (JSON) | header_sum u32 | payload (raw bytes) | payload_sum u64

The first line is the prefix, 20 bytes. Network byte order. `header_sum` is the low half of xxh3-64
over prefix and header, `payload_sum` is xxh3-64 over the payload and is there also when the payload
is empty. The sums find damage, not forgery. Where something else does (TLS, or a machine's own Unix
socket), the sum of a payload that is not empty is neither computed nor looked at.

Everything here is pure: no sockets, no clocks. Lengths are judged as soon as the prefix is read,
before any memory is taken for what they announce.
"""

import struct
from dataclasses import dataclass, field

from xxhash import xxh3_64, xxh3_64_intdigest

from smolcluster.errors import ProtocolError, VersionDiffers

Buffer = bytes | bytearray | memoryview

MAGIC = b"SMOL"
PROTOCOL_VERSION = 2
MAX_HEADER_NBYTES = 64 * 1024

_PREFIX = struct.Struct("!4sBBHIQ")
_HEADER_SUM = struct.Struct("!I")
_PAYLOAD_SUM = struct.Struct("!Q")

PREFIX_NBYTES = _PREFIX.size
NO_SUM = bytes(_PAYLOAD_SUM.size)
HEADER_SUM_NBYTES = _HEADER_SUM.size
PAYLOAD_SUM_NBYTES = _PAYLOAD_SUM.size


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the first 20 bytes of a frame announce; lengths in bytes, within the limits."""

    kind: int
    header_nbytes: int
    payload_nbytes: int

    @property
    def frame_nbytes(self) -> int:
        return frame_nbytes(self.header_nbytes, self.payload_nbytes)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Frame:
    """A frame ready to be sent, to one connection or to many at once.

    It is built once and holds nothing of any connection. The payload is not copied: whoever owns
    its memory must leave it unchanged until the frame has been sent everywhere. It is hashed once,
    when it is first sent, because then the socket finds it in the cache.
    """

    kind: int
    head: bytes
    """Prefix, header and header sum."""
    payload: memoryview
    _sum: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def payload_sum(self) -> bytes:
        """The 8 bytes that follow the payload."""
        if not self._sum:
            self._sum.append(_PAYLOAD_SUM.pack(xxh3_64_intdigest(self.payload)))
        return self._sum[0]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self.head) + self.payload.nbytes + PAYLOAD_SUM_NBYTES

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The frame's bytes in order for `sendmsg`: one to three buffers, where 16 are allowed."""
        if self.payload.nbytes == 0:
            return (self.head + self.payload_sum,)
        return (self.head, self.payload, self.payload_sum)

    @property
    def unsummed_buffers(self) -> tuple[Buffer, ...]:
        """The same for a connection that cannot damage a payload: its sum is not computed."""
        if self.payload.nbytes == 0:
            return self.buffers
        return (self.head, self.payload, NO_SUM)


def frame_nbytes(header_nbytes: int, payload_nbytes: int) -> int:
    sums = HEADER_SUM_NBYTES + PAYLOAD_SUM_NBYTES
    return PREFIX_NBYTES + header_nbytes + payload_nbytes + sums


def build_frame(kind: int, header: bytes, payload: Buffer = b"") -> Frame:
    """Lay out a frame; `payload` is C-contiguous and is referred to, not copied.

    Raises:
        ValueError: the header exceeds `MAX_HEADER_NBYTES`: a mistake of this process, not of a
            peer.
    """
    if len(header) > MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {len(header)} bytes exceeds {MAX_HEADER_NBYTES}")
    view = memoryview(payload)
    # A view with a zero in its shape cannot be cast.
    view = view.cast("B") if view.nbytes else memoryview(b"")
    prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, len(header), view.nbytes)
    body = prefix + header
    head = body + _HEADER_SUM.pack(header_sum(body))
    return Frame(kind, head, view)


def parse_prefix(data: Buffer, max_header: int, max_payload: int) -> Prefix:
    """Read the `PREFIX_NBYTES` bytes of a prefix; the limits are in bytes.

    Raises:
        ProtocolError: wrong magic or version, a reserved bit is set, or a length exceeds its limit.
    """
    magic, version, kind, reserved, header_nbytes, payload_nbytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a smolcluster peer: frame begins with {magic!r}, not {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise VersionDiffers(
            f"peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: "
            "install the same smolcluster on both"
        )
    if reserved != 0:
        raise ProtocolError(f"reserved field is {reserved:#06x}, must be 0")
    if header_nbytes > max_header:
        raise ProtocolError(f"header of {header_nbytes} bytes exceeds the limit of {max_header}")
    if payload_nbytes > max_payload:
        raise ProtocolError(f"payload of {payload_nbytes} bytes exceeds the limit of {max_payload}")
    return Prefix(kind, header_nbytes, payload_nbytes)


def header_sum(prefix_and_header: Buffer) -> int:
    return xxh3_64_intdigest(prefix_and_header) & 0xFFFFFFFF


def check_head(head: Buffer) -> bytes:
    """Verify prefix, header and header sum as received, and return the header.

    Raises:
        ProtocolError: the sum does not match.
    """
    view = memoryview(head)
    body, received = view[:-HEADER_SUM_NBYTES], view[-HEADER_SUM_NBYTES:]
    if _HEADER_SUM.unpack(received)[0] != header_sum(body):
        raise ProtocolError("header damaged on the way: its checksum does not match")
    return bytes(body[PREFIX_NBYTES:])


def check_payload(hasher: xxh3_64, received_sum: Buffer) -> None:
    """Verify a payload, of which `hasher` has seen every byte, against the 8 bytes that followed it.

    Raises:
        ProtocolError: the sum does not match.
    """
    if _PAYLOAD_SUM.unpack(received_sum)[0] != hasher.intdigest():
        raise ProtocolError("payload damaged on the way: its checksum does not match")
