"""A step in several microbatches is the step of the whole batch; computed in bfloat16 it is close to it."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from computing import forward_backward
from smolcluster.configs.schema import (
    DatasetConfig,
    GPTConfig,
    GradientClipping,
    LrSchedule,
    Precision,
    TrainConfig,
)
from smolcluster.data.dataset import NO_TERM, Dataset
from smolcluster.data.permutation import epoch_permutation
from smolcluster.data.tokens import TokenBlocks
from smolcluster.models.gpt import GPT
from smolcluster.training.build import Microbatching, TrainingContext, build, most_at_once
from smolcluster.training.builtin import builtin_workload
from smolcluster.training.compute import Microbatch
from smolcluster.training.compute import forward_backward as step_of
from smolcluster.training.loop import training_steps
from smolcluster.training.replica import Replica
from smolcluster.training.schedule import learning_rate
from smolcluster.training.workload import Workload

CPU = torch.device("cpu")
VOCAB = 13
SIZES = GPTConfig(model_dim=16, num_layers=1, num_heads=2, ff_dim=32, max_seq_len=8, dropout=0.0)


def gpt(dtype: torch.dtype = torch.float64) -> GPT:
    torch.manual_seed(0)
    return GPT(SIZES, VOCAB).to(dtype)


def uneven_batch(size: int = 12) -> tuple[Tensor, Tensor]:
    """Sequences of which some have all their loss terms, some few, and some none."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (size, 9), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    for row in range(size):
        targets[row, row % 9 :] = NO_TERM
    targets[:4] = NO_TERM  # the first microbatches have no term at all
    return inputs, targets


@pytest.mark.parametrize("microbatch", [1, 2, 4, 5, 12, 100])
def test_microbatches_with_uneven_terms_give_the_gradient_of_the_whole(microbatch: int) -> None:
    """That is the mean over all terms."""
    inputs, targets = uneven_batch()
    whole, parts = Replica(gpt(), "adamw"), Replica(gpt(), "adamw")
    expected = functional.cross_entropy(gpt()(inputs).flatten(0, 1), targets.flatten()).item()
    losses = [
        forward_backward(whole, inputs, targets),
        forward_backward(parts, inputs, targets, microbatch),
    ]
    assert losses == pytest.approx([expected] * 2, rel=1e-12)
    torch.testing.assert_close(parts.grads, whole.grads, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("scale", [1000.0, 1.0, 0.01])
@pytest.mark.parametrize("kind", [Tensor, float, np.float64, np.float32])
def test_a_weighted_mean_is_that_of_the_whole_however_the_weights_are_scaled(
    scale: float, kind: Any
) -> None:
    """The number of terms of a weighted mean is the sum of its weights, which is no whole number."""
    inputs, targets = uneven_batch()
    weights = scale * torch.linspace(0.1, 1.3, VOCAB, dtype=torch.float64)

    def weighted(model: nn.Module, batch: Tensor) -> tuple[Tensor, Any]:
        logits, wanted = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        counted = weights[wanted]
        each = functional.cross_entropy(logits, wanted, reduction="none")
        number = counted.sum()
        return (counted * each).sum(), number if kind is Tensor else kind(number)

    words = torch.cat([inputs[:, :1], targets.clamp(min=0)], dim=1)
    losses, gradients = [], []
    for size in (12, 5, 1):
        replica = Replica(gpt(), "adamw")
        parts = [
            Microbatch(len(each), lambda each=each: each)  # type: ignore[misc]
            for each in torch.split(words, size)
        ]
        found = step_of(replica, weighted, parts)
        losses.append(found.mean)
        gradients.append(replica.grads)
        assert found.num_terms == pytest.approx(float(weights[words[:, 1:]].sum()))
    precision = 1e-6 if kind is np.float32 else 1e-10
    assert losses == pytest.approx([losses[0]] * 3, rel=precision)
    for each in gradients:
        torch.testing.assert_close(each, gradients[0], rtol=precision, atol=1e-14)


# In a run


def text(num_tokens: int = 8 * 30 + 1, rest: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    stream = torch.randint(0, VOCAB, (num_tokens,), generator=generator).numpy()
    return Dataset(
        name="text",
        train=TokenBlocks(stream, 8),
        validation=TokenBlocks(stream[: 8 * 5 + 1 + rest], 8, is_whole=True),
        input_dim=8,
        num_classes=VOCAB,
        fingerprint="f",
        measure="perplexity",
    )


def workload(train: TrainConfig | None = None, rest: int = 0) -> Workload:
    return builtin_workload(train or config(), text(rest=rest))


def config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "batch_size": 4,
        "num_epochs": 2,
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "learning_rate": 0.01,
        "lr_schedule": LrSchedule(warmup_iters=3, min_lr=0.001),
        "track_gradients": False,
        "model": SIZES,
        "dataset": DatasetConfig(name="text"),
    }
    return TrainConfig.model_validate(values | changes)


def bench_for(train: TrainConfig, microbatch: int | None = None) -> TrainingContext:
    training = build(
        train, 42, DatasetConfig(name="text"), CPU, microbatch=microbatch, workload=workload()
    )
    replica = Replica(training.replica.model.double(), train.optimizer, weight_decay=0.1)
    return TrainingContext(training.workload, replica, 42, training.microbatch)


@pytest.mark.parametrize("microbatch", [None, 1, 3])
def test_n_small_batches_make_the_step_of_one_big_one(microbatch: int | None) -> None:
    accumulated = config(batch_size=4, gradient_accumulation=3)
    big = config(batch_size=12)
    training, reference = bench_for(accumulated, microbatch), bench_for(big)
    sizes: set[int] = set()
    embedding = training.replica.model.get_submodule("wte")
    embedding.register_forward_hook(lambda _module, given, _output: sizes.add(len(given[0])))
    steps = list(training_steps(training, accumulated))
    expected = list(training_steps(reference, big))
    assert len(steps) == len(expected) == 6, "30 samples, 12 a step, 2 epochs"
    assert max(sizes) == (microbatch or 4)
    for step, other in zip(steps, expected, strict=True):
        assert step.samples == other.samples
        assert step.learning_rate == other.learning_rate
        assert step.loss == pytest.approx(other.loss, rel=1e-9)
    torch.testing.assert_close(
        training.replica.params, reference.replica.params, rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize(
    ("accumulation", "microbatch", "most"),
    [(1, None, None), (1, 2, 2), (3, None, 4), (3, 2, 2), (3, 100, 4)],
)
def test_accumulation_bounds_what_is_computed_at_once(
    accumulation: int, microbatch: int | None, most: int | None
) -> None:
    assert most_at_once(config(gradient_accumulation=accumulation), microbatch) == most


def test_a_run_equals_pytorchs_own_loop() -> None:
    """Accumulation, AdamW, clipping and schedule together, against a plain loop over big batches."""
    train = config(batch_size=2, gradient_accumulation=3)
    train = train.model_copy(
        update={"gradient_clipping": train.gradient_clipping.model_copy(update={"max_norm": 0.2})}
    )
    training = bench_for(train)
    model = training.replica.copy_model().train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    applied, total, num_clipped = 0, 60, 0
    for step in training_steps(training, train):
        order, start = epoch_permutation(42, step.samples.epoch, 30), step.samples.start
        inputs, targets = training.workload.train.batch(order[start : start + 6])
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        num_clipped += int(norm > 0.2)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, applied, total)
        optimizer.step()
        applied += len(inputs)
        assert step.loss == pytest.approx(loss.item(), rel=1e-8)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-8)
    assert applied == total
    assert num_clipped, "the clipping has something to do"
    for name, place in training.replica.layers:
        expected = model.get_parameter(name).detach().flatten()
        torch.testing.assert_close(training.replica.params[place], expected, rtol=1e-6, atol=1e-8)


# bfloat16


def trained(precision: Precision) -> tuple[Replica, list[float]]:
    torch.manual_seed(0)
    replica = Replica(GPT(SIZES, VOCAB), "adamw", precision=precision)
    inputs, targets = uneven_batch()
    losses = []
    for _ in range(10):
        losses.append(forward_backward(replica, inputs, targets, 4))
        replica.clip(GradientClipping(enabled=True, max_norm=1.0))
        replica.step(0.01)
    return replica, losses


def test_bf16_follows_fp32_closely_but_is_not_the_same() -> None:
    (exact, expected), (replica, losses) = trained("fp32"), trained("bf16")
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(replica.params, exact.params), "it is computed in another precision"


def test_bf16_keeps_weights_gradient_and_optimizer_in_float32() -> None:
    replica, _ = trained("bf16")
    assert replica.params.dtype == replica.grads.dtype == torch.float32
    assert {p.dtype for p in replica.model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in replica.optimizer.state.values()} == {torch.float32}
    beyond_bf16 = replica.params != replica.params.bfloat16().float()
    assert beyond_bf16.float().mean() > 0.9, "nothing rounds them"


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_the_model_computes_and_is_evaluated_in_the_precision(
    precision: Precision, dtype: torch.dtype
) -> None:
    train = config(precision=precision)
    training = build(train, 42, DatasetConfig(name="text"), CPU, workload=workload())
    seen: list[torch.dtype] = []
    block = training.replica.model.get_submodule("h.0.mlp.c_fc")
    block.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    for compute in (lambda: training.compute(torch.arange(6)), training.evaluate):
        compute()
        assert set(seen) == {dtype}
        seen.clear()


# Dropout


def with_dropout(seed: int = 42, microbatch: int | None = None) -> TrainingContext:
    train = config(model=SIZES.model_copy(update={"dropout": 0.3}))
    place = DatasetConfig(name="text")
    training = build(train, 42, place, CPU, workload=workload(train), microbatch=microbatch)
    return TrainingContext(training.workload, training.replica, seed, Microbatching(microbatch))


def computed(training: TrainingContext, epoch: int = 0, start: int = 0) -> tuple[float, Tensor]:
    loss = training.compute(torch.arange(6), epoch, start).mean
    return loss, training.replica.grads.clone()


@pytest.mark.parametrize("microbatch", [None, 2])
def test_masks_depend_on_seed_epoch_and_place_and_on_nothing_else(microbatch: int | None) -> None:
    training = with_dropout(microbatch=microbatch)
    loss, gradient = computed(training, 1, 6)
    torch.manual_seed(99)
    torch.rand(7)
    computed(training, 0, 0)
    again, same = computed(training, 1, 6)
    assert again == loss
    assert torch.equal(same, gradient)
    elsewhere, equal = computed(with_dropout(microbatch=microbatch), 1, 6)
    assert elsewhere == loss, "on another machine"
    assert torch.equal(equal, gradient)


def test_another_place_epoch_or_seed_has_other_masks() -> None:
    losses = [
        computed(with_dropout(seed), epoch, start)[0]
        for seed, epoch, start in itertools.product((42, 43), (0, 1), (0, 6, 12))
    ]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("num_before", [1, 4, 8])
def test_a_run_that_goes_on_repeats_what_would_have_been(num_before: int) -> None:
    train = config(model=SIZES.model_copy(update={"dropout": 0.3}))
    whole, broken = with_dropout(), with_dropout()
    expected = [step.loss for step in training_steps(whole, train)]
    steps = training_steps(broken, train)
    before = [next(steps) for _ in range(num_before)]
    applied = sum(step.samples.num_samples for step in before)
    torch.manual_seed(0)
    rest = training_steps(broken, train, samples_applied=applied, step=num_before)
    assert [step.loss for step in [*before, *rest]] == expected
    assert torch.equal(broken.replica.params, whole.replica.params)


# Evaluation


def test_evaluation_leaves_out_dropout_and_the_replica_as_it_was() -> None:
    training = with_dropout()
    before = training.replica.snapshot()
    assert training.evaluate() == training.evaluate()
    assert training.replica.model.training
    assert torch.equal(training.replica.params, before)


def test_perplexity_of_a_model_that_knows_nothing_is_the_vocabulary() -> None:
    training = build(config(), 42, DatasetConfig(name="text"), CPU, workload=workload(rest=3))
    training.replica.params.zero_()
    evaluation = training.evaluate()
    assert evaluation is not None
    assert evaluation.metrics["perplexity"] == pytest.approx(VOCAB)


# What a batch costs


def test_an_example_has_the_size_of_a_batch_where_the_data_are_and_where_they_are_not() -> None:
    here = build(config(), 42, DatasetConfig(name="text"), CPU, workload=workload())
    served = Dataset.elsewhere(
        "text",
        num_samples=30,
        input_dim=8,
        num_classes=VOCAB,
        measure="perplexity",
        fingerprint="f",
    )
    there = TrainingContext(builtin_workload(config(), served), here.replica, 42)
    sizes: list[tuple[int, ...]] = []
    embedding = here.replica.model.get_submodule("wte")
    embedding.register_forward_hook(lambda _module, given, _output: sizes.append(given[0].shape))
    for training in (here, there):
        sizes.clear()
        training.rehearse(5)
        assert sizes == [(5, 8)]


def test_clipping_that_is_off_only_measures() -> None:
    replica = Replica(gpt(), "adamw")
    forward_backward(replica, *uneven_batch())
    before = replica.grads.clone()
    clipping = config().gradient_clipping.model_copy(update={"enabled": False, "max_norm": 1e-6})
    assert replica.clip(clipping) == pytest.approx(before.norm().item())
    assert torch.equal(replica.grads, before)
