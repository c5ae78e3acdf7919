import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from smolcluster.data import tokenizer as module
from smolcluster.data.tokenizer import Tokenizer, cut, load_tokenizer, tokenizer_identity
from smolcluster.errors import ConfigError, DataError, SmolclusterError

SHARED = Path(__file__).parents[4] / "shared" / "data"
GPT2 = SHARED / "gpt2-tokenizer"
SHAKESPEARE = SHARED / "tinyshakespeare.txt"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason=f"GPT-2's tokenizer is not in {GPT2}")
needs_shakespeare = pytest.mark.skipif(
    not SHAKESPEARE.is_file(), reason=f"there is no {SHAKESPEARE}"
)
TEXT = "Die Zeit läuft; 時間, 🙂\n\n  x = [1, 2]\r\n"


def whole(folder: Path, **settings: object) -> Path:
    """A folder with a tokenizer.json of five words."""
    from tokenizers import Tokenizer as Rust
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir()
    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "[SEP]": 4}
    rust = Rust(WordLevel(words, unk_token="[UNK]"))
    rust.pre_tokenizer = Whitespace()
    rust.enable_truncation(2)
    rust.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    (encoded,) = tokenizer.encode_batch([text])
    return [int(token) for token in encoded]


def test_bytes_are_those_of_utf_8_and_decode_to_the_text() -> None:
    tokenizer = load_tokenizer("bytes")
    assert ids(tokenizer, TEXT) == list(TEXT.encode())
    assert tokenizer.decode(ids(tokenizer, TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.identity) == (256, 0, "bytes")
    assert tokenizer.decode("é".encode()[:1] + b"!") == "\ufffd!", "half a character"


def test_bytes_refuse_the_character_that_separates_documents() -> None:
    with pytest.raises(DataError, match=r"NUL.*another tokenizer"):
        load_tokenizer("bytes").encode_batch(["fine", "not\0fine"])


def test_a_folder_with_vocabulary_and_merges_is_a_tokenizer(pair: Path) -> None:
    tokenizer = load_tokenizer(str(pair))
    assert ids(tokenizer, "abba\n") == [2, 1, 0, 3]
    assert tokenizer.decode([2, 1, 0, 3]) == "abba\n"
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (5, 4)


@needs_gpt2
def test_gpt_2_is_read_from_its_two_files() -> None:
    tokenizer = load_tokenizer(str(GPT2))
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    assert ids(tokenizer, "Hello world") == [15496, 995]
    assert tokenizer.decode(ids(tokenizer, TEXT)) == TEXT


@needs_gpt2
@needs_shakespeare
def test_pieces_have_the_tokens_of_the_whole_text() -> None:
    tokenizer = load_tokenizer(str(GPT2))
    text = SHAKESPEARE.read_text(encoding="utf-8")
    pieces = list(cut(text[i : i + 1000] for i in range(0, len(text), 1000)))

    assert len(pieces) > 10
    assert np.concatenate(tokenizer.encode_batch(pieces)).tolist() == ids(tokenizer, text)


@needs_gpt2
def test_pieces_of_text_full_of_white_space_have_the_tokens_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_CHARS", 8)
    monkeypatch.setattr(module, "LONGEST_PIECE_CHARS", 1000)
    tokenizer = load_tokenizer(str(GPT2))
    draw = random.Random(0)  # noqa: S311
    text = "".join(
        draw.choices(["\n", " ", "\t", "\r\n", "'s", "ab", "1", "é", ".", "\x1f"], k=5000)
    )
    pieces = list(cut([text]))

    assert len(pieces) > 50
    assert np.concatenate(tokenizer.encode_batch(pieces)).tolist() == ids(tokenizer, text)


@needs_gpt2
def test_long_texts_print_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    load_tokenizer(str(GPT2)).encode_batch(["word " * 5000])
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("text", ["", "short", "x" * 3_000_000, "x " * 1_000_000, "ab\n" * 500_000])
def test_pieces_make_up_the_text_and_none_is_too_long(text: str) -> None:
    chunks = [text[i : i + 99_999] for i in range(0, len(text), 99_999)]
    pieces = list(cut(chunks))
    assert "".join(pieces) == text
    assert max(map(len, pieces), default=0) <= module.LONGEST_PIECE_CHARS
    assert all(len(piece) >= module.PIECE_CHARS for piece in pieces[:-1])


def test_a_piece_ends_where_no_token_goes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_CHARS", 4)
    assert list(cut(["one\n\ntwo\n three\nfour\nfi"])) == ["one\n\ntwo\n three\n", "four\n", "fi"]


def test_a_tokenizer_file_cuts_no_text_short_and_may_have_another_separator_than_an_end(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(str(whole(tmp_path / "whole", sep_token="[SEP]")))
    assert ids(tokenizer, "one two three one") == [1, 2, 3, 1]
    assert tokenizer.end_of_text == 4


def test_a_tokenizer_without_any_separator_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token for the end of a text") as error:
        load_tokenizer(str(whole(tmp_path / "whole")))
    assert "\n" not in str(error.value)


def test_a_tokenizer_file_may_be_given_itself(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Rust

    folder = whole(tmp_path / "whole")
    rust = Rust.from_file(str(folder / "tokenizer.json"))
    rust.add_special_tokens(["<|endoftext|>"])
    rust.save(str(tmp_path / "alone.json"))
    tokenizer = load_tokenizer(str(tmp_path / "alone.json"))
    assert (ids(tokenizer, "two one two"), tokenizer.end_of_text) == ([2, 1, 2], 5)


def test_what_the_library_saved_is_read_again(pair: Path, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    theirs = GPT2Tokenizer(vocab=str(pair / "vocab.json"), merges=str(pair / "merges.txt"))
    theirs.save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(str(tmp_path / "saved"))
    assert (ids(tokenizer, "abba\n"), tokenizer.end_of_text) == ([2, 1, 0, 3], 4)


def test_the_identity_is_that_of_the_files_wherever_they_lie(pair: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(pair, tmp_path / "copy")
    (copy / "README.md").write_text("not the tokenizer's")
    before = tokenizer_identity(str(pair))

    assert tokenizer_identity(str(copy)) == before == load_tokenizer(str(pair)).identity
    (copy / "merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_identity(str(copy)) != before


def test_the_identity_is_told_without_loading(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert re.fullmatch("[0-9a-f]{64}", tokenizer_identity(str(pair)))
    assert tokenizer_identity("openai-community/gpt2") == "openai-community/gpt2"
    assert tokenizer_identity("bytes") == "bytes"


def test_a_tokenizer_below_home_may_be_written_with_a_tilde(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(pair.parent))
    assert tokenizer_identity("~/pair") == tokenizer_identity(str(pair))


def refused(
    name: str | Path, kind: type[SmolclusterError] = DataError, *, download: bool = True
) -> str:
    with pytest.raises(kind) as error:
        load_tokenizer(str(name), download=download)
    assert "\n" not in str(error.value)
    assert "dataset.tokenizer=bytes" in str(error.value)
    return str(error.value)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    says = f"dataset.tokenizer is {tmp_path}/nothing, which does not exist"
    assert says in refused(tmp_path / "nothing", ConfigError)


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    assert "without a tokenizer's files" in refused(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [("vocab.json", "{"), ("vocab.json", '{"a": 0}'), ("merges.txt", "a\nb c d")],
)
def test_a_broken_folder_is_refused(pair: Path, file: str, content: str) -> None:
    (pair / file).write_text(content)
    assert str(pair) in refused(pair)


@pytest.mark.parametrize(
    ("download", "most_asked", "told"),
    [(True, 1, "cannot be reached"), (False, 0, "dataset.download is false")],
)
def test_without_a_network_a_name_is_refused_after_one_try(
    lookups: list[str], download: bool, most_asked: int, told: str
) -> None:
    message = refused("nobody/no-such-tokenizer", download=download)
    assert "nobody/no-such-tokenizer" in message
    assert told in message
    assert len(lookups) <= most_asked


def test_a_name_of_the_hub_is_never_a_folder_that_is_here(
    pair: Path, lookups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pair.parent)
    assert tokenizer_identity(pair.name) == pair.name
    assert "was not fetched before" in refused(pair.name, download=False)


def test_a_tokenizer_that_was_fetched_before_needs_no_network(
    pair: Path, tmp_path: Path, lookups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    place = tmp_path / "hub" / "models--nobody--fetched"
    shutil.copytree(pair, place / "snapshots" / "0123")
    stated = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (place / "snapshots" / "0123" / "tokenizer_config.json").write_text(json.dumps(stated))
    (place / "snapshots" / "0123" / "config.json").write_text('{"model_type": "gpt2"}')
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for download in (True, False):
        tokenizer = load_tokenizer("nobody/fetched", download=download)
        assert (ids(tokenizer, "abba"), tokenizer.end_of_text) == ([2, 1, 0], 4)
        assert tokenizer.identity == "nobody/fetched"
    assert lookups == []
