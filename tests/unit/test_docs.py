"""The documents agree with the code and with each other: links, keys, messages, codecs, example bytes."""

import ast
import functools
import re
import runpy
import shlex
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from xxhash import xxh3_64

from smolcluster import distributed_training
from smolcluster.cli import app
from smolcluster.cli.options import EXIT_CODES
from smolcluster.codec.registry import CODECS
from smolcluster.configs.overrides import from_overrides
from smolcluster.wire import frames, messages

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "src" / "smolcluster" / "docs"
WIRE_FORMAT = DOCS / "wire_format.md"
PAGES = tuple(sorted(DOCS.rglob("*.md")))
DOCUMENTS = (*PAGES, *sorted(PROJECT.glob("*.md")))
GENERATED = {path for path in (DOCS / "reference").iterdir() if path.name != "python.md"}
BY_NAME = partial(pytest.mark.parametrize, ids=lambda path: str(path.relative_to(PROJECT)))

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def relative_links(document: Path) -> Iterator[tuple[Path, str]]:
    """Each link that stays in the project: the file that it points to, and the heading."""
    for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if ":" not in target:
            file, _, heading = target.partition("#")
            yield (document.parent / file if file else document), heading


def headings(document: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@BY_NAME("document", DOCUMENTS)
def test_links_lead_somewhere(document: Path) -> None:
    for file, heading in relative_links(document):
        assert file.exists(), f"{document.name} links to {file}"
        assert not heading or heading in headings(file), f"{document.name} links to #{heading}"


@BY_NAME("document", DOCUMENTS)
def test_elastic_torchrun_is_named_only_to_warn_of_it(document: Path) -> None:
    """Its agents unpickle what an unauthenticated store holds."""
    elastic = re.compile(r"--rdzv|c10d|--standalone|--nnodes[ =]\S*:")
    lines = document.read_text(encoding="utf-8").splitlines()
    assert [each for each in lines if elastic.search(each) and "Do not use" not in each] == []


def stated_settings(text: str) -> Iterator[str]:
    """What follows `--override` in the commands of a document, and `key=value` in its sentences."""
    for line in text.splitlines():
        command = line.partition(" #")[0]
        if not line.startswith("|") and "`" not in line and "--override" in command:
            words = shlex.split(command)
            yield from (word for word in words[words.index("--override") :] if "=" in word)
    for span in re.findall(r"`([a-z_.]+=[^`]+)`", FENCE.sub("", text)):
        yield from shlex.split(span)


@BY_NAME("document", DOCUMENTS)
def test_settings_that_are_stated_can_be_set(document: Path) -> None:
    settings = list(stated_settings(document.read_text(encoding="utf-8")))
    assert len(from_overrides(settings)) >= len(settings)


def quotations() -> list[tuple[str, str, str]]:
    """Code that a document quotes: the file, the function's qualified name, and the text."""
    quoted = re.compile(
        r"^<!-- quoted: (\S+) (\S+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
    )
    return [found for each in DOCUMENTS for found in quoted.findall(each.read_text("utf-8"))]


def test_code_that_is_quoted_is_what_stands_there() -> None:
    assert quotations()
    for file, name, text in quotations():
        code = (DOCS.parent / file).read_text(encoding="utf-8")
        [found] = (
            node
            for owner in ast.walk(ast.parse(code))
            if isinstance(owner, ast.ClassDef) and owner.name == name.partition(".")[0]
            for node in owner.body
            if isinstance(node, ast.FunctionDef) and node.name == name.partition(".")[2]
        )
        lines = code.splitlines(keepends=True)[found.lineno - 1 : found.end_lineno]
        assert textwrap.dedent("".join(lines)) == text


@functools.cache
def make_reference() -> dict[str, Any]:
    """What the script defines; it keeps what it has read of the project's files."""
    return runpy.run_path(str(PROJECT / "scripts" / "make_reference.py"))


@pytest.mark.xdist_group("reference")
def test_the_reference_is_what_the_code_says() -> None:
    pages = make_reference()["reference"]()
    told = "run `uv run scripts/make_reference.py`"
    for name, written in pages.items():
        assert written == (DOCS / "reference" / name).read_text(encoding="utf-8"), told
    assert pages.keys() == {path.name for path in GENERATED}


@pytest.mark.xdist_group("reference")
def test_the_reference_says_which_files_set_a_key() -> None:
    setters = make_reference()["setters"]
    assert setters("worker_update_interval")[0] == "configs"
    assert {"docs", "tests"} <= {*setters("kubernetes.claim")}
    assert "benchmarks" in setters("`nodes.NAME.threads`")
    assert setters("kubernetes.grace") == []  # a name of another section


WRITTEN = tuple(each for each in DOCUMENTS if each not in GENERATED)
"""What people write: the documents without the reference that scripts/make_reference.py makes."""


def num_words(page: Path) -> int:
    """As `wc -w` counts them, outside of blocks of code; a table's bars are words too."""
    return len(FENCE.sub("", page.read_text(encoding="utf-8")).split())


def test_the_readme_is_short() -> None:
    assert num_words(PROJECT / "README.md") <= 900


@BY_NAME("page", WRITTEN)
def test_a_page_is_read_in_ten_minutes(page: Path) -> None:
    assert num_words(page) <= 2000


def test_all_that_is_written_is_read_in_two_hours() -> None:
    assert sum(map(num_words, WRITTEN)) <= 25_000


@BY_NAME("document", DOCUMENTS)
def test_a_list_begins_after_an_empty_line(document: Path) -> None:
    """GitHub shows a list without one, the site does not."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    assert not re.findall(r"^(?![*|>]|\d+\. |  ).+\n(?:\* |1\. ).*", text, re.MULTILINE)


MESH_MODULE = "smolcluster.distributed_training"
SCRIPT_FLAGS = {"--torch", "--auto"}
"""Those of launches that no command declares."""
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands_of(document: Path) -> Iterator[tuple[list[str], set[str]]]:
    """Each command of ours in a document's blocks of code: its words, and its flags."""
    for block in FENCE.findall(document.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(
                r"(?:\bsmolcluster |launch_(\w+)\.sh|-m (smolcluster\.distributed_training)\b)(.*)",
                re.sub('"[^"]*"', "", line.partition(" #")[0].partition(" | ")[0]),
            )
            if found and not line.startswith(("#", "git ", "pip ", " ")):
                script = ["launch", found[1].replace("_", "-")] if found[1] else []
                words = [*script, *filter(None, [found[2]]), *found[3].split()]
                yield words, {word.partition("=")[0] for word in words if word.startswith("--")}


def known_flags(words: list[str]) -> set[str]:
    """The flags that a command takes."""
    if MESH_MODULE in words:
        return set(distributed_training.parser()._option_string_actions)
    command: Any = get_command(app)
    for word in ["launch", "auto"] if words[:2] == ["launch", "--auto"] else words:
        if not hasattr(command, "commands"):
            break
        command = command.get_command(None, word) or command
    own = {flag for each in command.params for flag in each.opts + each.secondary_opts}
    return own | SCRIPT_FLAGS if words[0] == "launch" else own


@BY_NAME("document", DOCUMENTS)
def test_the_flags_of_commands_exist(document: Path) -> None:
    for words, flags in commands_of(document):
        assert flags - {"--help"} <= known_flags(words), f"{document.name}: {' '.join(words)}"


OF_OTHERS = {
    *("--rdzv-backend", "--standalone", "--nnodes", "--node-rank"),  # torchrun
    *("--checkpoint_dir", "--resume_step"),  # programs of `init --hetero`
    *("--torch-backend", "--part", "--help"),  # uv, benchmarks, all
}
"""Flags of other programs that sentences name."""


def all_flags(command: Any) -> Iterator[str]:
    """The flags of a command and of those below it."""
    yield from (flag for each in command.params for flag in each.opts + each.secondary_opts)
    if hasattr(command, "commands"):
        for name in command.list_commands(None):
            yield from all_flags(command.get_command(None, name))


@BY_NAME("document", DOCUMENTS)
def test_the_flags_in_sentences_exist(document: Path) -> None:
    known = {*all_flags(get_command(app)), *known_flags([MESH_MODULE]), *SCRIPT_FLAGS, *OF_OTHERS}
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    spans = re.findall("`(--[^`]+|(?:smolcluster|launch) [^`]+)`", text)
    assert {flag for span in spans for flag in FLAG.findall(span)} <= known


def test_commands_are_found_in_the_documents() -> None:
    found = [words for each in DOCUMENTS for words, flags in commands_of(each) if flags]
    assert len(found) > 60
    assert {"launch", "train", "trace", MESH_MODULE} <= {each[0] for each in found}


@BY_NAME("document", DOCUMENTS)
def test_exit_codes_that_are_stated_exist(document: Path) -> None:
    known = {int(code) for code in re.findall(r"(\d+)   ?", EXIT_CODES)} | {137}
    text = document.read_text(encoding="utf-8")
    stated = re.findall(r"exit(?:s|ed)?(?: with)?(?: code)? (\d+)|exits? with code (\d+)", text)
    assert {int(code or other) for code, other in stated} <= known


@BY_NAME("document", DOCUMENTS)
def test_the_files_of_a_run_that_are_named_exist(document: Path) -> None:
    reference = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    files = set(re.findall(r"^\| `(.+?)` \|", reference, re.MULTILINE)) | {"promtail.log"}
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"\bruns/(?:RUN|latest|\*|<run>|<run id>)/([\w.-]+)", text)
    assert set(named) <= files


def test_the_site_navigates_to_every_page() -> None:
    text = (PROJECT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", text, re.MULTILINE)
    there = [each.relative_to(DOCS).as_posix() for each in PAGES]
    made = ["index.md", "contributing.md"]  # by scripts/site_hooks.py
    assert sorted(named) == sorted([*there, *made])


def test_the_floors_are_those_that_are_checked() -> None:
    floors = runpy.run_path(str(PROJECT / "tests" / "unit" / "test_layout.py"))["FLOORS"]
    text = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.*) \|$", text, re.MULTILINE)
    assert [(int(number), tuple(re.findall(r"`(\w+)`", rooms))) for number, rooms in rows] == [
        (number, rooms) for number, rooms in reversed(list(enumerate(floors, 1)))
    ]


def test_the_wire_format_measures_every_codec() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (float\d+) \|[^|]*\| ([\d,]+) \|",
        (DOCS / "wire_format" / "payloads.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert rows == [
        (name, codec().dtype_name, f"{codec().encoded_nbytes(1000):,}")
        for name, codec in CODECS.items()
    ]


def example_frames() -> list[bytes]:
    """The bytes of the worked examples: the code blocks that begin with the magic."""
    text = WIRE_FORMAT.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(534d4f4c.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        bytes.fromhex("".join(line.partition("    ")[0] for line in block.splitlines()))
        for block in blocks
    ]


def decoded(frame: bytes) -> tuple[messages.Message, bytes]:
    """Read a frame as a connection does."""
    prefix = frames.parse_prefix(frame[: frames.PREFIX_NBYTES], frames.MAX_HEADER_NBYTES, 1 << 20)
    assert len(frame) == prefix.frame_nbytes
    end_of_head = frames.PREFIX_NBYTES + prefix.header_nbytes + frames.HEADER_SUM_NBYTES
    payload = frame[end_of_head : -frames.PAYLOAD_SUM_NBYTES]
    frames.check_payload(xxh3_64(payload), frame[-frames.PAYLOAD_SUM_NBYTES :])
    return messages.decode(prefix.kind, frames.check_head(frame[:end_of_head])), payload


def test_the_examples_are_what_this_version_sends() -> None:
    heartbeat, assignment = example_frames()
    assert decoded(heartbeat) == (messages.Heartbeat(sent_at=1795328282.25), b"")
    message, indices = decoded(assignment)
    assert isinstance(message, messages.Assignment)
    assert [int.from_bytes(indices[i : i + 4], "little") for i in (0, 4)] == [1203, 17]
    for frame in (heartbeat, assignment):
        assert b"".join(messages.frame_of(*decoded(frame)).buffers) == frame


def test_the_examples_header_is_shown_as_it_is() -> None:
    [shown] = re.findall(
        r"^```json\n(.*?)^```$", WIRE_FORMAT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    message, _ = decoded(example_frames()[1])
    assert messages.encode(message).decode() == shown.replace("\n", "")
