"""Runs of all kinds of workloads: in one process, and by a cluster in this process."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Cluster, Server, local_settings
from smolcluster.configs.schema import AlgorithmName, Settings
from smolcluster.data.dataset import Batch
from smolcluster.data.digits import load_digits
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.builtin import builtin_workload, cross_entropy
from smolcluster.training.loop import StepTaken, training_steps
from smolcluster.training.workload import Terms, Workload

CPU = torch.device("cpu")
ALGORITHMS: list[AlgorithmName] = ["edp", "syncps"]
NODES = ("pi5", "win", "macbook", "mini1")
NUM_SAMPLES = 160
"""Of `normed`."""


class Rows:
    """A map-style dataset of inputs and targets."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.inputs[index], "target": self.targets[index]}


def settings_for(algorithm: AlgorithmName, num_workers: int, *overrides: str) -> Settings:
    own = ("num_epochs=2", f"min_workers={num_workers}", *overrides)
    if algorithm == "edp":
        own = ("worker_update_interval=1", "batch_size=32", *own)
    elif algorithm == "syncps":
        shares = [f"batch_share.{node}={1 / num_workers}" for node in NODES[:num_workers]]
        own = ("global_batch_size=32", *shares, *own)
    else:
        plain = ("mode=sync", "outer_lr=1", "outer_momentum=0", "codec_up=null", "codec_down=null")
        own = ("batch_size=32", *plain, *own)
    return local_settings(*own, workers=num_workers, algorithm=algorithm)


def steps_alone(
    settings: Settings, workload: Workload | None = None, algorithm: AlgorithmName = "syncps"
) -> tuple[list[StepTaken], TrainingContext]:
    """Every step of a single process with the same batches."""
    train, seed = settings.run_config("alone", algorithm).train, settings.cluster.seed
    training = build(train, seed, settings.node.dataset, CPU, workload=workload)
    return list(training_steps(training, train)), training


def alone(
    settings: Settings, workload: Workload | None = None, algorithm: AlgorithmName = "syncps"
) -> tuple[list[float], TrainingContext]:
    """The losses of every step of a single process with the same batches."""
    steps, training = steps_alone(settings, workload, algorithm)
    return [step.loss for step in steps], training


def run(
    settings: Settings,
    folder: Path,
    algorithm: AlgorithmName,
    workload: Workload | None = None,
    *,
    server_class: type[Server] | None = None,
    resume: bool = False,
) -> Cluster:
    """A run that ends well, with all stores and workers of the settings."""
    folder.mkdir(exist_ok=True)
    cluster = Cluster(
        settings, folder, server_class, algorithm=algorithm, workload=workload, resume=resume
    )
    stores = [cluster.start_store(node) for node in settings.cluster.store_nodes[1:]]
    num_workers = settings.cluster.num_workers
    workers = [cluster.worker(i + 1, node=NODES[i]) for i in range(num_workers)]
    cluster.finish(*workers, *stores)
    return cluster


def first_saved(whole: Cluster) -> int:
    """The first step that was saved: a later one is left out while the disk is busy."""
    return min(int(path.name[5:]) for path in (whole.folder / "checkpoints").glob("step-*"))


def killed_after(source: Path, folder: Path, step: int) -> Path:
    """A run's folder as it is when everything is killed soon after that step was saved.

    With what workers have kept of the run on their own machines.
    """
    place, kept = Path("checkpoints") / f"step-{step:08d}", "test-run"
    shutil.copytree(source / place, folder / place)
    (folder / "checkpoints" / "latest").symlink_to(place.name)
    if (source / kept).exists():
        shutil.copytree(source / kept, folder / kept)
    return folder


def assert_takes_the_same_steps(
    cluster: Cluster, steps: Sequence[StepTaken], training: TrainingContext
) -> None:
    """Those of a single process, and its weights at the end.

    Bit for bit where one worker's gradients are the run's.
    """
    is_exact = cluster.settings.cluster.num_workers == 1 and cluster.algorithm != "diloco"
    rtol, atol = (0.0, 0.0) if is_exact else (1e-4, 1e-6)
    for record, step in zip(cluster.metrics.steps, steps, strict=True):
        found = [record.values[name] for name in ("loss", "lr", "grad_norm")]
        expected = [step.loss, step.learning_rate, step.grad_norm]
        assert found == pytest.approx(expected, rel=rtol, abs=atol, nan_ok=True), record.step
    theirs, own = cluster.training.replica, training.replica
    torch.testing.assert_close(theirs.params, own.params, rtol=rtol, atol=atol)
    torch.testing.assert_close(theirs.evaluated, own.evaluated, rtol=rtol, atol=atol)
    if is_exact:
        assert_same(theirs.model.state_dict(), own.model.state_dict())


class Normed(nn.Module):
    """Two batch norms, one of which averages over all batches; a counter; and a table that never changes."""

    num_rows: Tensor
    largest: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.cumulative = nn.BatchNorm1d(12, momentum=None)
        self.outer = nn.Linear(12, 4)
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(8), persistent=False)
        self.register_buffer("table", torch.linspace(0, 1, 12))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 8) to logits (batch, 4)."""
        if self.training:
            self.num_rows += len(inputs)
            self.largest = torch.maximum(self.largest, inputs.detach().abs().amax(dim=0))
        hidden = self.norm(self.inner(inputs / (1 + self.largest))).relu() + self.table
        logits: Tensor = self.outer(self.cumulative(hidden))
        return logits


def loss(model: nn.Module, batch: Batch) -> Terms:
    logits = model(batch["input"])
    return functional.cross_entropy(logits, batch["target"], reduction="sum"), len(logits)


def double_normed() -> nn.Module:
    return Normed().double()


def normed(
    *, held_out: bool = False, double: bool = False, num_samples: int = NUM_SAMPLES
) -> Workload:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 8, generator=generator)
    rows = Rows(inputs, torch.randint(0, 4, (num_samples,), generator=generator))
    model = double_normed if double else Normed
    return Workload(model, loss, rows, rows if held_out else None, name="normed")


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


# Kinds of training, each with what a server and a checkpoint must keep of it.

LENGTH, VOCABULARY, IGNORED = 6, 11, -100


def scaled_digits(settings: Settings) -> Workload:
    """With so large a loss the gradient overflows in float16 until the scale has been halved some times."""

    def scaled(model: nn.Module, batch: Batch) -> Terms:
        total, count = cross_entropy(model, batch)
        return total * 2000.0, count

    workload = builtin_workload(settings.train, load_digits(settings.cluster.seed))
    workload.loss = scaled
    return workload


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
        for index in range(65)
    ]
    torch.manual_seed(7)
    model: nn.Module = TwoHeads()
    if compiled:
        model = cast("nn.Module", torch.compile(model, backend="eager"))
    return Workload(model, two_losses, rows, name="two heads")


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


def lora_model(base: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    torch.manual_seed(3)
    model: nn.Module = peft.get_peft_model(base, config)
    return model


def language(model: nn.Module, name: str) -> Workload:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, VOCABULARY, (64, LENGTH), generator=generator)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    return Workload(model, language_loss, samples, name=name)


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["input"].view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    return functional.cross_entropy(model(images), batch["target"])


def shufflenet() -> Workload:
    from torchvision.models import shufflenet_v2_x0_5

    images, targets = load_digits(0).train.batch(torch.arange(48))
    torch.manual_seed(4)
    rows = Rows(images, targets)
    return Workload(shufflenet_v2_x0_5(num_classes=10), image_loss, rows, name="shufflenet")


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


def ragged(*, held_out: bool = False, **options: Any) -> Workload:
    """Samples with 0 to 5 targets each: most of them with one, some with all."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, 8, generator=generator)
    targets = torch.randint(0, 4, (200, 5), generator=generator)
    lengths = torch.tensor([5, 1, 0, 1, 1, 1, 5, 1])[torch.arange(200) % 8]
    targets[torch.arange(5) >= lengths[:, None]] = IGNORED
    rows = Rows(inputs, targets)
    tagger = Tagger()  # threads that build it at once would draw other frozen weights
    return Workload(tagger, tag_loss, rows, rows if held_out else None, name="tags", **options)


@dataclass(frozen=True)
class Kind:
    """What is trained, and how."""

    overrides: tuple[str, ...] = ()
    make: Callable[[Settings], Workload | None] = lambda _: None
    """None: the digits."""


SMALL = ("model.hidden=16", "batch_size=64", "global_batch_size=64")
SCHEDULE = ("lr_schedule.warmup_iters=20", "lr_schedule.min_lr=0.0001")
MOMENTUM = ("optimizer=sgd", "optimizer_args.momentum=0.9", "learning_rate=0.05", "ema_decay=0.8")
NUM_STEPS = 17
"""Two more than there are in three epochs of `normed`."""
CLIPPED = ("gradient_clipping.max_norm=null", "gradient_clipping.max_value=0.01")
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "adam": Kind((*SMALL, *SCHEDULE)),
        "momentum": Kind((*SMALL, *MOMENTUM)),
        "RMSprop": Kind((*SMALL, "optimizer=torch.optim.RMSprop", "weight_decay=0.01")),
        "NAdam": Kind((*SMALL, "optimizer=NAdam", *CLIPPED)),
        "Adafactor": Kind((*SMALL, "optimizer=Adafactor", "learning_rate=0.05")),
        "muon": Kind((*SMALL, "optimizer=muon", "weight_decay=0.1")),
        "float16": Kind((*SMALL, "precision=fp16"), scaled_digits),
        "buffers": Kind((), lambda _: normed()),
        "so many steps": Kind(
            (f"num_steps={NUM_STEPS}", "lr_schedule.min_lr=0.0001", "lr_schedule.warmup_iters=1"),
            lambda _: normed(held_out=True),
        ),
        "ragged": Kind((), lambda _: ragged()),
        "two heads": Kind((), lambda _: two_headed()),
        "compiled": Kind((), lambda _: two_headed(compiled=True)),
        "Hugging Face": Kind((), lambda _: language(llama(), "llama")),
        "LoRA": Kind((), lambda _: language(lora_model(llama()), "lora")),
        "torchvision": Kind((), lambda _: shufflenet()),
    }
)
