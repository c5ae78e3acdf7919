"""What a run's folder says, and that nobody else reads it."""

import re
from pathlib import Path

import pytest

import smolcluster
from made_runs import MadeRun, killed_run
from reading import status_of
from smolcluster.observability.view.snapshot import Snapshot, read_snapshot
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import STOPPED, RunStatus

READERS = re.compile(
    r"\b(read_status|read_events|parse_event|first_start"
    r"|follow_metrics|parse_metric|SeriesReader)\b"
)
ROOMS = ("runs/", "observability/view/", "observability/sinks/jsonl.py")


def test_only_the_view_reads_what_a_run_writes() -> None:
    package = Path(smolcluster.__file__).parent
    others = {
        name: found
        for path in package.rglob("*.py")
        if not (name := path.relative_to(package).as_posix()).startswith(ROOMS)
        and (found := READERS.findall(path.read_text(encoding="utf-8")))
    }
    assert others == {}


TRAINING, ENDED = status_of(), status_of("ended", reason="done")


@pytest.mark.parametrize(
    ("status", "is_alive", "expected"),
    [
        (None, True, "starting"),
        (None, False, "broken off"),
        (None, None, "unknown"),
        (TRAINING, True, "training"),
        (TRAINING, False, "broken off"),
        (TRAINING, None, "unknown"),
        (ENDED, True, "ended"),
        (ENDED, None, "ended"),
        (status_of("failed", reason="x"), False, "failed"),
        (status_of("ended", reason=STOPPED), False, "stopped"),
    ],
)
def test_a_run_stands_as_its_owner_wrote_unless_that_is_gone(
    status: RunStatus | None, is_alive: bool | None, expected: str
) -> None:
    read = Snapshot(RunPaths(Path("r1")), status=status)
    assert read.state_if(is_alive) == expected


def test_a_folder_is_read_whatever_is_missing_or_damaged(tmp_path: Path) -> None:
    nothing = read_snapshot(RunPaths(tmp_path / "gone"))
    assert (nothing.status, nothing.summary, nothing.started) == (None, None, None)
    assert not nothing.is_over
    whole = read_snapshot(killed_run(tmp_path).paths)
    assert (whole.algorithm, whole.is_over) == ("edp", True)
    assert whole.started is not None
    run = MadeRun(tmp_path, "young")
    run.paths.status.write_text("{")
    assert read_snapshot(run.paths).state == "starting"
