"""A language model on a cluster: the same steps as in one process, and text that only the server has."""

import re
from pathlib import Path

import pytest

from harness import Cluster, free_port, steps_in
from own_workloads import assert_takes_the_same_steps, run, steps_alone
from processes import Processes
from smolcluster.configs.schema import AlgorithmName
from smolcluster.runs.events import Evaluated, RunEnded
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
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
    return write_text(tmp_path / "text.txt", 220)


@pytest.mark.parametrize(("algorithm", "num_workers"), [("edp", 1), ("syncps", 1), ("syncps", 2)])
@pytest.mark.parametrize("extra", [("worker_update_interval=1",), ALL_ON], ids=["plain", "all"])
def test_a_cluster_takes_the_steps_of_one_process(
    text: Path, tmp_path: Path, algorithm: AlgorithmName, num_workers: int, extra: tuple[str, ...]
) -> None:
    settings = tiny_settings(text, None, *extra, workers=num_workers, algorithm=algorithm)
    cluster = run(settings, tmp_path, algorithm)
    steps, training = steps_alone(settings, algorithm=algorithm)
    assert len(steps) >= 2
    assert_takes_the_same_steps(cluster, steps, training)
    evaluation, summary = training.evaluate(), cluster.server.summary
    assert evaluation is not None
    assert summary is not None
    assert summary.final.val_perplexity == pytest.approx(evaluation.metrics["perplexity"], rel=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workers_without_the_text_train_as_with_it(
    text: Path, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    extra = ("worker_update_interval=1", "training.epochs=2", "data.source=server")
    served = tiny_settings(text, None, *extra, algorithm=algorithm)
    barred = tmp_path / "a-file"
    barred.write_text("")
    place = f"data.cache={barred / 'cache'}"
    poor = tiny_settings(tmp_path / "nowhere.txt", None, place, algorithm=algorithm)
    cluster = Cluster(served, tmp_path, algorithm=algorithm)
    before = sorted((tmp_path / "cache").rglob("*"))
    cluster.finish(cluster.worker(1, settings=poor))
    assert_takes_the_same_steps(cluster, *steps_alone(served, algorithm=algorithm))
    assert barred.read_text() == ""
    assert sorted((tmp_path / "cache").rglob("*")) == before


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
    end = cluster.events[-1]
    assert isinstance(end, RunEnded)
    assert end.ok
    assert end.reason == "2 evaluations in a row have not lowered the validation loss"
    summary = cluster.server.summary
    assert summary is not None
    assert 0 < summary.samples_applied < 500 * summary.train_samples
    assert len({event.val_loss for event in cluster.happened(Evaluated)}) == 1
    assert sum(f"the run is over: {end.reason}" in line for line in cluster.log_lines) == 2


@pytest.mark.nightly
def test_a_cluster_of_processes_trains_a_language_model(
    processes: Processes, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "text.txt")
    processes.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    program = ("launch", "edp-gpt", "--local", "--workers", "2", "--override")
    overrides = (*TINY, f"data.root={text}", f"port={free_port()}", "num_epochs=1")
    shown = processes.ended(*program, *overrides)
    assert re.search(r"speed +[\d,]+ tokens/s", shown)
    assert re.search(r"validation perplexity +\d", shown)
    assert "a sample of what the model writes:" in shown
    assert "Traceback" not in shown
    paths = find_run(processes.runs)
    summary = read_summary(paths.summary)
    assert summary.samples_applied == summary.train_samples
    assert summary.final.val_perplexity is not None
    assert 1 < summary.final.val_perplexity < 256
    assert {share.rank for share in summary.workers} <= {0, 1}
    assert len(steps_in(paths.metrics)) == summary.steps
    assert paths.sample.is_file()
    assert paths.curves.is_file()
