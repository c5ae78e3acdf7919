"""What two machines compare, so that they train the same model: of layout, frozen weights and activations."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from smolcluster.training.buffers import plain_name


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over each parameter and buffer (name, shape, type), frozen weights, and the activations."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state = "trained" if parameter.requires_grad else f"frozen {content(parameter)}"
        digest.update(f"{_described(name, parameter)}|{state}\n".encode())
    for name, buffer in model.named_buffers():
        digest.update(f"{_described(name, buffer)}|buffer\n".encode())
    for name, module in model.named_modules():
        is_activation = type(module).__module__ == nn.ReLU.__module__
        if is_activation and not isinstance(module, nn.ReLU):  # of old checkpoints the only one
            place = plain_name(f"{name}.").removesuffix(".")
            digest.update(f"{place}|{type(module).__name__}\n".encode())
    return digest.hexdigest()


def frozen_digest(model: nn.Module) -> str:
    """SHA-256 over the frozen parameters (name, shape, type, content); empty: there are none."""
    frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
    return _digest(frozen) if frozen else ""


def _digest(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    lines = [f"{_described(name, each)}|{content(each)}\n" for name, each in parameters]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def base_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen parameters that adapters (of `peft`, such as LoRA) were put on, by name."""
    adapted = [
        f"{name}." for name, module in model.named_modules() if _adapters(module) is not None
    ]
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and name.startswith(tuple(at.lstrip(".") for at in adapted))
    }


def described_base(model: nn.Module) -> str | None:
    """The base of a model's adapters, for people and for comparison: its name and SHA-256."""
    base = base_of(model)
    return f"{_base_name(model)} (SHA-256 {_digest(base.items())})" if base else None


def _base_name(model: nn.Module) -> str:
    """Where the base was loaded from, as far as is known; else what it is called."""
    for module in model.modules():
        adapters = _adapters(module)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if path := getattr(adapter, "base_model_name_or_path", None):
                return str(path)[-100:]
    return "a model made on the spot"


def _adapters(module: nn.Module) -> object:
    """What peft keeps of a module's adapters, if any; a user's `__getattr__` may raise anything."""
    try:
        return getattr(module, "peft_config", None)
    except Exception:
        return None


def _described(name: str, tensor: Tensor) -> str:
    return f"{plain_name(name)}|{tuple(tensor.shape)}|{tensor.dtype}"


def content(tensor: Tensor) -> str:
    """xxh3-128 of a tensor's bytes; of an outline, which has none, empty."""
    if tensor.is_meta:
        return ""
    values = tensor.detach().to("cpu").contiguous().reshape(-1)
    return xxh3_128_hexdigest(memoryview(values.view(torch.uint8).numpy().data))
