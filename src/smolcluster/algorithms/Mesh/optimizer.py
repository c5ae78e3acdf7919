"""An optimizer step over a mesh: true norm, clip, and a rule on what lies on each rank.

Rules are elementwise, so a rank steps its own part of each weight, and parts of one weight on several ranks
stay what they would be in one process. Muon's is not: it takes meshes that cut no weight.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.config import check_optimizer
from smolcluster.algorithms.Mesh.groups import STEP_TIMEOUT, Groups
from smolcluster.algorithms.Mesh.parallel import Slot
from smolcluster.configs.schema import FLAT_OPTIMIZERS, GradientClipping
from smolcluster.errors import ConfigError
from smolcluster.training.muon import CHOOSERS, Matrix, MuonOptimizer, Split
from smolcluster.training.optimizer import (
    MUON,
    STEP_COUNT,
    FlatOptimizer,
    clip_factor,
    moments_of,
)
from smolcluster.training.recipe import OptimizerSpec


class MeshOptimizer:
    """Steps this rank's parts of the weights.

    Attributes:
        slots: the parameters of this rank's stages.
        num_steps: that were taken.
        moment_names: what it keeps of each weight.
    """

    def __init__(
        self, slots: Sequence[Slot], spec: OptimizerSpec, weight_decay: float, groups: Groups
    ) -> None:
        """Make it with fresh state; of muon `spec` has the whole model's split.

        Raises:
            ConfigError: the rule is not elementwise, as far as is known, or is Muon's and weights are cut.
        """
        if (
            not isinstance(spec.kind, str)
            or spec.kind not in FLAT_OPTIMIZERS
            or spec.groups is not None
        ):
            name = spec.kind if isinstance(spec.kind, str) else "a function of your own"
            raise ConfigError(
                f"optimizer is {name}, but each rank of a mesh steps its own part of the "
                f"weights: it must be one of {', '.join(FLAT_OPTIMIZERS)}, without groups"
            )
        check_optimizer(spec.kind, groups.sizes)
        self.slots, self._groups, self.num_steps = slots, groups, 0
        self.moment_names = moments_of(spec.kind, spec.arguments)
        by_muon = (spec.split or Split(frozenset())).by_muon
        self._rules = [
            _rule(spec, slot, weight_decay, is_muons=slot.name in by_muon) for slot in slots
        ]

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """The L2 norm of the whole gradient, of which each rank has parts, some ranks the same."""
        sizes = self._groups.sizes
        own = sum(
            float(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
            / slot.copies(sizes)
            for slot, gradient in zip(self.slots, gradients, strict=True)
        )
        [total] = self._groups.total(own)
        return math.sqrt(total)

    def step(
        self, gradients: Sequence[Tensor], norm: float, clipping: GradientClipping, rate: float
    ) -> None:
        """Change the weights by these gradients, of each slot's local part, clipped."""
        factor = clip_factor(norm, clipping)
        for rule, gradient in zip(self._rules, gradients, strict=True):
            if factor < 1.0:
                gradient.mul_(factor)
            if clipping.bound is not None:
                gradient.clamp_(-clipping.bound, clipping.bound)
            rule.step_with(gradient.reshape(-1), rate)
        self.num_steps += 1

    def moments(self, place: int) -> dict[str, Tensor]:
        """What is kept of a slot, by name, each as its local part; 0 before the first step."""
        local = self.slots[place].local
        return {name: flat.view_as(local) for name, flat in self._rules[place].moments.items()}

    def resume(self, moments: Sequence[Mapping[str, Tensor]], num_steps: int) -> None:
        """Go on with a state: each slot's local parts, by name; with fresh moments where there are none."""
        self.num_steps = num_steps
        for rule, kept in zip(self._rules, moments, strict=True):
            rule.reset()
            for name, each in kept.items():
                rule.state[name].copy_(each.reshape(-1))
            if STEP_COUNT in rule.state:
                rule.state[STEP_COUNT].fill_(num_steps)


def _rule(spec: OptimizerSpec, slot: Slot, weight_decay: float, *, is_muons: bool) -> FlatOptimizer:
    """What steps this rank's part of a parameter; `is_muons`: as a matrix of Muon's."""
    flat = slot.local.view(-1)
    decay = weight_decay if len(slot.shape) > 1 else 0.0
    if spec.kind != MUON:
        return FlatOptimizer(str(spec.kind), flat, torch.empty(0), decay, arguments=spec.arguments)
    return MuonOptimizer(
        flat,
        torch.empty(0),
        decay,
        matrices=[Matrix(0, *slot.shape)] if is_muons else [],
        arguments={key: each for key, each in spec.arguments.items() if key not in CHOOSERS},
    )


def sum_replicas(slots: Sequence[Slot], groups: Groups) -> list[Tensor]:
    """The gradients of each slot's local part, summed over ranks that hold the same part."""
    gradients = [slot.gradient for slot in slots]
    sizes = groups.sizes
    for slot, gradient in zip(slots, gradients, strict=True):
        if slot.is_summed:
            dist.all_reduce(gradient, group=groups.mesh["tp"].get_group())
    dimensions = [name for name in ("dp", "fsdp") if getattr(sizes, name) > 1]
    whole = [place for place, slot in enumerate(slots) if not slot.is_sharded]
    if not dimensions or not whole:
        return gradients
    flat = torch.cat([gradients[place].reshape(-1) for place in whole])
    for name in dimensions:
        dist.all_reduce(flat, group=groups.mesh[name].get_group())
    pieces = torch.split(flat, [gradients[place].numel() for place in whole])
    for place, piece in zip(whole, pieces, strict=True):
        gradients[place] = piece.view_as(gradients[place])
    return gradients


class TiedWeights:
    """Weights that several stages have, such as an embedding that is the output layer too."""

    def __init__(self, slots: Sequence[Slot], tied: set[str], groups: Groups) -> None:
        """Find out who else has them, which all ranks must do at once."""
        self._places: dict[str, list[int]] = {}
        for place, slot in enumerate(slots):
            if slot.name in tied:
                self._places.setdefault(slot.name, []).append(place)
        told = groups.all_told({name: len(each) for name, each in self._places.items()})
        self._groups: dict[str, Any] = {}
        names = sorted({name for each in told for name in each})
        for name in names:
            self._make_groups(name, told, groups)
        for name, places in self._places.items():
            for place in places:
                holders = [
                    told[groups.rank_at(pp=pp)].get(name, 0) for pp in range(groups.sizes.pp)
                ]
                slots[place].num_holders = sum(holders)

    def _make_groups(self, name: str, told: list[dict[str, int]], groups: Groups) -> None:
        """A group of the ranks that hold the same part of it, for each part."""
        sizes = groups.sizes
        for dp, fsdp, tp in product(range(sizes.dp), range(sizes.fsdp), range(sizes.tp)):
            column = [groups.rank_at(pp=pp, dp=dp, fsdp=fsdp, tp=tp) for pp in range(sizes.pp)]
            ranks = [rank for rank in column if name in told[rank]]
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=STEP_TIMEOUT)
                if groups.rank in ranks:
                    self._groups[name] = group

    def exchange(self, gradients: list[Tensor]) -> None:
        """Let each holder have the sum."""
        for name, places in sorted(self._places.items()):
            total = gradients[places[0]].clone()
            for place in places[1:]:
                total += gradients[place]
            if name in self._groups:
                dist.all_reduce(total, group=self._groups[name])
            for place in places:
                gradients[place] = total.clone()
