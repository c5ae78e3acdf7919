"""Weights of GPT-2 in the Hugging Face format: `config.json` and `model.safetensors`.

The format is that of transformers' `GPT2LMHeadModel`, without that library. Its names are ours, with or
without `transformer.` before them; its linear weights are (in, out), ours (out, in). The output layer is
the token embedding and need not be in the file. Pickles are never read: loading one runs what it says.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smolcluster.configs.schema import GPTConfig
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.utils.replacing import replacing
from smolcluster.utils.words import one_line

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RUN_FILE = "config.yaml"
"""What the folder of a run has instead."""
PICKLE_FILE = "pytorch_model.bin"
PARTS_FILE = "model.safetensors.index.json"
MAX_CONFIG_NBYTES = 1 << 20
PREFIX = "transformer."
OUTPUT_LAYER = "lm_head.weight"
LAYER_NORM_EPS = 1e-05
END_OF_TEXT = 50256
"""The last token of GPT-2's own vocabulary."""

_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_TRANSPOSED = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_DAMAGED = "copy the folder again, or set another model.pretrained"
_CONVERT = (
    'python -c "from transformers import GPT2LMHeadModel as M; '
    "M.from_pretrained('{0}').save_pretrained('{0}-whole', max_shard_size='100GB')\""
)


class GPT2Sizes(BaseModel):
    """What `config.json` says about the sizes and kind of a GPT-2; a default is GPT-2's own.

    Fields of another value than their only one mean a model that computes something else.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    model_type: Literal["gpt2"]
    vocab_size: PositiveInt = 50257
    n_positions: PositiveInt = 1024
    n_embd: PositiveInt = 768
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: float = Field(LAYER_NORM_EPS, ge=LAYER_NORM_EPS, le=LAYER_NORM_EPS)
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True

    @property
    def ff_dim(self) -> int:
        return self.n_inner or 4 * self.n_embd


def read_for(
    folder: Path, config: GPTConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Read the weights in `folder`, by our names, in our `shapes`, as float32 on the CPU.

    Position embeddings beyond `max_seq_len` are left out, for no token stands there.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: it holds a model of other sizes, of another vocabulary, or no GPT-2.
    """
    path = folder / CONFIG_FILE
    _check_folder(folder)
    sizes = _read_sizes(path)
    _check_sizes(path, sizes, config, shapes["wte.weight"][0])
    theirs = {**shapes, "wpe.weight": (sizes.n_positions, sizes.n_embd)}
    weights = _read_weights(folder / WEIGHTS_FILE, theirs)
    weights["wpe.weight"] = weights["wpe.weight"][: config.max_seq_len].clone()
    return weights


def write_gpt2(weights: Mapping[str, Tensor], config: GPTConfig, folder: Path) -> None:
    """Write a `GPT`'s weights, by our names, so that `GPT2LMHeadModel.from_pretrained` reads them.

    `folder` is made if need be. Each file appears whole or not at all.

    Raises:
        CheckpointError: there are such files already, or they cannot be written.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder / name} exists and is not overwritten: name another folder, or remove it"
            )
    theirs = {
        f"{PREFIX}{name}": _transposed(name, each.detach().cpu().float())
        for name, each in weights.items()
    }
    text = json.dumps(_config_fields(config, len(weights["wte.weight"])), indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS_FILE) as draft:
            save_file(theirs, draft, metadata={"format": "pt"})  # the library that wrote it
        with replacing(folder / CONFIG_FILE) as draft:
            draft.write_text(text)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            one_line(f"cannot write GPT-2 weights to {folder} ({error}); look at the disk")
        ) from error


def _check_folder(folder: Path) -> None:
    """Raise ConfigError unless it can be one of GPT-2's weights, and not that of a run of ours."""
    if not folder.is_dir():
        raise ConfigError(
            f"model.pretrained is {folder}, which is no folder; set it to one with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}, or to null"
        )
    if not (folder / CONFIG_FILE).exists() and (folder / RUN_FILE).exists():
        raise ConfigError(
            f"model.pretrained is {folder}, the folder of a run; export its weights first: "
            f"smolcluster export --transformers {folder} --to DIR, then set model.pretrained=DIR"
        )


def _read_sizes(path: Path) -> GPT2Sizes:
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(MAX_CONFIG_NBYTES))
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON; {_DAMAGED}") from error
    try:
        return GPT2Sizes.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "its content"
        value = "missing" if problem["type"] == "missing" else repr(problem["input"])[:100]
        raise ConfigError(
            one_line(
                f"{path}: {where} is {value}, which is no GPT-2 that can be trained here "
                f"({problem['msg'][:200]}); set another model.pretrained"
            )
        ) from None


def _check_sizes(path: Path, sizes: GPT2Sizes, config: GPTConfig, vocab_size: int) -> None:
    """Raise ConfigError at the first size that is not the model's."""
    pairs = {
        "model_dim": ("n_embd", sizes.n_embd),
        "num_layers": ("n_layer", sizes.n_layer),
        "num_heads": ("n_head", sizes.n_head),
        "ff_dim": ("n_inner", sizes.ff_dim),
    }
    for key, (theirs, value) in pairs.items():
        if value != getattr(config, key):
            raise ConfigError(
                f"{path}: {theirs} is {value}, but model.{key} is {getattr(config, key)}: "
                f"set model.{key}={value}, or another model.pretrained"
            )
    if sizes.vocab_size != vocab_size:
        raise ConfigError(
            f"{path}: vocab_size is {sizes.vocab_size}, but the tokenizer has {vocab_size} tokens: "
            "set dataset.tokenizer to the one that the weights were trained with"
        )
    if sizes.n_positions < config.max_seq_len:
        raise ConfigError(
            f"{path}: n_positions is {sizes.n_positions}, but model.max_seq_len is "
            f"{config.max_seq_len}: set model.max_seq_len to {sizes.n_positions} or less"
        )


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    stored = _load_tensors(path)
    theirs = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    if len(theirs) < len(stored):
        raise CheckpointError(f"{path} holds a tensor both with and without {PREFIX}; {_DAMAGED}")
    output = theirs.pop(OUTPUT_LAYER, None)
    unknown = next((n for n in theirs if n not in shapes and not _MASKS.fullmatch(n)), None)
    if unknown is not None:
        raise CheckpointError(one_line(f"{path} holds {unknown}, which no GPT-2 has; {_DAMAGED}"))
    weights = {name: _take(path, theirs, name, shape) for name, shape in shapes.items()}
    if output is not None and not torch.equal(output.float(), weights["wte.weight"]):
        raise ConfigError(
            f"{path}: {OUTPUT_LAYER} is not wte.weight, but here the output layer is the token "
            "embedding; set another model.pretrained"
        )
    return weights


def _take(path: Path, theirs: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor `name` in our shape, as float32; it leaves `theirs`."""
    if name not in theirs:
        raise CheckpointError(f"{path} lacks {name}, of shape {shape}; {_DAMAGED}")
    tensor = _transposed(name, theirs.pop(name))
    if tensor.shape != shape:
        raise CheckpointError(
            f"{path} holds {name} of shape {tuple(tensor.shape)}, but {CONFIG_FILE} beside it means "
            f"{shape} (linear weights are told as (out, in)); {_DAMAGED}"
        )
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{path} holds {name} as {tensor.dtype}, must be a floating-point type; {_DAMAGED}"
        )
    tensor = tensor.float()
    if not tensor.isfinite().all():
        raise CheckpointError(f"{path} holds NaN or infinity in {name}; {_DAMAGED}")
    return tensor


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Turn a linear weight from their shape into ours or back; what is none stays as it is."""
    if _TRANSPOSED.fullmatch(name) and tensor.ndim == 2:
        return tensor.T.contiguous()
    return tensor.contiguous()


def _load_tensors(path: Path) -> dict[str, Tensor]:
    folder = path.parent
    if not path.exists():
        if (folder / PARTS_FILE).exists():
            raise CheckpointError(
                f"{folder} holds its weights in several files, one is read: {_CONVERT.format(folder)}"
            )
        if (folder / PICKLE_FILE).exists():
            raise CheckpointError(
                f"{folder / PICKLE_FILE} is a pickle, which can run any code and is not read; "
                f"convert it: {_CONVERT.format(folder)}"
            )
    try:
        # Not mapped into memory: a disk that fails then ends as an error, not as a signal.
        return load_file(path, backend="pread")
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _config_fields(config: GPTConfig, vocab_size: int) -> dict[str, object]:
    end = END_OF_TEXT if vocab_size == END_OF_TEXT + 1 else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.model_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ff_dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": LAYER_NORM_EPS,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return CheckpointError(one_line(f"{path} cannot be read ({reason}); {_DAMAGED}"))
