import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data import wikitext
from smolcluster.data.dataset import Dataset, Samples
from smolcluster.data.tokens import TokenBlocks
from smolcluster.errors import ConfigError, DataError, SmolclusterError

LOG = logging.getLogger("smolcluster")

ROWS = ["", " = Title = \n", "", " Some words of an article . \n"]
Loader = Callable[[DatasetConfig, int, logging.Logger], Dataset]


def loader_of(name: str) -> Loader:
    def load(config: DatasetConfig, length: int, log: logging.Logger) -> Dataset:
        named = config.model_copy(update={"name": name})
        return wikitext.load_huggingface(named, length, log)

    return load


load_wikitext, load_snli, load_huggingface = map(loader_of, ("wikitext", "snli", "huggingface"))


def text_of(split: Samples) -> str:
    """The whole text of a split; documents end in NUL."""
    assert isinstance(split, TokenBlocks)
    return bytes(split.tokens.tolist()).decode()


def write_rows(folder: Path, kind: str, **splits: list[dict[str, object]]) -> None:
    """One file a split, as parquet or jsonl."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        if kind == "jsonl":
            lines = (json.dumps(row) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text("".join(lines))
        else:
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def texts(*rows: str | None) -> list[dict[str, object]]:
    return [{"text": row} for row in rows]


@pytest.mark.parametrize("names", ["wiki.{}.raw", "wiki.{}.tokens", "{}.txt"])
def test_wikitext_is_read_from_its_own_files(config: DatasetConfig, root: Path, names: str) -> None:
    held = "validation" if names == "{}.txt" else "valid"
    (root / names.format("train")).write_text(" \n = Title = \n \n Words . \n")
    (root / names.format(held)).write_text(" Other words . \n")
    data = load_wikitext(config, 4, LOG)

    assert text_of(data.train) == " = Title = \n Words . \n\0"
    assert text_of(data.validation) == " Other words . \n\0"
    assert (data.name, data.measure) == ("wikitext", "perplexity")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_wikitext_rows_are_lines_of_one_document(
    config: DatasetConfig, root: Path, kind: str
) -> None:
    write_rows(root, kind, train=texts(*ROWS), validation=texts(" Held out . \n"))
    data = load_wikitext(config, 4, LOG)
    assert text_of(data.train) == "".join(ROWS) + "\0"
    assert text_of(data.validation) == " Held out . \n\0"


def test_a_copy_of_the_repository_and_the_original_files_have_one_fingerprint(
    config: DatasetConfig, root: Path, tmp_path: Path
) -> None:
    write_rows(
        root / "wikitext-2-raw-v1", "parquet", train=texts(*ROWS), validation=texts(*reversed(ROWS))
    )
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "wiki.train.raw").write_text("".join(row or " \n" for row in ROWS))
    (plain / "wiki.valid.raw").write_text("".join(row or " \n" for row in reversed(ROWS)))
    there = config.model_copy(update={"root": plain})
    assert load_wikitext(config, 4, LOG).fingerprint == load_wikitext(there, 4, LOG).fingerprint


def test_a_row_of_snli_is_a_document_of_two_lines(config: DatasetConfig, root: Path) -> None:
    rows: list[dict[str, object]] = [
        {"premise": "A man sleeps.", "hypothesis": "He is awake.", "label": 2},
        {"premise": "A dog runs.", "hypothesis": "It moves.", "label": 0},
    ]
    write_rows(root, "parquet", train=rows, validation=rows[1:])
    data = load_snli(config, 4, LOG)
    assert text_of(data.train) == "A man sleeps.\nHe is awake.\0A dog runs.\nIt moves.\0"
    assert text_of(data.validation) == "A dog runs.\nIt moves.\0"


def test_splits_and_columns_of_any_dataset_can_be_named(config: DatasetConfig, root: Path) -> None:
    write_rows(root, "jsonl", train=[{"a": "x", "b": "y"}], test=[{"a": "held", "b": "out"}])
    named = config.model_copy(update={"columns": ("b", "a"), "validation_split": "test"})
    data = load_huggingface(named, 1, LOG)
    assert (text_of(data.train), text_of(data.validation)) == ("y\nx\0", "out\nheld\0")


def test_rows_without_text_are_no_documents(config: DatasetConfig, root: Path) -> None:
    write_rows(root, "parquet", train=texts("a", None, "", "b"), validation=texts("c"))
    assert text_of(load_huggingface(config, 1, LOG).train) == "a\0b\0"


def test_many_rows_arrive_in_order(config: DatasetConfig, root: Path) -> None:
    rows = [f"row {number}" for number in range(5000)]
    write_rows(root, "parquet", train=texts(*rows), validation=texts("c"))
    assert text_of(load_huggingface(config, 1, LOG).train) == "".join(f"{row}\0" for row in rows)


def test_reading_a_folder_prints_nothing(
    config: DatasetConfig, root: Path, capfd: pytest.CaptureFixture[str], lookups: list[str]
) -> None:
    write_rows(root, "parquet", train=texts("a"), validation=texts("c"))
    load_huggingface(config.model_copy(update={"download": True}), 1, LOG)
    captured = capfd.readouterr()
    assert (captured.out, captured.err, lookups) == ("", "", [])


def refused(
    load: Loader,
    config: DatasetConfig,
    kind: type[SmolclusterError] = DataError,
    **changes: object,
) -> str:
    with pytest.raises(kind) as error:
        load(config.model_copy(update=changes), 1, LOG)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_missing_column_names_those_there_are(
    config: DatasetConfig, root: Path, kind: str
) -> None:
    write_rows(root, kind, train=texts("a"), validation=texts("b"))
    message = refused(load_huggingface, config, columns=("body",))
    assert "no column 'body', it has text; set dataset.columns" in message


def test_a_missing_split_names_those_there_are(config: DatasetConfig, root: Path) -> None:
    write_rows(root, "parquet", train=texts("a"), test=texts("b"))
    message = refused(load_huggingface, config)
    assert "no split 'validation', it has train, test" in message


def test_a_column_of_numbers_is_refused(config: DatasetConfig, root: Path) -> None:
    write_rows(root, "parquet", train=[{"text": 1}], validation=[{"text": 2}])
    assert "column 'text' of dataset" in refused(load_huggingface, config)


def test_damaged_files_are_refused(config: DatasetConfig, root: Path) -> None:
    for split in ("train", "validation"):
        (root / f"{split}.parquet").write_bytes(b"PAR1 and no more")
    assert str(root) in refused(load_huggingface, config)


def test_a_folder_without_a_dataset_says_what_to_put_there(
    config: DatasetConfig, root: Path
) -> None:
    (root / "README").write_text("nothing here")
    message = refused(load_wikitext, config)
    assert "wiki.train.raw and wiki.valid.raw" in message


def test_a_place_that_does_not_exist_is_named(config: DatasetConfig, root: Path) -> None:
    root.rmdir()
    assert f"dataset.root is {root}" in refused(load_wikitext, config, ConfigError)


def test_a_dataset_without_a_name_is_refused(config: DatasetConfig) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.repository is null"):
        load_huggingface(config.model_copy(update={"root": None}), 1, LOG)


@pytest.mark.parametrize(("download", "tried"), [(True, 1), (False, 0)])
def test_without_a_network_one_line_says_what_can_be_done(
    config: DatasetConfig, lookups: list[str], download: bool, tried: int
) -> None:
    message = refused(
        load_huggingface, config, root=None, repository="nobody/nothing-at-all", download=download
    )
    assert "nobody/nothing-at-all" in message
    assert ("cannot be reached" if download else "dataset.download is false") in message
    assert "set dataset.root" in message
    assert "dataset.name=stdlib dataset.tokenizer=bytes" in message
    assert len(lookups) <= tried


def test_a_repository_s_name_is_never_a_folder_that_is_here(
    config: DatasetConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(root, "parquet", train=texts("a"), validation=texts("b"))
    monkeypatch.chdir(root.parent)
    assert "was not fetched before" in refused(
        load_huggingface, config, root=None, repository=root.name
    )


def test_a_dataset_that_was_fetched_before_needs_no_network(
    config: DatasetConfig,
    root: Path,
    tmp_path: Path,
    lookups: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets  # type: ignore[import-untyped]

    write_rows(root, "parquet", train=texts("a"), validation=texts("b"))
    datasets.disable_progress_bars()
    datasets.load_dataset(str(root), cache_dir=str(tmp_path / "made"))
    (made,) = (path.parent for path in (tmp_path / "made").rglob("dataset_info.json"))
    place = tmp_path / "library" / "nobody___fetched" / "default" / "0.0.0" / made.name
    shutil.copytree(made, place)
    for file in place.glob("*.arrow"):
        file.rename(place / f"fetched-{file.name.partition('-')[2]}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    fetched = config.model_copy(update={"root": None, "repository": "nobody/fetched"})
    data = load_huggingface(fetched, 1, LOG)

    assert (text_of(data.train), text_of(data.validation)) == ("a\0", "b\0")
    assert lookups == []
