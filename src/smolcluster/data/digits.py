"""The 8x8 handwritten digits that come with scikit-learn: 1797 samples, no download."""

import torch

from smolcluster.data.dataset import Dataset, Split
from smolcluster.data.permutation import seeded_order
from smolcluster.utils.seed import derive_seed

VALIDATION_SHARE = 0.2
LARGEST_PIXEL = 16.0


def load_digits_dataset(seed: int) -> Dataset:
    """Load the digits, pixels scaled to 0..1, with a fifth of them, drawn by `seed`, held out."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - costs a second to import

    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels / LARGEST_PIXEL).to(torch.float32)
    targets = torch.from_numpy(labels).to(torch.int64)
    order = seeded_order(derive_seed(seed, "digits", "validation"), len(targets)).long()
    num_validation = int(len(targets) * VALIDATION_SHARE)
    held_out, kept = order[:num_validation], order[num_validation:]
    return Dataset.of(
        "digits",
        train=Split(inputs[kept], targets[kept]),
        validation=Split(inputs[held_out], targets[held_out]),
        num_classes=10,
    )
