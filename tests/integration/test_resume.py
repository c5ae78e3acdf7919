"""A run that was stopped, or whose server died, goes on from a checkpoint as if nothing had been.

A checkpoint that an undisturbed run leaves on its way is what a server that is killed some steps later finds:
those are resumed from here, each in a folder of its own. That servers and workers are killed as processes is
in `tests/faults`.
"""

import signal
from pathlib import Path

import pytest
import torch

from harness import Cluster, assert_applied_once, local_settings
from own_workloads import ALGORITHMS, KINDS, NODES, killed_after, run, settings_for
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.algorithms.SynchronousPS.step import Step
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.errors import CheckpointError
from smolcluster.observability.metrics import MetricRecord
from smolcluster.runs.events import RunResumed
from smolcluster.runs.summary import Summary
from smolcluster.training.checkpoint import CheckpointWriter
from smolcluster.training.replica import Replica
from smolcluster.utils.stopping import Interrupted
from tiers import at_night
from waiting import eventually

KEPT = ("checkpoint_steps=1", "keep_last=100", "eval_steps=25", "reconnect_timeout_s=1")
SMALL = ("num_epochs=2", "model.hidden=16", *KEPT)


@pytest.fixture(autouse=True)
def no_checkpoint_is_left_out(monkeypatch: pytest.MonkeyPatch, no_flushing: None) -> None:
    """Training waits for the disk, however slow; else a busy disk would leave some steps out."""
    monkeypatch.setattr(CheckpointWriter, "submit", CheckpointWriter._write)


def steps_of(cluster: Cluster) -> list[tuple[object, ...]]:
    """What each step was, but for its speed."""
    return [told(record) for record in cluster.metrics.steps]


def told(record: MetricRecord) -> tuple[object, ...]:
    names = ("loss", "lr", "grad_norm", "start", "stop", "samples_applied", "overflows")
    return (record.step, record.epoch, *(record.values.get(name) for name in names))


def summary_of(cluster: Cluster) -> Summary:
    assert cluster.server.summary is not None
    return cluster.server.summary


def assert_counted(cluster: Cluster) -> None:
    """Steps, pushes and samples are those of the whole run."""
    summary = summary_of(cluster)
    assert summary.steps == cluster.core.version
    assert summary.samples_applied == summary.epochs * summary.train_samples
    assert sum(worker.samples for worker in summary.workers) == summary.samples_applied
    if summary.algorithm == "edp":
        assert summary.pushes.applied == summary.steps


def assert_equal_bit_for_bit(one: Replica, other: Replica) -> None:
    mine, theirs = (
        {**each.model.state_dict(), **each.optimizer.state, "evaluated": each.evaluated}
        for each in (one, other)
    )
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs"


def assert_same_end(resumed: Cluster, whole: Cluster, step: int) -> None:
    """What came after `step` is what an undisturbed run did, bit for bit; so is the end."""
    assert steps_of(resumed) == steps_of(whole)[step:]
    assert_equal_bit_for_bit(resumed.training.replica, whole.training.replica)
    mine, theirs = summary_of(resumed), summary_of(whole)
    assert mine.final == theirs.final
    assert mine.pushes == theirs.pushes
    assert_counted(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "kind",
    [
        *("adam", "momentum", "Adafactor", "muon", "float16", "buffers"),
        *at_night("NAdam", "LoRA"),
    ],
)
def test_killed_after_a_checkpoint_it_ends_as_an_undisturbed_run(
    tmp_path: Path, algorithm: AlgorithmName, kind: str
) -> None:
    """After the first step, within an epoch, at the end of one, and before the last step."""
    settings = settings_for(algorithm, 1, *KINDS[kind].overrides, *KEPT)
    workload = KINDS[kind].make(settings)
    whole = run(settings, tmp_path / "whole", algorithm, workload)
    num_steps = len(whole.metrics.steps)
    for step in sorted({1, num_steps // 3, num_steps // 2, num_steps - 1}):
        folder = killed_after(whole.folder, tmp_path / str(step), step)
        resumed = run(settings, folder, algorithm, workload, resume=True)
        assert_same_end(resumed, whole, step)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stopped_again_and_again_it_ends_as_an_undisturbed_run(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    """At its first step, near the end of an epoch, and after it; each time that step is saved."""
    settings = settings_for(algorithm, 1, *SMALL, *KINDS["adam"].overrides)
    whole = run(settings, tmp_path / "whole", algorithm)
    folder = tmp_path / "stopped"
    folder.mkdir()
    lives: list[Cluster] = []
    for step in (1, 22, 25, 40):
        life = Cluster(settings, folder, algorithm=algorithm, resume=bool(lives))
        stop_at(life, step)
        worker = life.worker(1, node=NODES[0])
        failure = life.server.failure()
        worker.failure()  # or it would take part in what is resumed
        assert isinstance(failure, Interrupted)
        assert failure.exit_code == 143
        stood, newest = life.core.version, life.store.newest_good()
        assert step <= stood <= step + 1, "it ends the step that it is in, and no other"
        assert newest is not None
        applied = steps_of(whole)[stood - 1][7]
        assert (newest.state.step, newest.state.samples_applied) == (stood, applied)
        lives.append(life)
    last = run(settings, folder, algorithm, resume=True)
    assert_same_end(last, whole, stood)
    assert [each for life in (*lives, last) for each in steps_of(life)] == steps_of(whole)
    resumed = last.happened(RunResumed)
    assert [event.step for event in resumed] == [life.core.version for life in lives]


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_that_has_taken_its_steps_goes_on_only_for_more(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    """Within an epoch, and then to the epoch's end; that it is refused for less is told below."""

    def life(folder: str, *overrides: str, resume: bool = False) -> Cluster:
        own = (*KINDS["momentum"].overrides, *KEPT, "num_epochs=1", *overrides)
        settings = settings_for(algorithm, 1, *own)
        return run(settings, tmp_path / folder, algorithm, resume=resume)

    whole = life("whole")
    lives = [
        life("parts", "num_steps=3"),
        life("parts", "num_steps=5", resume=True),
        life("parts", resume=True),
    ]
    assert [life.core.version for life in lives] == [3, 5, whole.core.version]
    assert all(summary_of(life).final.val_loss is not None for life in lives)
    assert [each for life in lives for each in steps_of(life)] == steps_of(whole)


def stop_at(cluster: Cluster, step: int) -> None:
    """Ask the server to stop when it has just taken that step; before workers are started."""
    saver = cluster.core.saver  # type: ignore[union-attr]
    after = saver.after_step

    def watched(*, is_evaluated: bool, num_steps: int = 1) -> bool:
        is_saved = after(is_evaluated=is_evaluated, num_steps=num_steps)
        if cluster.core.version == step:
            cluster.stop.note(signal.SIGTERM)
        return is_saved

    saver.after_step = watched  # type: ignore[method-assign]
    if isinstance(cluster.core, syncps.Server):
        answer_at_once(cluster.core, step)


def answer_at_once(server: syncps.Server, after: int) -> None:
    """Let the worker bring the steps after that one before the server looks at them again."""
    deal = server.deal

    def watched(step: Step, now: float) -> None:
        deal(step, now)
        if step.version > after:
            eventually(lambda: not step.unfinished(), f"step {step.version} is whole", 10)

    server.deal = watched  # type: ignore[method-assign]


def test_four_workers_of_syncps_lose_as_an_undisturbed_run(tmp_path: Path) -> None:
    settings = settings_for("syncps", 4, *SMALL, "global_batch_size=128")
    whole = run(settings, tmp_path / "whole", "syncps")
    folder = killed_after(whole.folder, tmp_path / "killed", 7)
    resumed = run(settings, folder, "syncps", resume=True)
    assert resumed.losses == pytest.approx(whole.losses[7:], rel=1e-6)
    assert_counted(resumed)


@pytest.mark.parametrize(
    ("algorithm", "num_workers"),
    [("edp", 4), *at_night(("edp", 1), ("syncps", 1), ("syncps", 4))],
)
def test_every_sample_is_applied_once_whoever_comes_back(
    tmp_path: Path, algorithm: AlgorithmName, num_workers: int
) -> None:
    """Three workers, and then one or four: in the middle of an epoch, and at the end of one."""

    def configured(workers: int) -> Settings:
        sizes = ("batch_size=32", "global_batch_size=32", "worker_update_interval=1")
        own = (*SMALL, *sizes, f"min_workers={workers}")
        return local_settings(*own, workers=workers, algorithm=algorithm)

    whole = run(configured(3), tmp_path / "whole", algorithm)
    for step in (20, 45, 70):
        folder = killed_after(whole.folder, tmp_path / str(step), step)
        resumed = run(configured(num_workers), folder, algorithm, resume=True)
        records = [*whole.metrics.steps[:step], *resumed.metrics.steps]
        assert_applied_once(records, whole.training.num_samples, 2)
        assert_counted(resumed)


@pytest.mark.usefixtures("closed_doors")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_run_is_refused_in_one_line_and_nothing_is_changed(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    def configured(algorithm: AlgorithmName, *overrides: str) -> Settings:
        return local_settings(*SMALL, *overrides, workers=1, algorithm=algorithm)

    run(configured(algorithm), tmp_path, algorithm)
    before = contents_of(tmp_path / "checkpoints")
    other: AlgorithmName = "syncps" if algorithm == "edp" else "edp"
    refusals: list[tuple[AlgorithmName, str, str]] = [
        (algorithm, "model.hidden=64", "another model"),
        (algorithm, "seed=43", "began with seed 42, not 43"),
        (algorithm, "num_epochs=1", "raise num_epochs"),
        (algorithm, "num_steps=2", "raise num_steps"),
        (algorithm, "optimizer=sgd", r"optimizer\.safetensors"),
        (other, "num_epochs=3", f"algorithm {algorithm}, not by {other}"),
    ]
    for resumed_by, override, sentence in refusals:
        settings = configured(resumed_by, "num_epochs=3", override)
        with pytest.raises(CheckpointError, match=sentence) as caught:
            Cluster(settings, tmp_path, algorithm=resumed_by, resume=True)
        assert "\n" not in str(caught.value)
        assert contents_of(tmp_path / "checkpoints") == before


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
