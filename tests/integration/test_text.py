"""A language model on a cluster: the same steps as in one process, and text that only the server has."""

import re
import sys
from pathlib import Path

import pytest
import torch

from harness import Cluster, Recorder, free_port
from peers import logger, next_event
from processes import Processes
from smolcluster.algorithms import single
from smolcluster.algorithms.context import ServerContext
from smolcluster.cli import main
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.errors import ConfigError
from smolcluster.observability.metrics import MetricRecord, Metrics
from smolcluster.observability.sinks.jsonl import follow_metrics
from smolcluster.runs.events import Evaluated, EventLog, RunEnded
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.server.evaluator import Evaluator
from smolcluster.server.records import Records
from smolcluster.training.build import build
from smolcluster.training.evaluate import Evaluation
from smolcluster.wire.inbox import Call, Inbox
from texts import FROZEN, TINY, tiny_settings, write_text

ALGORITHMS: tuple[AlgorithmName, ...] = ("edp", "syncps")
ALL_ON = (
    "training.optimizer=adamw",
    "training.weight_decay=0.2",
    "training.grad_clip_norm=0.5",
    "training.gradient_accumulation=2",
    "lr_schedule.min_lr=0.0005",
    "worker_update_interval=1",
)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of its own and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return write_text(tmp_path / "text.txt", 220)


class Finished:
    """What came of a run."""

    def __init__(
        self, summary: Summary, records: list[MetricRecord], weights: torch.Tensor
    ) -> None:
        self.summary = summary
        self.steps = [record for record in records if record.kind == "step"]
        self.evaluations = {
            record.step: record.values["val_loss"] for record in records if record.kind == "eval"
        }
        self.weights = weights

    def assert_follows(self, other: "Finished") -> None:
        """The same steps as another run, up to the rounding of sums in another order."""
        assert len(self.steps) == len(other.steps)
        for step, expected in zip(self.steps, other.steps, strict=True):
            for name in ("loss", "lr", "grad_norm", "samples_applied"):
                assert step.values[name] == pytest.approx(expected.values[name], rel=1e-5), (
                    name,
                    step.step,
                )
        torch.testing.assert_close(self.weights, other.weights, rtol=1e-4, atol=1e-5)
        for step_number, loss in self.evaluations.items():
            if step_number in other.evaluations:
                assert loss == pytest.approx(other.evaluations[step_number], rel=1e-4)


def run_cluster(settings: Settings, folder: Path, algorithm: AlgorithmName) -> Finished:
    folder.mkdir()
    cluster = Cluster(settings, folder, algorithm=algorithm)
    num_workers = settings.cluster.num_workers
    summary = cluster.finish(*(cluster.worker(rank + 1) for rank in range(num_workers)))
    return Finished(summary, cluster.metrics.records, cluster.training.replica.snapshot())


def run_single(settings: Settings, folder: Path, **train: object) -> Finished:
    """The same in one process; `train` are changes to what is trained."""
    folder.mkdir()
    changed = settings.train.model_copy(update=train)
    settings = Settings(settings.cluster, changed, settings.node)
    training = build(
        settings.train, settings.cluster.seed, settings.node.dataset, torch.device("cpu")
    )
    metrics = Recorder()
    events = EventLog(folder / "events.jsonl", "here", warn=print)
    context = ServerContext(
        settings=settings,
        run=settings.run_config("single-run", "single"),
        training=training,
        node="me",
        secret=None,
        incarnation="here",
        records=Records(Metrics([metrics]), events, "here"),
        log=logger([]),
    )
    try:
        summary = single.train(context)
    finally:
        events.close()
    return Finished(summary, metrics.records, training.replica.snapshot())


def reference_for(settings: Settings, folder: Path, algorithm: AlgorithmName) -> Finished:
    """What one process makes of the same samples a step."""
    if algorithm == "edp":
        return run_single(settings, folder)
    return run_single(settings, folder, global_batch_size=settings.global_batch_size)


# The same steps as in one process


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("extra", [(), ALL_ON], ids=["plain", "all"])
def test_syncps_takes_the_steps_of_one_process(
    text: Path, tmp_path: Path, num_workers: int, extra: tuple[str, ...]
) -> None:
    settings = tiny_settings(text, None, *extra, workers=num_workers, algorithm="syncps")
    finished = run_cluster(settings, tmp_path / "cluster", "syncps")
    reference = reference_for(settings, tmp_path / "single", "syncps")
    assert len(reference.steps) >= 2
    finished.assert_follows(reference)
    assert finished.summary.final.val_perplexity == pytest.approx(
        reference.summary.final.val_perplexity, rel=1e-4
    )


@pytest.mark.parametrize("extra", [("worker_update_interval=1",), ALL_ON], ids=["plain", "all"])
def test_edp_with_one_worker_takes_the_steps_of_one_process(
    text: Path, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    settings = tiny_settings(text, None, *extra)
    finished = run_cluster(settings, tmp_path / "cluster", "edp")
    reference = reference_for(settings, tmp_path / "single", "edp")
    assert len(reference.steps) >= 5
    finished.assert_follows(reference)
    assert finished.summary.final.val_perplexity == pytest.approx(
        reference.summary.final.val_perplexity, rel=1e-4
    )


def test_evaluation_in_the_background_is_of_the_weights_of_its_step(text: Path) -> None:
    """Weights are laid out with matrices first, which is not the order of the model's parameters."""
    settings = tiny_settings(text)
    training = build(settings.train, 42, settings.node.dataset, torch.device("cpu"))
    for start in (0, 4, 8):
        training.compute(torch.arange(start, start + 4))
        training.replica.step(0.05)
    expected, inbox = training.evaluate(), Inbox()
    assert expected is not None
    told: list[tuple[int, int, Evaluation]] = []
    done = lambda *event: told.append(event)  # noqa: E731
    with Evaluator(training, inbox, done, every=3, log=logger([])) as evaluator:
        assert evaluator.after_step(3, 0)
        training.replica.params.zero_()  # training goes on
        next_event(inbox, Call).run()
    [(version, _, evaluation)] = told
    assert version == 3
    assert evaluation.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_accumulation_is_what_a_larger_batch_gives(
    text: Path, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    common = ("worker_update_interval=1", "lr_schedule=null")
    parts = tiny_settings(
        text,
        None,
        *common,
        "training.batch_size=2",
        "training.gradient_accumulation=3",
        algorithm=algorithm,
    )
    big = tiny_settings(text, None, *common, "training.batch_size=6", algorithm=algorithm)
    finished = run_cluster(parts, tmp_path / "parts", algorithm)
    finished.assert_follows(run_cluster(big, tmp_path / "big", algorithm))


# Text that only the server has


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workers_without_the_text_train_as_with_it(
    text: Path, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    extra = ("worker_update_interval=1", "training.epochs=2")
    local = tiny_settings(text, None, *extra, algorithm=algorithm)
    expected = run_cluster(local, tmp_path / "local", algorithm)

    served = tiny_settings(text, None, *extra, "data.source=server", algorithm=algorithm)
    barred = tmp_path / "a-file"
    barred.write_text("")
    place = f"data.cache={barred / 'cache'}"
    poor = tiny_settings(tmp_path / "nowhere.txt", None, place, algorithm=algorithm)
    cluster = Cluster(served, tmp_path, algorithm=algorithm)
    before = sorted((tmp_path / "cache").rglob("*"))
    worker = cluster.worker(1, settings=poor)
    cluster.server.finish()
    worker.finish()
    cluster.assert_every_sample_applied_once()
    losses = [record.values["loss"] for record in cluster.metrics.steps]
    assert losses == pytest.approx([record.values["loss"] for record in expected.steps], rel=1e-6)
    assert barred.read_text() == ""
    assert sorted((tmp_path / "cache").rglob("*")) == before


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_the_text_a_worker_that_must_have_it_says_so(
    text: Path, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    """That the test above proves something."""
    settings = tiny_settings(text, None, "empty_cluster_timeout_s=1", algorithm=algorithm)
    poor = tiny_settings(tmp_path / "nowhere.txt", algorithm=algorithm)
    cluster = Cluster(settings, tmp_path, algorithm=algorithm)
    error = cluster.worker(1, settings=poor).failure()
    assert isinstance(error, ConfigError)
    assert "nowhere.txt, which does not exist" in str(error)
    good = cluster.worker(1)
    cluster.server.finish()
    good.finish()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_workers_are_served(text: Path, tmp_path: Path, algorithm: AlgorithmName) -> None:
    settings = tiny_settings(text, None, "data.source=server", workers=2, algorithm=algorithm)
    poor = tiny_settings(tmp_path / "nowhere.txt", algorithm=algorithm)
    cluster = Cluster(settings, tmp_path, algorithm=algorithm)
    workers = [cluster.worker(rank, settings=poor) for rank in (1, 2)]
    cluster.server.finish()
    for worker in workers:
        worker.finish()
    cluster.assert_every_sample_applied_once()


# Patience


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_that_gets_no_better_ends_well_for_everybody(
    text: Path, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = tiny_settings(
        text,
        None,
        *FROZEN,
        "training.patience=2",
        "training.eval_steps=2",
        "training.epochs=500",
        workers=2,
        algorithm=algorithm,
    )
    cluster = Cluster(settings, tmp_path, algorithm=algorithm)
    workers = [cluster.worker(rank) for rank in (1, 2)]
    cluster.server.finish()
    for worker in workers:
        worker.finish()
    events = [record.event for record in cluster.events()]
    end = events[-1]
    assert isinstance(end, RunEnded)
    assert end.ok
    assert end.reason == "2 evaluations in a row have not lowered the validation loss"
    summary = cluster.server.summary
    assert summary is not None
    assert 0 < summary.samples_applied < 500 * summary.train_samples
    assert len({event.val_loss for event in events if isinstance(event, Evaluated)}) == 1
    assert sum(f"the run is over: {end.reason}" in line for line in cluster.log_lines) == 2


# Launching

DOCUMENTED_GPT = "17,637,632 parameters"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["launch", *arguments, "--dry-run"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]


def test_edp_gpt_on_one_machine_is_the_small_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    server, *workers = plan(capsys, "edp-gpt", "--local", "--workers", "2")
    assert "EDP/server.py --local --workers 2" in server
    assert "--train-config stdlib" in server
    assert len(workers) == 2
    for rank, worker in enumerate(workers):
        assert f"EDP/worker.py {rank + 1} " in worker
        assert "--train-config" not in worker, "the server tells them"


def test_edp_gpt_on_a_cluster_is_the_documented_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "edp-gpt", "--dry-run", "--train-config", "gpt"]) == 0
    assert DOCUMENTED_GPT in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gpt_that_is_named_is_trained_on_one_machine_too(
    capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    server, *_ = plan(capsys, algorithm, "--local", "--train-config", "gpt")
    assert "--train-config gpt" in server
    assert main(["launch", algorithm, "--train-config", "gpt", "--dry-run"]) == 0
    assert DOCUMENTED_GPT in capsys.readouterr().out


@pytest.mark.nightly
def test_a_cluster_of_processes_trains_a_language_model(
    processes: Processes, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "text.txt")
    processes.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    program = ("launch", "edp-gpt", "--local", "--workers", "2", "--override")
    overrides = (*TINY, f"data.root={text}", f"port={free_port()}", "num_epochs=1")
    launch = processes.start(sys.executable, "-m", "smolcluster.cli", *program, *overrides)
    assert launch.wait() == 0, launch.output
    assert re.search(r"speed +[\d,]+ tokens/s", launch.output)
    assert re.search(r"validation perplexity +\d", launch.output)
    assert "a sample of what the model writes:" in launch.output
    assert "Traceback" not in launch.output
    run = find_run(processes.runs)
    summary = read_summary(run.summary)
    assert summary.samples_applied == summary.train_samples
    assert summary.final.val_perplexity is not None
    assert 1 < summary.final.val_perplexity < 256
    assert {share.rank for share in summary.workers} <= {0, 1}
    steps = [
        line.record for line in follow_metrics(run.metrics).poll() if line.record.kind == "step"
    ]
    assert len(steps) == summary.steps
    assert run.sample.is_file()
    assert run.curves.is_file()
