"""Causal language models from a folder of Hugging Face's format, whole or in stages, with or without LoRA.

A process of a pipeline makes the model's modules without memory for weights, and reads from the folder the
tensors of its own stage. What the folder does not have, such as rotary frequencies and the adapters of LoRA
(Hu et al., 2106.09685), is made as for the whole model, so that adapters have the names and initial values
that peft gives them there.
"""

import importlib
import importlib.util
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.errors import ConfigError
from smolcluster.training.stages.recording import alone
from smolcluster.training.weight_files import WeightFiles
from smolcluster.utils.isolated_rng import forked_rng

_PEFT_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer."
_DEFAULTS_ONLY = (
    "modules_to_save",
    "use_dora",
    "bias",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
)
"""Settings of LoRA that need the base's values, or train parts of the base itself."""
_LOG = logging.getLogger(__name__)


class Pretrained:
    """Makes a causal language model with the weights of a folder; a workload's `model`.

    Called, it makes the whole model as transformers' `from_pretrained` does, with adapters of peft on it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        lora: Any = None,
        dtype: str | torch.dtype | None = None,
        four_bit: bool = False,
    ) -> None:
        """Name the folder: `config.json`, and `model.safetensors` or its parts and their index.

        Args:
            folder: on this machine; each machine has its own copy, or shares one.
            lora: peft's LoraConfig; None: all weights are trained.
            dtype: of the weights, such as `torch.bfloat16` or its name; None: as the folder says.
            four_bit: keep frozen matrices of the blocks in 4 bits (NF4) on CUDA devices, by bitsandbytes;
                others keep them as they are, and say so.

        Raises:
            ConfigError: there is no such folder, its weights are pickled, or the adapters cannot be split.
        """
        self.folder = Path(folder).expanduser().absolute()
        self.lora = lora
        self.files = WeightFiles(self.folder)
        self._dtype = _dtype_named(dtype)
        self.four_bit = four_bit
        self._stored_as: dict[str, str] = {}
        if lora is not None:
            _check_lora(lora)
        elif four_bit:
            raise ConfigError("four_bit is for frozen weights: train adapters on them (lora)")

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type: what was asked for, or the configuration's, or that of the first tensor."""
        if self._dtype is not None:
            return self._dtype
        stated: torch.dtype | None = getattr(self._config(), "dtype", None)
        return stated or self.files.first_dtype()

    @property
    def vocab_size(self) -> int:
        return int(self._config().get_text_config().vocab_size)

    def __call__(self) -> nn.Module:
        """The whole model; the adapters' initial values come from PyTorch's generator.

        Raises:
            ConfigError: an adapter's target is nowhere in the model.
        """
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

        with alone:
            with forked_rng():
                model = AutoModelForCausalLM.from_pretrained(
                    str(self.folder),
                    config=self._config(),
                    dtype=self.dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                )
            adapted = self._adapted(model)
        if self.four_bit and can_quantize(torch.device("cuda")):
            quantize(adapted, self.dtype)
        return adapted

    def skeleton(self) -> nn.Module:
        """The model's modules and its adapters, under `recording`: parameters without values.

        Raises:
            ConfigError: as when it is called.
        """
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import
        from transformers.initialization import no_init_weights  # noqa: PLC0415

        with no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                self._config(), dtype=self.dtype
            )
        model.tie_weights()
        for stored in model.state_dict(keep_vars=True).values():
            stored._is_hf_initialized = True  # so that only what no file has is made
        model.initialize_weights()
        self._stored_as = self._names_in_files(model)
        adapted = self._adapted(model.eval())
        if self.dtype != torch.float32:  # peft does so where the base is not on `meta`
            for parameter in adapted.parameters() if self.lora is not None else ():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(self.dtype).to(parameter.dtype)
        return adapted

    def read_into(self, part: nn.Module, device: torch.device) -> int:
        """Read the weights of a part of `skeleton()`, and put them on `device`; returns the bytes read.

        Its modules have the whole model's names. What the folder does not have by intent stays on `meta`:
        adapters, and buffers that follow from the configuration.

        Raises:
            ConfigError: a weight is missing, or of another shape.
            DataError: a file is damaged.
        """
        is_quantized = self.four_bit and can_quantize(device)
        nbytes = self._read(part, torch.device("cpu") if is_quantized else device)
        if is_quantized:
            quantize(part, self.dtype, device)
        return nbytes

    def _read(self, part: nn.Module, device: torch.device) -> int:
        empty = _empty_tensors(part)
        wanted: dict[str, _Empty] = {}
        for each in empty:
            stored = next(filter(None, map(self.stored_as, each.names)), None)
            if stored is not None:
                wanted[stored] = each
            elif isinstance(each.tensor, nn.Parameter):
                raise ConfigError(
                    f"{self.folder} has no tensor {base_name(each.names[0])}, which its config.json asks "
                    "for, or has it in several parts, which a stage cannot read"
                )
        nbytes = 0
        for stored, value in self.files.read(wanted):
            if value.shape != wanted[stored].tensor.shape:
                raise ConfigError(
                    f"{stored} in {self.folder} has the shape {tuple(value.shape)}, but config.json says "
                    f"{tuple(wanted[stored].tensor.shape)}"
                )
            wanted[stored].fill(value, device)
            nbytes += value.nbytes
        return nbytes

    def stored_as(self, name: str) -> str | None:
        """What the folder's files call a parameter of `skeleton()`; None: they do not have it."""
        return self._stored_as.get(base_name(name))

    def _names_in_files(self, model: Any) -> dict[str, str]:
        """By a tensor's name in `model`, its name in the folder's files; of those that are stored whole."""
        from transformers.conversion_mapping import (  # noqa: PLC0415 - slow to import
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import (  # noqa: PLC0415
            WeightRenaming,
            rename_source_key,
        )

        rules = get_model_conversion_mapping(model)
        renamings = [each for each in rules if isinstance(each, WeightRenaming)]
        converters: list[Any] = [each for each in rules if not isinstance(each, WeightRenaming)]
        known, prefix = model.state_dict(), model.base_model_prefix
        found: dict[str, str] = {}
        for name in self.files.names:
            renamed, part_of = rename_source_key(name, renamings, converters, prefix, known)
            if part_of is None:
                found[renamed] = name
        return found

    def _config(self) -> Any:
        from transformers import AutoConfig  # noqa: PLC0415 - slow to import

        try:
            return AutoConfig.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{self.folder} holds no model of transformers: {reason:.200}"
            ) from None

    def _adapted(self, model: Any) -> nn.Module:
        if self.lora is None:
            return model  # type: ignore[no-any-return]
        from peft import get_peft_model  # noqa: PLC0415 - optional

        model.name_or_path = str(self.folder)
        try:
            own = type(self.lora)(**self.lora.to_dict())  # peft writes into what it is given
            adapted: Any = get_peft_model(model, own)
        except ValueError as error:
            raise ConfigError(f"lora: {' '.join(str(error).split()):.200}") from None
        targets = adapted.peft_config["default"].target_modules
        names = [name for name, _ in adapted.base_model.model.named_modules()]
        for target in () if isinstance(targets, str) else sorted(targets):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                raise ConfigError(
                    f"lora: the target {target} is in no stage: {type(model).__name__} has no module of "
                    "that name"
                )
        return adapted  # type: ignore[no-any-return]


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is one that LoRA added."""
    return any(part.startswith("lora_") for part in name.split("."))


def base_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.removeprefix(_PEFT_PREFIX).replace(_BASE_LAYER, ".")


@dataclass
class _Empty:
    """A tensor on `meta`: where modules keep it, and its names; tied weights have several."""

    tensor: Tensor
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def fill(self, value: Tensor, device: torch.device) -> None:
        meta = self.tensor
        real = value.to(device, meta.dtype)
        if isinstance(meta, nn.Parameter):
            real = nn.Parameter(real, requires_grad=meta.requires_grad)
        for table, key in self.places:
            table[key] = real


def _empty_tensors(root: nn.Module) -> list[_Empty]:
    """The tensors on `meta` of a model's part, but those of adapters."""
    found: dict[int, _Empty] = {}
    for prefix, module in root.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and tensor.is_meta and not is_adapter(name):
                    each = found.setdefault(id(tensor), _Empty(tensor))
                    each.places.append((table, key))
                    each.names.append(name)
    return list(found.values())


def _check_lora(lora: Any) -> None:
    kind = type(lora).__name__
    if getattr(lora, "peft_type", None) != "LORA":
        raise ConfigError(f"lora is a {kind}, must be a LoraConfig of peft")
    usual = type(lora)()
    for key in _DEFAULTS_ONLY:
        value = getattr(lora, key, None)
        if value not in (None, getattr(usual, key, None)):
            raise ConfigError(f"lora: {key}={value!r} cannot be split into stages: leave it out")
    if lora.init_lora_weights not in (True, False, "gaussian"):
        raise ConfigError(
            f"lora: init_lora_weights={lora.init_lora_weights!r} needs the whole base: choose True or "
            "'gaussian'"
        )


def _dtype_named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(f"dtype is {dtype}, must be float32, bfloat16 or float16")
    return found


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

    NF4 (QLoRA, Dettmers et al., 2305.14314), by bitsandbytes on CUDA.
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
