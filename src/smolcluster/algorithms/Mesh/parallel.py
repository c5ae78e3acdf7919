"""A stage spread over ranks: tensor parallel by DTensor, sharded by FSDP2.

Tensor parallel is Megatron's (1909.08053): the first linear layer of a pair is cut by its outputs
(`column`), the second by its inputs (`row`), so that a pair costs one all-reduce each way. A layer of
`fused` columns has several parts one behind the other, such as queries, keys and values, of which each rank
needs its share: its rows are put in another order before they are cut, and back when weights are gathered.

With `sequence_parallel` (2205.05198) ranks have a part of each sequence between such pairs, so that norms,
dropout and what is kept of them are divided too; the all-reduce becomes a reduce-scatter and an all-gather.
With `loss_parallel` ranks have a part of the vocabulary, and no rank ever has all logits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.configs.schema import MeshSizes
from smolcluster.errors import ConfigError
from smolcluster.models.gpt import Attention, Embedding, OutputLayer
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.huggingface import HuggingFaceStage

Style = Literal["column", "row", "fused3", "whole"]
OWN_PLAN: Mapping[str, Style] = {
    "h.*.mlp.c_fc": "column",
    "h.*.mlp.c_proj": "row",
    "fc1": "column",
    "fc2": "row",
}
"""How GPT and SimpleNN are cut: patterns of modules' names. Attention of a GPT is cut by its heads."""
OF_HEADS: Mapping[str, Style] = {"c_attn": "fused3", "c_proj": "row"}
"""How a GPT's attention is cut."""
TRANSFORMERS_STYLES: Mapping[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "whole",
}
"""What plans of transformers' configurations say; `whole` modules compute with a part of the heads."""
FUSED_PARTS = 3


@dataclass
class Slot:
    """A parameter of a stage.

    Attributes:
        name: in the model.
        parameter: what this rank holds of it, a DTensor where it is spread.
        shape: of the whole.
        fused: into how many ranks' shares its rows were put in order; 1: they are as in the model.
        is_summed: whether each rank along tp has a part of its gradient, of which the sum is meant.
        num_holders: stages that have it.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    fused: int = 1
    is_summed: bool = False
    num_holders: int = 1

    @property
    def local(self) -> Tensor:
        """What lies in this rank's memory, to be changed in place."""
        return _local(self.parameter.detach())

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP has it, which sums its gradient over the ranks that share a batch."""
        if not isinstance(self.parameter, DTensor):
            return False
        return "fsdp" in (self.parameter.device_mesh.mesh_dim_names or ())

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
    for each in stage.parameters():
        if not each.is_contiguous():  # no replica keeps another order, and backends refuse it
            each.data = each.data.contiguous()
    cut = _cut_layers(stage, plan, groups) if groups.sizes.tp > 1 else _Cut()
    if groups.sizes.fsdp > 1:
        _shard(stage, groups.mesh, groups.sizes, splits=splits)
    return [
        Slot(name, parameter, shapes[name], cut.fused.get(name, 1), name in cut.summed)
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    ]


@dataclass(frozen=True)
class _Cut:
    """Parameters by name: into how many shares rows were put in order, and whose gradients are summed."""

    fused: dict[str, int] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)


def _cut_layers(stage: Stage, plan: Mapping[str, Style], groups: Groups) -> _Cut:
    """Cut layers along tp."""
    mesh, sizes, cut = groups.mesh["tp"], groups.sizes, _Cut()
    if isinstance(stage, HuggingFaceStage):
        plan = _behind(plan, _transformers_plan(stage, sizes.tp))
    plan = _behind(plan, _torch_plan(stage))
    heads, found = dict[str, Style](), False
    for name, module in list(stage.named_modules()):
        if isinstance(module, Attention):
            _divided(f"the {module.num_heads} heads of {name}", module.num_heads, sizes.tp)
            module.num_heads //= sizes.tp
            heads |= {f"{name}.{layer}": style for layer, style in OF_HEADS.items()}
        named = (s for pattern, s in plan.items() if fnmatchcase(name, pattern))
        # `c_attn` holds queries, keys and values, also where a file calls it a column
        style = heads.get(name) or next(named, None)
        if style == "whole":
            cut.summed.update(f"{name}.{each}" for each, _ in module.named_parameters())
        elif style is not None and isinstance(module, nn.Linear):
            found = True
            _check_no_heads(stage, name, sizes.tp)
            if style == "fused3":
                cut.fused.update(
                    {f"{name}.{each}": sizes.tp for each, _ in module.named_parameters()}
                )
            _cut_linear(name, module, style, mesh, sizes)
    if not found:
        raise _nothing_cut(stage, plan, sizes.tp)
    if sizes.sequence_parallel or sizes.loss_parallel:
        _share_more(stage, mesh, sizes, is_gpt=bool(heads))
    return cut


def plan_of(told: Mapping[str, Style], *, is_ours: bool) -> Mapping[str, Style]:
    """What a sharding file says, and behind it how our models are cut.

    For a model that is not ours, a file that names layers is the whole plan.
    """
    return told if told and not is_ours else _behind(told, OWN_PLAN)


def _behind(plan: Mapping[str, Style], more: Mapping[str, Style]) -> dict[str, Style]:
    """Both plans; where both fit a module, the first one counts."""
    return {**plan, **more, **plan}


def _torch_plan(stage: Stage) -> dict[str, Style]:
    """PyTorch's own layers of transformers, whose MLPs are cut."""
    layers = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    found = [name for name, module in stage.named_modules() if isinstance(module, layers)]
    styles: Mapping[str, Style] = {"linear1": "column", "linear2": "row"}
    return {f"{name}.{layer}": style for name in found for layer, style in styles.items()}


def _nothing_cut(stage: Stage, plan: Mapping[str, Style], size: int) -> ConfigError:
    if isinstance(stage, HuggingFaceStage) and not _base_plan(stage):
        return ConfigError(
            f"mesh.tp is {size}, but {type(stage.text_config).__name__} has no base_model_tp_plan: name the "
            "linear layers of its MLPs in a sharding file, or set mesh.tp to 1"
        )
    return ConfigError(
        f"mesh.tp is {size}, but no layer of stage {stage.start}-{stage.end} is named in the sharding plan "
        f"({', '.join(plan) or 'which is empty'}): name its linear layers, or set mesh.tp to 1"
    )


def _cut_linear(
    name: str, module: nn.Linear, style: Style, mesh: DeviceMesh, sizes: MeshSizes
) -> None:
    between = Shard(1) if sizes.sequence_parallel else Replicate()
    if style == "row":
        _divided(f"the {module.in_features} inputs of {name}", module.in_features, sizes.tp)
        parallelize_module(module, mesh, RowwiseParallel(output_layouts=between))
        return
    _divided(f"the {module.out_features} outputs of {name}", module.out_features, sizes.tp)
    if style == "fused3":
        for parameter in module.parameters():
            parameter.data = _reordered(parameter.data, FUSED_PARTS, sizes.tp)
    parallelize_module(module, mesh, ColwiseParallel(input_layouts=between))


def _transformers_plan(stage: HuggingFaceStage, size: int) -> dict[str, Style]:
    """What the model's configuration says of tensor parallelism, as patterns of names in the stage.

    Empty: it says nothing.

    Raises:
        ConfigError: its heads cannot be divided, or it cuts in a way that is not known.
    """
    config = stage.text_config
    found = _base_plan(stage)
    if not found:
        return {}
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (number := getattr(config, key, None)) is not None:
            _divided(f"the {number} heads of {key}", number, size)
    for pattern, style in found.items():
        if style not in TRANSFORMERS_STYLES:
            raise ConfigError(
                f"mesh.tp is {size}, but base_model_tp_plan of {type(config).__name__} cuts {pattern} as "
                f"{style}, which a mesh does not know: set mesh.tp to 1"
            )
    return {f"*{pattern}": TRANSFORMERS_STYLES[style] for pattern, style in found.items()}


def _base_plan(stage: HuggingFaceStage) -> Mapping[str, str]:
    found: Mapping[str, str] = getattr(stage.text_config, "base_model_tp_plan", None) or {}
    return found


def _check_no_heads(stage: Stage, name: str, size: int) -> None:
    """Refuse attention of a model without a plan, which could go wrong silently with a part of its heads."""
    if not isinstance(stage, HuggingFaceStage) or _base_plan(stage):
        return
    parent = stage.get_submodule(name.rpartition(".")[0])
    if any("head" in each for each in vars(parent)):
        raise ConfigError(
            f"mesh.tp is {size}, and the sharding file names {name}, but the model's configuration has no "
            "base_model_tp_plan, so that its attention cannot be cut: name layers of its MLPs alone"
        )


def _share_more(stage: Stage, mesh: DeviceMesh, sizes: MeshSizes, *, is_gpt: bool) -> None:
    """Share sequences between the layers that are cut, and the vocabulary, among the ranks along tp."""
    if not is_gpt:
        key = "sequence_parallel" if sizes.sequence_parallel else "loss_parallel"
        raise ConfigError(f"mesh.{key} is true, but the model is no GPT of ours: set it to false")
    for module in list(stage.modules()):
        if isinstance(module, Embedding | OutputLayer) and sizes.loss_parallel:
            _cut_vocabulary(module.wte, mesh, sizes)
        if isinstance(module, Embedding) and sizes.sequence_parallel:
            module.register_forward_pre_hook(_check_length(sizes.tp))
        for style in _styles(module, sizes):
            parallelize_module(module, mesh, style)


def _styles(module: nn.Module, sizes: MeshSizes) -> Iterator[ParallelStyle]:
    match module:
        case nn.LayerNorm() if sizes.sequence_parallel:
            yield SequenceParallel()
        case Embedding() if sizes.sequence_parallel:
            yield PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        case OutputLayer():
            yield PrepareModuleInput(
                input_layouts=Shard(1) if sizes.sequence_parallel else Replicate(),
                desired_input_layouts=Replicate(),
                use_local_output=not sizes.loss_parallel,
            )


def _cut_vocabulary(embedding: nn.Embedding, mesh: DeviceMesh, sizes: MeshSizes) -> None:
    if isinstance(embedding.weight, DTensor):  # of an output layer that shares it
        return
    if sizes.fsdp > 1:
        what = f"the {embedding.num_embeddings} words of the vocabulary, which fsdp cuts again"
        _divided(what, embedding.num_embeddings, sizes.tp)
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))


def _check_length(size: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if (length := inputs[0].size(1)) % size:
            raise ConfigError(
                f"mesh.sequence_parallel cuts sequences over the {size} ranks of mesh.tp, but one has "
                f"{length} tokens: make their length a multiple of {size}, or set it to false"
            )

    return check


def seed_parts(stage: Stage, seeds: LayerSeeds) -> None:
    """Let ranks that have different parts of sequences draw different dropout masks, from the cut on."""
    for module in stage.modules():
        if isinstance(module, Embedding):
            module.register_forward_hook(lambda *_: seeds.sequences_cut())


def _shard(stage: Stage, mesh: DeviceMesh, sizes: MeshSizes, *, splits: bool) -> None:
    """Shard each layer that is a module of the model and shares no weights in the stage; the rest as one.

    Numbers, parameters of no dimension, stay whole on each rank.
    """
    ranks = mesh["dp", "fsdp"] if sizes.dp > 1 else mesh["fsdp"]
    keeps_whole = splits or sizes.pp > 1  # else each microbatch would gather the weights again
    holders = Counter(id(each) for layer in stage.own_layers() for each in layer.parameters())
    modules = {id(each) for child in stage.model_modules() for each in child.modules()}
    own = [
        layer
        for layer in stage.own_layers()
        if id(layer) in modules and all(holders[id(each)] == 1 for each in layer.parameters())
    ]
    numbers = {each for each in stage.parameters() if not each.ndim}  # which FSDP refuses
    for module in (*own, stage):
        if any(each.ndim for each in module.parameters()):
            fully_shard(
                module,
                mesh=ranks,
                reshard_after_forward=not keeps_whole,
                ignored_params=numbers,
            )
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are of sums
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it sums
            # each rank's samples may use other weights, as those of experts: all sum the same ones
            module.set_reduce_scatter_unused_params(True)


def _divided(what: str, number: int, size: int) -> None:
    if number % size:
        raise ConfigError(
            f"mesh.tp is {size}, which does not divide {what}: choose a mesh.tp that divides {number}"
        )


def _reordered(tensor: Tensor, parts: int, size: int) -> Tensor:
    """Rows of (parts, size, n) as (size, parts, n)."""
    cut = tensor.reshape(parts, size, -1, *tensor.shape[1:])
    return cut.transpose(0, 1).reshape(tensor.shape)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
