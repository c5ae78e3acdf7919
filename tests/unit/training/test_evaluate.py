import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from computing import PERPLEXITY, evaluated
from smolcluster.data.dataset import Split
from smolcluster.data.loading import MapSamples
from smolcluster.errors import DataError, NonFiniteLoss
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.evaluate import evaluate, evaluation_of


@pytest.mark.parametrize("batch_size", [1, 7, 30, 1024])
def test_it_is_the_mean_over_all_samples_whatever_the_batch(batch_size: int) -> None:
    torch.manual_seed(0)
    split = Split(torch.randn(30, 4), torch.randint(0, 3, (30,)))
    model = nn.Linear(4, 3)
    logits = model(split.inputs)

    result = evaluated(model, split, batch_size=batch_size)

    assert result.loss == pytest.approx(functional.cross_entropy(logits, split.targets).item())
    assert result.metrics["accuracy"] == (logits.argmax(1) == split.targets).double().mean().item()


def test_weights_that_have_diverged_are_an_error() -> None:
    model = nn.Linear(4, 3)
    model.weight.data.fill_(math.inf)
    with pytest.raises(NonFiniteLoss, match=r"validation loss is nan.*lower learning_rate"):
        evaluated(model, Split(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)))


@pytest.mark.parametrize("bad", ["samples", "a mean over no terms"])
def test_samples_that_have_no_loss_are_named_and_not_the_weights_blamed(bad: str) -> None:
    split = Split(torch.randn(30, 4), torch.randint(0, 3, (30,)))
    split.inputs[13] = math.nan if bad == "samples" else 0.0
    split.targets[10:15] = 255 if bad != "samples" else 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=255)

    words = "they hold nan" if bad == "samples" else r"no terms.*\(sum, number\)"
    with pytest.raises(DataError, match=rf"held-out samples 10 to 14 is nan.*{words}"):
        evaluated(nn.Linear(4, 3), split, {}, 5, loss)


def test_a_loss_that_takes_gradients_itself_is_evaluated() -> None:
    """As forces are those of an energy; where nothing is differentiated, gradients are off."""
    split = Split(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    seen = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs = batch[0].requires_grad_()
        [forces] = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return forces.square().mean()

    def metric(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        seen.append(torch.is_grad_enabled())
        return model(batch[0]).sum(), 1

    model = nn.Linear(4, 1)
    found = evaluated(model, split, {"sum": metric}, 3, loss)
    assert found.loss == pytest.approx(model.weight.square().mean().item())
    assert seen == [False, False]


def test_samples_are_made_as_for_training_whatever_is_computed() -> None:
    class Sloped:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            layer = nn.Linear(4, 4)
            layer(torch.ones(4)).sum().backward()
            assert layer.bias.grad is not None
            return torch.from_numpy(layer(torch.ones(4)).detach().numpy()), index % 3

    totals = evaluate(
        nn.Linear(4, 3),
        MapSamples(Sloped()),
        torch.device("cpu"),
        loss=cross_entropy,
        precision="bf16",
    )
    assert math.isfinite(evaluation_of(totals, {}).loss)


def test_a_double_precision_model_takes_single_precision_data() -> None:
    split = Split(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    assert evaluated(nn.Linear(4, 3).double(), split).loss > 0


def test_a_device_without_double_precision_takes_it_as_single(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert = Tensor.to

    def as_mps(tensor: Tensor, *how: Any) -> Tensor:
        if torch.float64 in how:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as MPS does not support it"
            )
        return convert(tensor, *how)

    monkeypatch.setattr(Tensor, "to", as_mps)
    split = Split(torch.randn(5, 4).double(), torch.zeros(5, dtype=torch.int64))
    assert math.isfinite(evaluated(nn.Linear(4, 3), split, batch_size=2).loss)


def test_a_sequence_of_targets_counts_each_of_them() -> None:
    model = nn.Embedding(5, 5)
    model.weight.data = 100 * torch.eye(5)
    tokens = torch.tensor([[0, 1], [2, 3], [4, 4]])
    targets = torch.tensor([[0, 1], [2, 3], [4, 0]])
    split = Split(tokens, targets)
    assert evaluated(model, split).metrics["accuracy"] == pytest.approx(5 / 6)
    assert evaluated(model, split).loss == pytest.approx(100 / 6)


@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_of_text_the_perplexity_is_said_and_masked_targets_do_not_count(
    batch_size: int | None,
) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(5, 5)
    tokens = torch.tensor([[0, 1], [2, 3], [4, 4]])
    targets = torch.tensor([[0, -100], [2, 3], [-100, -100]])
    expected = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()

    result = evaluated(model, Split(tokens, targets), PERPLEXITY, batch_size)

    assert result.metrics["perplexity"] == pytest.approx(math.exp(expected))
    assert result.values == {"val_loss": result.loss, "val_perplexity": math.exp(result.loss)}
    assert "perplexity" in str(result)


def test_a_loss_may_take_gradients_where_it_is_evaluated() -> None:
    model, split = nn.Linear(4, 1), Split(torch.randn(6, 4), torch.zeros(6))

    def slope(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.enable_grad():
            places = batch[0].detach().requires_grad_()
            found = torch.autograd.grad(model(places).sum(), places)[0]
        return found.square().mean()

    result = evaluated(model, split, {}, loss=slope)
    assert result.loss == pytest.approx(model.weight.square().mean().item())


def test_what_is_cached_in_an_evaluation_can_be_used_in_training() -> None:
    model, split = nn.Linear(4, 1), Split(torch.randn(6, 4), torch.zeros(6))
    cache: list[Tensor] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if not cache:
            cache.append(torch.arange(4).float().exp())
        output: Tensor = model(batch[0] * cache[0]) * cache[0][:1]
        return output.square().mean()

    evaluated(model, split, {}, loss=loss)
    loss(model, (split.inputs.requires_grad_(), split.targets)).backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
