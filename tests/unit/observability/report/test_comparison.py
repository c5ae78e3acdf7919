import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from made_runs import MadeRun, killed_run, worker_status
from smolcluster.cli import main
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.report.comparison import compare, comparison_of
from smolcluster.observability.view.view import read_view
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import read_status, write_status
from smolcluster.runs.summary import Final


def shown(*runs: RunPaths, page: Path | None = None, width: int = 120) -> str:
    output = io.StringIO()
    compare(runs, page, Console(file=output, width=width))
    return output.getvalue()


def two(folder: Path) -> tuple[RunPaths, RunPaths]:
    first, second = killed_run(folder, "one"), killed_run(folder, "two")
    second.config("num_epochs=2", "learning_rate=0.007")
    return first.paths, second.paths


def rows_of(*runs: RunPaths) -> dict[str, list[str]]:
    compared = comparison_of([read_view(run) for run in runs])
    return compared.outcomes | compared.settings


def test_what_came_of_runs_and_the_settings_that_differ_are_side_by_side(tmp_path: Path) -> None:
    runs = two(tmp_path)
    rows = rows_of(*runs)
    same = {
        "training loss": "0.0213",
        "validation loss": "0.0345",
        "steps": "100",
        "samples/s on average": "320",
        "workers lost": "1",
        "mean staleness": "0.68",
        "received": "5.7 MB",
    }
    assert {name: rows[name] for name in same} == {name: [said] * 2 for name, said in same.items()}
    assert rows["learning_rate"] == ["0.003", "0.007"]
    assert "num_epochs" not in rows
    table = shown(*runs)
    assert "learning_rate" in table
    assert "one" in table.splitlines()[1]


def test_json_has_a_shape_to_rely_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(two(tmp_path), None, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["settings"] == {"learning_rate": ["0.003", "0.007"]}
    assert document["problems"] == []
    assert document["runs"][1] == {
        "run_id": "two",
        "algorithm": "edp",
        "state": "ended",
        "train_loss": 0.0213,
        "is_last_step": False,
        "val_loss": 0.0345,
        "val_accuracy": 0.975,
        "val_perplexity": None,
        "steps": 100,
        "samples": 3200,
        "wall_s": 10.0,
        "samples_per_s": 320.0,
        "received_bytes": 5_678_000,
        "sent_bytes": 1_234_000,
        "num_workers": 3,
        "num_workers_lost": 1,
        "mean_staleness": pytest.approx(0.675),
    }


def test_a_run_that_is_not_over_is_compared_as_it_stands(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, "young")
    run.started()
    run.steps(1, 5)
    run.status("training", None, worker_status(0))
    rows = rows_of(killed_run(tmp_path).paths, run.paths)
    assert rows["state"] == ["ended", "broken off"]
    assert rows["training loss"][1] == "0.2500 (last step)"
    assert rows["received"][1] == "–"


def test_the_speed_of_a_resumed_run_is_over_the_time_of_all_its_starts(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, "resumed")
    run.status("training")
    status = read_status(run.paths.status)
    write_status(run.paths.status, status.model_copy(update={"wall_s": 96.0}))
    rows = rows_of(killed_run(tmp_path).paths, run.paths)
    assert rows["time"][1] == "1 min 36 s"
    assert rows["samples/s on average"][1] == "10"


def test_a_run_of_which_nothing_is_known_is_a_column_of_dashes(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    os.utime(empty, (1, 1))
    rows = rows_of(killed_run(tmp_path).paths, RunPaths(empty))
    assert rows["state"] == ["ended", "broken off"]
    assert rows["steps"][1] == "–"


def test_rows_have_their_order_whichever_run_comes_first(tmp_path: Path) -> None:
    text = MadeRun(tmp_path, "text")
    text.summary(final=Final(train_loss=2.0, val_loss=2.5, val_perplexity=12.25))
    runs = (text.paths, killed_run(tmp_path).paths)
    rows = rows_of(*runs)
    assert rows["perplexity"] == ["12.25", "–"]
    assert rows["accuracy"] == ["–", "97.50%"]
    for order in (runs, runs[::-1]):
        names = list(rows_of(*order))
        assert names.index("perplexity") == names.index("accuracy") + 1 == names.index("steps") - 1


@pytest.mark.usefixtures("with_curves")
def test_the_page_has_the_curves_of_all(tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    runs = []
    for number in range(9):
        run = MadeRun(tmp_path, f"r{number}")
        run.started()
        run.steps(1, 3)
        run.metric(MetricRecord("eval", 3, 0, {"val_accuracy": 0.5}))
        runs.append(run.paths)
    assert str(page) in shown(*runs, page=page, width=300)
    text = page.read_text()
    for look in ("stroke run0", "stroke run6", "stroke run0 dashed", "stroke run1 dashed"):
        assert f'class="{look}"' in text
    assert "validation accuracy" in text
    assert "<script" not in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    run = killed_run(tmp_path, "<script>alert(1)<!--")
    run.started(algorithm="<b>edp")
    page = tmp_path / "compared.html"
    shown(run.paths, killed_run(tmp_path).paths, page=page)
    assert "<script>" not in page.read_text()
    assert "&lt;script&gt;" in page.read_text()


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "nope"],
        ["report"],
        ["compare"],
        ["compare", "one"],
        ["compare", "one", "nope"],
        ["compare", "one", "../one"],
    ],
)
def test_a_wrong_name_is_one_line_and_2(
    arguments: list[str], runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_run(runs_dir, "one")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")


def test_the_command_line_writes_reports_and_compares(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two_ = two(runs_dir)
    assert main(["report", "one"]) == 0
    assert capsys.readouterr().out == f"{one.report}\n"
    assert one.report.is_file()
    page = runs_dir / "page.html"
    assert main(["compare", "one", "two", "--html", str(page)]) == 0
    assert "0.007" in capsys.readouterr().out
    assert page.is_file()
    assert not two_.report.exists()
    assert main(["compare", "one", "two", "--html", str(runs_dir / "no" / "page.html")]) == 1
    assert "no/page.html" in capsys.readouterr().err
