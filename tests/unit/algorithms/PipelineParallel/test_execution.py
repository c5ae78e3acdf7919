"""A step by threads over links on loopback: what arrives is what one process computes."""

import weakref
from typing import Any

import pytest
import torch

from pipelines import (
    SEED,
    alone,
    even_cuts,
    executions,
    gpt,
    gradients_of,
    parts_of,
    run_step,
    stages_of,
)
from smolcluster.algorithms.PipelineParallel.execution import Execution, evaluate_stages
from smolcluster.data.dataset import Batch
from smolcluster.training.build import Microbatching, TrainingContext
from smolcluster.training.builtin import cross_entropy_of
from smolcluster.training.schedules.instructions import generate, stage_ranks
from smolcluster.training.workload import Terms


def tokens(num: int) -> list[Batch]:
    made = torch.randint(0, 11, (num, 2, 9), generator=torch.Generator().manual_seed(3))
    return [(each[:, :-1], each[:, 1:]) for each in made]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1f1b", 1),
        ("1f1b", 2),
        ("gpipe", 3),
        ("zero-bubble", 4),
        ("zb-v", 2),
        ("dualpipev", 2),
        ("interleaved", 3),
    ],
)
def test_two_steps_in_turn_have_the_loss_gradient_and_norm_of_one_process(
    schedule: str, ranks: int
) -> None:
    lists, parts = generate(schedule, ranks, 6), parts_of(tokens(6), [2] * 6)
    total, count, expected = alone(gpt(), tokens(6))
    stages = stages_of(gpt(), even_cuts(gpt(), len(stage_ranks(lists))))
    with executions(lists, stages) as made:
        for turn in range(2):
            outcomes = run_step(made, lists, parts, turn)
            losses = [each.loss for each in outcomes if each.loss.num_terms]
            assert [each.num_terms for each in losses] == [count]
            assert losses[0].total == pytest.approx(total, rel=1e-5)
            found = gradients_of(stages)
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5)
            norm = sum(each.squared_norm for each in outcomes)
            assert norm == pytest.approx(
                sum(each.double().square().sum().item() for each in expected.values()), rel=1e-4
            )


def test_an_evaluations_output_is_gone_before_the_next_one_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits of a large vocabulary may be most of what an evaluation needs."""
    samples = [pair for batch in tokens(6) for pair in zip(*batch, strict=True)]
    workload = gpt(data=(samples, samples))
    assert workload.validation is not None
    [stage] = stages_of(workload, even_cuts(workload, 1))
    training = TrainingContext(workload, stage.replica, SEED, Microbatching(None))
    alive, outputs = list[int](), list[weakref.ref[torch.Tensor]]()
    evaluate = Execution.evaluate

    def watched(self: Execution, *given: Any) -> Any:
        alive.append(sum(each() is not None for each in outputs))
        output = evaluate(self, *given)
        outputs.append(weakref.ref(output))
        return output

    monkeypatch.setattr(Execution, "evaluate", watched)
    with executions(generate("1f1b", 1, 1), [stage]) as [own]:
        evaluate_stages(own, training, 0, workload.validation, 4)
    assert alive == [0, 0, 0]


def test_an_output_loss_is_evaluated_as_it_is_trained() -> None:
    """The loss itself may need what only the model has."""

    def loss(model: Any, batch: Batch) -> Terms:
        logits = model(batch[0])
        assert model.wte.weight.numel()
        return cross_entropy_of(logits, batch[1])

    samples = [pair for batch in tokens(2) for pair in zip(*batch, strict=True)]
    workload = gpt(data=(samples, samples))
    workload.loss = loss
    workload.output_loss = lambda output, batch: cross_entropy_of(output, batch[1])
    assert workload.validation is not None
    [stage] = stages_of(workload, even_cuts(workload, 1))
    training = TrainingContext(workload, stage.replica, SEED, Microbatching(None))
    with executions(generate("1f1b", 1, 1), [stage]) as [own]:
        totals = evaluate_stages(own, training, 0, workload.validation, 4)
    total, count, _ = alone(gpt(), tokens(2))
    assert totals["loss"] == pytest.approx((total, count), rel=1e-5)


@pytest.mark.parametrize(("codec", "rel"), [("bf16", 1e-2), ("int8", 1e-2)])
def test_coded_activations_change_the_loss_little(codec: str, rel: float) -> None:
    lists, parts = generate("1f1b", 3, 4), parts_of(tokens(4), [2] * 4)
    total, _, expected = alone(gpt(), tokens(4))
    stages = stages_of(gpt(), even_cuts(gpt(), 3))
    with executions(lists, stages, codec=codec) as made:
        outcomes = run_step(made, lists, parts)
    assert outcomes[-1].loss.total != total
    assert outcomes[-1].loss.total == pytest.approx(total, rel=rel)
    for name, values in gradients_of(stages).items():
        error = torch.linalg.vector_norm(values - expected[name])
        assert error < 0.1 * torch.linalg.vector_norm(expected[name]), name


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_activations_may_have_another_shape_in_each_microbatch_and_step(codec: str) -> None:
    """Sequences of 8, 5 and 3 tokens, then of fewer."""
    lists = generate("1f1b", 2, 3)
    stages = stages_of(gpt(), even_cuts(gpt(), 2))
    with executions(lists, stages, codec=codec) as made:
        for turn in range(2):
            batches = [
                (each[:, : size - turn], goal[:, : size - turn])
                for (each, goal), size in zip(tokens(3), (8, 5, 3), strict=True)
            ]
            total, count, _ = alone(gpt(), batches)
            loss = run_step(made, lists, parts_of(batches, [2] * 3), turn)[-1].loss
            assert loss.num_terms == count
            assert loss.total == pytest.approx(total, rel=1e-5 if codec == "fp32" else 1e-2)
