import io
import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from smolcluster.runs.summary import (
    Final,
    Pushes,
    Summary,
    Traffic,
    WorkerShare,
    read_summary,
    table,
    write_summary,
)


def summary(**changes: object) -> Summary:
    whole = Summary(
        algorithm="edp",
        run_id="edp-20261120-135025-3f9c",
        wall_s=10.0,
        epochs=30,
        steps=1350,
        train_samples=1437,
        samples_applied=43110,
        codec="int8",
        pushes=Pushes(applied=1350, late=2),
        leases_returned=3,
        final=Final(train_loss=0.0123, val_loss=0.0845, val_accuracy=0.9722),
        bytes=Traffic(sent=12_300_000, received=3_100_000),
        workers=[
            WorkerShare(rank=0, node="mini2", samples=30000, mean_staleness=1.25, share=0.696),
            WorkerShare(rank=1, node="pi [red]", samples=13110, mean_staleness=2.0, share=0.304),
        ],
    )
    return whole.model_copy(update=changes)


def shown(what: Summary) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(table(what))
    return out.getvalue()


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, summary())
    assert read_summary(path) == summary()


def test_the_file_has_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, summary())
    entry = json.loads(path.read_text())
    assert set(entry) == {
        *("algorithm", "run_id", "wall_s", "epochs", "steps", "train_samples", "samples_applied"),
        *("pushes", "leases_returned", "final", "lowest_val_loss", "bytes", "workers", "codec"),
        *("tokens_per_sample", "num_bad_evals"),
    }
    assert set(entry["pushes"]) == {"applied", "stale", "late", "duplicate", "non_finite", "lost"}
    assert set(entry["final"]) == {"train_loss", "val_loss", "val_accuracy", "val_perplexity"}
    assert set(entry["bytes"]) == {"sent", "received"}
    assert set(entry["workers"][0]) == {"rank", "node", "samples", "mean_staleness", "share"}


def test_of_a_language_model_the_table_shows_tokens_and_perplexity() -> None:
    final = Final(train_loss=1.5, val_loss=1.6, val_perplexity=4.95303)
    text = shown(summary(tokens_per_sample=128, final=final))
    assert f"{4311 * 128:,} tokens/s" in text
    assert "validation perplexity  4.953" in text
    assert "accuracy" not in text
    assert "samples/s" not in text


@pytest.mark.parametrize(
    "part", [{"steps": -1}, {"steps": 1.5}, {"wall_s": float("nan")}, {"stepz": 1}, {"codec": None}]
)
def test_wrong_values_are_refused(part: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Summary.model_validate(summary().model_dump() | part)


def test_the_closing_table_shows_the_run_and_a_row_for_each_worker() -> None:
    text = shown(summary())
    for part in (
        "edp-20261120-135025-3f9c",
        "4,311 samples/s",
        "1,350 applied, 2 late",
        "0.9722",
        "12.3 MB",
        "3.1 MB",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if "mini2" in line or "pi [red]" in line]
    assert len(rows) == 2
    assert "69.6%" in rows[0]
    assert "1.25" in rows[0]


def test_the_closing_table_copes_with_a_run_that_did_nothing() -> None:
    text = shown(summary(wall_s=0.0, final=Final(), workers=[]))
    assert "0 samples/s" in text
    assert "not measured" in text
    assert "\x1b" not in text


def test_the_lowest_validation_loss_is_said_and_small_losses_have_digits() -> None:
    final = summary().final.model_copy(update={"train_loss": 3.0871e-5, "val_loss": 0.174})
    said = shown(summary(final=final, lowest_val_loss=0.0871))
    assert "train 3.09e-05, validation 0.1740, lowest 0.0871" in said
    assert "lowest" not in shown(summary(final=final, lowest_val_loss=0.174))
