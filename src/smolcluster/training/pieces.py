"""A checkpoint's tensor files, written and read in pieces: nobody ever has a whole one in memory.

The files are those of `checkpoint.py`, whose tensors are known beforehand by name, shape and type. What the
optimizer keeps is flat over all weights; a parameter's part of it is addressed by the parameter's name.
Format: https://github.com/huggingface/safetensors: u64 size of the header | header (JSON) | tensors.
"""

import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.training.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    model_tensors,
    optimizer_tensors,
)
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.training.replica import Replica

WEIGHTS = "weights"
"""The content that is the model itself, besides what the optimizer keeps."""
DTYPES = MappingProxyType(
    {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.int16: "I16",
        torch.int32: "I32",
        torch.int64: "I64",
        torch.uint16: "U16",
        torch.uint32: "U32",
        torch.uint64: "U64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.complex64: "C64",
    }
)
"""What safetensors calls them."""
_SIZE = struct.Struct("<Q")


class Place(NamedTuple):
    """Where bytes lie: in which file, from which byte on, and how many."""

    file: str
    start: int
    nbytes: int


class Layout:
    """Where the tensors of a checkpoint of a model lie; `outline` has its names, shapes and types."""

    def __init__(self, outline: Replica) -> None:
        """Lay the files out.

        Raises:
            ConfigError: the model has a tensor of a type that they cannot hold.
        """
        model, optimizer = model_tensors(outline), optimizer_tensors(outline)
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        starts = {
            MODEL_FILE: self._lay_out(MODEL_FILE, model),
            OPTIMIZER_FILE: self._lay_out(OPTIMIZER_FILE, optimizer),
        }
        self.places = {
            (WEIGHTS, name): Place(MODEL_FILE, starts[MODEL_FILE][name], tensor.nbytes)
            for name, tensor in model.items()
        }
        """By content and name: the model's tensors, and parameters' parts of what the optimizer keeps."""
        for content, tensor in outline.optimizer.moments.items():
            first = starts[OPTIMIZER_FILE][content]
            for name, within in outline.layers:
                nbytes = (within.stop - within.start) * tensor.itemsize
                place = Place(OPTIMIZER_FILE, first + within.start * tensor.itemsize, nbytes)
                self.places[content, name] = place
        self.step_count = starts[OPTIMIZER_FILE].get(STEP_COUNT)
        """Where the optimizer counts its steps; None: it does not."""

    def _lay_out(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Write a file's header; returns where each tensor begins."""
        entries, offsets, end = {}, {}, 0
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise ConfigError(
                    f"model: {name} is {tensor.dtype}, which no checkpoint can hold: give it another type, "
                    "or register the buffer with persistent=False"
                )
            offsets[name], start, end = end, end, end + tensor.nbytes
            entries[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.headers[file] = _SIZE.pack(len(text)) + text
        self.sizes[file] = len(self.headers[file]) + end
        return {name: len(self.headers[file]) + at for name, at in offsets.items()}


class PieceWriter:
    """Writes the files of a checkpoint in a folder; any thread may bring a piece."""

    def __init__(self, layout: Layout, folder: Path, step: int) -> None:
        """Make the files, whose optimizer has taken `step` steps.

        Raises:
            OSError: they cannot be made.
        """
        self._layout, self._lock = layout, threading.Lock()
        self._left = {each: place.nbytes for each, place in layout.places.items()}
        self._files: dict[str, int] = {}
        try:
            self._begin(folder, step)
        except OSError:
            self.close()
            raise

    def _begin(self, folder: Path, step: int) -> None:
        layout = self._layout
        for name, header in layout.headers.items():
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._files[name] = os.open(folder / name, flags, 0o666)
            _write_whole(self._files[name], header, 0)
            os.ftruncate(self._files[name], layout.sizes[name])
        if layout.step_count is not None:
            count = torch.tensor(float(step), dtype=torch.float32).numpy().tobytes()
            _write_whole(self._files[OPTIMIZER_FILE], count, layout.step_count)

    def write(self, content: str, name: str, offset: int, data: memoryview) -> bool:
        """Write a piece; False: there is no such place.

        Raises:
            OSError: the disk is full, or fails.
        """
        place = self._layout.places.get((content, name))
        if place is None or offset + data.nbytes > place.nbytes:
            return False
        _write_whole(self._files[place.file], data, place.start + offset)
        with self._lock:
            self._left[content, name] -= data.nbytes
        return True

    @property
    def missing(self) -> str | None:
        """A tensor that has not come whole, if there is one."""
        with self._lock:
            return next((name for (_, name), left in self._left.items() if left), None)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


class PieceReader:
    """Reads tensors of a checkpoint that `PieceWriter`, or anybody else, has written."""

    def __init__(self, outline: Replica, folder: Path) -> None:
        """Look where they lie.

        Raises:
            CheckpointError: the checkpoint is not of this model and optimizer.
        """
        own = Layout(outline)
        self._folder = folder
        self._places: dict[tuple[str, str], Place] = {}
        found = {file: _offsets(folder / file) for file in own.headers}
        expected = {file: _offsets_in(own.headers[file]) for file in own.headers}
        for (content, name), place in own.places.items():
            tensor = name if content == WEIGHTS else content
            there, here = found[place.file].get(tensor), expected[place.file][tensor]
            if there is None or there[1] - there[0] != here[1] - here[0]:
                raise CheckpointError(
                    f"{folder / place.file} does not hold {tensor} of this model and optimizer: resume with "
                    "the configuration of its run"
                )
            self._places[content, name] = place._replace(start=place.start - here[0] + there[0])

    def read(self, content: str, name: str, nbytes: int) -> Iterator[tuple[int, bytes]]:
        """A tensor's bytes in pieces of at most `nbytes`, each with its offset; nothing if there is none.

        Raises:
            CheckpointError: the disk fails, or the file is gone.
        """
        place = self._places.get((content, name))
        if place is None:
            return
        path = self._folder / place.file
        try:
            with path.open("rb", buffering=0) as file:
                for offset in range(0, place.nbytes, nbytes):
                    file.seek(place.start + offset)
                    yield offset, file.read(min(nbytes, place.nbytes - offset))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _write_whole(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`, of which the system may take a part at a time, such as on a disk that gets full.

    Raises:
        OSError: it takes no more.
    """
    left = memoryview(data)
    while left:
        num = os.pwrite(descriptor, left, offset)
        left, offset = left[num:], offset + num


def _offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Where the tensors of a file lie.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.read(_SIZE.size)
            return _offsets_in(size + file.read(*_SIZE.unpack(size)))
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _offsets_in(header: bytes) -> dict[str, tuple[int, int]]:
    entries = json.loads(header[_SIZE.size :])
    return {
        name: (len(header) + start, len(header) + end)
        for name, entry in entries.items()
        if name != "__metadata__"
        for start, end in [entry["data_offsets"]]
    }
