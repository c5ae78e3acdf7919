import gzip
from pathlib import Path

import pytest
import torch
from torch import Tensor

from smolcluster.data import digits
from smolcluster.data.dataset import Samples, Split
from smolcluster.data.digits import load_digits
from smolcluster.errors import DataError


def inputs_of(split: Samples) -> Tensor:
    assert isinstance(split, Split)
    return split.inputs


def test_a_missing_file_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits, "digits_file", lambda: tmp_path / "digits.csv.gz")
    with pytest.raises(DataError, match=rf"{tmp_path}.*reinstall scikit-learn"):
        load_digits(seed=42)


@pytest.mark.parametrize("content", [b"1,2,3", b"a,b", b"1,2\n3"])
def test_a_damaged_file_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "digits.csv.gz"
    file.write_bytes(gzip.compress(content))
    monkeypatch.setattr(digits, "digits_file", lambda: file)
    with pytest.raises(DataError, match="reinstall scikit-learn"):
        load_digits(seed=42)


def test_the_seed_draws_the_held_out_samples() -> None:
    first, again, other = (load_digits(seed) for seed in (1, 1, 2))

    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    assert not torch.equal(inputs_of(first.validation), inputs_of(other.validation))


def test_the_fingerprint_of_seed_42_is_the_same_on_every_machine() -> None:
    assert load_digits(42).fingerprint == (
        "65832337da326d3838268f5321269befb84e543ebe566314c6122fb5e3db7745"
    )
