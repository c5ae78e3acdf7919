import errno
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from smolcluster.data import token_cache
from smolcluster.data.token_cache import Role, TextSource, Tokens, open_tokens
from smolcluster.data.tokenizer import ByteTokenizer, Ids, Tokenizer
from smolcluster.errors import DataError
from waiting import DEADLINE_S

LOG = logging.getLogger("test.tokens")


def source(
    train: Sequence[str] = ("one\n", "two\n"),
    validation: Sequence[str] = ("three\n",),
    name: str = "made",
) -> TextSource:
    """Documents of one chunk each."""

    def read() -> Iterator[tuple[Role, Iterable[str]]]:
        yield from (("train", [text]) for text in train)
        yield from (("validation", [text]) for text in validation)

    return TextSource(name, f"{train}|{validation}", read)


class Making:
    """Gives tokenizers, and counts how often it was asked for one."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.times = 0
        self._tokenizer = tokenizer or ByteTokenizer()

    def __call__(self) -> Tokenizer:
        self.times += 1
        return self._tokenizer


def open_at(cache: Path, making: Making | None = None, text: TextSource | None = None) -> Tokens:
    return open_tokens(text or source(), "bytes", making or Making(), cache, LOG)


def folder_in(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


def test_each_document_is_followed_by_the_end_of_text(tmp_path: Path) -> None:
    tokens = open_at(tmp_path)
    assert tokens.train.tolist() == [*b"one\n", 0, *b"two\n", 0]
    assert tokens.validation.tolist() == [*b"three\n", 0]
    assert (tokens.train.dtype, tokens.vocab_size) == (np.dtype("uint16"), 256)


def test_a_document_without_text_leaves_no_trace(tmp_path: Path) -> None:
    assert open_at(tmp_path, text=source(["", "one\n"])).train.tolist() == [*b"one\n", 0]


def test_the_second_start_encodes_nothing(tmp_path: Path) -> None:
    making = Making()
    first, second = (open_at(tmp_path, making) for _ in range(2))
    assert making.times == 1
    assert second.content == first.content
    assert second.train.tolist() == first.train.tolist()


def test_other_text_and_another_tokenizer_have_their_own_place(tmp_path: Path) -> None:
    open_at(tmp_path)
    open_at(tmp_path, text=source(["other\n"]))
    open_tokens(source(), "another", Making(), tmp_path, LOG)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3


def test_meta_says_what_the_folder_holds(tmp_path: Path) -> None:
    open_at(tmp_path, text=source(["é\n", "x"], ["abc"]))
    meta = json.loads((folder_in(tmp_path) / "meta.json").read_text())
    assert (meta["format"], meta["dtype"], meta["vocab_size"]) == (1, "uint16", 256)
    assert {
        name: meta["train"][name] for name in ("num_tokens", "num_documents", "text_bytes")
    } == {
        "num_tokens": 6,
        "num_documents": 2,
        "text_bytes": 4,
    }


class Wide(ByteTokenizer):
    """Ids that do not fit 16 bits."""

    def __init__(self) -> None:
        super().__init__(vocab_size=70_256, end_of_text=69_999)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [ids.astype(np.uint32) + 70_000 for ids in super().encode_batch(texts)]


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    tokens = open_at(tmp_path, Making(Wide()))
    assert tokens.validation.tolist() == [*(70_000 + byte for byte in b"three\n"), 69_999]
    assert tokens.train.dtype == np.dtype("uint32")


def test_long_text_is_written_in_batches_that_bound_the_memory(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Counting(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
            sizes.append(sum(map(len, texts)))
            return super().encode_batch(texts)

    line = "some words in a line\n"
    text = TextSource(
        "made",
        "long",
        lambda: iter([("train", (line for _ in range(300_000))), ("validation", [line])]),
    )
    tokens = open_at(tmp_path, Making(Counting()), text)

    assert (
        tokens.train[:-1].tobytes() == np.tile(list(line.encode()), 300_000).astype("<u2").tobytes()
    )
    assert max(sizes) <= token_cache.BATCH_CHARS + 2**20


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def change_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def make_a_folder_of_it(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "meta.json"])
@pytest.mark.parametrize("damage", [cut_short, change_a_bit, empty, remove, make_a_folder_of_it])
def test_damaged_tokens_are_made_anew_with_a_warning(
    tmp_path: Path, name: str, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    whole = open_at(tmp_path)
    assert callable(damage)
    damage(folder_in(tmp_path) / name)
    making = Making()
    caplog.clear()
    tokens = open_at(tmp_path, making)

    assert (making.times, tokens.content) == (1, whole.content)
    assert tokens.train.tolist() == [*b"one\n", 0, *b"two\n", 0]
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert str(tmp_path) in warning.getMessage()
    assert "making the tokens anew" in warning.getMessage()


def test_tokens_of_another_format_are_made_anew(tmp_path: Path) -> None:
    open_at(tmp_path)
    meta = folder_in(tmp_path) / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 2}))
    making = Making()
    open_at(tmp_path, making)
    assert making.times == 1


def test_start_and_end_of_the_work_are_logged_once_the_text_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Iterator[tuple[Role, Iterable[str]]]:
        LOG.info("fetching")
        yield from source().read()

    with caplog.at_level(logging.INFO):
        for _ in range(2):
            open_at(tmp_path, text=TextSource("made", "far", read))
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == "fetching"
    assert second.startswith("tokenizing made")
    assert third.startswith("tokenized made: 3 documents, 14 B, 17 tokens, in ")


class Stream(io.StringIO):
    """Standard error, of which a test says whether somebody looks at it."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    stream = Stream(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    open_at(tmp_path)
    assert ("tokenizing made" in stream.getvalue()) == is_terminal


class Told(logging.Handler):
    """Lets a test wait for a log line."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word = word
        self.event = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self._word in self.lines[-1]:
            self.event.set()


def test_who_comes_while_another_tokenizes_says_so_and_waits(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    log, told = logging.Logger("waiting"), Told("waiting for")
    log.addHandler(told)

    def slow() -> Tokenizer:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return ByteTokenizer()

    found: list[Tokens] = []
    unneeded = Making()
    maker = threading.Thread(
        target=lambda: found.append(open_tokens(source(), "bytes", slow, tmp_path, log))
    )
    waiter = threading.Thread(
        target=lambda: found.append(open_tokens(source(), "bytes", unneeded, tmp_path, log))
    )
    maker.start()
    assert begun.wait(DEADLINE_S)
    waiter.start()
    assert told.event.wait(DEADLINE_S)
    go_on.set()
    maker.join(DEADLINE_S)
    waiter.join(DEADLINE_S)

    assert f"waiting for process {os.getpid()}, which tokenizes made" in told.lines
    assert unneeded.times == 0
    assert found[0].content == found[1].content


SCRIPT = """
    import logging, os, signal, sys, time
    from pathlib import Path
    from smolcluster.data.token_cache import TextSource, open_tokens
    from smolcluster.data.tokenizer import ByteTokenizer

    def making():
        print("making", flush=True)
        {then}
        return ByteTokenizer()

    documents = [("train", ["one\\n", "two\\n"]), ("validation", ["three\\n"])]
    text = TextSource("made", {identity!r}, lambda: iter(documents))
    print(open_tokens(text, "bytes", making, Path(sys.argv[1]), logging.getLogger()).content)
"""


def start(cache: Path, then: str = "time.sleep(1)") -> subprocess.Popen[str]:
    script = textwrap.dedent(SCRIPT).format(then=then, identity=source().identity)
    command = [sys.executable, "-c", script, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_process_that_died_at_work_blocks_nobody(tmp_path: Path) -> None:
    process = start(tmp_path, then="os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    (lock,) = tmp_path.glob("*.lock")
    half = lock.with_suffix(".building")
    half.mkdir(exist_ok=True)
    (half / "train.bin").write_bytes(b"half")

    making = Making()
    open_tokens(source(), "bytes", making, tmp_path, LOG)
    assert making.times == 1
    assert not half.exists()


def refused(cache: Path, text: TextSource | None = None) -> str:
    with pytest.raises(DataError) as error:
        open_at(cache, text=text)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        message = refused(tmp_path, source(["some text\n" * 1000]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"tokens cannot be stored in {tmp_path} (File too large)" in message
    assert "dataset.cache" in message
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_place_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file/cache (Not a directory)" in refused(tmp_path / "file" / "cache")


def test_missing_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", deny)
    assert "(Permission denied); free some space or mend the folder's rights" in refused(tmp_path)


@pytest.mark.parametrize(
    ("train", "validation", "role"),
    [([], ["x"], "train"), (["x"], [], "validation"), (["x"], [""], "v")],
)
def test_a_split_without_text_is_refused(
    tmp_path: Path, train: list[str], validation: list[str], role: str
) -> None:
    assert f"dataset made has no text for its {role}" in refused(
        tmp_path, source(train, validation)
    )
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_text_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def read() -> Iterator[tuple[Role, Iterable[str]]]:
        yield "train", ["some"]
        raise DataError("the second file cannot be read")

    assert refused(tmp_path, TextSource("made", "x", read)) == "the second file cannot be read"
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
