"""Dropout masks of stages are those of one process that computes the same microbatches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipelines import SEED, by_hand, even_cuts, whole
from smolcluster.algorithms.PipelineParallel.execution import OwnStage
from smolcluster.configs.schema import GPTConfig
from smolcluster.data.dataset import Batch, Place
from smolcluster.data.drawing import NUM_WATCHED, Drawing
from smolcluster.errors import ConfigError
from smolcluster.models.gpt import GPT
from smolcluster.training.build import Microbatching, TrainingContext
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.layer_seeds import LayerSeeds, drawing_layers, may_draw, seed_generators
from smolcluster.training.replica import Replica
from smolcluster.training.schedules.instructions import generate, stage_ranks
from smolcluster.training.stages.build import build_stage
from smolcluster.training.workload import Workload
from smolcluster.utils.isolated_rng import forked_rng

NUM_SAMPLES, SIZE, EPOCH, START = 8, 2, 3, 16
SIZES = GPTConfig(
    type="GPT", model_dim=16, num_layers=5, num_heads=2, ff_dim=32, max_seq_len=8, dropout=0.1
)


def rows(*shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    return list(zip(inputs, targets, strict=True))


def text() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, 11, (NUM_SAMPLES, 7), generator=torch.Generator().manual_seed(3))
    return list(zip(tokens[:, :-1], tokens[:, 1:], strict=True))


def gpt() -> Workload:
    return Workload(lambda: GPT(SIZES, 11).double(), cross_entropy, text())


def layer(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))


def sequential() -> Workload:
    return Workload(
        lambda: nn.Sequential(*(layer() for _ in range(5)), nn.Linear(6, 3)).double(),
        cross_entropy,
        rows(6),
    )


def repeated() -> Workload:
    """One layer is two, of which the first may be the model's first."""

    def make() -> nn.Module:
        own, drops = layer(), nn.Dropout(0.2)
        inner = (nn.Linear(6, 6), drops, nn.Linear(6, 6), drops, layer(), drops, nn.Linear(6, 3))
        return nn.Sequential(drops, own, *inner).double()

    return Workload(make, cross_entropy, rows(6))


def noisy_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """One that disturbs the model's input, and tells the model's output from that noise."""
    inputs, _ = batch
    noise = torch.randn_like(inputs)
    return functional.mse_loss(model(inputs + noise), noise[:, :3], reduction="sum"), len(inputs)


def noisy() -> Workload:
    return Workload(sequential().maker, noisy_loss, rows(6))


def to_noise(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    noise = torch.randn_like(output)
    return functional.mse_loss(output, noise, reduction="sum"), len(batch[0])


def noise_after(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """A loss that draws once its model has returned."""
    return to_noise(model(batch[0]), batch)


def noisy_targets() -> Workload:
    return Workload(sequential().maker, noise_after, rows(6))


def noisy_targets_of_outputs() -> Workload:
    return Workload(sequential().maker, noise_after, rows(6), output_loss=to_noise)


def noisy_targets_without_dropout() -> Workload:
    return Workload(
        lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double(), noise_after, rows(6)
    )


def hugging_face() -> Workload:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=5,
        n_head=2,
        attn_implementation="eager",
    )

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        logits = model(batch[0]).logits
        return functional.cross_entropy(
            logits.flatten(0, 1), batch[1].flatten(), reduction="sum"
        ), batch[1].numel()

    def make() -> nn.Module:
        model: nn.Module = transformers.GPT2LMHeadModel(config).double()
        return model

    return Workload(make, loss, text())


def alone(workload: Workload, size: int = SIZE) -> tuple[TrainingContext, float, dict[str, Tensor]]:
    """A single process that computes so many samples at once: the sum of the loss terms and its gradient."""
    replica = Replica(whole(workload), "sgd")
    training = TrainingContext(workload, replica, SEED, Microbatching(size))
    found = training.compute(torch.arange(NUM_SAMPLES), EPOCH, START)
    grads = {
        name: each.grad * found.num_terms
        for name, each in replica.parameters.items()
        if each.grad is not None
    }
    return training, found.mean * found.num_terms, grads


def built(workload: Workload, num_stages: int, *, recompute: bool) -> list[OwnStage]:
    made = []
    for start, end in pairwise(even_cuts(workload, num_stages)):
        stage = build_stage(workload, start, end, SEED, torch.device("cpu"))
        replica = Replica(stage, "sgd", is_stage=True)
        made.append(OwnStage.of(replica, workload, SEED, recompute=recompute))
    return made


def summed(stages: list[OwnStage]) -> dict[str, Tensor]:
    """The gradients by name; what first and last stage both hold is added up."""
    found: dict[str, Tensor] = {}
    for each in stages:
        for name, parameter in each.replica.parameters.items():
            assert parameter.grad is not None
            found[name] = parameter.grad + found.get(name, torch.zeros(()))
    return found


@pytest.mark.parametrize(
    ("make", "ways"),
    [
        (sequential, (("zero-bubble", 1), ("zero-bubble", 3))),
        (repeated, (("zero-bubble", 1), ("zero-bubble", 3))),
        (gpt, (("1f1b", 1), ("gpipe", 2), ("1f1b", 3), ("zero-bubble", 4), ("zb-v", 2))),
        (noisy, (("zero-bubble", 2),)),
        (hugging_face, (("zero-bubble", 3),)),
        (noisy_targets, (("zero-bubble", 1), ("zero-bubble", 2))),
        (noisy_targets_of_outputs, (("zero-bubble", 2),)),
        (noisy_targets_without_dropout, (("zero-bubble", 2),)),
    ],
)
def test_a_pipeline_with_dropout_gives_the_loss_and_gradients_of_one_process(
    make: Callable[[], Workload], ways: tuple[tuple[str, int], ...]
) -> None:
    """Whatever the cut and the schedule; from three stages on activations are computed again."""
    workload = make()
    training, expected, grads = alone(workload)
    parts = training.parts(torch.arange(NUM_SAMPLES), EPOCH, START, SIZE)
    for schedule, ranks in ways:
        lists = generate(schedule, ranks, len(parts))
        stages = built(workload, len(stage_ranks(lists)), recompute=ranks > 2)
        assert by_hand(lists, stages, parts).total == pytest.approx(expected, rel=1e-9)
        found = summed(stages)
        assert found.keys() == grads.keys()
        for name, gradient in grads.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


def test_what_is_computed_at_once_has_masks_of_its_own() -> None:
    one, other = (alone(gpt(), size)[1] for size in (SIZE, NUM_SAMPLES))
    assert one != pytest.approx(other, rel=1e-6)


def test_only_layers_that_may_draw_are_seeded() -> None:
    """PyTorch's own modules without dropout are known to draw nothing, others are not."""
    assert not may_draw(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.MultiheadAttention(4, 2))
    )
    assert may_draw(nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.1)))
    assert may_draw(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert may_draw(GPT(SIZES, 11))
    drops, plain = nn.Dropout(0.1), nn.Linear(2, 2)
    model = nn.Sequential(plain, drops)
    assert drawing_layers(model, [plain, nn.Sequential(drops)]) == [None, drops]


def test_nothing_is_left_on_the_model() -> None:
    training, *_ = alone(gpt())
    modules = list(training.replica.model.modules())
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in modules)


def test_who_has_another_part_of_sequences_draws_another_mask_where_they_are_cut() -> None:
    def drawn(part: int) -> list[Tensor]:
        seeds, found = LayerSeeds(SEED, torch.device("cpu"), part=part), list[Tensor]()
        begins: list[Callable[[], None]] = [
            *(partial(seeds, 0), seeds.sequences_cut, partial(seeds, 1), seeds.model_returned)
        ]
        for begin in begins:
            begin()
            found.append(torch.rand(4))
        return found

    is_same = [torch.equal(*both) for both in zip(drawn(0), drawn(1), strict=True)]
    assert is_same == [True, False, False, True]


def passes(model: nn.Module, batch: Batch, seen: list[Tensor]) -> Tensor:
    own = [model(batch[0]) for _ in range(3)]
    seen += own
    loss: Tensor = functional.mse_loss(own[0], own[1]) + own[2].mean()
    return loss


def test_each_pass_of_one_loss_has_masks_of_its_own() -> None:
    seen: list[Tensor] = []
    workload = Workload(sequential().maker, partial(passes, seen=seen), rows(6))
    replica = Replica(whole(workload), "sgd")
    training = TrainingContext(workload, replica, SEED, Microbatching(None))
    training.compute(torch.arange(NUM_SAMPLES), EPOCH, START)
    again = [each.detach() for each in seen]
    assert not any(torch.equal(one, other) for one, other in pairwise([*again, again[0]]))
    seen.clear()
    training.compute(torch.arange(NUM_SAMPLES), EPOCH, START)
    assert all(torch.equal(*both) for both in zip(seen, again, strict=True))


def test_draws_of_numpy_and_python_follow_from_seed_and_place_alone() -> None:
    drawn: list[float] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        drawn.extend([random.random(), np.random.rand()])  # noqa: S311
        return functional.cross_entropy(model(batch[0]), batch[1])

    workload = Workload(sequential().maker, loss, rows(6))
    training = TrainingContext(workload, Replica(whole(workload), "sgd"), SEED, Microbatching(None))
    for start in (START, 0, START):
        training.compute(torch.arange(NUM_SAMPLES), EPOCH, start)
        random.random()  # noqa: S311 - so does somebody else
    assert drawn[:2] == drawn[4:]
    assert len(set(drawn)) == 4


def test_a_sample_that_is_being_drawn_is_not_disturbed_by_a_model_that_draws_nothing() -> None:
    seeds, dataset = LayerSeeds(SEED, torch.device("cpu")), Drawing(None)
    for start in range(NUM_WATCHED + 1):
        seeds.begin(Place(SEED, EPOCH, start))

    def sample(during: Callable[[], None]) -> list[float]:
        with dataset.of_process(7):
            before = random.random(), np.random.rand()  # noqa: S311
            during()
            return [*before, random.random(), np.random.rand()]  # noqa: S311

    alone = sample(lambda: None)
    assert sample(lambda: seeds.begin(Place(SEED, EPOCH, START))) == alone


def test_the_generator_of_the_very_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]
    seeded: list[tuple[str, int]] = []

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append((current[-1], seed)))
    with forked_rng():
        seed_generators(7, torch.device("cuda:1"))
    assert seeded == [("cuda:1", 7)]


class Checkpointed(nn.Sequential):
    """Layers that are computed again in the backward, each with its hooks."""

    def forward(self, value: Tensor) -> Tensor:
        for each in self:
            value = checkpoint(each, value, use_reentrant=self.reentrant)
        return value

    reentrant = False


class Reentrant(Checkpointed):
    reentrant = True


def layers_of(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, nn.Sequential)
    return list(model)


def layers_repeated() -> list[nn.Module]:
    again = nn.Dropout(0.1)
    return [layer(), again, layer(), again, nn.Linear(6, 3)]


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_activations_that_are_computed_again_have_the_masks_of_their_pass(
    kind: type[Checkpointed],
) -> None:
    def gradient(kind: type[nn.Sequential]) -> Tensor:
        workload = Workload(
            lambda: kind(*layers_repeated()).double(), two, rows(6), stages=layers_of
        )
        replica = Replica(whole(workload), "sgd")
        training = TrainingContext(workload, replica, SEED, Microbatching(SIZE))
        training.compute(torch.arange(NUM_SAMPLES), EPOCH, START)
        return replica.grads.clone()

    def two(model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        first, second = model(inputs), model(inputs)
        loss: Tensor = first.square().mean() + (second * first).mean()
        return loss

    torch.testing.assert_close(gradient(kind), gradient(nn.Sequential))


def test_a_pipeline_refuses_a_loss_that_calls_its_model_twice() -> None:
    workload = Workload(sequential().maker, partial(passes, seen=[]), rows(6))
    training, *_ = alone(workload)
    parts = training.parts(torch.arange(NUM_SAMPLES), EPOCH, START, SIZE)
    stages = built(workload, 2, recompute=False)
    with pytest.raises(ConfigError, match="more than once"):
        by_hand(generate("1f1b", 2, len(parts)), stages, parts)
