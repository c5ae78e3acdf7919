"""What ranks have computed, written and read back."""

import logging
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from smolcluster.algorithms.instruction_log import InstructionLog, logged, read_step
from smolcluster.commands.schedules import trace_command
from smolcluster.errors import DataError
from smolcluster.training.schedules.instructions import generate
from smolcluster.training.schedules.simulation import Costs, Timeline, median_costs, simulate

COSTS = [Costs(0.2, 0.1, 0.1), Costs(0.3, 0.2, 0.2)]


def written(folder: Path, num_steps: int = 2) -> Timeline:
    """Steps of 1F1B over two stages, each on two ranks of tp, as simulated; the last one is cut short."""
    timeline = simulate(generate("1f1b", 2, 4), COSTS)
    for rank in range(4):
        log = InstructionLog(folder, rank, rank // 2, logging.getLogger().warning)
        for step in range(1, num_steps + 1):
            note = log.of_step(step)
            for span in timeline.ranks[rank // 2]:
                note(span)
        if rank == 2:
            log.of_step(num_steps + 1)(timeline.ranks[1][0])
        log.close()
    return timeline


def test_what_ran_is_what_is_read(tmp_path: Path) -> None:
    timeline = written(tmp_path)
    step, read = read_step(tmp_path)
    assert step == 2  # of the third one only one rank has written
    for own, found in zip(timeline.ranks, read.ranks, strict=True):
        assert [each.instruction for each in own] == [each.instruction for each in found]
    assert read.makespan_s == pytest.approx(timeline.makespan_s, abs=1e-5)
    assert read.bubble == pytest.approx(timeline.bubble, abs=1e-5)
    for cost, found_cost in zip(COSTS, median_costs(read), strict=True):
        assert found_cost.forward_s == pytest.approx(cost.forward_s, abs=1e-5)
        assert found_cost.total_s == pytest.approx(cost.total_s, abs=1e-5)


def test_it_is_shown_beside_its_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "log")
    picture, rows = tmp_path / "step.svg", tmp_path / "step.csv"
    assert trace_command(tmp_path / "log", 1, rows, picture) == 0
    said = capsys.readouterr().out
    assert "rank 0: F0 F1 B0 F2 B1 F3 B2 B3\nrank 1: F0 B0 F1 B1 F2 B2 F3 B3" in said
    assert len(rows.read_text().splitlines()) == 1 + 2 * 8
    texts = [each.text or "" for each in ElementTree.parse(picture).iter()]  # noqa: S314
    assert any(text.startswith("step 1: ") for text in texts)
    assert any(text.startswith("simulated: ") for text in texts)


def test_a_step_that_nobody_has_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no instructions: name the folder"):
        read_step(tmp_path)
    written(tmp_path)
    with pytest.raises(DataError, match="step 9; all 2 ranks have: 1 to 2"):
        read_step(tmp_path, 9)


def test_a_folder_that_was_used_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a mesh of more ranks, and by one as it is now."""
    written(tmp_path, num_steps=3)
    later = time.time() + 100.0
    monkeypatch.setattr("time.time", lambda: later)
    alone = simulate(generate("1f1b", 1, 4), COSTS[:1])
    for _ in range(2):
        log = InstructionLog(tmp_path, 0, 0, logging.getLogger().warning)
        note = log.of_step(1)
        for span in alone.ranks[0]:
            note(span)
        log.close()
    step, read = read_step(tmp_path)
    assert (step, len(read.ranks)) == (1, 1)
    assert len(read.ranks[0]) == 8


def test_without_a_folder_nothing_is_written() -> None:
    with logged(None, 0, 0, logging.getLogger().warning) as log:
        assert log is None
