"""What the tests of text share."""

import json
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from smolcluster.configs.schema import DatasetConfig


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine without a network; the names of hosts that were looked up."""
    asked: list[str] = []

    def refuse(host: str, *args: object, **kwargs: object) -> NoReturn:
        asked.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


@pytest.fixture
def config(tmp_path: Path) -> DatasetConfig:
    """Text in `root`, tokens in `cache`, and no network."""
    return DatasetConfig(
        name="text", root=tmp_path / "root", cache=tmp_path / "cache", download=False
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with the smallest tokenizer of GPT-2's kind: a, b, ab, newline, end of text."""
    folder = tmp_path / "pair"
    folder.mkdir()
    vocabulary = {"a": 0, "b": 1, "ab": 2, "Ċ": 3, "<|endoftext|>": 4}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    return folder
