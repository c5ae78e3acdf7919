"""A stage as a mesh computes it: compiled, computed again, sharded, or with a part of the vocabulary."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from smolcluster.algorithms.Mesh.compiling import compile_layers, compiler_named
from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.configs.schema import Precision
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.stages.compute import StageCompute
from smolcluster.training.stages.cut import Stage
from smolcluster.training.user_code import user_code
from smolcluster.training.workload import Workload


def stage_compute(
    stage: Stage, workload: Workload, seeds: LayerSeeds, config: MeshConfig, precision: Precision
) -> StageCompute:
    """What computes a stage that has been spread over its ranks.

    Raises:
        ConfigError: its layers shall be compiled, but PyTorch's compiler does not work here.
    """
    has_part = config.mesh.loss_parallel and stage.is_last
    kernels = loss_parallel if has_part else nullcontext
    compiling = compiler_named if config.compile else nullcontext
    if config.compile:
        compile_layers(stage)
    # activations that are computed again in the backward draw the same numbers
    every = {"full": 1, "selective": 2}.get(config.activation_checkpointing)
    for layer in stage.own_layers()[::every] if every else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    @contextmanager
    def around(what: str) -> Iterator[None]:
        with kernels(), user_code(what), compiling():
            yield

    return StageCompute(stage, workload, seeds, precision=precision, around=around)


@contextmanager
def adding_up(stage: Stage) -> Iterator[None]:
    """Add up a step's gradients in this block; at its end sum them over the ranks that share weights."""
    for parameter in stage.parameters():
        parameter.grad = None
    if not isinstance(stage, FSDPModule):
        yield
        return
    stage.set_requires_gradient_sync(False)
    stage.set_reshard_after_backward(False)
    stage.set_manual_backward_finalization(True)
    yield
    stage.set_requires_gradient_sync(True)
    stage.set_reshard_after_backward(True)
    stage.finalize_backward()
    stage.set_manual_backward_finalization(False)
