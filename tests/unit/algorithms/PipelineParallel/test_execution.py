"""A step by threads over links on loopback: what arrives is what one process computes."""

import pytest
import torch

from pipelines import (
    alone,
    even_cuts,
    executions,
    gpt,
    gradients_of,
    parts_of,
    run_step,
    stages_of,
)
from smolcluster.data.dataset import Batch
from smolcluster.training.schedules.instructions import generate, stage_ranks


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
