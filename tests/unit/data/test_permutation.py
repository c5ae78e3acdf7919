import pytest
import torch

from smolcluster.data.permutation import (
    EpochOrders,
    epoch_permutation,
    global_batches,
    seeded_order,
)


@pytest.mark.parametrize("num_samples", [1, 2, 1000])
def test_every_sample_occurs_exactly_once(num_samples: int) -> None:
    order = epoch_permutation(42, 0, num_samples)

    assert order.dtype is torch.int32
    assert order.sort().values.tolist() == list(range(num_samples))


def test_the_order_of_a_key_never_changes_between_versions() -> None:
    assert seeded_order(42, 12).tolist() == [11, 7, 1, 6, 10, 4, 3, 5, 9, 0, 2, 8]


def test_the_order_of_an_epoch_never_changes_between_versions() -> None:
    assert epoch_permutation(42, 3, 12).tolist() == [5, 10, 11, 8, 0, 3, 2, 1, 4, 7, 6, 9]


def test_the_orders_of_an_epoch_and_the_next_are_made_once() -> None:
    """They are asked for with every part of every step, and in turns near an epoch's end."""
    made: list[int] = []

    def counted(epoch: int) -> torch.Tensor:
        made.append(epoch)
        return epoch_permutation(42, epoch, 50)

    orders = EpochOrders(counted)
    for epoch in (0, 0, 1, 0, 1, 0, 1, 1):
        assert orders[epoch].numel() == 50
    assert made == [0, 1]


def test_the_last_batch_of_an_epoch_and_of_the_run_has_what_is_left() -> None:
    batches = [(each.epoch, each.start, each.stop) for each in global_batches(10, 13, 4)]
    assert batches == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 3)]
