"""What a model, or its loss, keeps in plain attributes, of which nobody else knows.

Buffers travel and are saved. A running mean in an attribute, or a count by which a weight grows, is each
process's own: whoever evaluates has another one, and no checkpoint has it. Many attributes change to no
effect, such as a stored loss. So a loss is computed with what they hold now, and with what they began with.
So it is with the weights of what a loss refers to, such as a teacher that it lets follow the model.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from smolcluster.errors import SmolclusterError
from smolcluster.training.batches import apart
from smolcluster.training.buffers import SINGLE, kept_attributes
from smolcluster.training.copying import uncompiled
from smolcluster.training.criterion import holders_of, modules_of
from smolcluster.training.cutting import Few
from smolcluster.training.labels import LabelsSeen
from smolcluster.training.replica import Replica
from smolcluster.training.workload import LossFunction
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.utils.user_code import user_code
from smolcluster.utils.words import a_few

MOST_KEPT = 1 << 20
"""Elements of a tensor whose first values are remembered."""
TOLERANCE = 1e-4
"""Of a loss, relative and absolute."""


class AttributeCheck:
    """Says once if a loss depends on what computing has put into attributes."""

    def __init__(self, replica: Replica, loss: LossFunction, log: logging.Logger) -> None:
        """Remember those of now."""
        self.is_done = False
        self._num_batches = 0
        self._replica, self._loss, self._log = replica, loss, log
        model = replica.model
        named: list[tuple[str, object]] = list(model.named_modules())
        named += [("loss", each) for each in holders_of(loss)]
        self._owners = [owner for _, owner in named]
        holding = [(name, vars(owner)) for name, owner in named if hasattr(owner, "__dict__")]
        own = set(model.modules())
        for _, module in modules_of(loss):
            for name, each in () if module in own else module.named_modules(prefix="loss"):
                holding += [(name, each._parameters), (name, each._buffers)]
        self._initial = [
            (f"{name}.{key}".lstrip("."), holds, key, _kept(value))
            for name, holds in holding
            for key, value in holds.items()
            if _is_state(key, value)
        ]

    def is_due(self) -> bool:
        """Whether to look, now that a batch has been computed."""
        self._num_batches += 1
        is_turn = not self.is_done and self._num_batches.bit_count() == 1
        return is_turn and any(self._changed())

    def _changed(self) -> Iterator[tuple[str, dict[str, object], str, object]]:
        for each in self._initial:
            _, holds, key, before = each
            if key in holds and not _is_same(holds[key], before):
                yield each

    def look(self, few: Few) -> None:
        """Compute a few samples with each attribute as it is, and as it was; nothing else changes by it."""
        replica, loss = self._replica, self._loss
        with (
            isolated_rng(replica.device),
            replica.evaluating() as model,
            kept_attributes(self._owners),
            torch.no_grad(),
            uncompiled(),
            suppress(SmolclusterError, RuntimeError, MemoryError),  # the latter: out of memory
            user_code("loss"),
        ):
            model.eval()
            batch = few.gather(slice(0, few.num_samples), 0)

            def value() -> Tensor:
                seen = LabelsSeen(model)
                with kept_attributes(self._owners), seen.watching():
                    result = loss(model, apart(replica.placed(batch)))
                total, number = seen.count(result, few.num_samples, of=loss)
                return total / number

            now, again = value(), value()
            if not torch.equal(now, again):
                return
            names = []
            for name, holds, key, before in list(self._changed()):
                with _put(holds, key, _kept(before)):
                    if not torch.allclose(value(), now, TOLERANCE, TOLERANCE):
                        names.append(name)
            if names:
                self.is_done = True
                self._log.warning(
                    "the loss depends on what changes as it is computed, and is no buffer of the model (%s): "
                    "each process has its own, also the one that evaluates, and no checkpoint has it; keep "
                    "it in the model, with register_buffer",
                    a_few(names),
                )


@contextmanager
def _put(holds: dict[str, object], key: str, value: object) -> Iterator[None]:
    kept, holds[key] = holds[key], value
    try:
        yield
    finally:
        holds[key] = kept


def _is_state(key: str, value: object) -> bool:
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not value.is_meta
        return is_plain and value.numel() <= MOST_KEPT
    return key != "training" and (value is None or isinstance(value, SINGLE))


def _kept(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one.detach().cpu() == other.cpu()).all())
    return type(one) is type(other) and one == other
