"""What all ranks must agree on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from own_workloads import normed
from smolcluster.algorithms.Mesh import groups
from smolcluster.algorithms.Mesh.groups import Groups, compare, lost_named, own_device
from smolcluster.errors import ConfigError, PeerLost, Rejected, UserCodeError
from smolcluster.training.workload import Workload
from smolcluster.utils.user_code import user_code

SEED = 7


class Reversed:
    """A sampler of one's own."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Any:
        return iter(range(self._size)[::-1])

    def __len__(self) -> int:
        return self._size


def of(samples: list[float], *, is_reversed: bool = False, fingerprint: str = "f") -> Workload:
    data = [torch.tensor(each) for each in samples]
    sampler = Reversed(len(data)) if is_reversed else list(range(len(data)))
    loader: Any = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    made = normed()
    return Workload(nn.Linear(1, 1), made.loss, loader, fingerprint=fingerprint)


def check(*workloads: Workload) -> None:
    """As each rank does, of which the last one is this."""

    class Together(Groups):
        def __init__(self) -> None:
            pass

        def all_told(self, value: Any) -> list[Any]:
            if value == workloads[-1].fingerprint:
                return [each.fingerprint for each in workloads]
            assert value == [workloads[-1].sample_marks, workloads[-1].order_mark(SEED)]
            return [
                [list(map(list, each.sample_marks)), each.order_mark(SEED)] for each in workloads
            ]

    Together().check_data(workloads[-1], SEED)


def test_ranks_with_the_same_data_may_train() -> None:
    check(of([1.0, 2.0, 3.0]), of([1.0, 2.0, 3.0]))


def test_a_rank_with_another_sample_is_refused_by_rank_and_sample() -> None:
    with pytest.raises(Rejected, match="sample 2 of rank 1's training data is not rank 0's: each"):
        check(of([1.0, 2.0, 3.0]), of([1.0, 2.0, 4.0]), of([1.0, 2.0, 3.0]))


def test_a_rank_with_another_order_is_refused() -> None:
    with pytest.raises(Rejected, match="sampler of rank 1 gives another order than rank 0's"):
        check(of([1.0, 2.0, 3.0]), of([1.0, 2.0, 3.0], is_reversed=True))


def test_a_rank_with_another_fingerprint_is_refused() -> None:
    with pytest.raises(ConfigError, match="the dataset is f on rank 0 and g on rank 1"):
        check(of([1.0]), of([1.0], fingerprint="g"))


def test_ranks_of_other_code_or_configuration_are_named() -> None:
    first = {"smolcluster": "1.0", "batch_size": "16"}
    compare(2, first, dict(first))
    with pytest.raises(ConfigError, match="batch_size is 16 on rank 0 and 32 on rank 2"):
        compare(2, {**first, "batch_size": "32"}, first)
    with pytest.raises(ConfigError, match="ema is 1 on rank 0 and not known on rank 1"):
        compare(1, first, {**first, "ema": "1"})


def test_ranks_compute_on_the_cpu_where_that_is_wanted() -> None:
    assert own_device("cpu", 3, "ranks to null").type == "cpu"


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device(None, 1, "ranks to null") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="rank 2 of this machine has no GPU: it has 2"):
        own_device(None, 2, "ranks to null")


def test_a_device_that_ranks_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "pick_device", lambda _: torch.device("mps"))
    with pytest.raises(ConfigError, match=r"device is mps.*, or ranks to null"):
        own_device(None, 0, "ranks to null")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:533] Read error [127.0.0.1]:3501: "
                "Connection reset by peer. This may indicate a crash."
            ),
            "Read error [127.0.0.1]:3501: Connection reset by peer",
        ),
        (
            dist.DistStoreError("rank 0, which has the store, is lost"),
            "rank 0, which has the store, is lost",
        ),
    ],
)
@pytest.mark.parametrize("around", [nullcontext, partial(user_code, "backward of the model")])
def test_what_a_backend_says_of_a_connection_is_passed_on(
    error: Exception, said: str, around: Callable[[], AbstractContextManager[None]]
) -> None:
    """As the user's code may be what waits for another rank."""
    with pytest.raises(PeerLost) as lost, lost_named(), around():
        raise error
    assert str(lost.value) == f"its connection to another rank is lost ({said})"


def test_an_error_of_the_users_code_is_none_of_a_connection() -> None:
    with pytest.raises(UserCodeError), lost_named(), user_code("backward of the model"):
        raise RuntimeError("shapes do not fit")
