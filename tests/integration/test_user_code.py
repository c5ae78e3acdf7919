"""An error in a user's code ends the run with its own sentence, wherever it happens."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness import Cluster, local_settings
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.errors import RunFailed, UserCodeError
from smolcluster.runs.events import RunEnded, WorkerLost
from smolcluster.training.hooks import (
    CheckpointSaved,
    EvaluationDone,
    Hooks,
    StepDone,
    WorkerChanged,
)
from smolcluster.training.recipe import Training
from smolcluster.training.workload import Workload

ALGORITHMS: list[AlgorithmName] = ["edp", "syncps"]
DATA = TensorDataset(torch.randn(200, 4, generator=torch.Generator().manual_seed(3)))


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def settings_for(algorithm: AlgorithmName, *overrides: str) -> Settings:
    own = ("min_workers=2", "batch_size=8", "global_batch_size=16", *overrides)
    return local_settings(*own, workers=2, algorithm=algorithm)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_loss_that_fails_in_a_worker_ends_the_run_with_its_sentence(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    """One worker of two fails in the middle of the run; the other one is told why it is over."""
    failing: dict[str, int] = {}
    calls = iter(range(1_000_000))

    def loss(model: nn.Module, batch: Any) -> Any:
        me = threading.get_ident()
        if next(calls) > 20 and failing.setdefault("worker", me) == me:
            return square(model, {"x": batch}["y"])
        return square(model, batch)

    settings = settings_for(algorithm, "num_epochs=50")
    workload = Workload(Model, loss, DATA)
    cluster = Cluster(settings, tmp_path, algorithm=algorithm, workload=workload)
    workers = [cluster.worker(i + 1, node=node) for i, node in enumerate(("pi5", "win"))]
    failure = cluster.server.failure()
    assert isinstance(failure, UserCodeError)
    assert "loss (test_user_code.py:" in str(failure)
    assert str(failure).endswith("KeyError: 'y'")
    kinds = {type(worker.failure()) for worker in workers}
    assert kinds == {UserCodeError, RunFailed}
    told = next(str(each.failure()) for each in workers if type(each.failure()) is RunFailed)
    assert str(failure) in told
    assert not cluster.happened(WorkerLost)
    [ended] = cluster.happened(RunEnded)
    assert (ended.ok, ended.reason) == (False, f"the run failed: {failure}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hooks_hear_of_all_that_happens_in_a_run(tmp_path: Path, algorithm: AlgorithmName) -> None:
    heard: list[Any] = []
    add = heard.append
    hooks = Hooks(on_step=add, on_evaluation=add, on_checkpoint=add, on_worker=add)
    workload = Workload(Model, square, DATA, DATA, training=Training(hooks=hooks))
    settings = settings_for(algorithm, "min_workers=1", "num_epochs=1", "eval_steps=5")
    cluster = Cluster(settings, tmp_path, algorithm=algorithm, workload=workload)
    cluster.finish(cluster.worker(1, node="pi5"))
    steps = [each for each in heard if isinstance(each, StepDone)]
    assert [each.step for each in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].samples_applied == steps[-1].total_samples == 200
    assert [each.loss for each in steps] == cluster.losses
    saved = [each for each in heard if isinstance(each, CheckpointSaved)]
    assert saved[-1].step == len(steps)
    assert saved[-1].folder.is_dir()
    summary = cluster.server.summary
    assert summary is not None
    evaluations = [each for each in heard if isinstance(each, EvaluationDone)]
    assert (evaluations[-1].step, evaluations[-1].loss) == (len(steps), summary.final.val_loss)
    changes = [(each.node, each.change) for each in heard if isinstance(each, WorkerChanged)]
    assert changes[0] == ("pi5", "joined")


def hits(model: nn.Module, batch: Any) -> Any:
    return square(model, {"x": batch}["y"]), 1


def on_step(step: StepDone) -> None:
    assert step.step < 3, "enough"


def on_evaluation(done: EvaluationDone) -> None:
    raise ValueError(f"step {done.step}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("metrics", "hooks", "sentence"),
    [
        ({"hits": hits}, Hooks(), r"metric hits \(test_user_code.py:.*'y'"),
        ({}, Hooks(on_step=on_step), r"on_step \(.*AssertionError: enough"),
        ({}, Hooks(on_evaluation=on_evaluation), r"ValueError: step \d+"),
    ],
    ids=["a metric", "a hook", "a hook at the end"],
)
def test_code_that_fails_at_the_server_ends_the_run_with_its_sentence(
    tmp_path: Path,
    algorithm: AlgorithmName,
    metrics: dict[str, Any],
    hooks: Hooks,
    sentence: str,
) -> None:
    """Also at the very end: when the final weights are evaluated, nothing is asked of it any more."""
    evaluated = ["eval_steps=3"] if metrics else ["eval_steps=1000"]
    training = Training(hooks=hooks)
    workload = Workload(Model, square, DATA, DATA, metrics=metrics, training=training)
    settings = settings_for(algorithm, "min_workers=1", "num_epochs=1", *evaluated)
    cluster = Cluster(settings, tmp_path, algorithm=algorithm, workload=workload)
    worker = cluster.worker(1, node="pi5")
    failure = cluster.server.failure()
    assert isinstance(failure, UserCodeError)
    assert re.search(sentence, str(failure))
    assert str(failure) in str(worker.failure())
