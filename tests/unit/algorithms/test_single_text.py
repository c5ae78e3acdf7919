"""A language model in one process as a run: what it leaves, how it goes on after a crash, when it stops."""

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from smolcluster.algorithms import single
from smolcluster.algorithms.context import ServerContext
from smolcluster.configs.resolve import load_resolved
from smolcluster.errors import CheckpointError
from smolcluster.launch.language_model import gpt_config
from smolcluster.models.gpt2_weights import write_gpt2
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.events import (
    CheckpointSaved,
    Evaluated,
    EventRecord,
    RunEnded,
    RunResumed,
    RunStarted,
    read_events,
)
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.training.build import TrainingContext
from smolcluster.training.checkpoint import Checkpoint, CheckpointStore
from smolcluster.utils.stopping import Interrupted
from texts import FROZEN, tiny_settings, train_alone, write_text
from waiting import eventually

DROPOUT = ("model.dropout=0.3", "training.epochs=2")
Body = Callable[[ServerContext], Summary]


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flushing: None) -> Path:
    """A text of its own, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_text(tmp_path / "text.txt")


class Run:
    """A run of one process, as often as it is started."""

    def __init__(self, folder: Path, run_id: str, *overrides: str) -> None:
        self.runs = folder / "runs"
        self.paths = RunPaths(self.runs / run_id)
        self.overrides = [*overrides, "checkpoint_steps=4"]

    def train(
        self, *overrides: str, resume: str | None = None, body: Body = single.train
    ) -> Summary:
        text = self.runs.parent / "text.txt"
        settings = tiny_settings(text, self.runs, *self.overrides, *overrides, algorithm="single")
        train_alone(settings, self.paths.run_id, resume=resume, body=body)
        return read_summary(self.paths.summary)

    def abandon(self, after: int, saved: int) -> None:
        """Train some steps, and then no more, as if the process had been killed.

        A process that is killed may have written a checkpoint just so, or not; here that of `saved` is.
        """

        def body(context: ServerContext) -> Summary:
            asked = iter(range(after))

            def check() -> None:
                if next(asked, None) is None:
                    raise Interrupted(signal.SIGTERM)

            return single.train(replace(context, check_stop=check))

        evaluate = TrainingContext.evaluate
        steps_only = patch.object(
            TrainingContext,
            "evaluate",
            lambda training, model=None, *_, **__: evaluate(training, model),
        )
        with pytest.raises(Interrupted), steps_only:  # an evaluation asks `check` as well
            self.train(body=body)
        eventually(self.store.newest_good, "the checkpoint was not written")
        eventually(lambda: self.newest.state.step == saved, "the checkpoint was not written")

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.paths.checkpoints, 3, NodeLog("test", "me").logger)

    @property
    def newest(self) -> Checkpoint:
        found = self.store.newest_good()
        assert found is not None
        return found

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.newest.model.items()}

    def steps(self) -> list[MetricRecord]:
        records = [line.record for line in follow_metrics(self.paths.metrics).poll()]
        return [record for record in records if record.kind == "step"]

    def losses(self) -> dict[int, float]:
        """The loss of each step, in the time line that has led to the end."""
        return {record.step: record.values["loss"] for record in self.steps()}

    def events(self) -> list[EventRecord]:
        return read_events(self.paths.events)

    def end(self) -> RunEnded:
        told = [record.event for record in self.events()]
        event = next(event for event in reversed(told) if not isinstance(event, CheckpointSaved))
        assert isinstance(event, RunEnded)
        return event

    def evaluated(self) -> list[int]:
        return [
            record.event.step for record in self.events() if isinstance(record.event, Evaluated)
        ]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[name]) for name, tensor in left.items()
    )


# What a run leaves


@pytest.mark.usefixtures("with_curves")
def test_a_run_leaves_all_its_files(tmp_path: Path) -> None:
    run = Run(tmp_path, "mine")
    summary = run.train()
    paths = run.paths
    kept = load_resolved(paths.config)
    assert kept.train.model.type == "GPT"
    assert kept.train.dataset.name == "text"
    assert (summary.algorithm, summary.run_id) == ("single", "mine")
    assert summary.tokens_per_sample == 16
    assert summary.samples_applied == summary.epochs * summary.train_samples
    assert summary.workers == []
    final = summary.final
    assert final.val_loss is not None
    assert final.val_accuracy is None
    assert final.val_perplexity == pytest.approx(
        torch.tensor(final.val_loss).exp().item(), rel=1e-4
    )
    started = run.events()[0].event
    assert isinstance(started, RunStarted)
    assert (started.algorithm, started.model, started.dataset) == ("single", "GPT", "text")
    assert run.end().ok
    assert run.end().reason == "every sample of every epoch has been applied"
    assert sorted(run.losses()) == list(range(1, summary.steps + 1))
    for values in (record.values for record in run.steps()):
        assert values["tokens_per_s"] == pytest.approx(16 * values["samples_per_s"])
    assert run.newest.state.step == summary.steps
    assert (paths.checkpoints / "latest").is_dir()
    assert (paths.checkpoints / "best").is_dir()
    assert paths.curves.read_bytes().startswith(b"\x89PNG")
    assert paths.sample.read_text().strip()
    [log] = paths.logs.iterdir()
    assert "training GPT on text" in log.read_text()


# Going on


def test_an_abandoned_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """In its first epoch and in its second one."""
    whole = Run(tmp_path, "whole", *DROPOUT)
    expected = whole.train()
    assert expected.steps > 25
    for after, saved in ((5, 4), (21, 20)):
        broken = Run(tmp_path, f"broken-{after}", *DROPOUT)
        broken.abandon(after, saved)
        assert not broken.paths.summary.exists()
        assert not broken.end().ok
        summary = broken.train(resume=broken.paths.run_id)
        assert same(broken.weights, whole.weights)
        assert broken.losses() == whole.losses()
        assert summary.final == expected.final
        assert summary.steps == expected.steps
        assert summary.samples_applied == expected.samples_applied
        assert broken.paths.sample.read_bytes() == whole.paths.sample.read_bytes()
        [resumed] = [r.event for r in broken.events() if isinstance(r.event, RunResumed)]
        assert isinstance(resumed, RunResumed)
        assert resumed.step == saved


def test_a_run_that_has_ended_goes_on_with_more_epochs_only(tmp_path: Path) -> None:
    run = Run(tmp_path, "mine", "lr_schedule=null")
    first = run.train()
    with pytest.raises(CheckpointError, match="has ended; to train on, raise num_epochs above 1"):
        run.train(resume="mine")
    second = run.train("training.epochs=2", resume="mine")
    assert second.steps == 2 * first.steps
    once = Run(tmp_path, "once", "lr_schedule=null")
    once.train("training.epochs=2")
    assert same(run.weights, once.weights)


def test_another_seed_text_or_model_does_not_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path, "mine")
    run.abandon(5, 4)
    before = run.paths.config.read_bytes()
    for change in ("seed=7", "model.num_layers=2"):
        with pytest.raises(CheckpointError):
            run.train(change, resume="mine")
    other = write_text(tmp_path / "other.txt", 200)
    with pytest.raises(CheckpointError, match=r"other data .* dataset\.root: .* -> .*/other\.txt"):
        run.train(f"data.root={other}", resume="mine")
    assert run.paths.config.read_bytes() == before


# Patience


def test_patience_ends_a_run_early_says_why_and_it_goes_on_with_more_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "mine", *FROZEN, "training.patience=2", "training.eval_steps=3")
    summary = run.train()
    assert run.evaluated()[:3] == [3, 6, 9]
    assert (summary.steps, summary.num_bad_evals) == (9, 2)
    assert summary.samples_applied == 9 * 4 < summary.train_samples
    end = run.end()
    assert end.ok
    assert end.reason == "2 evaluations in a row have not lowered the validation loss"
    assert run.newest.state.step == 9
    assert run.paths.sample.is_file()
    assert summary.final.val_loss is not None

    for change in ("training.patience=2", "training.epochs=9"):
        with pytest.raises(CheckpointError, match="raise patience above 2 or set it to null"):
            run.train(change, resume="mine")
    assert run.train("training.patience=4", resume="mine").steps == 15
    summary = run.train("training.patience=null", resume="mine")
    assert (summary.samples_applied, summary.num_bad_evals) == (summary.train_samples, None)


def test_a_run_that_gets_better_is_not_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, "mine", "training.patience=1", "training.eval_steps=8")
    summary = run.train()
    losses = [
        record.event.val_loss for record in run.events() if isinstance(record.event, Evaluated)
    ]
    assert losses == sorted(losses, key=lambda loss: -(loss or 0))
    assert summary.samples_applied == summary.train_samples
    assert run.end().reason == "every sample of every epoch has been applied"


def test_weights_that_a_run_began_with_are_not_asked_for_again(tmp_path: Path) -> None:
    begin = Run(tmp_path, "begin")
    begin.train()
    folder = tmp_path / "weights"
    write_gpt2(begin.newest.model, gpt_config(begin.paths), folder)
    run = Run(tmp_path, "mine", f"model.pretrained={folder}")
    run.abandon(5, 4)
    shutil.rmtree(folder)
    summary = run.train(resume="mine")
    assert summary.samples_applied == summary.train_samples


def test_patience_survives_a_crash(tmp_path: Path) -> None:
    run = Run(tmp_path, "mine", *FROZEN, "training.patience=3", "training.eval_steps=3")
    run.abandon(10, 8)
    summary = run.train(resume="mine")
    assert summary.steps == 12, "3 was the lowest one; 6, 9 and 12 were not lower"
    assert run.end().reason == "3 evaluations in a row have not lowered the validation loss"


def test_the_last_evaluation_of_a_finished_run_is_counted_once(tmp_path: Path) -> None:
    """Its weights may have been evaluated as a step's just before."""
    run = Run(tmp_path, "mine", *FROZEN, "training.patience=2", "training.eval_steps=1000")
    first = run.train()
    run.train("training.epochs=2", "training.eval_steps=5", resume="mine")
    evaluated = [step for step in run.evaluated() if step > first.steps]
    assert len(evaluated) >= 2
    assert run.end().reason == "2 evaluations in a row have not lowered the validation loss"
