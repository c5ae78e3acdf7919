"""The codecs by the names that travel in frames."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from smolcluster.codec.base import Codec
from smolcluster.codec.floats import Bf16Codec, Fp16Codec, Fp32Codec, Fp64Codec
from smolcluster.codec.int4 import Int4BlockCodec
from smolcluster.codec.int8 import Int8BlockCodec
from smolcluster.codec.topk import TopKCodec
from smolcluster.errors import ConfigError, ProtocolError

CODECS: Mapping[str, type[Codec]] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            *(Fp32Codec, Fp64Codec, Bf16Codec, Fp16Codec),
            *(Int8BlockCodec, Int4BlockCodec, TopKCodec),
        )
    }
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


def lossless_for(dtype: torch.dtype) -> str:
    """Return the name of the lossless codec for a replica of that type.

    Raises:
        ConfigError: there is none.
    """
    names = {codec.dtype: name for name, codec in CODECS.items() if codec.lossless}
    if dtype not in names:
        allowed = ", ".join(str(known) for known in names)
        raise ConfigError(
            f"model: its parameters are {dtype}, which cannot be sent without loss, "
            f"allowed: {allowed}"
        )
    return names[dtype]
