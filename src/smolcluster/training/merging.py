"""What a run trained of a `Pretrained` model, as a folder that transformers or peft reads.

Merging adds LoRA's adapters to the base, W + B·A·alpha/r (Hu et al., 2106.09685, section 4.1), one file of
the base's after the other: no more of the model is in memory than its largest file.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from smolcluster.errors import CheckpointError
from smolcluster.training.pretrained import Pretrained, is_adapter
from smolcluster.training.stages.recording import recording
from smolcluster.training.weight_files import INDEX_FILE
from smolcluster.utils.replacing import replacing
from smolcluster.utils.words import one_line

ADAPTERS_FILE = "adapter_model.safetensors"
_ADAPTER = ".default"
"""Which peft leaves out of names in its files."""
_COPIED = (".json", ".txt", ".model", ".jinja", ".md")
"""Of the base's files: configuration, tokenizer, and what is said of it."""


def write_adapters(model: Pretrained, trained: Mapping[str, Tensor], folder: Path) -> None:
    """Write adapters as `PeftModel.from_pretrained(base, folder)` reads them.

    Args:
        model: what was trained.
        trained: its trained parameters, by name; others may be among them.
        folder: is made if need be.

    Raises:
        CheckpointError: adapters are missing, the files exist already, or they cannot be written.
    """
    outline: Any = _outline(model)
    names = [name for name, _ in outline.named_parameters() if is_adapter(name)]
    values = {name.replace(_ADAPTER, ""): _value(trained, name) for name in names}
    config = outline.peft_config["default"]
    config.inference_mode = True
    with _writing(folder):
        with replacing(folder / ADAPTERS_FILE) as draft:
            save_file(values, draft, metadata={"format": "pt"})
        config.save_pretrained(str(folder))


def write_merged(model: Pretrained, trained: Mapping[str, Tensor], folder: Path) -> None:
    """Write the whole model as `from_pretrained` reads it, in files as the base has them.

    Args:
        model: what was trained.
        trained: its trained parameters, by name: adapters, or weights that take the place of the base's.
        folder: is made if need be.

    Raises:
        CheckpointError: adapters are missing, the folder is not empty, or it cannot be written.
        DataError: the base is damaged.
    """
    changes = _changes(model, trained)
    with _writing(folder):
        for file, names in model.files.files.items():
            tensors = {
                name: changes[name](value) if name in changes else value
                for name, value in model.files.read(names)
            }
            with replacing(folder / file) as draft:
                save_file(tensors, draft, metadata=model.files.metadata(file))
        for path in _other_files(model.folder):
            with replacing(folder / path.name) as draft:
                shutil.copyfile(path, draft)


Change = Callable[[Tensor], Tensor]
"""What is stored of a weight to what becomes of it."""


def _replaced(value: Tensor, stored: Tensor) -> Tensor:
    """A weight that was trained itself."""
    return value.to(stored.dtype).contiguous()


def _merged(layer: Any, values: Mapping[str, Tensor], stored: Tensor) -> Tensor:
    """A weight that adapters were put on: peft's layer is given one weight after the other."""
    for key, value in values.items():
        module, _, last = key.rpartition(".")
        layer.get_submodule(module)._parameters[last] = nn.Parameter(value)
    base = layer.get_base_layer()
    base.weight = nn.Parameter(stored, requires_grad=False)
    layer.merge()
    merged: Tensor = base.weight.data
    base.weight = nn.Parameter(stored.to("meta"), requires_grad=False)
    return merged.contiguous()


def _changes(model: Pretrained, trained: Mapping[str, Tensor]) -> dict[str, Change]:
    """What becomes of each tensor of the base's files that changes."""
    outline = _outline(model)
    found: dict[str, Change] = {}
    tied: dict[int, list[str]] = {}
    for name, parameter in outline.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and not is_adapter(name):
            tied.setdefault(id(parameter), []).append(name)
    for names in tied.values():
        places = [each for each in map(model.stored_as, names) if each is not None]
        if not places:
            raise _nowhere(model, names[0])
        found.update(dict.fromkeys(places, partial(_replaced, _value(trained, names[0]))))
    for name, layer in outline.named_modules():
        if hasattr(layer, "get_base_layer") and hasattr(layer, "merge"):
            stored = model.stored_as(f"{name}.base_layer.weight")
            if stored is None:
                raise _nowhere(model, name)
            values = {
                key: _value(trained, f"{name}.{key}")
                for key, _ in layer.named_parameters()
                if is_adapter(key)
            }
            found[stored] = partial(_merged, layer, values)
    return found


def _nowhere(model: Pretrained, name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} was trained, but {model.folder} stores it in several parts, or not at all: it cannot be "
        "merged"
    )


def _outline(model: Pretrained) -> nn.Module:
    with recording():
        return model.skeleton()


def _value(trained: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in trained:
        raise CheckpointError(
            f"there is no {name} among what was trained: it is of another model or other adapters"
        )
    return trained[name].contiguous()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise CheckpointError(f"{folder} is not empty: name another folder, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            one_line(f"cannot write the model to {folder} ({error}); look at the disk")
        ) from error


def _other_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        is_other_index = path.name.endswith(".index.json") and path.name != INDEX_FILE
        if path.is_file() and path.suffix in _COPIED and not is_other_index:
            yield path
