"""What a run's folder says, and that nobody else reads it."""

import re
from pathlib import Path

import smolcluster
from made_runs import MadeRun, killed_run
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.paths import RunPaths

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
