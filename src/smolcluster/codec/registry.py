"""The codecs by the names that travel in frames."""

from collections.abc import Mapping
from types import MappingProxyType

from smolcluster.codec.base import Codec
from smolcluster.codec.fp32 import Fp32Codec
from smolcluster.codec.int8 import Int8BlockCodec
from smolcluster.errors import ProtocolError

CODECS: Mapping[str, type[Codec]] = MappingProxyType(
    {codec.name: codec for codec in (Fp32Codec, Int8BlockCodec)}
)


def get_codec(name: str) -> Codec:
    """Return a new codec, with scratch buffers of its own; it serves one thread at a time.

    Raises:
        ProtocolError: no codec has this name.
    """
    try:
        return CODECS[name]()
    except KeyError:
        raise ProtocolError(
            f"codec {name!r} is not known here (known: {', '.join(CODECS)}): "
            "run the same version of smolcluster on all nodes"
        ) from None
