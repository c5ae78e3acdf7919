"""A stage spread over ranks: tensor parallel by DTensor, sharded by FSDP2.

Tensor parallel is Megatron's (1909.08053): the first linear layer of a pair is cut by its outputs
(`column`), the second by its inputs (`row`), so that a pair costs one all-reduce each way. A layer of
`fused` columns has several parts one behind the other, such as queries, keys and values, of which each rank
needs its share: its rows are put in another order before they are cut, and back when weights are gathered.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.configs.schema import MeshSizes
from smolcluster.errors import ConfigError
from smolcluster.models.gpt import Attention
from smolcluster.training.stages.cut import Stage

Style = Literal["column", "row", "fused3"]
OWN_PLAN: Mapping[str, Style] = {
    "h.*.attn.c_attn": "fused3",
    "h.*.attn.c_proj": "row",
    "h.*.mlp.c_fc": "column",
    "h.*.mlp.c_proj": "row",
    "fc1": "column",
    "fc2": "row",
}
"""How GPT and SimpleNN are cut: patterns of modules' names."""
FUSED_PARTS = 3


@dataclass
class Slot:
    """A parameter of a stage.

    Attributes:
        name: in the model.
        parameter: what this rank holds of it, a DTensor where it is spread.
        shape: of the whole.
        fused: into how many ranks' shares its rows were put in order; 1: they are as in the model.
        num_holders: stages that have it.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    fused: int = 1
    num_holders: int = 1

    @property
    def local(self) -> Tensor:
        """What lies in this rank's memory, to be changed in place."""
        return _local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor:
        """Of `local`; zeros where the loss does not depend on it."""
        gradient = self.parameter.grad
        if gradient is None:
            return torch.zeros_like(self.local)
        if isinstance(gradient, DTensor) and isinstance(self.parameter, DTensor):
            placements = self.parameter.placements
            if gradient.placements != placements:
                gradient = gradient.redistribute(placements=placements)
        return _local(gradient)

    def whole(self, local: Tensor) -> Tensor:
        """All of a tensor of which `local` lies here; every rank of the stage must call it."""
        parameter = self.parameter
        if isinstance(parameter, DTensor):
            spread = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            local = spread.full_tensor()
        return _reordered(local, FUSED_PARTS, self.fused, back=True) if self.fused > 1 else local

    def part(self, whole: Tensor) -> Tensor:
        """What of a whole tensor lies here."""
        whole = whole.view(self.shape)
        if self.fused > 1:
            whole = _reordered(whole, FUSED_PARTS, self.fused)
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return whole
        mesh = parameter.device_mesh
        copied = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim)
        return copied.redistribute(placements=parameter.placements).to_local()

    def copies(self, sizes: MeshSizes) -> int:
        """On how many ranks of how many stages the same elements lie."""
        shards = 1
        if isinstance(self.parameter, DTensor):
            mesh = self.parameter.device_mesh
            for place, size in zip(self.parameter.placements, mesh.shape, strict=True):
                shards *= 1 if place.is_replicate() else size
        return sizes.dp * sizes.fsdp * sizes.tp // shards * self.num_holders


def spread(stage: Stage, plan: Mapping[str, Style], groups: Groups, *, splits: bool) -> list[Slot]:
    """Spread a stage over its ranks; it has the whole weights before.

    Args:
        plan: how modules are cut, by patterns of their names; unused with one rank along tp.
        splits: whether the schedule puts weight gradients off: then weights must stay whole after the
            forward, or gradients would be missing without an error.

    Raises:
        ConfigError: a layer cannot be divided, or the plan fits none.
    """
    shapes = {name: tuple(each.shape) for name, each in stage.named_parameters()}
    fused = _cut_layers(stage, plan, groups) if groups.sizes.tp > 1 else {}
    if groups.sizes.fsdp > 1:
        _shard(stage, groups.mesh, groups.sizes, splits=splits)
    return [
        Slot(name, parameter, shapes[name], fused.get(name, 1))
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    ]


def _cut_layers(stage: Stage, plan: Mapping[str, Style], groups: Groups) -> dict[str, int]:
    """Cut layers along tp; the parameters whose rows were put in order."""
    mesh, size, fused, found = groups.mesh["tp"], groups.sizes.tp, dict[str, int](), False
    joined = set[str]()
    for name, module in list(stage.named_modules()):
        if isinstance(module, Attention):
            _divided(f"the {module.num_heads} heads of {name}", module.num_heads, size)
            module.num_heads //= size
            joined.add(f"{name}.c_attn")
        style = next((s for pattern, s in plan.items() if fnmatchcase(name, pattern)), None)
        if style == "column" and name in joined:  # as a sharding file may call it
            style = "fused3"
        if style is None or not isinstance(module, nn.Linear):
            continue
        found = True
        if style == "row":
            _divided(f"the {module.in_features} inputs of {name}", module.in_features, size)
            parallelize_module(module, mesh, RowwiseParallel())
            continue
        _divided(f"the {module.out_features} outputs of {name}", module.out_features, size)
        if style == "fused3":
            for each, parameter in module.named_parameters():
                fused[f"{name}.{each}"] = size
                parameter.data = _reordered(parameter.data, FUSED_PARTS, size)
        parallelize_module(module, mesh, ColwiseParallel())
    if not found:
        raise ConfigError(
            f"mesh.tp is {size}, but no layer of stage {stage.start}-{stage.end} is named in the "
            f"sharding plan ({', '.join(plan) or 'which is empty'}): name its linear layers, or set "
            "mesh.tp to 1"
        )
    return fused


def _shard(stage: Stage, mesh: DeviceMesh, sizes: MeshSizes, *, splits: bool) -> None:
    """Shard each layer that is a module of the model and shares no weights in the stage; the rest as one."""
    ranks = mesh["dp", "fsdp"] if sizes.dp > 1 else mesh["fsdp"]
    keeps_whole = splits or sizes.pp > 1  # else each microbatch would gather the weights again
    holders = Counter(id(each) for layer in stage.own_layers() for each in layer.parameters())
    modules = {id(each) for child in stage.model_modules() for each in child.modules()}
    own = [
        layer
        for layer in stage.own_layers()
        if id(layer) in modules and all(holders[id(each)] == 1 for each in layer.parameters())
    ]
    for module in (*own, stage):
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=ranks, reshard_after_forward=not keeps_whole)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are of sums
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it sums


def _divided(what: str, number: int, size: int) -> None:
    if number % size:
        raise ConfigError(
            f"mesh.tp is {size}, which does not divide {what}: choose a mesh.tp that divides {number}"
        )


def _reordered(tensor: Tensor, parts: int, size: int, *, back: bool = False) -> Tensor:
    """Rows of (parts, size, n) as (size, parts, n), or back."""
    outer = (size, parts) if back else (parts, size)
    cut = tensor.reshape(*outer, -1, *tensor.shape[1:])
    return cut.transpose(0, 1).reshape(tensor.shape)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
