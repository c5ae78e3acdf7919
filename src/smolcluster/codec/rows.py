"""Activations and their gradients as bytes: tensors of floats, each row of the last dimension on its own.

`fp32`: every tensor as it is, whatever its type.

`bf16`: float32 and float64 rounded to bfloat16. Bound, for every finite x that bfloat16 can hold:

    |x - decoded| <= max(|x| * 2^-8, 2^-126)

`int8`: a scale (float32) for each row, then the codes (int8). With `absmax` the largest magnitude of a row:

    scale = absmax / 127 + 2^-126        code = round(x / scale)        decoded = code * scale

Bound, for every finite x:

    |x - decoded| <= absmax / 254 * (1 + 2^-13) + 2^-127

for float32; other types are converted to float32 and back, whose roundings come on top. A row is a token's
activations: an outlier costs precision to its own token only (Dettmers et al., arXiv:2208.07339).

NaN and infinities are neither refused nor lost, so that they show in the gradient's norm: `bf16` keeps them,
and in `int8` a row with one decodes to NaN throughout. Tensors of other types, and of fewer than two
dimensions, such as auxiliary losses, travel as they are.

Pure functions; shape letters: r rows of c values.
"""

import torch
from torch import Tensor

ROW_CODECS = ("fp32", "bf16", "int8")
_TINY = torch.finfo(torch.float32).tiny
_SCALE_NBYTES = 4


def is_coded(values: Tensor, codec: str) -> bool:
    """Whether `encode_rows` changes how this tensor is written."""
    if codec == "fp32" or not values.is_floating_point() or values.dim() < 2 or not values.numel():
        return False
    return codec == "int8" or values.dtype.itemsize > torch.bfloat16.itemsize


def encode_rows(values: Tensor, codec: str) -> Tensor:
    """What travels of a tensor that `is_coded`: bfloat16 of the same shape, or uint8 (4r + rc,)."""
    if codec == "bf16":
        return values.to(torch.bfloat16)
    rows = values.reshape(-1, values.shape[-1]).to(torch.float32)
    num_rows, width = rows.shape
    sent = torch.empty(num_rows * (_SCALE_NBYTES + width), dtype=torch.uint8)
    scales, codes = _parts(sent, num_rows, width)
    torch.amax(rows, 1, keepdim=True, out=scales)
    torch.maximum(scales, rows.amin(1, keepdim=True).neg_(), out=scales)
    scales.mul_(1 / 127).add_(_TINY)
    scaled = (rows * scales.reciprocal()).round_()
    is_finite = torch.isfinite(scales)
    if not bool(is_finite.all()):
        scales.masked_fill_(~is_finite, torch.nan)
        scaled.masked_fill_(~is_finite, 0)
    codes.copy_(scaled)
    return sent


def decode_rows(sent: Tensor, dtype: torch.dtype, shape: tuple[int, ...], codec: str) -> Tensor:
    """The tensor of that type and shape that was encoded.

    Raises:
        ValueError: it is not what `encode_rows` makes of such a tensor.
    """
    expected = encoded_form(shape, codec)
    if (sent.dtype, tuple(sent.shape)) != expected:
        raise ValueError(
            f"{codec} of a tensor of {shape} is {expected}, not {(sent.dtype, tuple(sent.shape))}"
        )
    if codec == "bf16":
        return sent.to(dtype)
    width = shape[-1]
    scales, codes = _parts(sent, sent.numel() // (_SCALE_NBYTES + width), width)
    return torch.mul(codes, scales).view(shape).to(dtype)


def encoded_form(shape: tuple[int, ...], codec: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of what travels of a tensor of this shape that `is_coded`.

    Raises:
        ValueError: no such tensor is coded with `codec`.
    """
    if len(shape) < 2 or 0 in shape or codec not in ("bf16", "int8"):
        raise ValueError(f"a tensor of {shape} is not sent as {codec!a}")
    if codec == "bf16":
        return torch.bfloat16, shape
    numel = torch.Size(shape).numel()
    return torch.uint8, (numel + _SCALE_NBYTES * (numel // shape[-1]),)


def _parts(sent: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Views of (4r + rc,): scales (r, 1) and codes (r, c)."""
    split = _SCALE_NBYTES * num_rows
    return sent[:split].view(torch.float32).view(-1, 1), sent[split:].view(torch.int8).view(
        num_rows, width
    )
