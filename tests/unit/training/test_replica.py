import math
import re
import threading
from contextlib import suppress
from typing import Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from computing import forward_backward
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.models.SimpleNN import SimpleNN
from smolcluster.training.replica import Replica


def perceptron(dtype: torch.dtype = torch.float32) -> SimpleNN:
    torch.manual_seed(0)
    return SimpleNN(6, 8, 3).to(dtype)


def batch(dtype: torch.dtype = torch.float32, size: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6, dtype=dtype), torch.randint(0, 3, (size,))


def test_the_models_parameters_and_gradients_are_views_of_the_flat_tensors() -> None:
    replica = Replica(perceptron(), "sgd")
    forward_backward(replica, *batch())
    for name, place in replica.layers:
        parameter = replica.model.get_parameter(name)
        assert parameter.grad is not None
        assert parameter.requires_grad
        assert parameter.data_ptr() == replica.params[place].data_ptr()
        assert parameter.grad.data_ptr() == replica.grads[place].data_ptr()
    assert replica.layers[-1][1].stop == replica.num_params == 6 * 8 + 8 + 8 * 3 + 3


def test_buckets_cover_the_flat_tensors_in_order_without_exceeding_their_size() -> None:
    replica = Replica(perceptron(), "sgd", bucket_bytes=100)
    sizes = [bucket.stop - bucket.start for bucket in replica.buckets]
    assert sizes == [25, 25, 25, 8]
    assert [bucket.start for bucket in replica.buckets] == [0, 25, 50, 75]
    doubles = Replica(perceptron(torch.float64), "sgd", bucket_bytes=100)
    assert doubles.buckets[0] == slice(0, 12)


def test_parameter_at_names_the_parameter_of_each_element() -> None:
    replica = Replica(perceptron(), "sgd")
    ends = [0, 47, 48, 71, 72, 79, 80, 82]
    names = ["fc1.weight"] * 2 + ["fc2.weight"] * 2 + ["fc1.bias"] * 2 + ["fc2.bias"] * 2
    assert [replica.parameter_at(index) for index in ends] == names


class Tied(nn.Module):
    """An embedding whose weights are the output layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embed(tokens))
        return logits


def test_tied_weights_occur_once_and_stay_tied() -> None:
    model = Tied()
    replica = Replica(model, "adam")
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    forward_backward(replica, tokens, tokens)
    replica.step(0.1)

    assert replica.num_params == 20
    assert model.out.weight is model.embed.weight
    copy = replica.copy_model()
    assert copy.get_parameter("embed.weight").data_ptr() != replica.params.data_ptr()
    assert torch.equal(copy(tokens), model(tokens))


def test_frozen_parameters_are_left_out_and_do_not_change() -> None:
    model = perceptron()
    model.fc1.requires_grad_(requires_grad=False)
    before = model.fc1.weight.clone()
    replica = Replica(model, "sgd", weight_decay=0.5)
    forward_backward(replica, *batch())
    replica.step(0.1)

    assert [name for name, _ in replica.layers] == ["fc2.weight", "fc2.bias"]
    assert torch.equal(model.fc1.weight, before)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3).double()),
            r"1\.weight is torch\.float64, but 0\.weight is torch\.float32",
        ),
        (nn.ReLU(), "no parameter is trainable"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "layer 0 has sparse=True, must be False"),
        (
            nn.ParameterDict({"edges": torch.eye(2).to_sparse()}),
            "parameter edges has the layout",
        ),
        (nn.Linear(2, 1).to(torch.bfloat16), r"model\.float\(\).*precision: bf16"),
        (nn.Linear(2, 1).to(torch.float16), r"model\.float\(\).*precision: bf16"),
    ],
)
def test_a_model_that_cannot_be_trained_so_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Replica(model, "sgd")


def test_the_fingerprint_tells_names_shapes_types_and_activations_apart() -> None:
    frozen = perceptron()
    frozen.fc1.requires_grad_(requires_grad=False)
    models = [
        perceptron(),
        SimpleNN(8, 6, 3),
        SimpleNN(6, 9, 3),
        SimpleNN(6, 8, 3, "tanh"),
        SimpleNN(6, 8, 3, "gelu"),
        perceptron(torch.float64),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        frozen,
    ]
    fingerprints = {Replica(model, "sgd").fingerprint for model in models}
    assert len(fingerprints) == len(models)
    assert Replica(SimpleNN(6, 8, 3), "adam").fingerprint in fingerprints


def test_a_huge_finite_gradient_has_a_finite_norm() -> None:
    replica = Replica(perceptron(), "sgd")
    replica.grads.copy_(torch.full((83,), 1e30))
    assert replica.clip(GradientClipping(enabled=True, max_norm=1.0)) == pytest.approx(
        1e30 * math.sqrt(83)
    )
    assert torch.linalg.vector_norm(replica.grads).item() == pytest.approx(1.0)


def test_the_norm_of_millions_of_small_elements_loses_none() -> None:
    replica = Replica(nn.Linear(2560, 2500), "sgd")
    replica.grads.fill_(1e-3)
    assert replica.grad_norm() == pytest.approx(1e-3 * replica.num_params**0.5, rel=1e-4)


def test_layer_norms_are_those_of_each_parameter() -> None:
    replica = Replica(perceptron(), "sgd")
    forward_backward(replica, *batch())
    norms = replica.layer_norms()

    assert list(norms) == ["fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"]
    fc1 = replica.model.get_parameter("fc1.weight").grad
    assert fc1 is not None
    assert norms["fc1.weight"] == pytest.approx(fc1.norm().item())
    assert math.hypot(*norms.values()) == pytest.approx(replica.grad_norm())
    assert replica.layer_norms(torch.zeros(83)) == dict.fromkeys(norms, 0.0)


def test_a_snapshot_and_a_copied_model_keep_the_weights_of_their_moment() -> None:
    replica, other = Replica(perceptron(), "sgd"), Replica(SimpleNN(6, 8, 3), "sgd")
    inputs, targets = batch()
    snapshot, copy, before = replica.snapshot(), replica.copy_model(), replica.model(inputs)
    forward_backward(replica, inputs, targets)
    replica.step(0.5)

    other.load(snapshot)
    for model in (copy, other.model):
        assert torch.equal(model(inputs), before)
    assert not torch.equal(replica.model(inputs), before)
    assert torch.equal(replica.snapshot(snapshot), replica.params)
    assert (copy.training, replica.model.training) == (False, True)


@pytest.mark.parametrize("planted", ["fc1.weight", "fc1.bias", "fc2.weight"])
def test_a_nan_weight_is_traced_to_its_layer(planted: str) -> None:
    replica = Replica(perceptron(), "sgd")
    replica.model.get_parameter(planted).data.view(-1)[1] = math.nan
    says = f"loss is nan at layer {planted[:3]}, whose output holds nan; lower learning_rate"
    with pytest.raises(NonFiniteLoss, match=says):
        forward_backward(replica, *batch())


@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_nan_in_the_batch_blames_the_data(microbatch: int | None) -> None:
    replica = Replica(perceptron(), "sgd")
    inputs, targets = batch(size=10)
    inputs[4, 2] = math.nan
    says = "loss is nan because the batch's inputs hold nan: check the dataset"
    with pytest.raises(NonFiniteLoss, match=says):
        forward_backward(replica, inputs, targets, microbatch)


def test_a_layer_that_overflows_in_the_second_microbatch_is_named() -> None:
    model = perceptron()
    replica = Replica(model, "sgd")
    model.fc1.weight.data.fill_(1e30)
    inputs, targets = batch(size=10)
    inputs[:] = 1e-30
    inputs[4] = 1e30
    sizes: list[int] = []
    model.register_forward_hook(lambda _module, given, _output: sizes.append(len(given[0])))
    with pytest.raises(NonFiniteLoss, match="at layer fc1, whose output holds inf"):
        forward_backward(replica, inputs, targets, 3)
    assert max(sizes) == 3


class InfiniteGradient(nn.Module):
    """x + sqrt(weight) at weight 0: a finite value with an infinite slope."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.bend.sqrt()


@pytest.mark.parametrize("microbatch", [None, 4])
def test_an_infinite_gradient_is_named_with_the_whole_loss(microbatch: int | None) -> None:
    replica = Replica(nn.Sequential(nn.Linear(6, 3), InfiniteGradient()), "sgd")
    inputs, targets = batch(size=10)
    loss = functional.cross_entropy(replica.model(inputs), targets).item()
    says = r"gradient is (-?inf|nan) at layer 1\.bend \(loss"
    with pytest.raises(NonFiniteLoss, match=says) as caught:
        forward_backward(replica, inputs, targets, microbatch)
    shown = re.search(r"loss (\S+)\)", str(caught.value))
    assert shown is not None
    assert float(shown[1]) == pytest.approx(loss, rel=1e-5)


def test_looking_for_the_layer_leaves_no_hooks_and_no_changed_weights() -> None:
    replica = Replica(perceptron(), "sgd")
    before = replica.snapshot()
    inputs, targets = batch()
    with pytest.raises(NonFiniteLoss):
        forward_backward(replica, inputs * math.inf, targets)

    assert torch.equal(replica.params, before)
    assert not any(module._forward_hooks for module in replica.model.modules())
    assert math.isfinite(forward_backward(replica, inputs, targets))


class Restless(nn.Module):
    """Changes about everything as it is evaluated, and refuses to be copied."""

    mean: Tensor
    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.frozen = nn.BatchNorm1d(3, affine=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("flag", torch.tensor(0))
        self.lock = threading.Lock()

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                self.fc.weight.zero_()
                self.fc.bias.data = torch.ones(2)
                self.mean += 1
                self.flag = self.flag + 1
        outputs: Tensor = self.fc(self.frozen(inputs))
        return outputs


@pytest.mark.parametrize("error", [None, KeyError()])
def test_a_model_that_was_evaluated_is_as_before_whatever_it_does_then(
    error: Exception | None,
) -> None:
    model = Restless()
    replica = Replica(model, "sgd", ema_decay=0.5)
    model.frozen.eval()
    replica.update_average()
    replica.params.add_(1.0)
    replica.update_average()
    weights, flag = replica.snapshot(), model.flag
    average = replica.evaluated.clone()
    with suppress(KeyError), replica.evaluating() as lent:
        seen = torch.cat([each.detach().flatten() for each in (model.fc.weight, model.fc.bias)])
        lent.eval()(torch.randn(2, 3)).sum().backward()
        lent.requires_grad_(False)
        if error is not None:
            raise error
    assert lent is model
    assert torch.equal(seen, average)
    assert not torch.equal(average, weights)
    assert torch.equal(replica.evaluated, average)
    assert torch.equal(replica.params, weights)
    for name, place in replica.layers:
        parameter = model.get_parameter(name)
        assert parameter.grad is not None
        assert parameter.requires_grad
        assert parameter.data_ptr() == replica.params[place].data_ptr()
        assert parameter.grad.data_ptr() == replica.grads[place].data_ptr()
    assert not replica.grads.any()
    assert (model.training, model.fc.training, model.frozen.training) == (True, True, False)
    assert not model.mean.any()
    assert model.flag is flag
    assert not model.flag


class Merging(nn.Linear):
    """Merges itself for evaluation, and drops what it was trained as."""

    def eval(self) -> Self:
        del self.weight
        return super().eval()


def test_a_model_without_its_parameters_in_evaluation_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight is gone in evaluation mode: eval\(\)"):
        Replica(Merging(3, 2), "sgd").copy_model()


def test_parts_of_a_step_move_the_average_as_the_whole_step_does() -> None:
    averages = []
    for num_parts in (1, 4):
        replica = Replica(perceptron(), "sgd", ema_decay=0.5)
        replica.params.fill_(0.0)
        replica.update_average()
        replica.params.fill_(1.0)
        for _ in range(num_parts):
            replica.update_average(1 / num_parts)
        averages.append(replica.evaluated)
    torch.testing.assert_close(averages[1], averages[0])
    torch.testing.assert_close(averages[0], torch.full_like(averages[0], 0.5))


def test_what_is_saved_meanwhile_are_the_weights_themselves() -> None:
    replica = Replica(perceptron(), "sgd", ema_decay=0.5)
    replica.update_average()
    replica.params.add_(1.0)
    with replica.evaluating():
        saved = replica.saved_parameters()
    for name, place in replica.layers:
        assert torch.equal(saved[name].flatten(), replica.params[place])
