import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from made_runs import summary_of
from smolcluster.configs.schema import DatasetConfig, TrainConfig
from smolcluster.errors import CheckpointError
from smolcluster.runs.paths import create_run
from smolcluster.runs.summary import (
    Final,
    Summary,
    WorkerShare,
    check_unfinished,
    read_summary,
    table,
    write_summary,
)


def shown(what: Summary) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(table(what))
    return out.getvalue()


def test_the_file_has_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, summary_of())
    assert read_summary(path) == summary_of()
    entry = json.loads(path.read_text())
    assert set(entry) == {
        *("algorithm", "run_id", "wall_s", "epochs", "steps", "train_samples", "samples_applied"),
        *("pushes", "leases_returned", "final", "lowest_val_loss", "bytes", "workers", "codec"),
        *("tokens_per_sample", "num_bad_evals", "steps_undone"),
    }
    assert set(entry["pushes"]) == {"applied", "stale", "late", "duplicate", "non_finite", "lost"}
    assert set(entry["final"]) == {"train_loss", "val_loss", "val_accuracy", "val_perplexity"}
    assert set(entry["bytes"]) == {"sent", "received"}
    assert set(entry["workers"][0]) == {"rank", "node", "samples", "mean_staleness", "share"}


def test_a_metric_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    final = Final.model_validate({"val_accuracy": float("nan"), "val_f1": float("inf")})
    write_summary(path, summary_of(final=final))
    read = read_summary(path)
    assert read is not None
    assert read.final.val_accuracy is None
    assert dict(read.final)["val_f1"] is None


def test_of_a_language_model_the_table_shows_tokens_and_perplexity() -> None:
    final = Final(train_loss=1.5, val_loss=1.6, val_perplexity=4.95303)
    text = shown(summary_of(tokens_per_sample=128, final=final))
    assert f"{320 * 128:,} tokens/s on average" in text
    assert "validation perplexity  4.953" in text
    assert "accuracy" not in text
    assert "samples/s" not in text


@pytest.mark.parametrize(
    "part", [{"steps": -1}, {"steps": 1.5}, {"wall_s": float("nan")}, {"stepz": 1}, {"codec": None}]
)
def test_wrong_values_are_refused(part: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Summary.model_validate(summary_of().model_dump() | part)


def test_the_closing_table_shows_the_run_and_a_row_for_each_worker() -> None:
    evil = WorkerShare(rank=1, node="pi [red]", samples=9, mean_staleness=1.25, share=0.696)
    text = shown(summary_of(workers=[*summary_of().workers, evil]))
    for part in (
        "edp-1",
        "320 samples/s on average",
        "100 applied, 7 stale",
        "0.975",
        "1.2 MB",
        "5.7 MB",
    ):
        assert part in text
    [row] = [line for line in text.splitlines() if "pi [red]" in line]
    assert "69.6%" in row
    assert "1.25" in row


def test_the_closing_table_copes_with_a_run_that_did_nothing() -> None:
    text = shown(summary_of(wall_s=0.0, final=Final(), workers=[]))
    assert "0 samples/s" in text
    assert "not measured" in text
    assert "\x1b" not in text


def test_the_lowest_validation_loss_is_said_and_small_losses_have_digits() -> None:
    final = summary_of().final.model_copy(update={"train_loss": 3.0871e-5, "val_loss": 0.174})
    said = shown(summary_of(final=final, lowest_val_loss=0.0871))
    assert "train 3.09e-05, validation 0.1740, lowest 0.0871" in said
    assert "lowest" not in shown(summary_of(final=final, lowest_val_loss=0.174))


@pytest.mark.parametrize(
    ("asked", "num_bad_evals", "refused"),
    [
        ({"num_epochs": 2}, None, "raise num_epochs above 2"),
        ({"num_epochs": 3}, None, ""),
        ({"num_steps": 100}, None, "raise num_steps above 100"),
        ({"num_steps": 101}, None, ""),
        ({"num_epochs": 9, "patience": 4}, 4, "raise patience above 4"),
        ({"num_epochs": 2, "patience": 5}, 4, ""),
        ({"num_epochs": 2}, 4, ""),
    ],
)
def test_a_run_that_has_ended_goes_on_only_if_more_is_asked_of_it(
    tmp_path: Path, asked: dict[str, Any], num_bad_evals: int | None, refused: str
) -> None:
    paths = create_run(tmp_path, "edp-1")
    train = TrainConfig(dataset=DatasetConfig(name="digits"), **asked)
    check_unfinished(paths, train)  # there is no summary yet
    write_summary(paths.summary, summary_of(num_bad_evals=num_bad_evals))
    with pytest.raises(CheckpointError, match=refused) if refused else nullcontext():
        check_unfinished(paths, train)
