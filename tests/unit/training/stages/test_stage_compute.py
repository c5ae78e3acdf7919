"""A step's microbatches through all stages, by every schedule: one process's loss and gradients."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipelines
from pipelines import (
    SEED,
    GatedModel,
    alone,
    by_hand,
    even_cuts,
    gradients_of,
    parts_of,
    stages_of,
    whole,
)
from smolcluster.data.dataset import Batch, Place
from smolcluster.errors import ProtocolError, UserCodeError
from smolcluster.models.SimpleNN import SimpleNN
from smolcluster.training.batches import Doubles
from smolcluster.training.builtin import cross_entropy, cross_entropy_of
from smolcluster.training.cutting import CutCheck
from smolcluster.training.schedules.instructions import SCHEDULES, generate, stage_ranks
from smolcluster.training.stages.compute import StageLoss
from smolcluster.training.workload import Terms, Workload

SIZES = [3, 1, 2, 3, 2, 3, 1]
"""Samples of each microbatch: ragged, as in an epoch's last step."""


def features(dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=dtype),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in SIZES
    ]


def tokens() -> list[Batch]:
    """Sequences of different lengths, of which some targets do not count."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for number, size in enumerate(SIZES):
        made = torch.randint(0, 11, (size, 5 + number % 3), generator=generator)
        targets = made[:, 1:].clone()
        targets[:, number % 3] = -100
        batches.append((made[:, :-1], targets))
    return batches


def simple() -> Workload:
    return Workload(
        lambda: nn.Sequential(
            *(SimpleNN(6, 8, 6) for _ in range(7)), nn.ReLU(), nn.Linear(6, 3)
        ).double(),
        cross_entropy,
        [(torch.zeros(6), 0)],
    )


gpt = partial(pipelines.gpt, dtype=torch.float64)


def gated_loss(model: nn.Module, batch: Batch) -> Terms:
    hidden, mask, auxiliary = model(batch[0])
    return (hidden.square().sum() + 0.1 * auxiliary), mask.sum()


def gated() -> Workload:
    return Workload(lambda: GatedModel().double(), gated_loss, [(torch.zeros(6), 0)])


def test_it_is_said_once_that_samples_in_float64_are_cast(caplog: pytest.LogCaptureFixture) -> None:
    """In one process they are not before a layer refuses them."""
    workload = Workload(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)),
        cross_entropy,
        [(torch.zeros(6), 0)],
    )
    stages, doubles = stages_of(workload, [0, 1, 2]), Doubles()
    doubles.log = logging.getLogger("smolcluster.test")
    for each in stages:
        each.compute.doubles = doubles
    with caplog.at_level(logging.INFO, "smolcluster.test"):
        parts = parts_of(features(torch.float64), SIZES)
        by_hand(generate("1f1b", 2, len(SIZES)), stages, parts)
    assert sum("float64" in each.getMessage() for each in caplog.records) == 1


class Doubling(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        value += value
        return value


def in_place() -> Workload:
    """Every other layer writes into what it is given."""

    def make() -> nn.Module:
        first, last = (Doubling(), nn.Linear(6, 6)), (Doubling(), nn.Linear(6, 3))
        return nn.Sequential(*first, nn.ReLU(inplace=True), nn.Linear(6, 6), *last).double()

    return Workload(make, cross_entropy, [(torch.zeros(6), 0)])


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert values is not None
        assert torch.equal(found[name], values), name


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-11)


def run(workload: Workload, schedule: str, ranks: int, batches: list[Batch]) -> Any:
    lists = generate(schedule, ranks, len(batches))
    cuts = even_cuts(workload, len(stage_ranks(lists)))
    stages = stages_of(workload, cuts)
    loss = by_hand(lists, stages, parts_of(batches, SIZES))
    return loss, stages


def summed(stages: Any) -> dict[str, Tensor]:
    """The gradients, with those of tied parameters added up, as first and last stage exchange them."""
    tied = [each for each in stages if each.module.tied]
    if len(tied) > 1:
        for name in tied[0].module.tied:
            both = [dict(each.module.named_parameters())[name].grad for each in tied]
            total = torch.stack([each for each in both if each is not None]).sum(0)
            for each in both:
                assert each is not None
                each.copy_(total)
    return gradients_of(stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_loss_and_gradients_of_one_process(schedule: str) -> None:
    expected, count, grads = alone(gpt(), tokens())
    for ranks in (1, 2, 3):
        loss, stages = run(gpt(), schedule, ranks, tokens())
        assert loss.total == pytest.approx(expected, rel=1e-9)
        assert loss.num_terms == count
        assert_close(summed(stages), grads)


@pytest.mark.parametrize("make", [simple, gated])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_other_models_do_too_whatever_is_between_their_layers(make: Any, schedule: str) -> None:
    batches = features(torch.float64)
    expected, count, grads = alone(make(), batches)
    loss, stages = run(make(), schedule, 2, batches)
    assert (loss.total, loss.num_terms) == (pytest.approx(expected, rel=1e-9), count)
    assert_close(gradients_of(stages), grads)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_stage_may_begin_with_a_layer_that_computes_in_place(
    schedule: str, *, recompute: bool
) -> None:
    expected, count, grads = alone(in_place(), features(torch.float64))
    parts, lists = parts_of(features(torch.float64), SIZES), generate(schedule, 3, len(SIZES))
    stages = stages_of(in_place(), [0, 2, 4, 6], recompute=recompute)
    loss = by_hand(lists, stages, parts)
    assert loss.total == pytest.approx(expected, rel=1e-9)
    assert loss.num_terms == count
    assert_close(gradients_of(stages), grads)


def test_the_loss_is_computed_in_the_precision_of_one_process() -> None:
    """A logarithm of a sum of exponentials is in float32 there, whatever the logits are in."""
    [batch] = features()[:1]
    workload = Workload(
        lambda: nn.Sequential(nn.Linear(6, 3)), cross_entropy, [(torch.zeros(6), 0)]
    )
    model = whole(workload)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = workload.loss(model, batch)
    loss.backward()
    [stage] = stages_of(workload, [0, 1], precision="bf16")
    part = parts_of([batch], SIZES[:1])[0]
    assert by_hand(generate("gpipe", 1, 1), [stage], [part]).total == loss.item()
    assert_equal(gradients_of([stage]), {n: each.grad for n, each in model.named_parameters()})


def test_the_loss_is_scaled_for_the_backward_alone() -> None:
    scaled, plain = (stages_of(gpt(), even_cuts(gpt(), 2)) for _ in range(2))
    for each in scaled:
        each.compute.loss_scale = 4.0
    lists, parts = generate("1f1b", 2, len(SIZES)), parts_of(tokens(), SIZES)
    assert by_hand(lists, scaled, parts) == by_hand(lists, plain, parts)
    for one, other in zip(scaled, plain, strict=True):
        assert torch.equal(one.replica.grads, 4 * other.replica.grads)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_samples_that_keep_others_company_count_nothing(num_stages: int) -> None:
    """Such as the one of a rank that has none of a small batch."""
    stages = stages_of(gpt(), even_cuts(gpt(), num_stages))
    part = parts_of(tokens()[:1], [0])
    assert by_hand(generate("1f1b", num_stages, 1), stages, part) == StageLoss()
    assert not any(each.replica.grads.any() for each in stages)


def mean_over_labels(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_microbatch_without_labels_counts_nothing(schedule: str) -> None:
    """A mean over no label is NaN, as PyTorch's cross-entropy gives it."""
    workload, batches = gpt(), tokens()
    workload.loss = mean_over_labels
    for number in (0, 3):
        batches[number][1].fill_(-100)
    loss, stages = run(workload, schedule, 2, batches)
    labelled = [
        (each, size) for each, size in zip(batches, SIZES, strict=True) if (each[1] >= 0).any()
    ]
    model, total = whole(workload), 0.0
    for each, size in labelled:
        weighted = workload.loss(model, each) * size
        weighted.backward()  # type: ignore[no-untyped-call]
        total += weighted.item()
    assert loss.total == pytest.approx(total, rel=1e-9)
    assert loss.num_terms == sum(size for _, size in labelled)
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert_close(summed(stages), expected)


def taking_apart(model: nn.Module, batch: Any) -> Terms:
    """Writes into what it is given, and takes out of it."""
    targets = batch.pop("targets")
    batch["inputs"].mul_(0.5).add_(1.0)
    logits = model(batch["inputs"])
    targets[targets < 1] = -100
    return cross_entropy_of(logits, targets)


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 1), ("1f1b", 2), ("zb-v", 1)])
def test_a_loss_may_write_into_its_batch(schedule: str, ranks: int) -> None:
    """As in one process, also while it is looked at how that depends on the cut."""

    def batches() -> list[Batch]:
        pairs = features(torch.float64)
        return [{"inputs": inputs, "targets": targets} for inputs, targets in pairs]

    workload = Workload(simple().maker, taking_apart, [(torch.zeros(6), 0)])
    expected, count, grads = alone(workload, batches())
    lists = generate(schedule, ranks, len(SIZES))
    stages = stages_of(workload, even_cuts(workload, len(stage_ranks(lists))))
    for each in stages:
        each.compute.cut_check = CutCheck(logging.getLogger("smolcluster.test"))
    loss = by_hand(lists, stages, parts_of(batches(), SIZES))
    assert loss.total == pytest.approx(expected, rel=1e-9)
    assert loss.num_terms == count
    assert_close(gradients_of(stages), grads)


@pytest.mark.parametrize("is_one_by_one", [False, True], ids=["microbatches", "single samples"])
@pytest.mark.parametrize(
    ("loss", "num_ignored", "is_said"),
    [(mean_over_labels, 4, True), (cross_entropy, 4, False), (mean_over_labels, 0, False)],
    ids=["a mean of means", "terms", "equally many terms"],
)
def test_a_loss_that_depends_on_the_cut_is_told_of_once(
    loss: Any,
    num_ignored: int,
    *,
    is_said: bool,
    is_one_by_one: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    workload, batches = gpt(), tokens()
    workload.loss = loss
    for _, targets in batches:
        targets[targets < 0] = 1
        targets[0, :num_ignored] = -100
    if is_one_by_one:
        batches = [(batches[0][0][row:][:1], batches[0][1][row:][:1]) for row in range(SIZES[0])]
    parts = parts_of(batches, [len(inputs) for inputs, _ in batches])
    looked, not_looked = (stages_of(workload, even_cuts(workload, 2)) for _ in range(2))
    for each in looked:
        each.compute.cut_check = CutCheck(logging.getLogger("smolcluster.test"))
    for _ in range(2):
        lists = generate("1f1b", 2, len(parts))
        assert by_hand(lists, looked, parts) == by_hand(lists, not_looked, parts)
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == is_said
    assert all("(sum, number)" in each for each in told)


class Mixing(nn.Linear):
    """Cannot take values of fewer bits."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.zeros(1, 1).index_copy_(0, torch.zeros(1).long(), super().forward(inputs))


def test_a_stage_that_cannot_compute_in_fewer_bits_is_told_what_to_do() -> None:
    """As in one process."""
    workload = Workload(lambda: nn.Sequential(Mixing(6, 1)), cross_entropy, [(torch.zeros(6), 0)])
    [stage] = stages_of(workload, [0, 1], precision="bf16")
    with pytest.raises(UserCodeError, match=r"Mixing\.forward.*; precision is bf16.*x\.float\(\)"):
        stage.compute.forward(0, Place(SEED, 0, 0), None, (torch.ones(1, 6), torch.zeros(1)))


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        raise ValueError(f"no gradient of {tuple(gradient.shape)}")


class Stopping(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = Refusing.apply(super().forward(inputs))
        return output


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_an_error_of_a_models_backward_is_the_users(schedule: str) -> None:
    workload = Workload(lambda: nn.Sequential(Stopping(6, 3)), cross_entropy, [(torch.zeros(6), 0)])
    [stage] = stages_of(workload, [0, 1])
    part = parts_of(features()[:1], SIZES[:1])
    with pytest.raises(UserCodeError, match=r"backward of the model.*no gradient of \(3, 3\)"):
        by_hand(generate(schedule, 1, 1), [stage], part)


def test_a_loss_that_is_none_is_named_where_it_is_written() -> None:
    def answers(model: nn.Module, batch: Batch) -> Any:
        return model(batch[0]).argmax()[None, None].expand(2, 1)

    workload = Workload(lambda: nn.Sequential(nn.Linear(6, 3)), answers, [(torch.zeros(6), 0)])
    [stage] = stages_of(workload, [0, 1])
    with pytest.raises(UserCodeError, match=r"answers \(test_stage_compute\.py:\d+\): returned a"):
        by_hand(generate("gpipe", 1, 1), [stage], parts_of(features()[:1], SIZES[:1]))


def test_nothing_is_held_of_a_step_that_is_over_or_broke_off() -> None:
    _, stages = run(gpt(), "zero-bubble", 2, tokens())
    first, last = (each.compute for each in stages)
    assert not (first._held or first._deferred or last._held or last._deferred)
    part = parts_of(tokens(), SIZES)[0]
    first.forward(0, part.place, None, part.gather(), part.num_samples)
    assert first._held
    assert first.end_step().num_terms == 0
    assert not first._held


def test_gradients_of_another_tree_are_refused() -> None:
    [first, _] = stages_of(gated(), even_cuts(gated(), 2))
    batch = features(torch.float64)[0]
    part = parts_of([batch], [3])[0]
    first.compute.forward(0, part.place, None, batch, 3)
    with pytest.raises(ProtocolError, match="1 gradients of 2 tensors"):
        first.compute.backward(0, [torch.ones(3, 8)])
