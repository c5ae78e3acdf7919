"""What is said of losses that depend on how a batch is cut, and what a part weighs."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from computing import evaluated
from smolcluster.configs.schema import TrainConfig
from smolcluster.data.dataset import Batch, Place
from smolcluster.errors import ConfigError, NonFiniteLoss, OutOfMemory
from smolcluster.training.build import Microbatching, TrainingContext, most_at_once
from smolcluster.training.cutting import CutCheck
from smolcluster.training.replica import Replica
from smolcluster.training.workload import LossFunction, Workload
from smolcluster.wire.messages import ServedData

SIZE = 24
UNLABELLED = torch.arange(SIZE) % 5 > 1


def rows(labels: Tensor | None = None) -> TensorDataset:
    inputs = torch.randn(SIZE, 6)
    return TensorDataset(inputs, torch.randint(2, (SIZE,)) if labels is None else labels)


def some_labels() -> Tensor:
    labels = torch.randint(2, (SIZE,))
    labels[UNLABELLED] = -100
    return labels


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def mean(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def by_terms(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    summed = functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return summed, (batch[1] != -100).sum()


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    out = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(out @ out.t() / 0.1, torch.arange(len(out)))


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return mean(model, batch) + torch.randn(())


def broken_in_evaluation(model: nn.Module, batch: Any) -> Tensor:
    if not model.training:
        raise ValueError("only trained")
    return mean(model, batch)


class Experts(nn.Module):
    """Balances its experts in training alone, by the product of two means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        chances = self.gate(inputs).softmax(1)
        chosen = functional.one_hot(chances.argmax(1), 3).float()
        self.balance = 3 * (chosen.mean(0) * chances.mean(0)).sum() if self.training else 0.0
        out: Tensor = self.out(inputs)
        return out


def balanced(model: Any, batch: Any) -> Tensor:
    loss: Tensor = mean(model, batch) + model.balance
    return loss


class Noisy(nn.Linear):
    """Disturbs its outputs in training, with a generator of its own."""

    def __init__(self) -> None:
        super().__init__(6, 2)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        noise = torch.randn(outputs.shape, generator=self.generator)
        return outputs + noise if self.training else outputs


class Remembering(nn.Module):
    """What its last samples were, and how they are on average."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.out = names, nn.Linear(6, 2)
        for name in names:
            dtype = torch.bfloat16 if name == "coarse" else torch.float32
            shape = (9, 6) if name == "queue" else (6,)
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            for name in self.names:
                kept: Tensor = getattr(self, name)
                if name == "queue":
                    kept.copy_(torch.cat((inputs, kept))[: len(kept)])
                else:
                    kept.lerp_(inputs.mean(0).to(kept.dtype), 0.1)
        out: Tensor = self.out(inputs)
        return out


def training(
    loss: LossFunction,
    microbatch: int | None,
    labels: Tensor | None = None,
    make: Callable[[], nn.Module] = model,
) -> TrainingContext:
    torch.manual_seed(0)
    workload = Workload(make, loss, rows(labels))
    replica = Replica(workload.new_model(), "sgd")
    check = CutCheck(logging.getLogger("smolcluster.test"))
    return TrainingContext(workload, replica, 1, Microbatching(microbatch), cut_check=check)


@pytest.mark.parametrize(
    ("loss", "labels", "is_said"),
    [
        (mean, None, False),
        (by_terms, some_labels(), False),
        (noisy, None, False),
        (broken_in_evaluation, None, False),
        (contrastive, None, True),
        (mean, some_labels(), True),
    ],
    ids=["a mean", "terms", "at random", "not in evaluation", "contrastive", "a mean of means"],
)
def test_a_loss_that_depends_on_the_cut_is_told_of_once(
    loss: LossFunction, labels: Tensor | None, *, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    context = training(loss, 8, labels)
    for _ in range(2):
        context.compute(context.order(0))
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == is_said
    assert all("batch: whole" in each and "(sum, number)" in each for each in told)


@pytest.mark.parametrize(
    ("make", "loss", "words"),
    [
        (Experts, balanced, ["the loss of 8 samples", "batch: whole"]),
        (partial(Remembering, "queue", "mean"), mean, ["buffers (queue)", "batch: whole"]),
        (partial(Remembering, "mean", "coarse"), mean, []),
        (Noisy, mean, []),
    ],
    ids=["a loss in training alone", "a queue", "a running mean", "noise"],
)
def test_what_depends_on_the_cut_in_training_alone_is_told_of(
    make: Callable[[], nn.Module],
    loss: LossFunction,
    words: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = training(loss, 8, make=make)
    kept = {name: each.clone() for name, each in context.replica.model.named_buffers()}
    context.compute(context.order(0))
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == bool(words)
    assert [word for word in words if word not in told[0]] == []
    quiet = training(loss, 8, make=make)
    assert quiet.cut_check is not None
    quiet.cut_check.is_done = True
    quiet.compute(quiet.order(0))
    for name, each in context.replica.model.named_buffers():
        assert torch.equal(each, quiet.replica.model.get_buffer(name))
        assert not torch.equal(each, kept[name])


def test_a_class_that_no_first_sample_has_is_told_of_once_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def weighted(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 50.0]))

    rare = torch.zeros(SIZE, dtype=torch.int64)
    context = training(weighted, 4, rare)
    few = torch.split(context.order(0), 8)
    rare[few[1][0]] = 1
    context.compute(few[0], 0, 0)
    assert caplog.records == []
    for number in range(1, 3):
        context.compute(few[number], 0, 8 * number)
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_samples_that_are_computed_one_by_one_are_looked_at_in_pairs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = training(contrastive, 1)
    for number, few in enumerate(torch.split(context.order(0), 4)):
        context.compute(few, 0, 4 * number)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("loss", "is_said"), [(contrastive, True), (mean, False)], ids=["contrastive", "a mean"]
)
def test_samples_that_others_send_are_looked_at(
    loss: LossFunction, *, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    context = training(loss, 8)
    sent = context.gather(torch.arange(SIZE), Place(1, 0, 0))
    there = context.workload.served(ServedData(name="rows", num_samples=SIZE, fingerprint="0" * 64))
    replace(context, workload=there).compute_batch(sent, SIZE)
    assert len(caplog.records) == is_said


@pytest.mark.parametrize("loss", [contrastive, mean])
def test_looking_changes_nothing(loss: LossFunction) -> None:
    looked, not_looked = training(loss, 8), training(loss, 8)
    assert not_looked.cut_check is not None
    not_looked.cut_check.is_done = True
    for _ in range(2):
        found = [each.compute(each.order(0)) for each in (looked, not_looked)]
        assert found[0] == found[1]
        assert torch.equal(looked.replica.grads, not_looked.replica.grads)
    for name, buffer in looked.replica.model.named_buffers():
        assert torch.equal(buffer, dict(not_looked.replica.model.named_buffers())[name])
    assert looked.replica.model.training


def test_nothing_is_looked_at_where_nothing_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    context = training(contrastive, None)
    context.compute(context.order(0))
    assert caplog.records == []


@pytest.mark.parametrize("num_labels", [1, 0])
def test_parts_without_labels_weigh_nothing(num_labels: int) -> None:
    """A mean over no label is NaN, as PyTorch's cross-entropy gives it."""
    labels = torch.full((SIZE,), -100)
    labels[:num_labels] = 1
    context = training(mean, 1, labels)
    found = context.compute(torch.arange(SIZE))
    assert found.num_terms == num_labels
    assert torch.isfinite(context.replica.grads).all()
    assert bool(context.replica.grads.any()) is bool(num_labels)


def test_a_loss_that_is_no_number_with_labels_is_refused_as_ever() -> None:
    context = training(lambda model, batch: mean(model, batch) * torch.nan, 8)
    with pytest.raises(NonFiniteLoss):
        context.compute(context.order(0))


def test_a_batch_without_labels_is_left_out_of_an_evaluation() -> None:
    labels = torch.randint(2, (SIZE,))
    labels[8:16] = -100
    workload = Workload(model, mean, rows(labels), rows(labels))
    own = workload.new_model()
    assert workload.validation is not None
    found = evaluated(own, workload.validation, {}, 8, mean)
    terms = evaluated(own, workload.validation, {}, 8, by_terms)
    assert found.loss == pytest.approx(terms.loss)


def test_a_hugging_face_models_own_loss_is_weighed_by_its_labels() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 11}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    words = torch.randint(11, (SIZE, 8))
    labels = words.clone()
    for row in range(SIZE):
        labels[row, : row % 8] = -100

    def lm() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet))
        return made.double()

    def own_loss(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return loss

    def step(microbatch: int | None) -> tuple[float, float, Tensor]:
        workload = Workload(lm, own_loss, TensorDataset(words, labels))
        replica = Replica(workload.new_model(), "sgd")
        context = TrainingContext(workload, replica, 1, Microbatching(microbatch))
        found = context.compute(torch.arange(SIZE))
        return found.mean, found.num_terms, replica.grads

    whole, parts = step(None), step(5)
    assert parts[:2] == pytest.approx(whole[:2])
    assert whole[1] == int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(parts[2], whole[2])


def test_a_batch_that_stays_whole_is_not_cut_by_anything() -> None:
    train = TrainConfig(dataset={"name": "digits"}, batch="whole")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="microbatch 4"):
        most_at_once(train, 4)
    cut = train.model_copy(update={"gradient_accumulation": 2})
    with pytest.raises(ConfigError, match="gradient_accumulation 2"):
        most_at_once(cut, None)

    def out_of_memory(_: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemory, match="batch is whole"):
        Microbatching(None, is_whole=True).fitted(8, out_of_memory)
