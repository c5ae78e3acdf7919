import errno
import logging
import os
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

import pytest

from smolcluster.configs.schema import DatasetConfig
from smolcluster.data import corpus
from smolcluster.data.corpus import (
    CorpusFile,
    draw,
    list_files,
    load_corpus,
    load_stdlib,
    stdlib_files,
)
from smolcluster.data.dataset import Dataset, Samples
from smolcluster.data.tokens import TokenBlocks
from smolcluster.errors import ConfigError, DataError, SmolclusterError

LOG = logging.getLogger("smolcluster")


def text_of(split: Samples) -> str:
    """The whole text of a split; documents end in NUL."""
    assert isinstance(split, TokenBlocks)
    return bytes(split.tokens.tolist()).decode()


def both(data: Dataset) -> tuple[str, str]:
    return text_of(data.train), text_of(data.validation)


def fill(root: Path, count: int, lines: int = 10) -> dict[str, str]:
    """Files of equal size; their texts by name."""
    texts = {f"{number:03}.txt": f"this is {number:03}\n" * lines for number in range(count)}
    for name, text in texts.items():
        (root / name).write_text(text)
    return texts


def test_of_one_file_the_last_tenth_is_draw_from_a_lines_beginning(
    config: DatasetConfig, root: Path
) -> None:
    lines = [f"line {number:02}\n" for number in range(100)]
    (root / "book.txt").write_text("".join(lines))
    for place in (root, root / "book.txt"):
        train, validation = both(load_corpus(config.model_copy(update={"root": place}), 8, LOG))
        assert train + validation == "".join([*lines[:90], "\0", *lines[90:], "\0"])


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("a" * 50 + "\n" + "b" * 49, "b" * 49),
        ("a" * 50 + "\n" + "b" * 48 + "\n", "b" * 48 + "\n"),
        ("a" * 100, "a" * 10),
        ("é" * 50, "é" * 5),
        ("a" + "é" * 47, "é" * 5),
    ],
)
def test_text_without_a_late_line_end_is_cut_where_it_can_be(
    config: DatasetConfig, root: Path, text: str, held: str
) -> None:
    (root / "book.txt").write_text(text)
    train, validation = both(load_corpus(config, 3, LOG))
    assert validation == held + "\0"
    assert train == text.removesuffix(held) + "\0"


def test_of_few_files_the_last_ones_are_draw(config: DatasetConfig, root: Path) -> None:
    texts = list(fill(root, 10).values())
    train, validation = both(load_corpus(config, 8, LOG))
    assert train == "\0".join([*texts[:9], ""])
    assert validation == texts[9] + "\0"


def test_of_many_files_whole_ones_are_draw_by_their_names(
    config: DatasetConfig, root: Path, tmp_path: Path
) -> None:
    texts = fill(root, 100)
    train, validation = (text.split("\0")[:-1] for text in both(load_corpus(config, 8, LOG)))
    assert sorted(train + validation) == sorted(texts.values())
    assert len(validation) == 5
    assert validation != list(texts.values())[-5:]


def test_twenty_files_are_enough_for_one_to_be_draw(config: DatasetConfig, root: Path) -> None:
    texts = fill(root, 20)
    _, validation = both(load_corpus(config, 8, LOG))
    assert validation.removesuffix("\0") in texts.values()


def test_which_documents_are_draw_never_changes_between_versions() -> None:
    entries = [CorpusFile(Path(), f"{number}.txt", 10, 0) for number in range(40)]
    assert draw(entries, 20.0) == draw(reversed(entries), 20.0)
    assert sorted(draw(entries, 20.0)) == ["1.txt", "39.txt"]


def test_files_are_read_in_the_order_of_their_names_with_folders(
    config: DatasetConfig, root: Path
) -> None:
    for name in ("b.txt", "a/z.md", "a.py", "a/b/c"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n" * 4)
    (root / "z.txt").write_text("z\n" * 8)
    assert [entry.name for entry in list_files(root)] == [
        "a.py",
        "a/b/c",
        "a/z.md",
        "b.txt",
        "z.txt",
    ]
    train, _ = both(load_corpus(config, 3, LOG))
    assert train.startswith("a.py\na.py\na.py\na.py\n\0a/b/c\n")


def test_hidden_and_binary_files_are_left_out_and_binary_ones_counted(
    config: DatasetConfig, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "text").write_text("text\n" * 20)
    (root / ".hidden").write_text("hidden\n" * 20)
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden\n" * 20)
    (root / "nul").write_bytes(b"binary\0" * 20)
    (root / "latin").write_bytes("é".encode("latin-1") * 20)
    (root / "half").write_bytes(b"binary" + "é".encode()[:1])
    (root / "empty").touch()
    with caplog.at_level(logging.INFO):
        train, validation = both(load_corpus(config, 3, LOG))

    assert train + validation == "text\n" * 18 + "\0" + "text\n" * 2 + "\0"
    assert "3 files" in caplog.text
    assert "left out" in caplog.text


def test_a_character_may_lie_across_two_reads(config: DatasetConfig, root: Path) -> None:
    text = "a" + "é" * 300_000
    (root / "long").write_text(text)
    train, validation = both(load_corpus(config, 3, LOG))
    assert (train + validation).replace("\0", "") == text


def test_line_ends_stay_and_a_byte_order_mark_goes(config: DatasetConfig, root: Path) -> None:
    (root / "dos.txt").write_bytes(b"\xef\xbb\xbf" + b"line\r\n" * 20)
    train, validation = both(load_corpus(config, 3, LOG))
    assert train + validation == "line\r\n" * 18 + "\0" + "line\r\n" * 2 + "\0"


def test_the_fingerprint_does_not_depend_on_place_or_time(
    config: DatasetConfig, root: Path, tmp_path: Path
) -> None:
    fill(root, 30)
    other = tmp_path / "other"
    other.mkdir()
    fill(other, 30)
    os.utime(other / "003.txt", (1, 1))
    here = load_corpus(config, 8, LOG).fingerprint
    there = config.model_copy(update={"root": other})

    assert load_corpus(there, 8, LOG).fingerprint == here
    (other / "003.txt").write_text((root / "003.txt").read_text().replace("003", "004", 1))
    assert load_corpus(there, 8, LOG).fingerprint != here


def test_the_second_start_reads_no_text(
    config: DatasetConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 30)
    first = load_corpus(config, 8, LOG)

    def read(*args: object) -> NoReturn:
        raise AssertionError("text was read")

    monkeypatch.setattr(corpus, "_is_text", read)
    monkeypatch.setattr(corpus, "_decoded", read)
    assert load_corpus(config, 8, LOG).fingerprint == first.fingerprint
    assert load_corpus(config, 9, LOG).fingerprint != first.fingerprint


def refused(
    config: DatasetConfig, kind: type[SmolclusterError] = DataError, **changes: object
) -> str:
    with pytest.raises(kind) as error:
        load_corpus(config.model_copy(update=changes), 8, LOG)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_place_that_is_not_stated_or_does_not_exist_is_asked_for(
    config: DatasetConfig, tmp_path: Path
) -> None:
    stated = refused(config, ConfigError, root=None)
    assert "dataset.root is null; set dataset.root" in stated
    assert f"dataset.root is {tmp_path}/root, which does not exist" in refused(config, ConfigError)


@pytest.mark.parametrize(
    ("files", "place", "told"),
    [
        ({}, "", "{}, which is empty"),
        ({"empty": b""}, "", "{}, which is empty"),
        ({"empty": b""}, "empty", "{}/empty, which is empty"),
        ({"image": b"\x89PNG\0"}, "", "{}, which is no text"),
        ({"image": b"\x89PNG\0"}, "image", "{}/image, which is not a text file"),
        ({"short": b"a\n" * 20}, "", "set model.max_seq_len to at most 4"),
    ],
)
def test_what_holds_no_text_or_too_little_is_refused(
    config: DatasetConfig, root: Path, files: dict[str, bytes], place: str, told: str
) -> None:
    for name, content in files.items():
        (root / name).write_bytes(content)
    assert told.format(root) in refused(config, root=root / place)


def test_a_file_that_cannot_be_read_is_named(
    config: DatasetConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "secret").write_text("a\n" * 20)

    opened: Any = Path.open

    def deny(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "secret":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", deny)
    assert f"{root}/secret cannot be read (Permission denied)" in refused(config)


def test_the_standard_library_is_text_of_a_bounded_validation_split(config: DatasetConfig) -> None:
    data = load_stdlib(config.model_copy(update={"name": "stdlib", "root": None}), 128, LOG)
    train, validation = both(data)

    assert data.name == "stdlib"
    assert len(train.encode()) > 2_000_000
    assert 150_000 < len(validation.encode()) <= 200_000 + 1000
    assert "\ndef " in train
    assert "\ndef " in validation


def test_modules_made_for_one_machine_are_no_part_of_the_standard_library(root: Path) -> None:
    for name in ("ast.py", "abc.py", "_sysconfigdata__linux_.py", "sitecustomize.py", "cgi.pyc"):
        (root / name).write_text("x = 1\n")
    (root / "bisect.py").touch()
    assert [entry.name for entry in stdlib_files(root)] == ["abc.py", "ast.py"]


def test_a_python_without_its_source_is_refused(
    config: DatasetConfig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "ast.py").write_text("x = 1\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    with pytest.raises(DataError, match=rf"in {root} has 6 B in 1 files.*dataset.name=text"):
        load_stdlib(config, 8, LOG)
