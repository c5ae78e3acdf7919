"""A workload is called on the machine that launches it, before others get anything."""

from pathlib import Path

import pytest

from smolcluster.errors import SmolclusterError
from smolcluster.launch import workload_check
from smolcluster.launch.workload_check import calling
from waiting import DEADLINE_S

PROGRAM = """
import time, torch
from torch import nn
from smolcluster import Workload

def workload(kind):
    print("noise")
    if kind == "wrong":
        return nn.Linear(1, 1).nothing
    if kind == "elsewhere":
        open("/nowhere/data")
    if kind == "slow":
        time.sleep(6000)
    return Workload(nn.Linear(1, 1), lambda model, batch: model(batch).mean(), torch.ones(4, 1))
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may take long to be imported."""
    monkeypatch.setattr(workload_check, "PATIENCE_S", DEADLINE_S)


def check(folder: Path, *, trains_here: bool = True, **args: str) -> list[str]:
    """What is said of the function with these arguments."""
    file = folder / "own.py"
    file.write_text(PROGRAM)
    said: list[str] = []
    env = {"KIND": "good"} if trains_here else None
    with calling(f"{file}:workload", args, 1, said.append, env) as wait:
        wait()
    return said


def test_what_works_needs_no_word(tmp_path: Path) -> None:
    assert check(tmp_path, kind="env:KIND") == []


def test_an_error_in_the_function_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SmolclusterError, match=r"own\.py:9.*nothing") as raised:
        check(tmp_path, kind="wrong")
    assert raised.value.exit_code == 3


@pytest.mark.nightly  # as an error in the function
def test_an_argument_that_is_not_here_ends_it(tmp_path: Path) -> None:
    with pytest.raises(SmolclusterError, match="NOT_HERE"):
        check(tmp_path, kind="env:NOT_HERE")


def test_what_only_the_others_have_is_said_and_no_more(tmp_path: Path) -> None:
    [said] = check(tmp_path, kind="elsewhere", trains_here=False)
    assert "cannot be called on this machine" in said
    assert "nowhere" in said


def test_nobody_waits_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_check, "PATIENCE_S", 0.2)
    [said] = check(tmp_path, kind="slow")  # which ends the process
    assert "going on" in said


def test_without_a_workload_nothing_is_called() -> None:
    with calling(None, {}, 1, pytest.fail, None) as wait:
        wait()
