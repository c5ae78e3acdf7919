"""Layers of a model are measured: bytes exactly, seconds by their order."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pretrained_models import transformers
from smolcluster.training.stages.measure import (
    LayerToMeasure,
    key_of,
    measure_layers,
    measure_workload,
)
from smolcluster.training.workload import Workload
from waiting import Clock

CPU = torch.device("cpu")


class Slow(nn.Module):
    """A block whose forward and backward each take a second of the clock a repeat."""

    def __init__(self, repeats: int, clock: Clock) -> None:
        super().__init__()
        self.linear, self.repeats, self.clock = nn.Linear(8, 8, bias=False), repeats, clock

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(self.repeats):
            self.work()
            value = self.linear(value).tanh()
            value.register_hook(self.work)  # type: ignore[no-untyped-call]
        return value

    def work(self, _gradient: Tensor | None = None) -> None:
        self.clock.now += 1.0


def test_bytes_are_exact_and_blocks_are_measured_once() -> None:
    built: list[int] = []
    model = [nn.Embedding(10, 8), *(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 10)]

    def layers() -> Iterator[LayerToMeasure]:
        for place, layer in enumerate(model):

            def build(place: int = place, layer: nn.Module = layer) -> nn.Module:
                built.append(place)
                return layer

            yield key_of(layer), build

    tokens = torch.arange(6).reshape(2, 3)
    found = measure_layers(layers(), tokens, lambda output: output.sum(), CPU)
    assert built == [0, 1, 6]
    assert len(found) == 7
    assert found[1] == found[5]
    assert [each.trained_bytes for each in found] == [4 * 80, *[4 * 72] * 5, 4 * 90]
    assert [each.output_bytes for each in found] == [*[4 * 2 * 3 * 8] * 6, 0]
    assert found[1].activation_bytes == 4 * 2 * 3 * 8, "a linear layer keeps its input alone"
    assert found[0].activation_bytes == tokens.nbytes
    assert all(min(each.forward_s, each.input_s, each.weight_s) >= 0 for each in found)


def test_weights_without_gradients_are_frozen_and_cost_no_weight_gradients() -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    lora = nn.Linear(4, 4, bias=False)
    layers = [(key_of(each), lambda each=each: each) for each in (layer, lora)]
    frozen, trained = measure_layers(layers, torch.ones(2, 4), lambda output: output.sum(), CPU)
    assert (frozen.trained_bytes, frozen.frozen_bytes) == (0, 4 * 20)
    assert (trained.trained_bytes, trained.frozen_bytes) == (4 * 16, 0)
    assert lora.weight.grad is None, "gradients are not left behind"


def test_a_layer_that_computes_in_place_is_measured() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)]
    each_of = [(key_of(each), lambda each=each: each) for each in layers]
    _, relu, _ = measure_layers(each_of, torch.ones(2, 4), lambda output: output.sum(), CPU)
    assert relu.activation_bytes == relu.output_bytes == 4 * 2 * 4


def test_what_takes_longer_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("smolcluster.training.stages.measure._now", lambda _device: clock())
    quick, slow = Slow(1, clock), Slow(40, clock)
    layers = [(key_of(each), lambda each=each: each) for each in (quick, slow)]
    one, other = measure_layers(layers, torch.ones(4, 8), lambda output: output.sum(), CPU)
    assert (one.forward_s, one.input_s, one.weight_s) == (1, 1, 0)
    assert (other.forward_s, other.input_s, other.weight_s) == (40, 40, 0)
    assert other.activation_bytes > 20 * one.activation_bytes


def test_a_hugging_face_model_is_measured_block_by_block() -> None:
    """The first block has the embedding with it, the last one the head; those between are alike."""
    config = transformers().LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    tokens = torch.randint(0, 50, (2, 8))
    workload = Workload(
        lambda: transformers().AutoModelForCausalLM.from_config(config), loss, [tokens[0]]
    )
    found = measure_workload(workload, 0, 1, CPU).layers
    block = found[1].trained_bytes
    assert found[2] == found[1]
    assert found[0].trained_bytes == block + 4 * 50 * 16
    assert found[3].trained_bytes == block + 4 * 50 * 16 + 4 * 16
    assert found[1].output_bytes == 4 * 1 * 8 * 16
    assert found[3].activation_bytes > found[1].activation_bytes
