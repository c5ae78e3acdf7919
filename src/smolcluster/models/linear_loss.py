"""Cross-entropy of a linear layer's logits that never holds more than a chunk of them.

A language model's logits are its largest tensor by far: 4096 tokens over 50 257 words are 0.8 GB in
float32, and plain cross-entropy keeps as much again for the backward pass. Here the tokens go through
in chunks. The loss is a sum over tokens, so each chunk's gradient is known as soon as its logits are:
it is taken at once, and the backward pass only scales it. The idea is that of Liger Kernel
(arXiv 2410.10989) and of Wijmans et al., "Cut Your Losses" (arXiv 2411.09009).

Shapes: N tokens, D features, V words, C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The target that is no loss term, as `functional.cross_entropy` has it."""
CHUNK_NUMEL = 1 << 22
"""Logits held at once; more gain nothing, fewer make the gradient of the weight be added up too often."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits `hidden @ weight.T`, summed over all targets but -100, ().

    Under autocast the matrix products are computed in its type; softmax, sums, the loss and the
    gradient of the weight are float32 (float64 where the weight is).

    Args:
        hidden: (N, D).
        weight: (V, D).
        targets: (N,), from 0 to V-1, or -100 for what is no loss term.
    """
    kept = targets != IGNORED
    if not kept.all():
        hidden, targets = hidden[kept], targets[kept]
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets)
        return loss
    return _sum_up(hidden, weight, targets)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        loss = _sum_up(hidden, weight, targets, grad_hidden, grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # In place, for a second (V, D) buffer would double the memory. A second backward pass through
        # the same graph is refused by autograd, which sees that a saved tensor was changed.
        grad_hidden, grad_weight = (
            None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors
        )
        return grad_hidden, grad_weight, None


def _sum_up(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    grad_hidden: Tensor | None = None,
    grad_weight: Tensor | None = None,
) -> Tensor:
    """The loss, (); its gradients are written to `grad_hidden` (N, D), and added to `grad_weight` (V, D)."""
    dtype = _product_dtype(weight)
    weight = weight.to(dtype)
    loss = torch.zeros((), dtype=_sum_dtype(weight), device=weight.device)
    for place in _chunks(len(hidden), len(weight)):
        chunk = hidden[place].to(dtype)
        slopes = _add_loss(loss, chunk @ weight.T, targets[place])
        if grad_hidden is None and grad_weight is None:
            continue
        slopes = _minus_one_at(slopes, targets[place]).to(dtype)
        if grad_hidden is not None:
            grad_hidden[place] = slopes @ weight
        if grad_weight is not None:
            _add_product(grad_weight, slopes.T, chunk)
    return loss


def _add_loss(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Add the cross-entropy of logits (C, V) to `loss`, in place; return their softmax (C, V).

    The largest logit z and its probability p give log(sum(exp)) = z - log(p): p is 1/V at least, so
    that nothing is lost, and a second pass of exponentials is saved.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=loss.dtype)
    largest, where = logits.max(dim=-1, keepdim=True)
    log_sum = largest.to(loss.dtype) - probabilities.gather(1, where).log()
    loss += (log_sum - logits.gather(1, targets[:, None])).sum()
    return probabilities


def _minus_one_at(probabilities: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the loss by the logits (C, V), in place."""
    one = probabilities.new_full((1, 1), -1.0).expand(len(targets), 1)
    return probabilities.scatter_add_(1, targets[:, None], one)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total may be of a finer type than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(num_tokens: int, num_words: int) -> Iterator[slice]:
    length = max(1, CHUNK_NUMEL // num_words)
    return (slice(start, start + length) for start in range(0, num_tokens, length))


def _product_dtype(weight: Tensor) -> torch.dtype:
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def _sum_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
