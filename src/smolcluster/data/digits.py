"""The 8x8 handwritten digits that come with scikit-learn: 1797 samples, no download.

Their file is read from where scikit-learn is installed, without importing it: that would cost a
small machine seconds in every process.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from smolcluster.data.dataset import Dataset, Split
from smolcluster.data.permutation import seeded_order
from smolcluster.errors import DataError
from smolcluster.utils.seed import derive_seed

VALIDATION_SHARE = 0.2
LARGEST_PIXEL = 16.0
NUM_FEATURES = 64


def load_digits(seed: int) -> Dataset:
    """Load the digits, pixels scaled to 0..1, with a fifth of them, drawn by `seed`, held out.

    Raises:
        DataError: scikit-learn's file is missing or damaged.
    """
    table = _read(digits_file())
    inputs = table[:, :NUM_FEATURES] / LARGEST_PIXEL
    targets = table[:, NUM_FEATURES].to(torch.int64)
    order = seeded_order(derive_seed(seed, "digits", "validation"), len(targets)).long()
    num_validation = int(len(targets) * VALIDATION_SHARE)
    held_out, kept = order[:num_validation], order[num_validation:]
    return Dataset.of(
        "digits",
        train=Split(inputs[kept], targets[kept]),
        validation=Split(inputs[held_out], targets[held_out]),
        num_classes=10,
    )


def digits_file() -> Path:
    """Return where scikit-learn keeps the digits: 64 pixels 0..16 and a label a line, compressed.

    Raises:
        DataError: scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("the digits come with scikit-learn, which is not installed: run `uv sync`")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _read(file: Path) -> torch.Tensor:
    try:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32, ndmin=2)
    except (OSError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"cannot read the digits in {file} ({reason}); reinstall scikit-learn"
        ) from error
    if table.shape[1] != NUM_FEATURES + 1:
        raise DataError(
            f"the digits in {file} have {table.shape[1]} columns, expected {NUM_FEATURES + 1}; "
            "reinstall scikit-learn"
        )
    return torch.from_numpy(table)
