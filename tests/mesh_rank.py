"""A rank of a mesh as a process of its own: `mesh_rank.py RANK WORLD_SIZE FOLDER CASE...`.

Trains each case and leaves what came of it in FOLDER/CASE.json; the test compares it with one process.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.configs.schema import GPTConfig, TrainConfig
from smolcluster.models.gpt import GPT
from smolcluster.training.recipe import Training
from smolcluster.training.schedules.instructions import SCHEDULES
from smolcluster.training.workload import Workload

if TYPE_CHECKING:
    from smolcluster.algorithms.Mesh.trainer import MeshTrainer

SEED, NUM_STEPS, LENGTH, WORDS = 3, 3, 6, 24
NUM_EXPERTS = 5
NUM_GATHERED = 2
"""Steps after which weights are gathered, while the next ones are taken."""
MOST_LAYERS = 16
V_SHAPED = ("interleaved", "zb-v", "zbv", "dualpipev")
CPU = torch.device("cpu")
TRAIN: dict[str, Any] = {
    "dataset": {"name": "digits"},
    "batch_size": 16,
    "num_epochs": 2,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "gradient_clipping": {"max_norm": 0.4},
    "weight_decay": 0.01,
}
ADAM = {"optimizer": "adam", "learning_rate": 0.01}
SHARDING = {
    "pp_stage0": {"workers": [0, 1]},
    "pp_stage1": {"workers": [2, 3]},
    "pp_stage0_colpar": {"workers": [0, 1], "modules": ["*.c_attn", "*.c_fc"]},
    "pp_stage0_rowpar": {"workers": [0, 1], "modules": ["*.c_proj"]},
}
"""Queries, keys and values are cut by columns, as others say of them."""


@dataclass(frozen=True)
class Case:
    """A mesh, and what is trained on it."""

    mesh: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    double: bool = False
    num_layers: int = 4
    num_heads: int = 4
    num_words: int = WORDS
    architecture: str | None = None
    """Of transformers; None: the GPT of ours."""
    own: Literal["bare", "uncut"] | None = None
    """A model of layers some of which have no parameters, or one that does not say how it is cut."""
    backend: str = "inductor"
    """Of `torch.compile`; `aot_eager` traces the same graphs, and makes no C++ of them."""

    @property
    def config(self) -> MeshConfig:
        return MeshConfig.model_validate({"mesh": self.mesh, **self.keys})

    @property
    def training(self) -> TrainConfig:
        return TrainConfig.model_validate({**TRAIN, **self.train})


MUON = {"optimizer": "muon", "learning_rate": 0.01}
CASES = {
    "dp2-pp2-muon": Case({"dp": 2, "pp": 2}, {"microbatches": 2}, MUON),
    "tp4": Case({"tp": 4}),
    "fsdp4": Case({"fsdp": 4}, {"microbatches": 2}, ADAM, double=True),
    "dp2-fsdp2": Case({"dp": 2, "fsdp": 2}, {"activation_checkpointing": "full"}),
    "tp2-pp2-1f1b": Case(
        {"tp": 2, "pp": 2}, {"microbatches": 4, "sharding": SHARDING}, ADAM, double=True
    ),
    "pp2-fsdp2-eager": Case(
        {"fsdp": 2, "pp": 2}, {"microbatches": 4, "schedule": "eager-1f1b"}, ADAM, double=True
    ),
    "pp4-gpipe": Case({"pp": 4}, {"microbatches": 4, "schedule": "gpipe"}),
    "dp2-pp2-zero-bubble": Case(
        {"dp": 2, "pp": 2}, {"microbatches": 2, "schedule": "zero-bubble"}, ADAM, double=True
    ),
    "fsdp2-pp2-zbv": Case(
        {"fsdp": 2, "pp": 2}, {"microbatches": 4, "schedule": "zbv"}, ADAM, double=True
    ),
    "dp2-pp2-dualpipev": Case(
        {"dp": 2, "pp": 2}, {"microbatches": 4, "schedule": "dualpipev"}, ADAM, double=True
    ),
    "fsdp2-pp2-dualpipev": Case(
        {"fsdp": 2, "pp": 2}, {"microbatches": 4, "schedule": "dualpipev"}, ADAM, double=True
    ),
    "tp2-fsdp2": Case({"tp": 2, "fsdp": 2}, {"activation_checkpointing": "selective"}),
    "tp2-pp2-interleaved": Case({"tp": 2, "pp": 2}, {"microbatches": 4, "schedule": "interleaved"}),
    "tp2-fsdp2-sequence": Case(
        *({"tp": 2, "fsdp": 2, "sequence_parallel": True}, {"microbatches": 2}, ADAM), double=True
    ),
    "dp2-tp2-sequence": Case({"dp": 2, "tp": 2, "sequence_parallel": True}),
    "tp2-pp2-sequence-loss": Case(
        {"tp": 2, "pp": 2, "sequence_parallel": True, "loss_parallel": True},
        *({"microbatches": 4}, ADAM),
        double=True,
    ),
    "tp2-pp2-zero-bubble-sequence": Case(
        {"tp": 2, "pp": 2, "sequence_parallel": True, "loss_parallel": True},
        {"microbatches": 4, "schedule": "zero-bubble"},
    ),
    "tp2-fsdp2-loss": Case(
        {"tp": 2, "fsdp": 2, "loss_parallel": True}, {"activation_checkpointing": "full"}
    ),
    "tp2-dp2-uneven-loss": Case({"tp": 2, "dp": 2, "loss_parallel": True}, num_words=25),
    "dp2-tp2-llama": Case({"dp": 2, "tp": 2}, architecture="Llama"),
    "tp2-fsdp2-qwen3": Case({"tp": 2, "fsdp": 2}, architecture="Qwen3"),
    "tp2-pp2-compiled": Case(
        {"tp": 2, "pp": 2, "sequence_parallel": True, "loss_parallel": True},
        {"microbatches": 2, "compile": True},
        num_layers=2,
        backend="aot_eager",
    ),
    "fsdp2-pp2-compiled": Case(
        {"fsdp": 2, "pp": 2},
        {"microbatches": 2, "compile": True, "activation_checkpointing": "full"},
        num_layers=2,
    ),
    "pp4-bare": Case({"pp": 4}, {"microbatches": 4}, ADAM, double=True, own="bare"),
    "dp2-pp2-bare-zero-bubble": Case(
        *({"dp": 2, "pp": 2}, {"microbatches": 4, "schedule": "zero-bubble"}, ADAM),
        double=True,
        own="bare",
    ),
    "dp2-fsdp2-uncut": Case(
        {"dp": 2, "fsdp": 2}, {"microbatches": 2}, ADAM, double=True, own="uncut"
    ),
    "dp2-tp2-bf16": Case({"dp": 2, "tp": 2}, {}, {"precision": "bf16"}),
}


def table(world_size: int, schedules: Sequence[str]) -> dict[str, Case]:
    """Every mesh of so many ranks, with every schedule where it has stages; float64 with Adam."""
    cases = {}
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for mesh in itertools.product(sizes, repeat=4):
        if math.prod(mesh) != world_size:
            continue
        dp, fsdp, tp, pp = mesh
        for schedule in schedules if pp > 1 else ("gpipe",):
            if pp * (1 + (schedule in V_SHAPED)) > MOST_LAYERS:
                continue
            num = 2 if pp == 1 else 16 // (dp * fsdp)
            keys = {"microbatches": num, "schedule": schedule}
            name = f"dp{dp}-fsdp{fsdp}-tp{tp}-pp{pp}-{schedule}"
            cases[name] = Case(
                {"dp": dp, "fsdp": fsdp, "tp": tp, "pp": pp},
                *(keys, ADAM),
                double=True,
                num_layers=MOST_LAYERS,
                num_heads=8,
            )
    return cases


class Sentences:
    """Tokens by arithmetic, of which the last ones of every third sample are no loss terms."""

    def __len__(self) -> int:
        return 24  # the second step of an epoch has 8 samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH + 1) * (index % 7 + 1) + index) % WORDS
        targets = tokens[1:].clone()
        if index % 3 == 0:
            targets[-2:] = -100
        return {"inputs": tokens[:-1], "targets": targets}


def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    output, targets = model(batch["inputs"]), batch["targets"].flatten()
    logits = getattr(output, "logits", output)
    total = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total, (targets != -100).sum()


def workload(case: Case) -> Workload:
    config = GPTConfig(
        model_dim=16,
        num_layers=case.num_layers,
        num_heads=case.num_heads,
        ff_dim=32,
        max_seq_len=LENGTH,
        dropout=0.0,
    )
    dtype = torch.float64 if case.double else torch.float32

    def model() -> torch.nn.Module:
        if case.own == "bare":
            return bare().to(dtype)
        if case.own == "uncut":
            return Uncut().to(dtype)
        if case.architecture is None:
            return GPT(config, case.num_words).to(dtype)
        return of_transformers(case.architecture, case).to(dtype)

    return Workload(
        model,
        loss,
        Sentences(),
        name="arithmetic",
        training=Training(),
    )


class AsFloats(torch.nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return functional.one_hot(tokens, WORDS).to(torch.float64)


def bare() -> torch.nn.Sequential:
    """The first and the third layer have no parameters."""
    first, second = torch.nn.Linear(WORDS, 8), torch.nn.Linear(8, WORDS)
    return torch.nn.Sequential(AsFloats(), first, torch.nn.Tanh(), second)


class Uncut(torch.nn.Module):
    """Does not say how it is cut, and has parameters of its own beside its modules'.

    One is a number, one does not lie in memory row by row, and samples say which experts compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(NUM_EXPERTS))
        self.out = torch.nn.Linear(8, WORDS)
        self.out.weight = torch.nn.Parameter(torch.randn(8, WORDS).mul(0.1).t())
        self.scale = torch.nn.Parameter(torch.full((3,), 0.5))
        self.warmth = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale.sum()
        routed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mine = tokens[:, 0] % NUM_EXPERTS == number
            if mine.any():
                routed[mine] = expert(hidden[mine])
        logits: Tensor = self.out(torch.tanh(routed)) * self.warmth
        return logits


def of_transformers(architecture: str, case: Case) -> torch.nn.Module:
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=case.num_words,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=case.num_layers,
        num_attention_heads=case.num_heads,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=LENGTH,
    )
    model: torch.nn.Module = getattr(transformers, f"{architecture}ForCausalLM")(config)
    return model


@contextmanager
def lengths_of_norms() -> Iterator[set[int]]:
    """The numbers of tokens that layer norms are given on this rank."""
    lengths = set[int]()

    def note(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.LayerNorm):
            lengths.add(getattr(inputs[0], "_local_tensor", inputs[0]).size(1))

    handle = register_module_forward_pre_hook(note)
    try:
        yield lengths
    finally:
        handle.remove()


class Gathered:
    """The whole state of a mesh on rank 0; every rank makes it."""

    def __init__(self, trainer: "MeshTrainer") -> None:
        from smolcluster.algorithms.Mesh.gathering import StateGathering
        from smolcluster.algorithms.Mesh.shards import Shards
        from smolcluster.algorithms.Mesh.trainer import WEIGHTS

        told = trainer.groups.all_told([[slot.name, slot.shape] for slot in trainer.slots])
        self.shapes = shapes = {name: tuple(shape) for each in told for name, shape in each}
        ends = [0]
        for shape in shapes.values():
            ends.append(ends[-1] + math.prod(shape))
        self._layers = [
            (name, slice(*ends[number : number + 2])) for number, name in enumerate(shapes)
        ]
        self._is_first = trainer.groups.rank == 0
        shards = Shards(trainer, self._layers)
        self._gathering = StateGathering(trainer, shards)
        moments = (WEIGHTS, *trainer.optimizer.moment_names)
        self.state = {each: torch.zeros(ends[-1], dtype=trainer.dtype) for each in moments}

    def begin(self) -> None:
        self._gathering.begin(self.state if self._is_first else None)

    def named(self, moment: str = "") -> dict[str, Tensor]:
        """On rank 0, a moment of each parameter when it is here, flat."""
        self._gathering.wait()
        return {name: self.state[moment][place] for name, place in self._layers}

    def weights(self) -> dict[str, list[float]]:
        return {name: each.tolist() for name, each in self.named().items()}


def train_case(name: str, case: Case, folder: Path) -> None:
    from smolcluster.algorithms.Mesh.groups import Groups
    from smolcluster.algorithms.Mesh.trainer import MeshTrainer

    groups = Groups(case.config.mesh, CPU, Mock())
    trainer = MeshTrainer(workload(case), case.training, case.config, groups, seed=SEED)
    gathered = Gathered(trainer)
    applied, steps = 0, []
    # compiled, the hook would be a part of each layer, which is compiled again as the set changes
    watched = nullcontext(set[int]()) if case.config.compile else lengths_of_norms()
    with watched as lengths:
        for number in range(NUM_STEPS):
            step = trainer.step(applied, number + 1)
            applied += step.samples.num_samples
            steps.append([step.loss, step.num_terms, step.grad_norm])
            if number + 1 == NUM_GATHERED:
                gathered.begin()
    early = gathered.weights()
    if case.architecture is None and case.own is None:
        mesh = case.config.mesh
        length = LENGTH // mesh.tp if mesh.sequence_parallel else LENGTH
        assert lengths == (set() if case.config.compile else {length})
        words = next((each.local.shape for each in trainer.slots if each.name == "wte.weight"), [0])
        most = -(-case.num_words // (mesh.tp * mesh.fsdp))
        assert words[0] <= most or not mesh.loss_parallel
    if case.config.compile:
        from torch._dynamo.utils import counters

        assert counters["stats"]["unique_graphs"] > 0
    gathered.begin()
    weights = gathered.weights()
    if groups.rank == 0:
        whole = folder / f".{name}.json"
        whole.write_text(json.dumps({"steps": steps, "weights": weights, "early": early}))
        whole.rename(folder / f"{name}.json")


def compare(name: str, case: Case, folder: Path) -> None:
    import pytest

    found = json.loads((folder / f"{name}.json").read_text())
    steps, weights, early = alone(case)
    exact = 1e-9 if case.double else 1e-5
    if case.train.get("optimizer") == "muon":  # its bfloat16 makes much of a sum's last bit
        exact = 1e-3
    tolerance = 2e-2 if case.train.get("precision") == "bf16" else exact
    for mesh, single in zip(found["steps"], steps, strict=True):
        assert mesh == pytest.approx(single, rel=tolerance, abs=tolerance), name
    for gathered, expected in (("early", early), ("weights", weights)):
        assert found[gathered].keys() == expected.keys(), name
        for each, own in expected.items():
            values = torch.tensor(found[gathered][each], dtype=own.dtype)
            close = torch.allclose(values, own, rtol=tolerance, atol=tolerance)
            assert close, f"{name}: {each}, {gathered}"


def alone(case: Case) -> tuple[list[list[float]], dict[str, Tensor], dict[str, Tensor]]:
    """Loss, loss terms and norm of each step of one process, its weights, and those after `NUM_GATHERED`."""
    from smolcluster.configs.schema import DatasetPlace
    from smolcluster.training.build import build
    from smolcluster.training.loop import training_steps

    work, train = workload(case), case.training
    training = build(train, SEED, DatasetPlace(), CPU, workload=work)
    steps = []
    for step in training_steps(training, train):
        steps.append([step.loss, step.num_terms, step.grad_norm])
        parameters = training.replica.parameters.items()
        weights = {name: each.detach().flatten().clone() for name, each in parameters}
        if len(steps) == NUM_GATHERED:
            early = weights
        if len(steps) == NUM_STEPS:
            break
    return steps, weights, early


def main() -> None:
    rank, world_size, folder, *names = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(hours=1),
    )
    torch.set_num_threads(1)
    cases = CASES | table(int(world_size), [*SCHEDULES, "zbv"])
    for name in names:
        compiled = partial(torch.compile, backend=cases[name].backend)
        with patch.object(torch, "compile", compiled):
            train_case(name, cases[name], Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
