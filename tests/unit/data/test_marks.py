"""What two machines know a sample by: other data are seen, what only rounds or draws differently is not."""

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from smolcluster.data import marks
from smolcluster.data.marks import chosen, first_difference, marks_of


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(marks, "PATIENCE_S", math.inf)


def differ(one: Any, other: Any) -> bool:
    return first_difference(marks_of([one], [0]), marks_of([other], [0])) is not None


IMAGE = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 4),
        ("cat", "dog"),
        (b"cat", b"dog"),
        ((IMAGE, 1), (IMAGE, 2)),
        (IMAGE, IMAGE.flip(0)),
        (IMAGE, IMAGE[:, :4]),
        (IMAGE, IMAGE.numpy()),
        ([1, 2, 3], [1, 3, 2]),
        ({"ids": [1, 2]}, {"labels": [1, 2]}),
        (torch.tensor([0.5]), torch.tensor([0.51])),
        ({1, 2}, {1, 3}),
        (Image.new("L", (2, 2), 0), Image.new("L", (2, 2), 1)),
    ],
)
def test_other_samples_are_seen(one: Any, other: Any) -> None:
    assert differ(one, other)
    assert not differ(one, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IMAGE, IMAGE * (1 + 1e-5)),
        ("/home/ada/data/cat.png", "/mnt/disk/cat.png"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (object(), object()),
    ],
)
def test_what_another_machine_may_have_otherwise_is_not_compared(one: Any, other: Any) -> None:
    assert not differ(one, other)


def test_samples_that_take_long_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "PATIENCE_S", 0.05)
    num_read = 0

    class Slow:
        def __getitem__(self, index: int) -> int:
            nonlocal num_read
            num_read += 1
            time.sleep(0.05)
            return index

    of_all = marks_of(Slow(), [0, 1])
    assert num_read == 1
    assert first_difference(of_all, marks_of([5, 5], [0, 1])) is None


class Augmented:
    """Draws what a seed reaches, and from a generator that none does."""

    def __init__(self, label: int = 0) -> None:
        self.label, self.own = label, np.random.default_rng()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, float, float, Any, int]:
        drawn = torch.rand(2), random.random(), np.random.rand()  # noqa: S311
        return (*drawn, self.own.random(4), self.label + index)


def test_chance_is_no_difference_and_does_not_hide_one() -> None:
    of: Callable[[int], Any] = lambda label: marks_of(Augmented(label), [0, 1, 2])  # noqa: E731
    assert first_difference(of(0), of(0)) is None
    assert first_difference(of(0), of(1)) == 0


def test_samples_that_change_with_the_epoch_are_compared_as_the_first_one_has_them() -> None:
    """A worker has computed some of that epoch when it joins, a server has not been told of any."""

    class Growing(Dataset[Tensor]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index, self.epoch])

    fresh, later = Growing(), Growing()
    later.set_epoch(3)
    for ours, theirs in ((fresh, later), (Subset(fresh, [0, 1]), Subset(later, [0, 1]))):
        assert first_difference(marks_of(ours, [0, 1]), marks_of(theirs, [0, 1])) is None
    assert (fresh.epoch, later.epoch) == (-1, 3)


def test_the_generators_of_the_process_are_left_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(1), random.random()  # noqa: S311
    torch.manual_seed(1)
    random.seed(1)
    marks_of(Augmented(), [0, 1, 2])
    assert (torch.rand(1), random.random()) == expected  # noqa: S311


def test_a_split_without_a_seed_is_seen() -> None:
    data = TensorDataset(torch.linspace(-1, 1, 400)[:, None])
    torch.manual_seed(1)
    first, _ = random_split(data, [320, 80])
    second, _ = random_split(data, [320, 80])
    places = chosen(320)
    assert places == [0, 160, 319]
    assert first_difference(marks_of(first, places), marks_of(second, places)) is not None


def test_a_sample_that_cannot_be_read_is_not_compared() -> None:
    assert first_difference(marks_of([], [0]), marks_of([1], [0])) is None


def test_a_dataset_that_would_end_the_process_ends_it_only_in_training() -> None:
    class Leaving:
        def __getitem__(self, index: int) -> Any:
            raise SystemExit(index)

    assert first_difference(marks_of(Leaving(), [0]), marks_of([1], [0])) is None
