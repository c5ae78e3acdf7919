import json
from pathlib import Path

import pytest

from smolcluster.utils import words
from smolcluster.utils.words import a_few, as_command, condensed, nearest, one_line, write_json


def test_what_would_break_a_line_or_a_terminal_is_escaped() -> None:
    assert one_line("a\nb\r\x1b[31mτ ×") == r"a\nb\r\x1b[31mτ ×"


def test_of_a_long_text_the_beginning_and_the_cause_stay() -> None:
    assert condensed("error: no\n  wheel\n") == "error: no wheel"
    before = f"error: it failed {'again and ' * 200}cause: no route to host"
    text = condensed(before)
    assert text.startswith("error: it failed again")
    assert text.endswith("cause: no route to host")
    assert len(text) < 620
    assert set(text.split()) == {*before.split(), "…"}, "no word is cut"


def test_of_many_names_a_few_are_told() -> None:
    assert a_few(["a", "b", "c"], 3) == "a, b, c"
    assert a_few(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_the_nearest_word_is_found_whatever_its_case() -> None:
    known = ["digits", "MNIST"]
    assert nearest("mnst", known) == "MNIST"
    assert nearest("Digit", known) == "digits"
    assert nearest("imagenet", known) is None


def test_a_command_is_said_as_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_command("fetch", "r1") == "`uv run smolcluster fetch r1`"
    assert as_command("resume", Path("my runs/r1")) == "`uv run smolcluster resume 'my runs/r1'`"
    monkeypatch.setattr(words, "which", lambda _: None)
    assert as_command("fetch", "r1") == "`.venv/bin/smolcluster fetch r1`"
    monkeypatch.setattr(words, "checkout", lambda: None)
    assert as_command("fetch", "r1") == "`smolcluster fetch r1`"


def test_json_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"reason": "\x1b[2J\x9b2J\u202e τ"}
    write_json(document)
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert json.loads(shown) == document
