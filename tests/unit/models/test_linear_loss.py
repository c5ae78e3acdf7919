from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smolcluster.models import linear_loss
from smolcluster.models.linear_loss import linear_cross_entropy

NUM_TOKENS, WIDTH, NUM_WORDS = 23, 6, 40


@pytest.fixture(params=["one chunk", "chunks of 3", "a token each"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = {"one chunk": 1 << 20, "chunks of 3": 3 * NUM_WORDS, "a token each": 1}[request.param]
    monkeypatch.setattr(linear_loss, "CHUNK_NUMEL", numel)


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, dtype=dtype)
    weight = torch.randn(NUM_WORDS, WIDTH, dtype=dtype)
    targets = torch.randint(0, NUM_WORDS, (NUM_TOKENS,))
    targets[[0, 5, 22]] = -100
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")


def results(
    loss: Any, hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0
) -> list[Tensor | None]:
    """The loss, and the gradients of `factor` times it."""
    inputs = [
        tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight)
    ]
    value = loss(*inputs, targets)
    (value * factor).backward()
    return [value.detach(), *(tensor.grad for tensor in inputs)]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("factor", [1.0, -0.3])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_value_and_gradients_are_those_of_plain_cross_entropy(
    needs: tuple[bool, bool], factor: float, dtype: torch.dtype, close: float
) -> None:
    hidden, weight, targets = example(dtype)
    hidden.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    ours = results(linear_cross_entropy, hidden, weight, targets, factor)
    theirs = results(plain, hidden, weight, targets, factor)
    for our, their, needed in zip(ours, theirs, (True, *needs), strict=True):
        if needed:
            torch.testing.assert_close(our, their, rtol=close, atol=close)
        else:
            assert our is None


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_value_is_the_same(mode: Any) -> None:
    hidden, weight, targets = example()
    weight.requires_grad_()
    expected = plain(hidden, weight, targets).detach()
    with mode():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.clone(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [NUM_TOKENS, 0])
def test_a_batch_without_loss_terms_has_no_loss_and_no_gradient(size: int) -> None:
    hidden, weight, targets = example()
    ours = results(
        linear_cross_entropy,
        hidden[:size].requires_grad_(),
        weight.requires_grad_(),
        torch.full_like(targets[:size], -100),
    )
    assert all(tensor is not None and not tensor.any() for tensor in ours)


@pytest.mark.parametrize("target", [NUM_WORDS, -1])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int) -> None:
    hidden, weight, targets = example()
    targets[3] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)


def test_a_gradient_is_added_to_what_is_there_in_place() -> None:
    hidden, weight, targets = example()
    hidden.requires_grad_()
    flat = torch.ones(weight.numel(), dtype=weight.dtype)
    weight.requires_grad_().grad = flat.view(weight.shape)
    linear_cross_entropy(hidden, weight, targets).backward()  # type: ignore[no-untyped-call]
    expected = results(plain, hidden, weight, targets)[2]
    assert expected is not None
    torch.testing.assert_close(flat.view(weight.shape), expected + 1, rtol=1e-12, atol=1e-12)


def test_a_second_backward_pass_is_refused_and_not_wrong() -> None:
    hidden, weight, targets = example()
    loss = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets)
    (loss * 2).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_products_are_bf16_and_sums_are_not(hidden_dtype: torch.dtype) -> None:
    hidden, weight, targets = example(torch.float32)
    exact = results(plain, hidden.requires_grad_(), weight.requires_grad_(), targets)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours = results(linear_cross_entropy, hidden, weight, targets)
    assert [t.dtype for t in ours if t is not None] == [torch.float32, hidden_dtype, torch.float32]
    for our, their in zip(ours, exact, strict=True):
        assert our is not None
        assert their is not None
        assert 1e-5 < relative_error(our.float(), their) < 0.02


def test_the_weights_gradient_does_not_lose_small_parts_under_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """600 equal parts of a token each: a sum in bf16 would stop growing at 256 of them."""
    monkeypatch.setattr(linear_loss, "CHUNK_NUMEL", 1)
    hidden, weight, targets = example(torch.float32)
    hidden, targets = hidden[1:2].repeat(600, 1), targets[1:2].repeat(600)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        [_, _, ours] = results(linear_cross_entropy, hidden, weight, targets)
    [_, _, exact] = results(plain, hidden, weight, targets)
    assert ours is not None
    assert exact is not None
    assert relative_error(ours, exact) < 0.02


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor - exact).norm() / exact.norm())


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    targets = torch.tensor([2, 2])
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 2000.0
    torch.testing.assert_close(hidden.grad, torch.tensor([[2.0], [0.0]]))


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size in bytes of each storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = {storage(tensor) for tensor in tensors((args, kwargs))}
        made = (tensor for tensor in tensors(outputs) if storage(tensor) not in given)
        self.nbytes += [tensor.untyped_storage().nbytes() for tensor in made]
        return outputs


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def allocated(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[int]:
    torch.manual_seed(0)
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(300, 8, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    with Allocations() as allocations:
        loss(hidden, weight, torch.randint(0, 300, (512,))).backward()  # type: ignore[no-untyped-call]
    nbytes: list[int] = allocations.nbytes
    return nbytes


def test_neither_pass_makes_a_tensor_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_NUMEL", 300 * 32)
    assert max(allocated(plain)) >= 512 * 300 * 4, "the measure does not see the logits"
    assert max(allocated(linear_cross_entropy)) == 32 * 300 * 4


def test_one_buffer_of_the_weights_size_is_made() -> None:
    assert allocated(linear_cross_entropy).count(300 * 8 * 4) == 1
