import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from smolcluster.data.dataset import Split
from smolcluster.errors import NonFiniteLoss
from smolcluster.training.evaluate import evaluate

CPU = torch.device("cpu")


@pytest.mark.parametrize("batch_size", [1, 7, 30, 1024])
def test_it_is_the_mean_over_all_samples_whatever_the_batch(batch_size: int) -> None:
    torch.manual_seed(0)
    split = Split(torch.randn(30, 4), torch.randint(0, 3, (30,)))
    model = nn.Linear(4, 3)
    logits = model(split.inputs)

    result = evaluate(model, split, CPU, batch_size=batch_size)

    assert result.loss == pytest.approx(functional.cross_entropy(logits, split.targets).item())
    assert result.accuracy == (logits.argmax(1) == split.targets).double().mean().item()


def test_a_perfect_model_has_accuracy_one() -> None:
    model = nn.Linear(3, 3, bias=False)
    model.weight.data = 100 * torch.eye(3)
    split = Split(torch.eye(3), torch.arange(3))

    result = evaluate(model, split, CPU)
    assert result.accuracy == 1.0
    assert result.loss == pytest.approx(0.0)


def test_weights_that_have_diverged_are_an_error() -> None:
    model = nn.Linear(4, 3)
    model.weight.data.fill_(math.inf)
    with pytest.raises(NonFiniteLoss, match=r"validation loss is nan.*lower learning_rate"):
        evaluate(model, Split(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)), CPU)


def test_dropout_is_off() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9))
    split = Split(torch.randn(50, 4), torch.randint(0, 3, (50,)))
    assert evaluate(model, split, CPU) == evaluate(model, split, CPU)


def test_a_double_precision_model_takes_single_precision_data() -> None:
    split = Split(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    assert evaluate(nn.Linear(4, 3).double(), split, CPU).loss > 0


def test_a_sequence_of_targets_counts_each_of_them() -> None:
    model = nn.Embedding(5, 5)
    model.weight.data = 100 * torch.eye(5)
    tokens = torch.tensor([[0, 1], [2, 3], [4, 4]])
    targets = torch.tensor([[0, 1], [2, 3], [4, 0]])
    split = Split(tokens, targets)
    assert evaluate(model, split, CPU).accuracy == pytest.approx(5 / 6)
    assert evaluate(model, split, CPU).loss == pytest.approx(100 / 6)
    assert evaluate(model, split, CPU, measure="perplexity").loss == pytest.approx(100 / 6)


@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_of_text_the_perplexity_is_said_and_masked_targets_do_not_count(
    batch_size: int | None,
) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(5, 5)
    tokens = torch.tensor([[0, 1], [2, 3], [4, 4]])
    targets = torch.tensor([[0, -100], [2, 3], [-100, -100]])
    expected = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()

    result = evaluate(
        model, Split(tokens, targets), CPU, measure="perplexity", batch_size=batch_size
    )

    assert result.accuracy is None
    assert result.perplexity == pytest.approx(math.exp(expected))
    assert result.values == {"val_loss": result.loss, "val_perplexity": result.perplexity}


def test_of_labels_no_perplexity_is_said() -> None:
    split = Split(torch.eye(3), torch.arange(3))
    result = evaluate(nn.Linear(3, 3), split, CPU)
    assert result.perplexity is None
    assert result.values == {"val_loss": result.loss, "val_accuracy": result.accuracy}
