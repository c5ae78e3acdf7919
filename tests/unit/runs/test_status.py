"""`status.json`: how a run stands, written once a second and read by whoever looks."""

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from reading import status_of
from smolcluster.runs.status import (
    STOPPED,
    RunStatus,
    StatusFile,
    read_status,
    write_status,
)
from waiting import Clock

NOON = datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC)


def status(**changes: object) -> RunStatus:
    written = status_of(now=NOON.timestamp(), age_s=0.0, workers={0: ("pi5", "lost")})
    return RunStatus.model_validate(dict(written) | {"updated_at": NOON} | changes)


def test_a_status_is_read_as_it_was_written_to_the_millisecond(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    on_the_second = NOON.replace(microsecond=0)
    written = status(updated_at=on_the_second, started_at=on_the_second, workers=[])
    write_status(path, written)
    assert read_status(path) == written
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_times_in_the_file_are_as_in_the_other_files_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_status(path, status())
    content = json.loads(path.read_text())
    assert content["updated_at"] == "2026-11-20T12:00:00.123Z"
    assert content["workers"][0]["last_seen"] == "2026-11-20T11:59:59.923Z"
    assert content["reason"] is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_finite_number_is_null(tmp_path: Path, value: float) -> None:
    path = tmp_path / "status.json"
    write_status(path, status(loss=value, val_perplexity=value, val_f1=value))
    read = read_status(path)
    assert (read.loss, read.val_perplexity) == (None, None)
    assert dict(read)["val_f1"] is None


def test_how_old_it_is_and_how_long_a_worker_is_silent() -> None:
    now = NOON + timedelta(seconds=3)
    assert status().age_s(now) == 3.0
    assert status().workers[0].silent_s(now) == pytest.approx(3.2)
    assert status().age_s(NOON - timedelta(hours=1)) == 0.0, "another machine's clock may be late"


@pytest.mark.parametrize(
    ("state", "reason", "is_over", "word"),
    [
        ("waiting", None, False, "waiting"),
        ("training", None, False, "training"),
        ("ended", "every sample has been applied", True, "ended"),
        ("ended", STOPPED, True, "stopped"),
        ("failed", STOPPED, True, "failed"),
    ],
)
def test_a_run_is_over_when_it_ended_or_failed(
    state: str, reason: str | None, is_over: bool, word: str
) -> None:
    written = status(state=state, reason=reason)
    assert (written.is_over, written.word) == (is_over, word)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="updated_at"):
        status(updated_at=datetime(2026, 11, 20))


def test_it_is_told_once_a_second_at_most_and_nobody_is_asked_in_between(
    tmp_path: Path,
) -> None:
    clock, asked = Clock(100.0), []

    def asking() -> RunStatus:
        asked.append(clock.now)
        return status(step=len(asked))

    file = StatusFile(tmp_path / "status.json", warn=pytest.fail, clock=clock)
    for _ in range(25):
        file.ask(asking)
        clock.now += 0.125
    file.flush()
    assert asked == [100.0, 101.0, 102.0, 103.0]
    assert read_status(tmp_path / "status.json").step == 4


def test_what_must_be_written_is_written_at_once(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "status.json", warn=pytest.fail, clock=Clock(100.0))
    file.ask(status)
    file.write(status(state="ended", reason="it was stopped"))
    file.flush()
    assert read_status(tmp_path / "status.json").state == "ended"


def test_what_cannot_be_written_is_one_warning_and_tried_again(tmp_path: Path) -> None:
    clock, folder, warnings = Clock(100.0), tmp_path / "run", list[str]()
    file = StatusFile(folder / "status.json", warn=warnings.append, clock=clock)
    for _ in range(5):
        file.ask(status)
        file.flush()
        clock.now += 1.0
    (warning,) = warnings
    assert str(folder / "status.json") in warning
    assert "training goes on" in warning
    folder.mkdir()
    file.flush()
    assert read_status(folder / "status.json").step == 120
    assert len(warnings) == 1
