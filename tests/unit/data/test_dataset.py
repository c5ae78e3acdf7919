import pytest
import torch

from smolcluster.data.dataset import Dataset, Split
from smolcluster.errors import DataError


def make_split(num_samples: int = 6, features: int = 3, offset: float = 0.0) -> Split:
    inputs = torch.arange(num_samples * features, dtype=torch.float32).view(-1, features) + offset
    return Split(inputs, torch.arange(num_samples) % 2)


def make_dataset(train: Split | None = None, validation: Split | None = None) -> Dataset:
    return Dataset.of(
        "made",
        train=make_split() if train is None else train,
        validation=make_split(2) if validation is None else validation,
        num_classes=2,
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_holds_the_samples_asked_for_in_order(dtype: torch.dtype) -> None:
    inputs, targets = make_split().batch(torch.tensor([4, 0, 4], dtype=dtype))

    assert inputs.tolist() == [[12, 13, 14], [0, 1, 2], [12, 13, 14]]
    assert targets.tolist() == [0, 0, 0]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)


def test_bytes_are_normalised_when_a_batch_is_made() -> None:
    split = Split(
        torch.tensor([[0, 255]], dtype=torch.uint8), torch.tensor([1]), scale=2 / 255, shift=-1.0
    )
    inputs, _ = split.batch(torch.tensor([0]))
    assert inputs.tolist() == [[-1.0, pytest.approx(1.0)]]


def test_an_empty_batch_is_empty() -> None:
    inputs, targets = make_split().batch(torch.tensor([], dtype=torch.int32))
    assert (inputs.shape, targets.shape) == ((0, 3), (0,))


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_outside_the_split_is_refused(index: int) -> None:
    with pytest.raises(DataError, match=f"sample {index} does not exist, the split has 0 to 5"):
        make_split().batch(torch.tensor([0, index, 1]))


def test_the_fingerprint_changes_with_any_bit_of_either_split() -> None:
    other_labels = Split(make_split().inputs, 1 - make_split().targets)
    variants = [
        make_dataset(),
        make_dataset(train=make_split(offset=1e-6)),
        make_dataset(train=other_labels),
        make_dataset(validation=make_split(2, offset=1e-6)),
        make_dataset(train=make_split(7)),
    ]
    assert len({dataset.fingerprint for dataset in variants}) == len(variants)


@pytest.mark.parametrize(
    ("splits", "told"),
    [
        (
            {"validation": Split(torch.zeros(3, 3), torch.tensor([0, 1, 2]))},
            "validation split: labels run from 0 to 2, expected 0 to 1",
        ),
        ({"train": Split(torch.zeros(3, 3), torch.tensor([0, 1]))}, "training split"),
        ({"validation": make_split(features=5)}, "3 features, validation samples 5"),
        (
            {"validation": Split(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))},
            "is empty",
        ),
    ],
    ids=["labels outside the classes", "as many labels as inputs", "another width", "empty"],
)
def test_splits_that_do_not_fit_are_refused(splits: dict[str, Split], told: str) -> None:
    with pytest.raises(DataError, match=told):
        make_dataset(**splits)
