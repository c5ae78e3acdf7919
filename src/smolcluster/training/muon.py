"""Muon (Jordan et al., 2024) for hidden matrices and AdamW for all other weights, on flat tensors.

Of each matrix Muon keeps an average of the gradients. Its step is that average with all singular values
brought near 1 by Newton-Schulz iterations. It equals that of `torch.optim.Muon`. The step is scaled by
0.2 · sqrt(max(rows, columns)) ("Muon is Scalable for LLM Training", Liu et al., 2502.16982), which PyTorch
calls match_rms_adamw. It is then as large as AdamW's, so one learning rate and one decoupled weight decay
serve all weights. DiLoCo with Muon inside is MuLoCo (2505.23725).

Departs from PyTorch: where the device does not compute bfloat16 itself, iterations are in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from smolcluster.errors import ConfigError
from smolcluster.training.optimizer import MOMENTUM, MUON, FlatOptimizer
from smolcluster.utils.units import format_count
from smolcluster.utils.words import a_few, hint_at

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's polynomial, whose slope at 0 is steep: a few steps bring small singular values up."""
NS_EPS = 1e-7
MATCHED_RMS = 0.2
"""Root mean square of an update of AdamW, about."""
EMBEDDING, HEAD, NAMED = "embedding", "output layer", "named"
CHOOSERS = ("adamw", "muon")
"""Arguments that hold patterns of parameters' names."""
EMBEDDING_WORDS = ("emb", "pos", "token")
"""Of a matrix that is no layer's weight, a name with one of these means an embedding."""


class Matrix(NamedTuple):
    """A matrix in the flat tensors, which Muon steps as a whole."""

    start: int
    rows: int
    columns: int

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.rows * self.columns)


@dataclass(frozen=True)
class Split:
    """Which parameters Muon steps, by name, and why AdamW steps other matrices."""

    by_muon: frozenset[str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    num_others: int = 0

    @property
    def sentence(self) -> str:
        """What went where, in one line."""
        kinds = [
            f"{a_few([name for name, why in self.reasons.items() if why == kind])} ({kind})"
            for kind in (EMBEDDING, HEAD, NAMED)
            if kind in self.reasons.values()
        ]
        num = len(self.by_muon)
        rest = [f"{format_count(self.num_others, 'tensor')} that are no matrices"]
        return (
            f"Muon trains {num} {'matrix' if num == 1 else 'matrices'}; AdamW trains "
            f"{', '.join(kinds + rest)}; optimizer_args.muon and optimizer_args.adamw name exceptions"
        )


class MuonOptimizer(FlatOptimizer):
    """Muon for some matrices, AdamW for what is between and after them.

    `state` has two flat tensors: `momentum_buffer`, Muon's average or AdamW's first moment, and `exp_avg_sq`,
    which is 0 where Muon steps.
    """

    def __init__(
        self,
        params: Tensor,
        grads: Tensor,
        weight_decay: float,
        num_decayed: int | None = None,
        *,
        matrices: Sequence[Matrix],
        arguments: Mapping[str, Any] = MappingProxyType({}),
        split: Split | None = None,
    ) -> None:
        """See `FlatOptimizer`; `matrices`, in order, are Muon's, and `split` is how they were chosen.

        Raises:
            ConfigError: an argument that neither of both knows.
        """
        super().__init__(MUON, params, grads, weight_decay, num_decayed, arguments=arguments)
        self._matrices = tuple(matrices)
        self.split = split or Split(frozenset())

    def part(self, place: slice) -> Self:
        """See `FlatOptimizer.part`.

        Raises:
            ConfigError: it is not the whole.
        """
        if place != slice(0, self._params.numel()):
            raise ConfigError(
                "optimizer is muon, which steps whole matrices, but servers lists several, which would cut "
                "them: leave servers out, take algorithm diloco, or set optimizer to adamw"
            )
        return self

    @torch.no_grad()
    def step_with(self, gradient: Tensor, learning_rate: float, *, owned: bool = False) -> None:
        """Change the weights by one step with this gradient (num_params,), on the same device."""
        for matrix in self._matrices:
            self._muon_step(matrix, gradient[matrix.place], learning_rate)
        super().step_with(gradient, learning_rate, owned=owned)

    def _muon_step(self, matrix: Matrix, gradient: Tensor, learning_rate: float) -> None:
        shape = matrix.rows, matrix.columns
        momentum = self._arguments["momentum"]
        average, gradient = self.state[MOMENTUM][matrix.place].view(shape), gradient.view(shape)
        average.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(average, momentum) if self._arguments["nesterov"] else average
        update = orthogonalized(update, self._arguments["ns_steps"])
        weights = self._params[matrix.place].view(shape)
        weights.mul_(1 - learning_rate * self._weight_decay)
        weights.add_(update, alpha=-learning_rate * MATCHED_RMS * max(shape) ** 0.5)

    def _stretches(self) -> list[tuple[slice, float]]:
        """What AdamW steps: the weights that are in no matrix."""
        borders = [0]
        for matrix in self._matrices:
            borders += [matrix.place.start, matrix.place.stop]
        gaps = map(slice, borders[::2], [*borders[1::2], self._params.numel()])
        found = []
        for gap in gaps:
            border = min(max(gap.start, self._num_decayed), gap.stop)
            found += [
                (slice(gap.start, border), self._weight_decay),
                (slice(border, gap.stop), 0.0),
            ]
        return found


def orthogonalized(matrix: Tensor, num_steps: int) -> Tensor:
    """A matrix (rows, columns) with singular values of about 1, in the type that it is computed in."""
    a, b, c = NS_COEFFICIENTS
    dtype = torch.bfloat16 if has_bfloat16(matrix.device) else torch.float32
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.to(dtype, copy=True)
    if is_tall:
        found = found.T
    found.div_(found.norm().clamp(min=NS_EPS))  # then no singular value is above 1
    for _ in range(num_steps):
        gram = found @ found.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, gram, found, beta=a)
    return found.T.contiguous() if is_tall else found  # weights take a transposed one in slowly


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions that multiply matrices of bfloat16, as far as PyTorch tells."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    told: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(told.get("avx512_bf16") or told.get("amx_bf16"))


def choose(
    model: nn.Module,
    trainable: Sequence[tuple[str, nn.Parameter]],
    arguments: Mapping[str, Any],
) -> Split:
    """Which parameters Muon steps: matrices that are neither embedding nor output layer, and those named.

    Raises:
        ConfigError: no parameter is left to Muon; or a pattern matches none, one that is no matrix, or one
            that the other argument matches too.
    """
    embeddings = _embeddings(model)
    head = _head(model, has_embeddings=bool(embeddings))
    by_adamw, by_muon = (_named(key, arguments, trainable) for key in CHOOSERS)
    if both := sorted(by_adamw & by_muon):
        raise ConfigError(
            f"optimizer_args.adamw and optimizer_args.muon both name {both[0]}: leave it in one"
        )
    chosen, reasons = set[str](), dict[str, str]()
    for name, weight in trainable:
        if name in by_muon and weight.ndim != 2:
            raise ConfigError(
                f"optimizer_args.muon names {name}, which has {weight.ndim} dimensions, must have 2: name "
                "others"
            )
        if weight.ndim != 2:
            continue
        if name in by_adamw:
            reasons[name] = NAMED
        elif name in by_muon:
            chosen.add(name)
        elif id(weight) in embeddings:
            reasons[name] = EMBEDDING
        elif weight is head:
            reasons[name] = HEAD
        else:
            chosen.add(name)
    if not chosen:
        raise ConfigError(
            "optimizer is muon, but the model has no matrix besides embeddings and its output layer: set "
            "optimizer to adamw, or name matrices in optimizer_args.muon"
        )
    return Split(frozenset(chosen), reasons, len(trainable) - len(chosen) - len(reasons))


def _named(
    key: str, arguments: Mapping[str, Any], trainable: Sequence[tuple[str, nn.Parameter]]
) -> set[str]:
    given = arguments.get(key, ())
    patterns = [given] if isinstance(given, str) else given
    names = [name for name, _ in trainable]
    found = set[str]()
    for pattern in patterns:
        matching = {name for name in names if fnmatchcase(name, str(pattern))}
        if not matching:
            raise ConfigError(
                f"optimizer_args.{key} has {pattern!r}, which is no trainable parameter's name"
                f"{hint_at(str(pattern), names)}"
            )
        found |= matching
    return found


def _embeddings(model: nn.Module) -> set[int]:
    """The ids of weights of embeddings: those that are output layers as well are among them."""
    found = set[int]()
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for name, weight in module.named_parameters(recurse=False):
            is_own = not name.startswith("weight") and any(
                word in name.lower() for word in EMBEDDING_WORDS
            )
            if is_embedding or is_own:
                found.add(id(weight))
    return found


def _head(model: nn.Module, *, has_embeddings: bool) -> nn.Parameter | None:
    """The weight of the output layer: what the model says, or the last linear layer outside of all blocks.

    Where all are in blocks an embedding may be the output layer as well; without one it is the last layer.
    """
    said = getattr(model, "get_output_embeddings", None)
    module = said() if callable(said) else None
    if module is None:
        names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
        outside = [name for name in names if not _is_in_block(model, name)]
        found = outside or ([] if has_embeddings else names)
        module = model.get_submodule(found[-1]) if found else None
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, nn.Parameter) else None


def _is_in_block(model: nn.Module, name: str) -> bool:
    """Whether a layer is a part of one of several blocks, such as of a transformer."""
    path = name.split(".")
    for depth in range(1, len(path)):
        container = model.get_submodule(".".join(path[: depth - 1]))
        block = model.get_submodule(".".join(path[:depth]))
        if isinstance(container, nn.ModuleList):
            return True
        alike = [each for each in container.children() if type(each) is type(block)]
        if isinstance(container, nn.Sequential) and len(alike) > 1:
            return True
    return False
