"""A user's own workload, in one process and by both algorithms."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Cluster
from own_workloads import ALGORITHMS, NODES, Rows, alone, losses_of, run, settings_for
from smolcluster.configs.schema import AlgorithmName
from smolcluster.data.dataset import Batch
from smolcluster.data.digits import load_digits
from smolcluster.runs.events import Evaluated
from smolcluster.training.workload import Terms, Workload

IGNORED = -100


class Tagger(nn.Module):
    """Frozen features, then a label for each of five places."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 12).requires_grad_(requires_grad=False)
        self.labels = nn.Linear(12, 5 * 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 8) to logits (batch, 5, 4)."""
        logits: Tensor = self.labels(self.features(inputs).tanh()).unflatten(1, (5, 4))
        return logits


def tag_loss(model: nn.Module, batch: Batch) -> Terms:
    logits, targets = model(batch["input"]), batch["target"]
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != IGNORED).sum()


def num_hits(model: nn.Module, batch: Batch) -> Terms:
    is_hit = model(batch["input"]).argmax(dim=-1) == batch["target"]
    return is_hit.sum(), (batch["target"] != IGNORED).sum()


def undefined(model: nn.Module, batch: Batch) -> Terms:
    return torch.tensor(math.nan), 1


def ragged(num_samples: int = 200, *, held_out: bool = False) -> Workload:
    """Samples with 0 to 5 targets each: most of them with one, some with all."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 8, generator=generator)
    targets = torch.randint(0, 4, (num_samples, 5), generator=generator)
    lengths = torch.tensor([5, 1, 0, 1, 1, 1, 5, 1])[torch.arange(num_samples) % 8]
    targets[torch.arange(5) >= lengths[:, None]] = IGNORED
    rows = Rows(inputs, targets)
    metrics = {"hits": num_hits, "nothing": undefined, "accuracy": undefined}
    tagger = Tagger()  # threads that build it at once would draw other frozen weights
    return Workload(
        tagger, tag_loss, rows, rows if held_out else None, metrics=metrics, name="tags"
    )


@pytest.mark.parametrize(
    ("algorithm", "num_workers"), [("edp", 1), ("syncps", 1), ("syncps", 2), ("syncps", 3)]
)
def test_ragged_targets_train_as_in_one_process_whoever_computes_them(
    tmp_path: Path, algorithm: AlgorithmName, num_workers: int
) -> None:
    settings = settings_for(algorithm, num_workers)
    workload = ragged()
    cluster = run(settings, tmp_path, algorithm, workload)
    expected, training = alone(settings, workload)
    assert losses_of(cluster) == pytest.approx(expected, rel=1e-5)
    theirs = cluster.training.replica
    torch.testing.assert_close(theirs.params, training.replica.params, rtol=1e-4, atol=1e-6)
    assert [name for name, _ in theirs.layers] == ["labels.weight", "labels.bias"], "what travels"
    summary = cluster.server.summary
    assert summary is not None
    assert (summary.final.val_loss, summary.final.val_accuracy) == (None, None)
    assert summary.final.train_loss is not None


def test_a_mean_of_means_would_be_another_loss() -> None:
    training = alone(settings_for("syncps", 2), ragged())[1]
    whole = training.compute(torch.tensor([0, 3]))
    five, one = (training.compute(torch.tensor([index])) for index in (0, 3))
    assert (five.num_terms, one.num_terms, whole.num_terms) == (5, 1, 6)
    assert five.mean != pytest.approx(one.mean, rel=0.02), "or all means would be the same"
    assert (5 * five.mean + one.mean) / 6 == pytest.approx(whole.mean, rel=1e-6)
    assert (five.mean + one.mean) / 2 != pytest.approx(whole.mean, rel=1e-3)


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
    cluster = run(settings, tmp_path, algorithm, ragged(held_out=True))
    evaluation = cluster.training.evaluate()
    assert evaluation is not None
    summary = cluster.server.summary
    assert summary is not None
    final = summary.final.model_dump()
    assert final["val_hits"] == evaluation.metrics["hits"]
    assert final["val_loss"] == evaluation.loss
    assert (final["val_nothing"], final["val_accuracy"]) == (None, None), "they are NaN"
    evaluated = [each.event for each in cluster.events() if isinstance(each.event, Evaluated)]
    assert evaluated[-1].model_dump()["val_hits"] == final["val_hits"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_digits_written_as_a_user_s_workload_give_the_same_losses_bit_for_bit(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = settings_for(algorithm, 1, "model.hidden=16", "eval_steps=20")

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
    built_in = Cluster(settings, tmp_path, algorithm=algorithm)
    built_in.finish(built_in.worker(1, node=NODES[0]))
    again = settings_for(algorithm, 1, "model.hidden=16", "eval_steps=20")
    theirs = run(again, tmp_path / "own", algorithm, own)
    assert losses_of(theirs) == losses_of(built_in)
    assert torch.equal(theirs.training.replica.params, built_in.training.replica.params)
    assert theirs.server.summary is not None
    assert built_in.server.summary is not None
    assert theirs.server.summary.final.val_loss == built_in.server.summary.final.val_loss


class Counting(nn.Module):
    """Counts in a buffer how many batches it has seen while training."""

    num_batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 20)
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 8) to logits (batch, 5, 4)."""
        if self.training:
            self.num_batches += 1
        logits: Tensor = self.layer(inputs).unflatten(1, (5, 4))
        return logits


def test_in_one_process_a_buffer_may_change_as_the_model_computes() -> None:
    module = Counting()
    workload = Workload(module, tag_loss, ragged().train)
    losses, training = alone(settings_for("syncps", 1), workload)
    assert training.replica.model.get_buffer("num_batches") == len(losses) == 14
    assert module.num_batches == 0, "a module is copied"
