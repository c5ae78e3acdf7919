"""Modules as people have them: tied, frozen, compiled, with adapters, of other libraries."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Cluster
from own_workloads import ALGORITHMS, NODES, alone, losses_of, run, settings_for
from smolcluster.configs.schema import AlgorithmName
from smolcluster.data.dataset import Batch
from smolcluster.data.digits import load_digits
from smolcluster.errors import CheckpointError
from smolcluster.training.build import build
from smolcluster.training.checkpoint import restore
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload
from tiers import at_night

NUM_SAMPLES, LENGTH, VOCABULARY = 64, 6, 11


class Table:
    """A map-style dataset of samples in a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def tokens() -> Table:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
    return Table([{"input_ids": row, "labels": row} for row in rows])


class TwoHeads(nn.Module):
    """Two inputs, two outputs, a tied embedding, a frozen layer, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.features = nn.Linear(LENGTH, 8).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(8)
        self.words = nn.Linear(8, VOCABULARY, bias=False)
        self.words.weight = self.embedding.weight
        self.length = nn.Linear(8, 1)
        self.forgotten = nn.Linear(8, 8)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Map (batch, LENGTH) and (batch, 1) to word logits (batch, vocabulary) and a length (batch, 1)."""
        hidden = self.embedding(ids).mean(dim=1) * scale + self.features(ids.float())
        hidden = self.norm(hidden)
        return {"words": self.words(hidden), "length": self.length(hidden)}


def two_losses(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["inputs"]["ids"], scale=batch["inputs"]["scale"])
    word_loss = functional.cross_entropy(output["words"], batch["target"])
    total: Tensor = word_loss + output["length"].square().mean()
    return total


def two_headed(*, compiled: bool = False) -> Workload:
    generator = torch.Generator().manual_seed(5)
    rows = [
        {
            "inputs": {
                "ids": torch.randint(0, VOCABULARY, (LENGTH,), generator=generator),
                "scale": torch.rand(1, generator=generator),
            },
            "target": index % VOCABULARY,
        }
        for index in range(NUM_SAMPLES + 1)
    ]
    torch.manual_seed(7)
    model: nn.Module = TwoHeads()
    if compiled:
        model = cast("nn.Module", torch.compile(model, backend="eager"))
    return Workload(model, two_losses, Table(rows), name="two heads")


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(2)
    model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def hugging_face() -> Workload:
    return Workload(llama(), language_loss, tokens(), name="llama")


def lora_model(base: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    torch.manual_seed(3)
    model: nn.Module = peft.get_peft_model(base, config)
    return model


def lora() -> Workload:
    return Workload(lora_model(llama()), language_loss, tokens(), name="lora")


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["input"].view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    return functional.cross_entropy(model(images), batch["target"])


def residual_network() -> Workload:
    from torchvision.models import shufflenet_v2_x0_5

    images, targets = load_digits(0).train.batch(torch.arange(48))
    pairs = zip(images, targets, strict=True)
    rows = [{"input": image, "target": target} for image, target in pairs]
    torch.manual_seed(4)
    return Workload(shufflenet_v2_x0_5(num_classes=10), image_loss, Table(rows), name="shufflenet")


MODELS: dict[str, Callable[[], Workload]] = {
    "two heads": two_headed,
    "compiled": lambda: two_headed(compiled=True),
    "Hugging Face": hugging_face,
    "LoRA": lora,
    "torchvision": residual_network,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "model", ["two heads", "LoRA", *at_night("compiled", "Hugging Face", "torchvision")]
)
def test_a_model_is_trained_as_it_is_and_one_worker_equals_one_process_bit_for_bit(
    tmp_path: Path, model: str, algorithm: AlgorithmName
) -> None:
    workload = MODELS[model]()
    settings = settings_for(algorithm, 1)
    cluster = run(settings, tmp_path, algorithm, workload)
    expected, training = alone(settings, workload)
    assert losses_of(cluster) == expected
    theirs, own = cluster.training.replica.model.state_dict(), training.replica.model.state_dict()
    begun = workload.new_model().state_dict()
    assert any(not torch.equal(own[name], begun[name]) for name in own)
    for name, tensor in own.items():
        assert torch.equal(theirs[name], tensor), name


def test_tied_weights_travel_once_and_frozen_ones_not_at_all() -> None:
    replica = Replica(TwoHeads(), "sgd")
    names = [name for name, _ in replica.layers]
    assert names[0] == "embedding.weight"
    assert not {"words.weight", "features.weight", "features.bias"} & set(names)


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_parameter_that_nothing_uses_stays_as_it_is_and_is_named_once(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    settings = settings_for(algorithm, 1, "optimizer=sgd")
    workload = two_headed()
    cluster = run(settings, tmp_path, algorithm, workload)
    forgotten = cluster.training.replica.model.get_parameter("forgotten.bias")
    assert torch.equal(forgotten, workload.new_model().get_parameter("forgotten.bias"))
    [line] = [line for line in cluster.log_lines if "gave no gradient" in line]
    assert "forgotten.weight, forgotten.bias:" in line


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checkpoints_of_adapters_hold_no_base_and_say_which_one_it_is(
    tmp_path: Path, algorithm: AlgorithmName
) -> None:
    workload = lora()
    settings = settings_for(algorithm, 1, "checkpoint_steps=2")
    cluster = run(settings, tmp_path, algorithm, workload)
    saved = cluster.store.newest_good()
    assert saved is not None
    assert saved.model
    assert all("lora_" in name for name in saved.model)
    assert saved.state.base is not None
    assert saved.state.base == cluster.training.replica.base
    again = settings_for(algorithm, 1, "num_epochs=3")
    resumed = Cluster(again, tmp_path, algorithm=algorithm, workload=workload, resume=True)
    worker = resumed.worker(1, node=NODES[0])
    resumed.server.finish()
    worker.finish()
    assert losses_of(resumed) == alone(again, workload)[0][4:]
    other = copy.deepcopy(llama())
    with torch.no_grad():
        other.get_parameter("model.norm.weight").add_(1)
    elsewhere = Workload(lora_model(other), language_loss, tokens(), name="lora")
    replica = build(
        again.train,
        again.cluster.seed,
        again.node.dataset,
        torch.device("cpu"),
        workload=elsewhere,
    ).replica
    with pytest.raises(CheckpointError, match="is of adapters on a model made on the spot"):
        restore(replica, saved)
