"""MNIST (LeCun et al., 1998) through torchvision: 28x28 handwritten digits.

Its test files are the validation split. Pixels stay uint8 in memory and are normalised with the
training set's mean and deviation when a batch is made.
"""

import zlib
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from smolcluster.data.dataset import Dataset, Split
from smolcluster.data.huggingface import reason_of
from smolcluster.errors import ConfigError, DataError
from smolcluster.utils.folders import user_cache

MEAN = 0.1307
DEVIATION = 0.3081
NUM_FEATURES = 784
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_mnist(root: Path | None, *, download: bool) -> Dataset:
    """Read MNIST from `root/MNIST/raw`, or fetch it there first.

    Raises:
        ConfigError: `root` does not exist, and nothing may be fetched.
        DataError: the files are missing, damaged or cannot be fetched.
    """
    folder = default_root() if root is None else root.expanduser().absolute()
    place = folder / "MNIST" / "raw"
    if not all((place / name).is_file() for name in FILES):
        if not download and root is not None and not folder.exists():
            raise ConfigError(
                f"dataset.root is {folder}, which does not exist; set it to the folder that holds MNIST/raw, "
                "or set dataset.download=true"
            )
        if not download:
            raise DataError(
                f"MNIST is not in {place}; put its four ubyte files there, set dataset.root to the "
                "folder that holds MNIST/raw, or set dataset.download=true"
            )
        _fetch(folder, place)
    train, validation = _read(folder, place, train=True), _read(folder, place, train=False)
    return Dataset.of("MNIST", train=train, validation=validation, num_classes=10)


def default_root() -> Path:
    """Return the folder used when none is given: the package's own if it has the data, else a cache."""
    package_data = Path(__file__).parent
    return package_data if (package_data / "MNIST").is_dir() else user_cache()


def _fetch(folder: Path, place: Path) -> None:
    """Download into a folder beside, then move whole files: processes that fetch at once do no harm."""
    from torchvision.datasets import MNIST  # noqa: PLC0415 - see _read

    try:
        place.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(dir=folder, prefix=".fetching-")
    except OSError as error:
        raise DataError(
            f"MNIST cannot be stored in {place} ({error.strerror}); set dataset.root to a folder that "
            "can be written"
        ) from error
    with scratch:
        try:
            MNIST(scratch.name, download=True)
            for name in FILES:
                (Path(scratch.name) / "MNIST" / "raw" / name).replace(place / name)
        except (RuntimeError, OSError, HTTPException, EOFError, zlib.error) as error:
            raise DataError(
                f"MNIST could not be fetched into {place} ({reason_of(error)}); check the network, or "
                "put its four ubyte files there and set dataset.download=false"
            ) from error


def _read(folder: Path, place: Path, *, train: bool) -> Split:
    from torchvision.datasets import MNIST  # noqa: PLC0415 - seconds to import, only for MNIST

    try:
        files = MNIST(str(folder), train=train)
    except OSError as error:
        raise DataError(f"MNIST in {place} cannot be read: {reason_of(error)}") from error
    except (RuntimeError, AssertionError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"MNIST in {place} is damaged ({reason_of(error)}); remove the folder and fetch it again"
        ) from error
    return _split(files.data, files.targets, place)


def _split(images: Tensor, labels: Tensor, place: Path) -> Split:
    inputs = images.flatten(1)
    if inputs.shape[1:] != (NUM_FEATURES,):
        raise DataError(
            f"MNIST in {place} has images of shape {tuple(images.shape[1:])}, expected (28, 28); "
            "remove the folder and fetch it again"
        )
    scale = 1.0 / (255.0 * DEVIATION)
    return Split(inputs, labels.to(torch.int64), scale=scale, shift=-MEAN / DEVIATION)
