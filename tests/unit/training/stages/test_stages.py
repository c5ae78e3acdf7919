"""A model in stages computes what it computes whole, and no stage has what is another one's."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines import SEED, assert_are_the_model
from smolcluster.configs.schema import GPTConfig
from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.models.gpt import GPT
from smolcluster.models.SimpleNN import SimpleNN
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.stages.build import build_stage, model_input, num_layers, output_loss
from smolcluster.training.stages.cut import Stage
from smolcluster.training.workload import Workload

CPU = torch.device("cpu")
SIZES = GPTConfig(
    type="GPT", model_dim=16, num_layers=4, num_heads=2, ff_dim=32, max_seq_len=8, dropout=0.0
)
TOKENS = (torch.arange(16).view(2, 8) % 11, (torch.arange(16).view(2, 8) + 1) % 11)
FEATURES = (torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 1, 2, 0]))


def workload(model: Callable[[], nn.Module], **said: Any) -> Workload:
    return Workload(model, cross_entropy, [(torch.zeros(6), 0)], **said)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def repeated() -> nn.Module:
    act = nn.GELU()
    return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3))


class Tied(nn.Module):
    """Its output layer has the embedding's weight under a name of its own, which may be the first one."""

    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        head = nn.Linear(8, 11, bias=False)
        if head_first:
            self.head = head
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 8)
        self.head = head
        self.head.weight = self.embedding.weight

    def stages(self) -> list[nn.Module]:
        return [self.embedding, self.inner, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T) to (B, T, 11)."""
        logits: Tensor = self.head(self.inner(self.embedding(tokens)))
        return logits


MODELS = {
    "sequential": (sequential, FEATURES),
    "sequential, a module twice": (repeated, FEATURES),
    "SimpleNN": (lambda: SimpleNN(6, 8, 3), FEATURES),
    "GPT": (lambda: GPT(SIZES, 11), TOKENS),
    "tied": (lambda: Tied(head_first=False), TOKENS),
    "tied, head first": (lambda: Tied(head_first=True), TOKENS),
}


def stages_of(trained: Workload, *cuts: int) -> list[Stage]:
    ends = [*cuts, num_layers(trained)]
    return [
        build_stage(trained, start, end, SEED, CPU)
        for start, end in zip([0, *cuts], ends, strict=True)
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [(), (1,), "all"])
def test_stages_give_the_loss_and_gradients_of_the_whole_model(name: str, cuts: Any) -> None:
    make, batch = MODELS[name]
    trained = workload(make)
    cuts = range(1, num_layers(trained)) if cuts == "all" else cuts
    assert_are_the_model(trained, stages_of(trained, *cuts), batch)


@pytest.mark.parametrize(
    ("name", "cuts", "tied"),
    [
        ("GPT", (1, 3), "wte.weight"),
        ("tied", (1, 2), "embedding.weight"),
        ("tied, head first", (1, 2), "head.weight"),
    ],
)
def test_a_tied_embedding_is_of_the_first_and_the_last_stage(
    name: str, cuts: tuple[int, int], tied: str
) -> None:
    """Under the model's name for it."""
    first, middle, last = stages_of(workload(MODELS[name][0]), *cuts)
    assert first.tied == last.tied == (tied,)
    assert middle.tied == ()
    assert tied in dict(first.named_parameters()).keys() & dict(last.named_parameters()).keys()
    assert (first.is_first, middle.is_first, last.is_last) == (True, False, True)


@pytest.mark.parametrize(
    ("holders", "is_trained", "is_taken"),
    [([0, 4], True, True), ([1, 2], True, False), ([0, 2, 4], True, False), ([1, 2], False, True)],
)
def test_pipelines_refuse_what_layers_share_but_for_a_tied_embedding(
    holders: list[int], *, is_trained: bool, is_taken: bool
) -> None:
    """Stages would each train one of their own."""

    def model() -> nn.Module:
        made = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
        weight = nn.Parameter(torch.ones(6, 6), requires_grad=is_trained)
        for number in holders:
            made[number].weight = weight
        return made

    assert num_layers(workload(model)) == 5
    refused = pytest.raises(ConfigError, match=r"share \d\.weight")
    with nullcontext() if is_taken else refused:
        assert num_layers(workload(model), shares_ends_alone=True) == 5


def test_a_layer_is_announced_by_its_number_before_it_computes() -> None:
    stage = stages_of(workload(sequential), 2)[1]
    numbers: list[int] = []
    stage.before_layer = numbers.append
    stage(torch.zeros(1, 8))
    assert numbers == [2, 3, 4]


def test_a_stage_in_evaluation_mode_drops_nothing_out() -> None:
    sizes = SIZES.model_copy(update={"dropout": 0.5})
    first = stages_of(workload(lambda: GPT(sizes, 11)), 1)[0].eval()
    assert torch.equal(first(TOKENS[0]), first(TOKENS[0]))


def test_a_model_may_call_its_modules_layers() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def stages(self) -> list[nn.Module]:
            return list(self.layers)

    first, second = stages_of(workload(Plain), 2)
    assert [name for each in (first, second) for name, _ in each.named_parameters()] == [
        f"layers.{number}.{kind}" for number in range(2) for kind in ("weight", "bias")
    ]


def test_a_workload_says_its_own_layers() -> None:
    class Ring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.body = nn.Linear(6, 3)

    class Scaled(nn.Module):
        def __init__(self, ring: Ring) -> None:
            super().__init__()
            self.scale = ring.scale

        def forward(self, value: Tensor) -> Tensor:
            return value * self.scale

    trained = workload(Ring, stages=lambda model: [Scaled(model), model.body])
    first, last = stages_of(trained, 1)
    assert [name for name, _ in first.named_parameters()] == ["scale"]
    assert last(first(FEATURES[0])).shape == (4, 3)


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({}, ConfigError, "Workload(stages="),
        ({"stages": lambda _: []}, UserCodeError, "list of modules"),
        ({"stages": lambda _: [nn.Linear(6, 3)]}, ConfigError, "no parameter"),
        ({"stages": lambda _: 1 / 0}, UserCodeError, "ZeroDivisionError"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    said: dict[str, Any], error: type[Exception], words: str
) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        @property
        def stages(self) -> int:
            return 1

    with pytest.raises(error, match=words.replace("(", r"\(")):
        build_stage(workload(Plain, **said), 0, 1, SEED, CPU)


def test_a_sequential_that_computes_something_else_must_say_its_layers() -> None:
    class Residual(nn.Sequential):
        def forward(self, value: Tensor) -> Tensor:
            inner: Tensor = super().forward(value)  # type: ignore[no-untyped-call]
            return value + inner

    def model() -> nn.Module:
        return Residual(nn.Linear(6, 6), nn.Linear(6, 6))

    with pytest.raises(ConfigError, match="stages="):
        num_layers(workload(model))
    assert num_layers(workload(model), may_be_one=True) == 1


@pytest.mark.parametrize("keeps_statistics", [True, False])
def test_batch_norm_is_refused(keeps_statistics: bool) -> None:
    def model() -> nn.Module:
        norm = nn.BatchNorm1d(3, track_running_stats=keeps_statistics)
        return nn.Sequential(nn.Linear(6, 3), norm)

    with pytest.raises(ConfigError, match="BatchNorm1d"):
        num_layers(workload(model))


def test_a_loss_that_calls_no_model_is_refused() -> None:
    trained = Workload(sequential, lambda *_: torch.zeros(()), [(torch.zeros(6), 0)])
    with pytest.raises(ConfigError, match="never calls the model"):
        model_input(trained, FEATURES)


def test_named_values_and_an_output_loss_of_ones_own() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(left=batch, right=batch), batch)

    trained = Workload(
        sequential, loss, [torch.zeros(6)], output_loss=lambda output, _: (output.sum(), 5)
    )
    value = torch.ones(2, 6)
    assert set(model_input(trained, value)) == {"left", "right"}
    assert output_loss(trained)(value, value) == (12.0, 5)


def test_a_module_that_is_built_already_is_refused() -> None:
    built = Workload(sequential(), cross_entropy, [(torch.zeros(6), 0)])
    with pytest.raises(ConfigError, match="a function that makes it"):
        build_stage(built, 0, 1, SEED, CPU)


def test_a_function_that_returns_layers_made_before_is_refused() -> None:
    shared = nn.Linear(4, 4)
    trained = workload(lambda: nn.Sequential(shared, nn.Linear(4, 1)))
    with pytest.raises(ConfigError, match=r"returns the same 0\.weight at each call"):
        num_layers(trained)
    assert not shared.weight.is_meta


def test_a_function_that_makes_parameters_of_values_is_taken() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0, 5.0]))

    trained = workload(lambda: nn.Sequential(Scaled(), nn.Linear(4, 1)))
    stage, _ = stages_of(trained, 1)
    assert stage.get_parameter("0.scale").tolist() == [2.0, 3.0, 4.0, 5.0]
