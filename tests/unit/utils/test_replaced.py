"""Variables of GT are answered wherever a user may set them, by what does the same here."""

import sys
from collections.abc import Callable

import pytest

from smolcluster import cli, distributed_training
from smolcluster.algorithms import entry

NAMES = ("GT_INSTRUCTION_LOG", "GT_CONFIG", "GT_BACKEND", "GT_VERBOSE", "GT_DEBUG_DISPATCHER")


def server() -> int:
    return entry.main("edp", "server")


def worker() -> int:
    return entry.main("syncps", "worker")


def command(*words: str) -> Callable[[], int]:
    return lambda: cli.main(list(words))


def ranks() -> int:
    return distributed_training.main([])


@pytest.mark.parametrize(
    ("start", "flags", "key"),
    [
        (server, [], "--override"),
        (worker, ["1", "pi5"], "--override"),
        (command("launch", "edp", "--config", "nowhere.yaml"), [], "--override"),
        (command("train", "--config", "nowhere.yaml"), [], "--override"),
        (ranks, [], "--instruction-log FOLDER"),
    ],
    ids=["server", "worker", "launch", "train", "ranks"],
)
@pytest.mark.parametrize("is_set", [True, False])
def test_each_variable_is_answered_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start: Callable[[], int],
    flags: list[str],
    key: str,
    *,
    is_set: bool,
) -> None:
    for module in (entry, distributed_training):
        monkeypatch.setattr(module, "guarded", lambda *_, **__: 0)
    monkeypatch.setattr(sys, "argv", ["program", *flags])
    for name in NAMES:
        if is_set:
            monkeypatch.setenv(name, "1")
        else:
            monkeypatch.delenv(name, raising=False)
    start()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("GT_")]
    assert [line.split()[0] for line in said] == [name for name in NAMES if is_set]
    assert key in (said or [key])[0]


def test_processes_that_a_launch_starts_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launch has said it."""
    monkeypatch.setattr(entry, "guarded", lambda *_, **__: 0)
    monkeypatch.setenv("GT_VERBOSE", "1")
    monkeypatch.setattr(sys, "argv", ["worker.py", "1", "pi5", "--stop-on-stdin-eof"])
    worker()
    assert capsys.readouterr().err == ""
