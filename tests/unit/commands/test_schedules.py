"""`mesh schedule`: a schedule in numbers, as a table and as a picture."""

from pathlib import Path

import pytest

from smolcluster.cli import main


def test_a_schedule_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "zbv.csv"
    flags = ("--pp", "4", "--microbatches", "8", "--schedule", "zbv", "--csv", str(csv))
    assert main(["mesh", "schedule", *flags]) == 0
    assert "4 ranks, 8 stages, 8 microbatches" in capsys.readouterr().out
    rows = csv.read_text().splitlines()
    assert len([row for row in rows if row.startswith("rank ")]) == 8 * 8 * 3


def test_a_schedule_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for schedule in ("zbv", "1f1b"):
        flags = ("--pp", "4", "--microbatches", "2", "--schedule", schedule)
        assert main(["mesh", "schedule", *flags]) != 0
        assert "microbatches is 2, fewer than the 4 stages" in capsys.readouterr().err
    assert main(["mesh", "schedule", "--pp", "4", "--microbatches", "8", "--schedule", "z"]) != 0
    assert "zb-v (zb-v is also called zbv)" in capsys.readouterr().err
