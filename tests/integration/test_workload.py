"""A user's own workload and modules as people have them: tied, frozen, compiled, with adapters."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from own_workloads import (
    ALGORITHMS,
    CPU,
    IGNORED,
    Rows,
    TwoHeads,
    alone,
    language,
    llama,
    lora_model,
    ragged,
    run,
    settings_for,
    two_headed,
)
from smolcluster.configs.schema import AlgorithmName
from smolcluster.data.dataset import Batch
from smolcluster.data.digits import load_digits
from smolcluster.errors import CheckpointError
from smolcluster.runs.events import Evaluated
from smolcluster.training.build import build
from smolcluster.training.checkpoint import restore
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Metric, Terms, Workload


def num_hits(model: nn.Module, batch: Batch) -> Terms:
    is_hit = model(batch["input"]).argmax(dim=-1) == batch["target"]
    return is_hit.sum(), (batch["target"] != IGNORED).sum()


def undefined(model: nn.Module, batch: Batch) -> Terms:
    return torch.tensor(math.nan), 1


METRICS: dict[str, Metric] = {"hits": num_hits, "nothing": undefined, "accuracy": undefined}


def coupled(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample is to be told from all others of its batch."""
    out = functional.normalize(model(batch["input"]), dim=1)
    return functional.cross_entropy(out @ out.t() / 0.1, torch.arange(len(out)))


def test_a_loss_that_depends_on_the_cut_is_told_of_once_a_run(tmp_path: Path) -> None:
    rows = Rows(torch.randn(96, 8, generator=torch.Generator().manual_seed(3)), torch.zeros(96))
    workload = Workload(lambda: nn.Linear(8, 4), coupled, rows)
    cluster = run(settings_for("syncps", 3, "num_epochs=1"), tmp_path, "syncps", workload)
    assert len([line for line in cluster.log_lines if "set batch: whole" in line]) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_workload_s_own_metrics_are_reported(tmp_path: Path, algorithm: AlgorithmName) -> None:
    settings = settings_for(algorithm, 1, "eval_steps=5")
    cluster = run(settings, tmp_path, algorithm, ragged(held_out=True, metrics=METRICS))
    evaluation = cluster.training.evaluate()
    assert evaluation is not None
    summary = cluster.server.summary
    assert summary is not None
    final = summary.final.model_dump()
    assert final["val_hits"] == evaluation.metrics["hits"]
    assert final["val_loss"] == evaluation.loss
    assert (final["val_nothing"], final["val_accuracy"]) == (None, None), "they are NaN"
    evaluated = cluster.happened(Evaluated)
    assert evaluated[-1].model_dump()["val_hits"] == final["val_hits"]


def test_the_digits_written_as_a_user_s_workload_give_the_same_losses_bit_for_bit() -> None:
    """In one process; clusters take the steps of one process with either."""
    settings = settings_for("syncps", 1, "model.hidden=16")

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def loss(model: nn.Module, batch: Batch) -> Terms:
        logits = model(batch["input"])
        return functional.cross_entropy(logits, batch["target"], reduction="sum"), len(logits)

    data = load_digits(settings.cluster.seed)
    everything = [
        split.batch(torch.arange(split.num_samples)) for split in (data.train, data.validation)
    ]
    own = Workload(model, loss, *(Rows(*tensors) for tensors in everything), eval_batch_size=1024)
    (expected, built_in), (losses, theirs) = alone(settings), alone(settings, own)
    assert losses == expected
    assert torch.equal(theirs.replica.params, built_in.replica.params)
    evaluations = theirs.evaluate(), built_in.evaluate()
    assert all(each is not None for each in evaluations)
    assert len({each and each.loss for each in evaluations}) == 1


@pytest.mark.nightly
def test_a_compiled_model_s_names_and_checkpoints_are_those_of_the_model(tmp_path: Path) -> None:
    settings = settings_for("syncps", 1, "checkpoint_steps=2")
    cluster = run(settings, tmp_path, "syncps", two_headed(compiled=True))
    saved = cluster.store.newest_good()
    assert saved is not None
    plain = Replica(two_headed().new_model(), settings.train.optimizer)
    assert plain.fingerprint == cluster.training.replica.fingerprint
    restore(plain, saved)
    assert torch.equal(plain.params, cluster.training.replica.params)
    fresh = TwoHeads()
    fresh.load_state_dict({**saved.model, "words.weight": saved.model["embedding.weight"]})


def test_a_parameter_that_nothing_uses_stays_as_it_is_and_is_named_once(tmp_path: Path) -> None:
    workload = two_headed()
    cluster = run(settings_for("syncps", 1, "optimizer=sgd"), tmp_path, "syncps", workload)
    forgotten = cluster.training.replica.model.get_parameter("forgotten.bias")
    assert torch.equal(forgotten, workload.new_model().get_parameter("forgotten.bias"))
    [line] = [line for line in cluster.log_lines if "gave no gradient" in line]
    assert "forgotten.weight, forgotten.bias:" in line


@pytest.mark.nightly
def test_checkpoints_of_adapters_hold_no_base_and_say_which_one_it_is(tmp_path: Path) -> None:
    settings = settings_for("syncps", 1, "checkpoint_steps=2")
    workload = language(lora_model(llama()), "lora")
    cluster = run(settings, tmp_path, "syncps", workload)
    saved = cluster.store.newest_good()
    assert saved is not None
    assert saved.model
    assert all("lora_" in name for name in saved.model)
    assert saved.state.base is not None
    assert saved.state.base == cluster.training.replica.base
    other = llama()
    with torch.no_grad():
        other.get_parameter("model.norm.weight").add_(1)
    elsewhere = language(lora_model(other), "lora")
    train, seed = settings.train, settings.cluster.seed
    replica = build(train, seed, settings.node.dataset, CPU, workload=elsewhere).replica
    with pytest.raises(CheckpointError, match="is of adapters on a model made on the spot"):
        restore(replica, saved)
