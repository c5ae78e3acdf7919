"""A run that was stopped, or whose server died, goes on from a checkpoint as if nothing had been.

A checkpoint that an undisturbed run leaves on its way is what a server that is killed some steps later finds:
those are resumed from here, each in a folder of its own. That servers and workers are killed as processes is
in `tests/faults`.
"""

import json
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import DEADLINE_S, Cluster, Outcome, local_settings
from smolcluster.algorithms import context, leasing
from smolcluster.algorithms.SynchronousPS import server as syncps
from smolcluster.algorithms.SynchronousPS.reduction import RESIDUAL
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.data.permutation import epoch_permutation
from smolcluster.errors import CheckpointError
from smolcluster.observability.metrics import MetricRecord
from smolcluster.runs.events import RunResumed
from smolcluster.runs.summary import Summary
from smolcluster.server.leases import Dispatcher, DispatcherState
from smolcluster.training.checkpoint import Checkpoint, CheckpointWriter, Snapshot, restore
from smolcluster.training.replica import Replica
from smolcluster.training.schedule import learning_rate
from smolcluster.utils.stopping import Interrupted
from tiers import at_night

NODES = ("pi5", "win", "macbook", "mini1")
NUM_SAMPLES = 1438
STEPS_PER_EPOCH = 45
"""Of 32 samples; the last one has 30."""
EPOCHS = 3
EVERY = 15
"""Steps from checkpoint to checkpoint, of which one is at the end of an epoch."""
SCHEDULE = ("lr_schedule.warmup_iters=20", "lr_schedule.min_lr=0.0001")
ALGORITHMS: tuple[AlgorithmName, ...] = ("edp", "syncps")

Edit = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def no_checkpoint_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for the disk, however slow; else a busy disk would leave some steps out."""
    submit = CheckpointWriter.submit

    def patient(self: CheckpointWriter, snapshot: Snapshot) -> None:
        submit(self, snapshot)
        assert self.flush(DEADLINE_S)

    monkeypatch.setattr(CheckpointWriter, "submit", patient)


def settings_for(algorithm: AlgorithmName, *overrides: str, workers: int = 1) -> Settings:
    """Three epochs of the shipped digits, with many checkpoints."""
    common = (
        *(f"num_epochs={EPOCHS}", f"checkpoint_steps={EVERY}", "keep_last=100", "eval_steps=25"),
        *("worker_update_interval=1", f"min_workers={workers}", *SCHEDULE),
        "reconnect_timeout_s=1",
    )
    return local_settings(*common, *overrides, workers=workers, algorithm=algorithm)


def start(
    settings: Settings,
    folder: Path,
    algorithm: AlgorithmName,
    *,
    resume: bool = False,
    workers: int = 1,
) -> tuple[Cluster, list[Outcome]]:
    """Start a server, and workers as soon as it listens."""
    cluster = Cluster(settings, folder, algorithm=algorithm, resume=resume)
    return cluster, [
        cluster.worker(number + 1, node=NODES[number % len(NODES)]) for number in range(workers)
    ]


def run(
    settings: Settings,
    folder: Path,
    algorithm: AlgorithmName,
    *,
    resume: bool = False,
    workers: int = 1,
) -> Cluster:
    """A run that ends well."""
    cluster, outcomes = start(settings, folder, algorithm, resume=resume, workers=workers)
    cluster.server.finish()
    for outcome in outcomes:
        outcome.finish()
    return cluster


def at_step(cluster: Cluster, step: int, act: Callable[[], None]) -> None:
    """Do something when the server has just taken that step, before workers are started."""
    saver = cluster.core.saver  # type: ignore[union-attr]
    after = saver.after_step

    def watched(*, is_evaluated: bool, num_steps: int = 1) -> bool:
        is_saved = after(is_evaluated=is_evaluated, num_steps=num_steps)
        if cluster.core.version == step:
            act()
        return is_saved

    saver.after_step = watched  # type: ignore[method-assign]


def place_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def leave_only(source: Path, step: int, folder: Path) -> Path:
    """A run's folder in which a server was killed soon after it saved that step."""
    folder.mkdir()
    shutil.copytree(place_of(source, step), place_of(folder, step))
    (folder / "checkpoints" / "latest").symlink_to(place_of(folder, step).name)
    return folder


def told(record: MetricRecord) -> tuple[object, ...]:
    """What a step was, but for its speed."""
    names = ("loss", "lr", "grad_norm", "start", "stop", "samples_applied")
    return (record.step, record.epoch, *(record.values[name] for name in names))


def steps_of(cluster: Cluster) -> list[tuple[object, ...]]:
    return [told(record) for record in cluster.metrics.steps]


def losses_of(cluster: Cluster) -> list[float]:
    return [record.values["loss"] for record in cluster.metrics.steps]


def summary_of(cluster: Cluster) -> Summary:
    assert cluster.server.summary is not None
    return cluster.server.summary


def state_of(replica: Replica) -> dict[str, Tensor]:
    return {"weights": replica.params, **replica.optimizer.state}


def assert_equal_bit_for_bit(one: Replica, other: Replica) -> None:
    mine, theirs = state_of(one), state_of(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs"


def assert_counted(summary: Summary, epochs: int = EPOCHS, steps: int | None = None) -> None:
    """Steps, pushes and samples are those of the whole run."""
    expected = epochs * STEPS_PER_EPOCH if steps is None else steps
    assert summary.steps == expected
    assert summary.train_samples == NUM_SAMPLES
    assert summary.samples_applied == epochs * NUM_SAMPLES
    assert sum(worker.samples for worker in summary.workers) == epochs * NUM_SAMPLES
    if summary.algorithm == "edp":
        assert summary.pushes.applied == expected


def assert_same_end(resumed: Cluster, whole: Cluster, step: int) -> None:
    """What came after `step` is what an undisturbed run did, bit for bit; so is the end."""
    assert steps_of(resumed) == steps_of(whole)[step:]
    assert_equal_bit_for_bit(resumed.training.replica, whole.training.replica)
    mine, theirs = summary_of(resumed), summary_of(whole)
    assert mine.final == theirs.final
    assert mine.pushes == theirs.pushes
    assert_counted(mine)


@dataclass
class Whole:
    """An undisturbed run, and where its checkpoints are."""

    cluster: Cluster
    folder: Path
    settings: Settings
    algorithm: AlgorithmName

    def resume_from(self, step: int, folder: Path) -> Cluster:
        """What becomes of it when its server is killed soon after a checkpoint."""
        leave_only(self.folder, step, folder)
        return run(self.settings, folder, self.algorithm, resume=True)


def run_whole(algorithm: AlgorithmName, folder: Path, *overrides: str) -> Whole:
    settings = settings_for(algorithm, *overrides)
    return Whole(run(settings, folder, algorithm), folder, settings, algorithm)


# One worker: bit for bit.


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_killed_after_any_checkpoint_it_ends_as_an_undisturbed_run(
    tmp_path: Path, algorithm: AlgorithmName, optimizer: str
) -> None:
    """In the warm-up, in the middle of an epoch, at the end of one, and in the last."""
    whole = run_whole(algorithm, tmp_path / "whole", f"optimizer={optimizer}")
    assert_counted(summary_of(whole.cluster))
    for step in (EVERY, 30, STEPS_PER_EPOCH, 120):
        resumed = whole.resume_from(step, tmp_path / str(step))
        assert_same_end(resumed, whole.cluster, step)


@pytest.mark.slow
@pytest.mark.parametrize("step", [38, *at_night(1, STEPS_PER_EPOCH, 100)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stopped_at_any_step_it_saves_that_step_and_goes_on_from_it(
    tmp_path: Path, algorithm: AlgorithmName, step: int
) -> None:
    settings = settings_for(algorithm)
    whole = run(settings, tmp_path / "whole", algorithm)
    folder = tmp_path / "stopped"
    folder.mkdir()
    stopped = Cluster(settings, folder, algorithm=algorithm)
    at_step(stopped, step, lambda: stopped.stop.note(signal.SIGTERM))
    worker = stopped.worker(1, node=NODES[0])
    failure = stopped.server.failure()
    worker.failure()  # or it would take part in what is resumed
    assert isinstance(failure, Interrupted)
    assert failure.exit_code == 143
    stood = stopped.core.version
    assert step <= stood <= step + 1, "it ends the step that it is in, and no other"
    newest = stopped.store.newest_good()
    assert newest is not None
    assert newest.state.step == stood
    assert newest.state.samples_applied == sum(map(_size, stopped.metrics.steps))
    assert_equal_bit_for_bit_with(newest, stopped.training.replica)
    resumed = run(settings, folder, algorithm, resume=True)
    assert steps_of(stopped) == steps_of(whole)[:stood]
    assert_same_end(resumed, whole, stood)


def _size(record: MetricRecord) -> int:
    return int(record.values["stop"] - record.values["start"])


def assert_equal_bit_for_bit_with(checkpoint: Checkpoint, replica: Replica) -> None:
    for name, tensor in replica.optimizer.state.items():
        assert torch.equal(checkpoint.optimizer[name], tensor), name
    for name, tensor in replica.model.state_dict().items():
        assert torch.equal(checkpoint.model[name], tensor), name


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stopped_again_and_again_it_ends_as_an_undisturbed_run(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    whole = run_whole(algorithm, tmp_path / "whole")
    folder = tmp_path / "stopped"
    folder.mkdir()
    lives: list[Cluster] = []
    for step in (7, 44, 46, 90):
        life = Cluster(whole.settings, folder, algorithm=algorithm, resume=bool(lives))
        at_step(life, step, lambda life=life: life.stop.note(signal.SIGINT))  # type: ignore[misc]
        worker = life.worker(1, node=NODES[0])
        assert isinstance(life.server.failure(), Interrupted)
        worker.failure()
        lives.append(life)
    stood = lives[-1].core.version
    last = run(whole.settings, folder, algorithm, resume=True)
    assert_same_end(last, whole.cluster, stood)
    assert [each for life in (*lives, last) for each in steps_of(life)] == steps_of(whole.cluster)
    resumed = [each.event for each in last.events() if isinstance(each.event, RunResumed)]
    assert [event.step for event in resumed] == [life.core.version for life in lives]


def progress_in(folder: Path) -> dict[int, dict[str, Any]]:
    """What each checkpoint of a run says of its progress, by step."""
    states = [json.loads(path.read_text()) for path in folder.glob("checkpoints/step-*/state.json")]
    return {state["step"]: state["progress"] for state in sorted(states, key=lambda it: it["step"])}


# Several workers.


def test_four_workers_of_syncps_lose_as_an_undisturbed_run(tmp_path: Path) -> None:
    settings = settings_for("syncps", "global_batch_size=128", workers=4)
    whole = run(settings, tmp_path / "whole", "syncps", workers=4)
    leave_only(tmp_path / "whole", EVERY, tmp_path / "killed")
    resumed = run(settings, tmp_path / "killed", "syncps", resume=True, workers=4)
    assert losses_of(resumed) == pytest.approx(losses_of(whole)[EVERY:], rel=1e-6)
    assert_counted(summary_of(resumed), steps=EPOCHS * 12)


def applied_until(step: int, cluster: Cluster) -> dict[int, Counter[int]]:
    """How often each sample was applied up to a step, by epoch."""
    applied: dict[int, Counter[int]] = defaultdict(Counter)
    for record in cluster.metrics.steps:
        if record.step <= step:
            order = epoch_permutation(cluster.settings.cluster.seed, record.epoch, NUM_SAMPLES)
            positions = slice(int(record.values["start"]), int(record.values["stop"]))
            applied[record.epoch].update(order[positions].tolist())
    return applied


def assert_each_sample_applied_once(first: Mapping[int, Counter[int]], second: Cluster) -> None:
    """Over both lives; what the first did after the checkpoint is undone."""
    applied = {epoch: Counter(counts) for epoch, counts in first.items()}
    for epoch, counts in second.applied.items():
        applied.setdefault(epoch, Counter()).update(counts)
    once = Counter(range(NUM_SAMPLES))
    assert applied == dict.fromkeys(range(second.settings.train.num_epochs), once)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 3, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_sample_is_applied_once_whoever_comes_back(
    tmp_path: Path, algorithm: AlgorithmName, workers: int
) -> None:
    """Three workers, and then one, three or five: in the middle of an epoch, and at the end of one."""
    batch = ("global_batch_size=32",) if algorithm == "syncps" else ()
    settings = settings_for(algorithm, *batch, workers=3)
    whole = run(settings, tmp_path / "whole", algorithm, workers=3)
    whole.assert_every_sample_applied_once()
    later = settings_for(algorithm, *batch, "min_workers=1", workers=3)
    for step in (30, STEPS_PER_EPOCH, 105):
        folder = leave_only(tmp_path / "whole", step, tmp_path / str(step))
        resumed = run(later, folder, algorithm, resume=True, workers=workers)
        assert_each_sample_applied_once(applied_until(step, whole), resumed)
        assert_counted(summary_of(resumed))


def test_leases_that_were_open_at_a_checkpoint_are_in_it(tmp_path: Path) -> None:
    settings = settings_for("edp", workers=3)
    run(settings, tmp_path, "edp", workers=3)
    waiting = [each["dispatcher"]["waiting"] for each in progress_in(tmp_path).values()]
    assert len(waiting) == EPOCHS * STEPS_PER_EPOCH // EVERY
    assert any(waiting)
    assert waiting[-1] == []


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_goes_on_for_more_epochs_than_were_asked_for_at_first(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    constant = "lr_schedule=null"
    whole = run(settings_for(algorithm, constant), tmp_path / "whole", algorithm)
    run(settings_for(algorithm, constant, "num_epochs=2"), tmp_path / "short", algorithm)
    resumed = run(settings_for(algorithm, constant), tmp_path / "short", algorithm, resume=True)
    assert_same_end(resumed, whole, 2 * STEPS_PER_EPOCH)


# Codecs that lose something.


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_8_bits_it_goes_on_and_what_the_server_owes_is_kept(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = settings_for(algorithm, "use_quantization=true")
    whole = run(settings, tmp_path / "whole", algorithm)
    folder = leave_only(tmp_path / "whole", 60, tmp_path / "killed")
    cluster = Cluster(settings, folder, algorithm=algorithm, resume=True)
    kept = cluster.store.newest_good()
    assert kept is not None
    assert (RESIDUAL in kept.optimizer) == (algorithm == "syncps")
    if algorithm == "syncps":
        reduction = cluster.core.reduction  # type: ignore[union-attr]
        residual = kept.optimizer[RESIDUAL]
        assert float(residual.abs().max()) > 0
        assert torch.equal(reduction.residual()[RESIDUAL], residual)
    worker = cluster.worker(1, node=NODES[0])
    cluster.server.finish()
    worker.finish()
    summary = summary_of(cluster)
    assert summary.codec == "int8"
    assert_counted(summary)
    assert losses_of(cluster) == pytest.approx(losses_of(whole)[60:], rel=0.05, abs=0.02)


# What is refused.


@pytest.mark.usefixtures("closed_doors")
@pytest.mark.parametrize(
    ("algorithm", "override", "sentence"),
    [
        *((each, "model.hidden=64", "another model") for each in ALGORITHMS),
        *((each, "seed=43", "began with seed 42, not 43") for each in ALGORITHMS),
        *((each, "num_epochs=1", "raise num_epochs") for each in ALGORITHMS),
        ("edp", "num_steps=2", "raise num_steps"),
        *((each, "optimizer=sgd", "optimizer.safetensors") for each in ALGORITHMS),
    ],
)
def test_another_run_is_refused_in_one_line_and_nothing_is_changed(
    tmp_path: Path, algorithm: AlgorithmName, override: str, sentence: str
) -> None:
    run(settings_for(algorithm, "num_epochs=2"), tmp_path, algorithm)
    before = contents_of(tmp_path / "checkpoints")
    refuse(settings_for(algorithm, "num_epochs=3", override), tmp_path, algorithm, sentence)
    assert contents_of(tmp_path / "checkpoints") == before


@pytest.mark.usefixtures("closed_doors")
@pytest.mark.parametrize(
    ("first", "second"), [("edp", "syncps"), ("syncps", "edp")], ids=["edp", "syncps"]
)
def test_another_algorithm_is_refused_in_one_line_and_nothing_is_changed(
    tmp_path: Path, first: AlgorithmName, second: AlgorithmName
) -> None:
    run(settings_for(first, "num_epochs=1"), tmp_path, first)
    before = contents_of(tmp_path / "checkpoints")
    refuse(settings_for(second), tmp_path, second, f"algorithm {first}, not by {second}")
    assert contents_of(tmp_path / "checkpoints") == before


def refuse(settings: Settings, folder: Path, algorithm: AlgorithmName, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        Cluster(settings, folder, algorithm=algorithm, resume=True)
    assert "\n" not in str(caught.value)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# These tests can fail.


def forget_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the weights come back."""

    def forgetful(
        replica: Replica, checkpoint: Checkpoint, extra: Mapping[str, Tensor] | None = None
    ) -> None:
        kept = {name: tensor.clone() for name, tensor in replica.optimizer.state.items()}
        restore(replica, checkpoint, extra)
        for name, tensor in kept.items():
            replica.optimizer.state[name].copy_(tensor)

    monkeypatch.setattr(context, "restore", forgetful)


def forget_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight comes back with its last bit wrong."""

    def sloppy(
        replica: Replica, checkpoint: Checkpoint, extra: Mapping[str, Tensor] | None = None
    ) -> None:
        restore(replica, checkpoint, extra)
        replica.params[1234] = torch.nextafter(replica.params[1234], torch.tensor(9.0))

    monkeypatch.setattr(context, "restore", sloppy)


def forget_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate begins anew."""
    for module in (leasing, syncps):
        monkeypatch.setattr(
            module,
            "learning_rate",
            lambda train, _, *more: learning_rate(train, 0, *more),
        )


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bug", [forget_the_optimizer, forget_one_weight, forget_the_schedule])
def test_a_resume_that_forgets_something_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: AlgorithmName, bug: Edit
) -> None:
    whole = run_whole(algorithm, tmp_path / "whole")
    with monkeypatch.context() as patch:
        bug(patch)
        resumed = whole.resume_from(60, tmp_path / "resumed")
    with pytest.raises(AssertionError):
        assert_same_end(resumed, whole.cluster, 60)


@pytest.mark.nightly
def test_a_dispatcher_that_forgets_its_open_leases_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what waits for applied."""
    settings = settings_for("edp", workers=3)
    whole = run(settings, tmp_path / "whole", "edp", workers=3)
    step = next(
        step
        for step, progress in progress_in(tmp_path / "whole").items()
        if progress["dispatcher"]["waiting"]
    )
    folder = leave_only(tmp_path / "whole", step, tmp_path / "resumed")
    resume = Dispatcher.resume

    def forgetful(self: Dispatcher, standing: DispatcherState, samples_applied: int) -> None:
        resume(self, standing, samples_applied)
        self.samples_applied += sum(each.num_samples for each in self._waiting)
        self._waiting.clear()

    monkeypatch.setattr(Dispatcher, "resume", forgetful)
    resumed = run(settings, folder, "edp", resume=True, workers=3)
    with pytest.raises(AssertionError):
        assert_each_sample_applied_once(applied_until(step, whole), resumed)
    with pytest.raises(AssertionError):
        assert_counted(summary_of(resumed))
