import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smolcluster.configs.schema import DatasetConfig, DatasetPlace
from smolcluster.data.dataset import Dataset
from smolcluster.data.token_cache import TextSource
from smolcluster.data.tokens import TokenBlocks, load_text
from smolcluster.errors import ConfigError, DataError

LOG = logging.getLogger("smolcluster")


def blocks(num_tokens: int = 11, *, is_whole: bool = False) -> TokenBlocks:
    return TokenBlocks(np.arange(100, 100 + num_tokens, dtype=np.uint16), 4, is_whole=is_whole)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_target_is_the_token_after_its_input(dtype: torch.dtype) -> None:
    inputs, targets = blocks().batch(torch.tensor([1, 0, 1], dtype=dtype))

    assert inputs.tolist() == [[104, 105, 106, 107], [100, 101, 102, 103], [104, 105, 106, 107]]
    assert targets.tolist() == [[105, 106, 107, 108], [101, 102, 103, 104], [105, 106, 107, 108]]
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_training_leaves_out_what_fills_no_sample(num_tokens: int, num_samples: int) -> None:
    split = blocks(num_tokens)
    _, targets = split.batch(torch.arange(num_samples))
    assert split.num_samples == num_samples
    assert targets.shape == (num_samples, 4)
    assert (targets != -100).all()


@pytest.mark.parametrize("num_tokens", range(2, 14))
def test_validation_counts_each_token_but_the_first_once(num_tokens: int) -> None:
    split = blocks(num_tokens, is_whole=True)
    inputs, targets = split.batch(torch.arange(split.num_samples))

    terms = targets[targets != -100]
    assert terms.tolist() == list(range(101, 100 + num_tokens))
    assert inputs[targets != -100].tolist() == list(range(100, 99 + num_tokens))


def test_rows_hold_inputs_and_the_last_target_as_they_are_stored() -> None:
    rows = blocks().rows(torch.tensor([1]))
    assert rows.tolist() == [[104, 105, 106, 107, 108]]
    assert rows.dtype == np.uint16


@pytest.mark.parametrize(("index", "is_whole"), [(-1, False), (2, False), (-1, True), (3, True)])
def test_a_sample_outside_the_split_is_refused(index: int, is_whole: bool) -> None:
    with pytest.raises(DataError, match=f"sample {index} does not exist"):
        blocks(is_whole=is_whole).batch(torch.tensor([0, index]))


def test_no_samples_are_an_empty_batch() -> None:
    for is_whole in (False, True):
        inputs, targets = blocks(is_whole=is_whole).batch(torch.tensor([], dtype=torch.int64))
        assert (inputs.shape, targets.shape) == ((0, 4), (0, 4))


def test_batches_lie_on_the_device_that_is_asked_for() -> None:
    inputs, targets = blocks().to(torch.device("meta")).batch(torch.tensor([0]))
    assert (inputs.device.type, targets.device.type) == ("meta", "meta")


def load(
    config: DatasetConfig,
    train: str = "one two three\n" * 9,
    validation: str = "four\n" * 9,
    length: int = 8,
) -> Dataset:
    """The two texts as a dataset, a document each."""
    source = TextSource(
        "text",
        identity=f"{train}|{validation}",
        read=lambda: iter([("train", [train]), ("validation", [validation])]),
    )
    return load_text(config, source, length, LOG)


def test_the_dataset_holds_both_splits(config: DatasetConfig) -> None:
    data = load(config)
    inputs, targets = data.train.batch(torch.tensor([1]))
    last, ends = data.validation.batch(torch.tensor([data.validation.num_samples - 1]))

    assert (data.name, data.input_dim, data.num_classes, data.measure) == (
        "text",
        8,
        256,
        "perplexity",
    )
    assert bytes(inputs[0].tolist()) == b"three\non"
    assert bytes(targets[0].tolist()) == b"hree\none"
    assert bytes(last[0, :5].tolist()) == b"four\n"
    assert ends[0].tolist() == [*b"our\n", 0, -100, -100, -100]


def test_the_fingerprint_tells_text_length_and_tokenizer_apart(
    config: DatasetConfig, tmp_path: Path
) -> None:
    first = load(config)
    variants = [
        first,
        load(config, train="one two threE\n" * 9),
        load(config, validation="foul\n" * 9),
        load(config, length=9),
    ]
    assert len({data.fingerprint for data in variants}) == len(variants)
    elsewhere = config.model_copy(update={"cache": tmp_path / "other"})
    assert load(elsewhere).fingerprint == first.fingerprint


def test_a_worker_s_own_copy_of_a_tokenizer_gives_the_server_s_fingerprint(
    config: DatasetConfig, pair: Path, tmp_path: Path
) -> None:
    text: dict[str, Any] = {"train": "ab\n" * 40, "validation": "ba\n" * 20}
    server = config.model_copy(update={"tokenizer": str(pair)})
    copy = shutil.copytree(pair, tmp_path / "copy")
    place = DatasetPlace(root=config.root, cache=config.cache, download=False, tokenizer_path=copy)
    worker = server.anywhere.at(place)
    assert load(worker, **text).fingerprint == load(server, **text).fingerprint

    (copy / "merges.txt").write_text("#version: 0.2\n")
    assert load(worker, **text).fingerprint != load(server, **text).fingerprint
    with pytest.raises(ConfigError, match="tokenizer_path"):
        load(server.anywhere.at(config), **text)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (46, "the validation split .* has 46 tokens.* 46 .* at most 45"),
        (500, "the train split .* has 127 tokens.* 500 .* at most 45"),
    ],
)
def test_text_shorter_than_a_sample_is_refused_with_the_longest_possible(
    config: DatasetConfig, length: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(config, length=length)


def test_the_longest_possible_sample_is_possible(config: DatasetConfig) -> None:
    assert load(config, length=45).validation.num_samples == 1


def test_the_second_start_imports_no_tokenizers(
    config: DatasetConfig, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = config.model_copy(update={"tokenizer": str(pair)})
    first = load(local, train="abba\n" * 9, validation="ab\n" * 9, length=2)
    for name in ("transformers", "tokenizers", "huggingface_hub", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    second = load(local, train="abba\n" * 9, validation="ab\n" * 9, length=2)
    assert second.fingerprint == first.fingerprint
    assert second.num_classes == 5
