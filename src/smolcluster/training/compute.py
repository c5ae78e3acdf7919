"""Forward and backward: from batches to a mean loss, and its gradient in a replica."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from smolcluster.configs.schema import Precision
from smolcluster.data.dataset import Batch, Place
from smolcluster.data.pytree import tensors_in
from smolcluster.errors import NonFiniteLoss, UserCodeError
from smolcluster.training.replica import DIVERGENCE_REMEDY, Replica, first_non_finite
from smolcluster.training.workload import LossFunction, real_count
from smolcluster.utils.user_code import user_code, wrong_result

AT_THE_LOSS = "at the loss itself: every layer's output is finite"
NO_TERMS_REMEDY = (
    "a mean over no terms is no number: where a part of a batch may have none, such as no labels, return "
    "(sum, number) of the terms; else look for a division by 0 or a logarithm of 0"
)

HALF_TYPES = re.compile(r"\b(b?float16|BFloat16|Half)\b")
"""How PyTorch calls them where it refuses them."""


class BatchLoss(NamedTuple):
    """The mean loss of a batch, and over how many loss terms it is; 0 where there is none.

    `mean` is NaN where nobody has told it; `learning_rate` is that of a user's own schedule, if there is one.
    `overflow`: the loss scale with which the gradient overflowed, which is 0 then; None: it did not.
    """

    mean: float
    num_terms: float
    learning_rate: float | None = None
    overflow: float | None = None


class Microbatch(NamedTuple):
    """Samples that go through the model at once: how many, what gathers them, and where the first stands."""

    num_samples: int
    gather: Callable[[], Batch]
    place: Place = Place(0, 0, 0)

    @classmethod
    def of(cls, batch: Batch, num_samples: int, place: Place) -> Self:
        """Samples that have been gathered."""
        return cls(num_samples, lambda: batch, place)


def forward_backward(
    replica: Replica,
    loss: LossFunction,
    parts: list[Microbatch],
    begin: Callable[[Place], None] = lambda _: None,
) -> BatchLoss:
    """Return the mean over all loss terms of a batch's parts, and leave its gradient in `replica.grads`.

    `begin` is told of each part, before it is gathered and computed. How many terms there are in all is known
    when all parts have gone through. Until then it is judged by the first part: where samples have equally
    many terms that is right, and the gradient need not be scaled.

    Raises:
        NonFiniteLoss: the loss or the gradient is NaN or infinite; the message names the layer.
            The weights are unchanged; `replica.grads` must not be used.
        UserCodeError: data or loss raised an exception, or the loss is no scalar that can be differentiated.
    """
    replica.grads.zero_()
    num_samples = sum(part.num_samples for part in parts)
    shares: list[Tensor] = []
    counts: list[float | Tensor] = []
    divisor: float | Tensor = 0.0
    has_gradient = False
    for part in parts:
        begin(part.place)
        with replica.meter("data"), user_code("data"):
            batch = replica.placed(part.gather())
        with replica.meter("forward"), autocast(replica.precision, replica.device):
            is_lone = part.num_samples == 1
            lone = lone_sample(replica.model) if is_lone else nullcontext()
            looking = replica.labels.watching()
            with replica.watch.around_loss(is_first=not counts), user_code("loss"), lone, looking:
                result = loss(replica.model, batch)
            total, count = replica.labels.count(result, part.num_samples, of=loss)
            if not counts:
                divisor = at_least_one(count * num_samples / part.num_samples)
            share = total / divisor
            scaled = share if replica.loss_scale == 1.0 else share.float() * replica.loss_scale
        counts.append(count)
        with replica.meter("backward"), user_code("backward of the loss"):
            if share.requires_grad:
                has_gradient = True
                scaled.backward()  # type: ignore[no-untyped-call]
                replica.watch.gather()
        shares.append(share.detach())
    with replica.meter("backward"):  # an accelerator has it to finish
        num_terms = sum(real_count(count, of=loss) for count in counts)
        if num_terms and not has_gradient:
            raise wrong_result(
                "loss",
                loss,
                "does not depend on any trainable parameter; compute it from the model's output, without "
                "detach, item or no_grad",
            )
        scale = float(divisor) / (num_terms or 1.0)
        if scale != replica.loss_scale:
            replica.grads.mul_(scale / replica.loss_scale)
        norm = torch.linalg.vector_norm(replica.grads).item()
    losses = [share.item() for share in shares]
    mean = sum(losses) * scale
    if math.isfinite(mean) and not math.isfinite(norm) and replica.may_overflow:
        replica.grads.zero_()
        return BatchLoss(mean, num_terms, overflow=replica.loss_scale)
    if not (math.isfinite(mean) and math.isfinite(norm)):
        bad = next((i for i, value in enumerate(losses) if not math.isfinite(value)), 0)
        _explain_non_finite(replica, loss, parts[bad], mean)
    return BatchLoss(mean, num_terms)


@contextmanager
def lone_sample(model: nn.Module) -> Iterator[None]:
    """Let batch norms that are given one value a channel use their running statistics in this block.

    A part of a step, or the last batch of an epoch, may be one sample, and PyTorch refuses to train on that.
    """
    resting = []

    def rest(norm: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        values = inputs[0] if inputs else named["input"]
        if norm.training and values.numel() == values.shape[1]:
            norm.eval()
            resting.append(norm)

    norms = [each for each in model.modules() if isinstance(each, _BatchNorm)]
    hooks = [norm.register_forward_pre_hook(rest, with_kwargs=True) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in resting:
            norm.train()


def at_least_one(number: float | Tensor) -> float | Tensor:
    """A number, or 1 if that is more; a tensor stays on its device, so that nothing waits for it."""
    return number.clamp(min=1.0) if isinstance(number, Tensor) else max(1.0, number)


@contextmanager
def autocast(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute the block in this precision.

    Raises:
        UserCodeError: the user's code raised it in the block; if it cannot take values of fewer bits, the
            message says what to do.
    """
    if precision == "fp32":
        yield
        return
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    try:
        with torch.autocast(device.type, dtype):
            yield
    except UserCodeError as error:
        is_of_torch = isinstance(error.__cause__, RuntimeError | TypeError)
        if not (is_of_torch and HALF_TYPES.search(str(error))):
            raise
        raise UserCodeError(
            f"{error}; precision is {precision}, in which layers return {dtype}: cast what is put together "
            "to one type (x.float()), or set precision to fp32",
            error.frames,
        ) from error.__cause__


def trained_dtype(model: nn.Module) -> torch.dtype:
    """That of a model's trained parameters, and of the samples it takes; float32 where nothing is trained."""
    return next((each.dtype for each in model.parameters() if each.requires_grad), torch.float32)


def _explain_non_finite(
    replica: Replica, loss: LossFunction, part: Microbatch, mean: float
) -> None:
    """Raise and name the cause; return if all is finite and only the norm's sum overflowed."""
    if not math.isfinite(mean):
        batch = replica.placed(part.gather())
        origin = _origin_of_loss(replica, loss, batch)
        remedy = NO_TERMS_REMEDY if origin == AT_THE_LOSS else DIVERGENCE_REMEDY
        raise NonFiniteLoss(f"loss is {mean} {origin}; {remedy}")
    for name, place in replica.layers:
        if (value := first_non_finite(replica.grads[place])) is not None:
            raise NonFiniteLoss(
                f"gradient is {value} at layer {name} (loss {mean:.6g}); {DIVERGENCE_REMEDY}"
            )


def _origin_of_loss(replica: Replica, loss: LossFunction, batch: Batch) -> str:
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and (value := first_non_finite(tensor)) is not None:
            return f"because the batch's inputs hold {value}: check the dataset"
    with autocast(replica.precision, replica.device):
        found = _first_bad_output(replica.model, loss, batch)
    if found is not None:
        return f"at layer {found[0]}, whose output holds {found[1]}"
    for name, place in replica.layers:
        if (value := first_non_finite(replica.params[place])) is not None:
            return f"at layer {name}, whose weights hold {value}"
    return AT_THE_LOSS


def _first_bad_output(
    model: nn.Module, loss: LossFunction, batch: Batch
) -> tuple[str, float] | None:
    """Run the batch again and return the first module with a non-finite output, and that value."""
    found: list[tuple[str, float]] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor):
                value = first_non_finite(output)
                if value is not None:
                    found.append((name, value))

        return look

    with ExitStack() as hooks, torch.no_grad(), lone_sample(model):
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(watch(name or "model")))
        loss(model, batch)
    return found[0] if found else None
