"""Frozen matrices in 4 bits (NF4; QLoRA, Dettmers et al., 2305.14314), by bitsandbytes on CUDA."""

import importlib
import importlib.util
import logging

import torch
from torch import nn

_LOG = logging.getLogger(__name__)


def can_quantize(device: torch.device) -> bool:
    """Whether this machine has weights of 4 bits on `device`; where it has not, a warning says why."""
    if device.type != "cuda" or not torch.cuda.is_available():
        missing = "a CUDA device"
    elif importlib.util.find_spec("bitsandbytes") is None:
        missing = "bitsandbytes (uv pip install bitsandbytes)"
    else:
        return True
    _LOG.warning(
        "4-bit weights need %s: on this machine the frozen weights stay as they are", missing
    )
    return False


def quantize(root: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Replace the frozen matrices in lists of blocks by ones of 4 bits that compute in `dtype`.

    They are of 4 bits once they are on a CUDA device, which `device` puts all of `root` on. Embedding, norms
    and head stay as they are.
    """
    bitsandbytes = importlib.import_module("bitsandbytes")
    lists = (each for each in root.modules() if isinstance(each, nn.ModuleList))
    parents = dict.fromkeys(module for each in lists for module in each.modules())
    for parent in parents:
        for name, child in list(parent.named_children()):
            if (
                type(child) is nn.Linear
                and not child.weight.requires_grad
                and not child.weight.is_meta
            ):
                new = bitsandbytes.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=dtype,
                    quant_type="nf4",
                    device="meta",
                )
                new.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4"
                )
                new.bias = child.bias
                parent.register_module(name, new if device is None else new.to(device))
