import torch

from smolcluster.data.dataset import Split
from smolcluster.data.digits import load_digits_dataset


def rows(split: Split) -> list[tuple[float, ...]]:
    return sorted(map(tuple, torch.cat([split.inputs, split.targets[:, None]], dim=1).tolist()))


def test_a_fifth_is_held_out_and_nothing_is_lost() -> None:
    digits = load_digits_dataset(seed=42)
    other = load_digits_dataset(seed=1)

    assert (digits.train.num_samples, digits.validation.num_samples) == (1438, 359)
    assert (digits.input_dim, digits.num_classes) == (64, 10)
    assert sorted(rows(digits.train) + rows(digits.validation)) == sorted(
        rows(other.train) + rows(other.validation)
    )


def test_pixels_lie_between_zero_and_one() -> None:
    inputs = load_digits_dataset(seed=42).train.inputs
    assert (inputs.min().item(), inputs.max().item()) == (0.0, 1.0)


def test_the_seed_draws_the_held_out_samples() -> None:
    first, again, other = (load_digits_dataset(seed) for seed in (1, 1, 2))

    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    assert not torch.equal(first.validation.inputs, other.validation.inputs)


def test_the_fingerprint_of_seed_42_is_the_same_on_every_machine() -> None:
    assert load_digits_dataset(42).fingerprint == GOLDEN


GOLDEN = ""
