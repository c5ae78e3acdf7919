"""SyncPS's arithmetic against a plain reference."""

from itertools import pairwise

import pytest
import torch

from smolcluster.algorithms.SynchronousPS.rule import ExpectedTerms, blend
from smolcluster.data.permutation import global_batches
from unit.algorithms.SynchronousPS.actors import random_gradient


def test_only_the_last_batch_of_an_epoch_is_smaller() -> None:
    batches = list(global_batches(100, 200, 32))
    assert [batch.num_samples for batch in batches] == [32, 32, 32, 4] * 2
    assert all(one.epoch <= other.epoch for one, other in pairwise(batches))


@pytest.mark.parametrize("sizes", [[32], [1, 31], [5, 17, 10], [1] * 32])
def test_the_mean_does_not_depend_on_the_parts(sizes: list[int]) -> None:
    samples = random_gradient(32, 1, torch.float64)
    means = [part.mean() for part in torch.split(samples, sizes)]
    weights = [ExpectedTerms(3, 1, 32).weight(3 * size) for size in sizes]
    assert sum(weights) == pytest.approx(1.0)
    mean = sum(share * float(part) for share, part in zip(weights, means, strict=True))
    assert mean == pytest.approx(float(samples.mean()), rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_blending_draws_towards_the_server(beta: float) -> None:
    own, server = random_gradient(50, 1), random_gradient(50, 2)
    before, theirs = own.clone(), server.clone()
    blend(own, server, beta)
    torch.testing.assert_close(own, beta * theirs + (1 - beta) * before)
    assert torch.equal(server, theirs)


def test_a_weight_of_0_changes_nothing_and_of_1_copies_bit_for_bit() -> None:
    own = torch.tensor([1e30, -1e-30, 3.0, 0.1])
    server = torch.tensor([1e-30, 1e30, -3.0, 0.3])
    before = own.clone()
    blend(own, server, 0.0)
    assert torch.equal(own, before)
    blend(own, server, 1.0)
    assert torch.equal(own, server)


@pytest.mark.parametrize("first", [(7.0, 4), (0.0, 4), (20.0, 1)])
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-3, 1e3])
def test_parts_weigh_their_loss_terms_whatever_the_first_one_lets_expect(
    first: tuple[float, int], scale: float
) -> None:
    terms = [scale * each for each in (7, 0, 20, 1)]
    expected = ExpectedTerms(scale * first[0], first[1], batch_samples=16)
    weights = [expected.weight(each) * expected.correction(sum(terms)) for each in terms]
    assert weights == pytest.approx([each / sum(terms) for each in terms])


def test_a_batch_without_a_term_has_finite_weights() -> None:
    expected = ExpectedTerms(0, 4, 8)
    assert expected.weight(0) * expected.correction(0) == 0.0
