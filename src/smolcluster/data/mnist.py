"""MNIST (LeCun et al., 1998) through torchvision: 28x28 handwritten digits.

Its test files are the validation split. Pixels stay uint8 in memory and are normalised with the
training set's mean and deviation when a batch is made.
"""

import os
import sys
from pathlib import Path
from urllib.error import URLError

import torch
from torch import Tensor

from smolcluster.data.dataset import Dataset, Split
from smolcluster.errors import DataError

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

    Args:
        root: the folder that holds `MNIST/raw`; None: the default one.
        download: fetch the files when they are not there.

    Raises:
        DataError: the files are missing, damaged or cannot be fetched.
    """
    folder = default_root() if root is None else root.expanduser()
    train = _read(folder, train=True, download=download)
    validation = _read(folder, train=False, download=download)
    return Dataset.of("MNIST", train=train, validation=validation, num_classes=10)


def default_root() -> Path:
    """Return the folder used when none is given: the package's own in a checkout, else a cache."""
    package_data = Path(__file__).parent
    if (package_data.parents[2] / "pyproject.toml").is_file():
        return package_data
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "smolcluster"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "smolcluster"


def _read(folder: Path, *, train: bool, download: bool) -> Split:
    from torchvision.datasets import MNIST  # noqa: PLC0415 - slow to import, needed for MNIST only

    place = folder / "MNIST" / "raw"
    try:
        if not download and not _is_there(place):
            raise DataError(
                f"MNIST is not in {place}; put its four ubyte files there, set dataset.root to the "
                "folder that holds MNIST/raw, or set dataset.download=true"
            )
        files = MNIST(str(folder), train=train, download=download)
    except (URLError, TimeoutError, ConnectionError) as error:
        raise _not_fetched(place, error) from error
    except RuntimeError as error:
        if "rror downloading" in str(error):
            raise _not_fetched(place, error) from error
        raise _damaged(place, error) from error
    except OSError as error:
        raise DataError(f"MNIST in {place} cannot be used: {error.strerror or error}") from error
    except (AssertionError, KeyError, TypeError, ValueError, EOFError) as error:
        raise _damaged(place, error) from error
    return _split(files.data, files.targets, place)


def _split(images: Tensor, labels: Tensor, place: Path) -> Split:
    inputs = images.reshape(len(images), -1)
    if inputs.shape[1:] != (NUM_FEATURES,):
        raise DataError(
            f"MNIST in {place} has images of shape {tuple(images.shape[1:])}, expected (28, 28); "
            "remove the folder and fetch it again"
        )
    scale = 1.0 / (255.0 * DEVIATION)
    return Split(inputs, labels.to(torch.int64), scale=scale, shift=-MEAN / DEVIATION)


def _is_there(place: Path) -> bool:
    return all((place / name).is_file() for name in FILES)


def _not_fetched(place: Path, error: Exception) -> DataError:
    reason = " ".join(str(getattr(error, "reason", error)).split())
    return DataError(
        f"MNIST could not be fetched into {place} ({reason[:200]}); check the network, "
        "or put its four ubyte files there and set dataset.download=false"
    )


def _damaged(place: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(
        f"MNIST in {place} is damaged ({reason[:200]}); remove the folder and fetch it again"
    )
