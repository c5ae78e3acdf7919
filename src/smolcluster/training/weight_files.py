"""The tensors in a folder of Hugging Face's format, each read by its name without the others."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from smolcluster.errors import ConfigError, DataError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightFiles:
    """What `model.safetensors`, or the parts that `model.safetensors.index.json` names, hold.

    Attributes:
        files: by file, the names of its tensors.
    """

    def __init__(self, folder: Path) -> None:
        """Read which file has which tensors.

        Raises:
            ConfigError: there are none, or they are pickled.
            DataError: the index or a file is damaged.
        """
        self.folder = folder
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of a model")
        if (folder / INDEX_FILE).is_file():
            self.files = self._of_index()
        elif (folder / WEIGHTS_FILE).is_file():
            with self._open(WEIGHTS_FILE) as file:
                self.files = {WEIGHTS_FILE: list(file.keys())}
        else:
            raise ConfigError(_missing(folder))

    @property
    def names(self) -> Iterator[str]:
        """Of all tensors."""
        return chain.from_iterable(self.files.values())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, one at a time, file by file.

        Raises:
            DataError: a file is damaged, or lacks what the index says.
        """
        wanted = set(names)
        for file, known in self.files.items():
            here = [name for name in known if name in wanted]
            if here:
                with self._open(file) as opened:
                    for name in here:
                        try:
                            yield name, opened.get_tensor(name)
                        except SafetensorError as error:
                            raise DataError(f"{self.folder / file}: {error}") from None

    def metadata(self, file: str) -> dict[str, str] | None:
        with self._open(file) as opened:
            found: dict[str, str] | None = opened.metadata()
            return found

    def first_dtype(self) -> torch.dtype:
        """Of the first tensor of floating point."""
        for _, tensor in self.read(self.names):
            if tensor.is_floating_point():
                return tensor.dtype
        raise DataError(f"{self.folder} holds no weights")

    def _of_index(self) -> dict[str, list[str]]:
        path = self.folder / INDEX_FILE
        try:
            weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path} is no index of safetensors files") from None
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise DataError(f"{path} names {file!r}, must be a file beside it")
            if not (self.folder / file).is_file():
                raise DataError(f"{path} names {file}, which is not there: download it again")
            files.setdefault(file, []).append(str(name))
        return files

    def _open(self, file: str) -> safe_open:
        path = self.folder / file
        try:
            return safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} cannot be read ({error}): download it again") from None


def _missing(folder: Path) -> str:
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    if pickled:
        return (
            f"{folder} has its weights pickled ({pickled[0].name}), which runs code of whoever wrote them: "
            "take the model's safetensors files"
        )
    return f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: name the folder of a model"
